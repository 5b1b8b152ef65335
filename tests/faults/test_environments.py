"""Scripts as containers and clusters run them: no user, no home, ASCII, few open files, folders that are read-only."""

import subprocess
import sys

import pytest

from tests.conftest import flags, rows, small
from tests.faults.processes import succeeds_or_skips
from tests.launch import ROOT, script

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TEXT = "Zwölf Boxkämpfer jagen Viktor über den großen Sylter Deich.\nThe quick brown fox jumps over the lazy dog.\n"
ODD_NAME = " ä\n€'\"$(x)"
ASCII = ["LC_ALL=C", "PYTHONUTF8=0", "PYTHONCOERCECLOCALE=0"]  # with LC_ALL alone, Python would take UTF-8
FEW_FILES = ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh"]
NOBODY = ["unshare", "--map-user=12345", "--map-group=12345"]  # a user without a name and a home
ONE_THREAD = "OMP_NUM_THREADS=1"  # more threads add up in another order, which changes the weights
BARE = [*FEW_FILES, *NOBODY, "env", "-i", *ASCII, ONE_THREAD, "HOME=/nonexistent"]


def read_only(folder):
    """The start of a command that makes `folder` read-only for the rest."""
    mount = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1"'
    then = f'shift && cd "{ROOT}" && exec "$@"'  # cd again, to be on the new mount
    return ["unshare", "-rm", "sh", "-c", f"{mount} && {then}", "sh", str(folder)]


def test_two_ranks_do_the_same_without_a_user_and_with_few_files(tmp_path):
    # torchrun has files, sockets and a home of its own
    prefix = [*read_only(ROOT), *BARE]
    succeeds_or_skips([*prefix, "true"])
    text, prepared = tmp_path / f"a{ODD_NAME}.txt", tmp_path / f"data{ODD_NAME}"
    text.write_text(40 * TEXT, encoding="utf-8")
    script("data/text/prepare.py", "--tokenizer=char", f"--out_dir={prepared}", "--input", text)
    settings = dict(n_layer=1, max_iters=4, eval_interval=2, gradient_accumulation_steps=2)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]
    asked = flags(small(tmp_path / ODD_NAME, prepared, parallel="fsdp", **settings))
    done = subprocess.run([*prefix, *torchrun, *asked], cwd=ROOT, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr.decode()
    script("train.py", *flags(small(tmp_path / "one", prepared, **settings)))
    two, one = ([row["loss"] for row in rows(tmp_path / out)] for out in (ODD_NAME, "one"))
    assert two == pytest.approx(one, rel=1e-4)  # two ranks add up in another order
