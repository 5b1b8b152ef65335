"""Services start scripts without stdin, stdout or stderr. Each script does its work, and prints into no file."""

import json

import pytest

from fusedgpt.runs import checkpoint
from tests.conftest import TINY, assert_same_bytes, flags, rows, run, small, weights, why_no_bpe
from tests.fusedgpt.data.test_tokenizer import TEXT, meta_of
from tests.launch import process
from tests.test_export import data_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# A config file that writes to the numbers 1 and 2 all the time, as C code does. Without a guard, the first opened
# files would get these numbers.
NOISE = """
import os as _os, threading as _threading, time as _time
def _noise():
    while True:
        try:
            for number in (1, 2):
                _os.write(number, b"noise")
        except OSError:  # end at once, because Python would print the error of a thread
            _os._exit(7)
        _time.sleep(1e-3)
_threading.Thread(target=_noise, daemon=True).start()
"""


def scripts(folder, data):
    """Command lines by the file that each has to write."""
    out = folder / "out"
    (folder / "noise.py").write_text(NOISE)
    (folder / "texts").mkdir()
    for number in range(30):  # python_stdlib needs a file for validation, about one in ten
        (folder / "texts" / f"{number}.py").write_text(TEXT * 20)
    yield out / "ckpt.pt", ["train.py", folder / "noise.py", *flags(small(out, data))]
    yield None, ["sample.py", f"--out_dir={out}", "--device=cpu", "--num_samples=1", "--max_new_tokens=5"]
    yield folder / "hf" / "model.safetensors", ["export.py", out, folder / "hf"]
    yield out / "loss.png", ["plot.py", out]
    yield out / "shards-10" / ".metadata", ["convert.py", out, "shards"]
    yield folder / "lm_eval.json", ["harness.py", folder / "hf", folder / "lm_eval.json", "sonnets"]
    sizes = [f"--{name}={value}" for name, value in TINY.items()]
    yield None, ["bench.py", "plan", *sizes, "--gpus=1"]
    for name in ("text", "shakespeare_char", "openwebtext", "python_stdlib"):
        source = "" if name == "python_stdlib" else "1.py"
        prepare = [f"data/{name}/prepare.py", f"--input={folder / 'texts' / source}", f"--out_dir={folder / 'data'}"]
        yield folder / "data" / "meta.json", prepare


@pytest.mark.skipif(bool(why_no_bpe()), reason="GPT-2's BPE files are not here (set TIKTOKEN_CACHE_DIR)")
def test_no_script_needs_its_streams(tmp_path):
    # each script died at once of an AttributeError: None has no `reconfigure`
    of_bytes = run(tmp_path / "whole", data_of(meta_of("byte"), tmp_path / "of_bytes"))
    for file, command in scripts(tmp_path, tmp_path / "of_bytes"):
        if file is not None and file.exists():
            file.unlink()
        for closed in [(1,), (2,), (0, 1, 2)] if command[0] == "sample.py" else [(0, 1, 2)]:
            done = process(*command, closed=closed, check=False)
            assert done.returncode == 0, (command, done)
            assert "Traceback" not in done.stderr and (file is None or file.exists()), (command, done)
    assert_same_bytes(checkpoint.load(tmp_path / "out" / "ckpt.pt")["model"], weights(of_bytes))
    assert [row["iter"] for row in rows(tmp_path / "out")] == list(range(10))  # each line of the file can be read
    assert (tmp_path / "out" / ".lock").read_bytes().startswith(b"process ")
    json.loads((tmp_path / "out" / "run.json").read_text())
