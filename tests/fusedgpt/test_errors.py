"""How a script ends on what a user can correct."""

import os
import re
import subprocess
import sys
import warnings

import pytest
import torch

from fusedgpt.errors import TRAIN_WITH_LESS, UserError, first_line, one_sentence, shown
from tests.launch import ROOT, fails, process, sentence

# runs a script as if a package were not installed
WITHOUT = """
import importlib.util, runpy, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name == "{package}" else find(name)
sys.modules["{package}"] = None
sys.argv = sys.argv[1:]
sys.path[0] = "."
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_full_memory_is_one_sentence():
    # sample.py used to advise --batch_size, which it does not have
    for advice, said in ((TRAIN_WITH_LESS, "out of memory. Halve --batch_size"), ("", "out of memory. PyTorch said")):
        with pytest.raises(SystemExit, match=said) as ended, one_sentence(advice):
            torch.empty(1 << 50)
        assert ("--batch_size" in str(ended.value)) == bool(advice)


def test_what_a_console_cannot_show_is_escaped():
    # a lone surrogate, as in a file name that is not UTF-8, used to be a UnicodeEncodeError
    code = r"""
from fusedgpt.errors import UserError, one_sentence
with one_sentence():
    print("out_dir=a\udcffb")
    raise UserError("no \udcff")
"""
    assert fails("-c", code, run=process, PYTHONIOENCODING="ascii") == r"error: no \udcff"


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_files(closed, tmp_path):
    # services start scripts like this: all died at once of None.reconfigure, and the first file that is opened would
    # have got what C code and children print. All scripts are in tests/faults/test_streams.py
    code = f"""
import os, subprocess, sys
from fusedgpt.errors import UserError, one_sentence
with one_sentence():
    with open({str(tmp_path / "file")!r}, "w") as file:
        for number in (1, 2):
            os.write(number, b"of C code")
        subprocess.run(["sh", "-c", "cat; echo child; echo child >&2"], check=True, stdin=sys.stdin)
        print("of", file=sys.stdout)
        print("Python", file=sys.stderr)
        file.write("whole")
    raise UserError("the end")
"""
    shell = ["sh", "-c", f'exec "$0" "$@" {closed}', sys.executable]
    done = process("-c", code, prefix=shell, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "error: the end" in done.stderr or "2>&-" in closed
    assert (tmp_path / "file").read_text() == "whole"


def test_only_an_output_that_nobody_reads_ends_in_silence():
    # any pipe that broke, such as one to wandb, used to end a run with status 1 and not a word
    read, unread = os.pipe()
    os.close(read)
    code = "import os, sys\nfrom fusedgpt.errors import one_sentence\nwith one_sentence():\n    {}"
    for statement, stdout, said in (
        ("print('line')", unread, ""),
        ("os.write(int(sys.argv[1]), b'text')", subprocess.DEVNULL, "error: [Errno 32] Broken pipe\n"),
    ):
        command = [sys.executable, "-c", code.format(statement), str(unread)]
        options = dict(stdout=stdout, stderr=subprocess.PIPE, pass_fds=[unread], text=True, cwd=ROOT)
        done = subprocess.run(command, check=False, **options)
        assert (done.returncode, done.stderr) == (1, said)
    os.close(unread)


def test_ctrl_c_leaves_the_console_on_a_new_line(capsys):
    with pytest.raises(SystemExit, match="130"), one_sentence():
        print("half a sam", end="")
        raise KeyboardInterrupt
    assert capsys.readouterr() == ("half a sam", "\n")


def test_a_panic_of_rust_is_one_sentence(capsys):
    # no Exception, so it passed every handler; here as lm_eval would meet it, which calls tokenizers by itself
    from tokenizers import pre_tokenizers

    said = r"error: a package failed, most likely at a damaged tokenizer\.json: chunk size"
    with pytest.raises(SystemExit, match=said), one_sentence():
        pre_tokenizers.FixedLength(0).pre_tokenize_str("ab")


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("train.py", "torch"),
        ("study.py", "torch"),
        ("plot.py", "numpy"),
        ("fusedgpt/__main__.py", "torch"),
        ("data/shakespeare/prepare.py", "numpy"),
    ],
)
def test_without_the_environment_a_script_says_how_to_get_it(name, package):
    # "python train.py" before "source .venv/bin/activate" was a traceback that ended in No module named 'torch'
    prefix = [sys.executable, "-c", WITHOUT.format(package=package)]
    done = process(name, prefix=prefix, check=False)
    assert f"has no package {package}: " in sentence(done.stderr)
    assert any(remedy in done.stderr for remedy in ("bin/activate", "make setup"))


def test_a_package_that_is_missing_is_one_sentence(capsys):
    with pytest.raises(SystemExit, match=r"has no package absent: (activate|install)"), one_sentence():
        raise ModuleNotFoundError("No module named 'absent'", name="absent")
    with pytest.raises(ModuleNotFoundError), one_sentence():  # a mistake of ours
        raise ModuleNotFoundError("No module named 'fusedgpt.absent'", name="fusedgpt.absent")


def test_an_old_python_is_named():
    code = "import sys; sys.version_info = (3, 8, 18); import fusedgpt"
    assert "and 3.11 or newer is needed" in sentence(process("-c", code, check=False).stderr)


def test_anything_can_be_shown():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    faulty = type("Faulty", (Exception,), {"__repr__": None, "__str__": None})()
    wide = []
    for _ in range(60):
        wide = [wide, wide]  # its repr has 2**60 brackets
    assert [shown(v) for v in ("a", deep, wide)] == ["'a'", "[[[[...]]]]", shown(wide)]
    assert re.fullmatch("<int.*>", shown(10**5000))  # from Python 3.14 on with the number of its digits
    assert all(len(shown(v)) <= 201 for v in ("x" * 10**6, wide, faulty, [["x" * 100] * 9] * 9))
    assert first_line(faulty) == "" and first_line(UserError("one.\ntwo")) == "one"


def test_a_name_that_the_locale_cannot_write_is_one_sentence():
    # it used to be a traceback; such a name comes from a config file or a checkpoint, those of a command line are bytes
    ascii_only = dict(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    code = """
import pathlib
from fusedgpt.errors import one_sentence
with one_sentence():
    pathlib.Path("zw\\xf6lf").mkdir()
"""
    sentence = "error: 'zw\\xf6lf' cannot be a file name here, because file names are ascii: set PYTHONUTF8=1, or"
    sentence += " take another name"
    assert fails("-c", code, run=process, **ascii_only) == sentence


def test_a_warning_that_is_made_an_error_is_one_sentence():
    # python -W error: our own warning about bfloat16 used to be a traceback
    said = r"turns a warning into an error, at line \d+ of .*test_errors.py: UserWarning: this CPU is slow$"
    with pytest.raises(SystemExit, match=said), one_sentence(), warnings.catch_warnings(action="error"):
        warnings.warn("this CPU is slow", stacklevel=1)
