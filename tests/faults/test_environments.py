"""Run scripts in odd environments. Each gives the same bytes as elsewhere, or says in one sentence why it cannot."""

import json
import subprocess
import sys

import pytest

from tests.conftest import flags, rows, small
from tests.faults.test_disks import succeeds_or_skips
from tests.launch import ROOT, script, sentence

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

# Run commands one after another, forked from one process, so that PyTorch is imported only once. They have its flags
# and environment. They come as arguments, because Python decodes these like the arguments of a script.
DRIVER = """
import json, sys
from tests.launch import process
for command in json.loads(sys.argv[1]):
    done = process(*command, check=False)
    print(json.dumps([done.returncode, done.stdout, done.stderr]))
"""
TEXT = "Zwölf Boxkämpfer jagen Viktor über den großen Sylter Deich.\nThe quick brown fox jumps over the lazy dog.\n"
ODD_NAME = " ä\n€'\"$(x)"
DATA, RUN = f"data{ODD_NAME}", f"run{ODD_NAME}"
ASCII = ["LC_ALL=C", "PYTHONUTF8=0", "PYTHONCOERCECLOCALE=0"]  # with LC_ALL alone, Python would take UTF-8
FEW_FILES = ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh"]
NOBODY = ["unshare", "--map-user=12345", "--map-group=12345"]  # a user without a name and a home
ONE_THREAD = "OMP_NUM_THREADS=1"  # more threads add up in another order, which changes the weights
BARE = [*FEW_FILES, *NOBODY, "env", "-i", *ASCII, ONE_THREAD, "HOME=/nonexistent"]


def texts(folder):
    """A folder of texts of several formats, and a Python file."""
    folder.mkdir(parents=True)
    (folder / f"a{ODD_NAME}.txt").write_text(40 * TEXT, encoding="utf-8")
    (folder / "b.jsonl").write_text(30 * (json.dumps({"text": TEXT}, ensure_ascii=False) + "\n"), encoding="utf-8")
    (folder / "c.csv").write_text('number,text\n1,"' + 30 * TEXT + '"\n', encoding="utf-8")
    for n in range(40):  # some for each split
        (folder / f"{n}.py").write_text(20 * "x = 5  # ä\n", encoding="utf-8")
    return folder


def tiny(out, data, **settings):
    return flags(small(out, data, n_layer=1, max_iters=4, eval_interval=2, **settings))


def chain(folder, text):
    """Commands for all scripts, from text to figures, that write into `folder`."""
    out, benchmark = folder / RUN, f"--results={folder / 'bench'}"
    return [
        ["data/text/prepare.py", "--tokenizer=char", f"--out_dir={folder / DATA}", "--input", text],
        ["data/python_stdlib/prepare.py", f"--out_dir={folder / 'stdlib'}", "--input", text],
        ["train.py", *tiny(out, folder / DATA, sample_interval=2)],
        ["train.py", f"--out_dir={out}", f"--dataset={folder / DATA}", "--init_from=resume", "--max_iters=6"],
        ["sample.py", f"--out_dir={out}", "--device=cpu", "--num_samples=1", "--max_new_tokens=20"],
        ["plot.py", out],
        ["export.py", out, folder / "export"],
        ["convert.py", out, "shards"],
        ["bench.py", "numerics", "--device=cpu", "--only=manual = math, masked", benchmark],
        ["bench.py", "report", folder / "bench" / "numerics"],
        ["harness.py", "--help"],
    ]


def run_in(prefix, python, commands):
    """The finished processes of `commands`, run by `python` with its flags in an environment that `prefix` makes."""
    names = [[str(word) for word in command] for command in commands]
    start = [*prefix, *python, "-c", DRIVER, json.dumps(names, ensure_ascii=False)]
    done = subprocess.run(start, cwd=ROOT, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr.decode()
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(commands)
    return [subprocess.CompletedProcess(name, *answer) for name, answer in zip(names, answers)]


def results(folder):
    """What the chain left in `folder`: the files that have the same bytes each time, and the losses."""
    names = ["export/tokenizer.json", "export/README.md", "bench/numerics/report.md"]
    names += [f"{RUN}/{name}" for name in ("ckpt.pt", "curves.png", "report.html")]
    assert all((folder / name).stat().st_size for name in names)
    same = [f"{DATA}/train.bin", f"{DATA}/meta.json", "stdlib/train.bin", "export/model.safetensors"]
    losses = [row["loss"] for row in rows(folder / RUN)], [row["val_loss"] for row in rows(folder / RUN, "eval")]
    return {name: (folder / name).read_bytes() for name in same}, losses


def read_only(*folders):
    """The start of a command that makes `folders` read-only for the rest."""
    mounts = [f'mount --bind "${n}" "${n}" && mount -o remount,bind,ro "${n}"' for n, _ in enumerate(folders, start=1)]
    then = f'shift {len(folders)} && cd "{ROOT}" && exec "$@"'  # cd again, to be on the new mount
    return ["unshare", "-rm", "sh", "-c", " && ".join([*mounts, then]), "sh", *map(str, folders)]


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory):
    """The folder of a chain in the environment of the tests, and the folder of its texts."""
    folder = tmp_path_factory.mktemp("ordinary")
    text = texts(folder / "texts")
    for command in chain(folder / "out", text):
        script(*command)
    return folder / "out", text


ENVIRONMENTS = {
    "strict": ([], ["-O", "-W", "error"]),  # not -OO: transformers needs its docstrings to be imported
    "few files, no user, no variables, ASCII, a read-only checkout": ([*read_only(ROOT), *BARE], []),
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_scripts_do_the_same_in(name, ordinary, tmp_path):
    prefix, options = ENVIRONMENTS[name]
    if prefix:
        succeeds_or_skips([*prefix, "true"])
    folder = tmp_path / ODD_NAME
    for done in run_in(prefix, [sys.executable, *options], chain(folder, ordinary[1])):
        assert done.returncode == 0, (done.args, done.stderr)
        for word in ("Traceback", "Exception ignored", "Warning"):
            assert word not in done.stderr, (done.args, done.stderr)
    assert results(folder) == results(ordinary[0])


def test_two_ranks_do_the_same_without_a_user_and_with_few_files(ordinary, tmp_path):
    # torchrun has files, sockets and a home of its own
    (before, _), same = ordinary, dict(gradient_accumulation_steps=2)
    prefix = [*read_only(ROOT, before), *BARE]
    succeeds_or_skips([*prefix, "true"])
    torchrun = [sys.executable, "-O", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]
    asked = tiny(tmp_path / ODD_NAME, before / DATA, parallel="fsdp", **same)
    done = subprocess.run([*prefix, *torchrun, *asked], cwd=ROOT, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr.decode()
    script("train.py", *tiny(tmp_path / "one", before / DATA, **same))
    two, one = ([row["loss"] for row in rows(tmp_path / out)] for out in (ODD_NAME, "one"))
    assert two == pytest.approx(one, rel=1e-4)  # two ranks add up in another order


def test_what_a_read_only_folder_keeps_from_being_written_is_one_sentence(ordinary, tmp_path):
    folder, text = ordinary
    out, data, new = folder / RUN, folder / DATA, tmp_path / ODD_NAME
    work = [
        ["train.py", f"--out_dir={out}", f"--dataset={data}", "--init_from=resume", "--eval_only=True"],
        ["train.py", *tiny(new, data)],
        ["sample.py", f"--out_dir={out}", "--device=cpu", "--num_samples=1", "--max_new_tokens=20"],
        ["plot.py", out, f"--out={tmp_path / 'curves.png'}"],
        ["export.py", out, tmp_path / "export"],
    ]
    refused = [
        ["train.py", f"--out_dir={out}", f"--dataset={data}", "--init_from=resume", "--max_iters=8"],
        ["train.py", *tiny(folder / "new", data)],
        ["plot.py", out],
        ["export.py", out, folder / "export"],
        ["convert.py", out, "file"],
        ["bench.py", "numerics", "--device=cpu", "--only=manual = math, masked", f"--results={folder / 'bench'}"],
        ["bench.py", "report", folder / "bench" / "numerics"],
        ["data/text/prepare.py", "--tokenizer=byte", f"--out_dir={data}", "--input", text],
        ["data/python_stdlib/prepare.py"],
    ]
    prefix = read_only(ROOT, folder)
    succeeds_or_skips([*prefix, "true"])
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    answers = run_in(prefix, [sys.executable], work + refused)
    for done in answers[: len(work)]:
        assert done.returncode == 0, (done.args, done.stderr)
    for done in answers[len(work) :]:
        assert done.returncode == 1 and "Read-only file system" in sentence(done.stderr), done.args
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
