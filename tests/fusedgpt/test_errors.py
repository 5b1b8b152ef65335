"""How a script ends on what a user can correct."""

import sys

import pytest
import torch

from fusedgpt.errors import UserError, first_line, one_sentence, shown
from tests.launch import fails, process, sentence

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
    for advice, said in ((" Halve --batch_size.", "memory. Halve --batch_size"), ("", "out of memory. PyTorch said")):
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


def test_ctrl_c_leaves_the_console_on_a_new_line(capsys):
    with pytest.raises(SystemExit, match="130"), one_sentence():
        print("half a sam", end="")
        raise KeyboardInterrupt
    assert capsys.readouterr() == ("half a sam", "\n")


@pytest.mark.parametrize(("name", "package"), [("train.py", "torch"), ("data/shakespeare/prepare.py", "numpy")])
def test_without_the_environment_a_script_says_how_to_get_it(name, package):
    # "python train.py" before "source .venv/bin/activate" was a traceback that ended in No module named 'torch'
    prefix = [sys.executable, "-c", WITHOUT.format(package=package)]
    done = process(name, prefix=prefix, check=False)
    assert f"has no package {package}: " in sentence(done.stderr)
    assert any(remedy in done.stderr for remedy in ("bin/activate", "make setup"))


def test_a_package_that_is_missing_is_one_sentence():
    with pytest.raises(SystemExit, match="error: No module named 'absent'"), one_sentence():
        raise ModuleNotFoundError("No module named 'absent'")


def test_an_old_python_is_named():
    code = "import sys; sys.version_info = (3, 8, 18); import fusedgpt"
    assert "and 3.11 or newer is needed" in sentence(process("-c", code, check=False).stderr)


def test_anything_can_be_shown():
    assert [shown(v) for v in ("a", [[[[[]]]]])] == ["'a'", "[[[[...]]]]"]
    assert all(len(shown(v)) <= 201 for v in ("x" * 10**6, [["x" * 100] * 9] * 9))
    assert first_line(UserError("")) == "" and first_line(UserError("one.\ntwo")) == "one"
    assert len(first_line(UserError("x" * 10_000))) == 300  # zipfile quotes 10 kB of a damaged name
