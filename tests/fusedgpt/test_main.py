"""The command fusedgpt: which script it runs, and how it refuses. tests/test_wheel.py runs it without a clone."""

import pathlib

import pytest

from fusedgpt import __main__ as command
from fusedgpt import home
from fusedgpt.errors import UserError
from tests.launch import ROOT, process


def test_every_script_has_a_command():
    scripts = {path.stem for path in ROOT.glob("*.py") if '__name__ == "__main__"' in path.read_text(encoding="utf-8")}
    assert set(command.COMMANDS) == scripts
    for name in command.COMMANDS:
        assert command.script_of([name, "a", "--b=c"]) == (ROOT / f"{name}.py", ["a", "--b=c"])
    assert command.script_of(["prepare", "text", "a.txt"]) == (ROOT / "data" / "text" / "prepare.py", ["a.txt"])


def test_an_unknown_name_is_refused_with_those_there_are():
    with pytest.raises(UserError, match="there is no command 'trian': it can be prepare, train, "):
        command.script_of(["trian"])
    with pytest.raises(UserError, match="there is no data set '': it can be fineweb, openwebtext, "):
        command.script_of(["prepare"])


def test_help_names_each_command_and_is_quick():
    code = "import sys; from fusedgpt.__main__ import main; sys.argv = ['fusedgpt', '--help']\ntry: main()\n"
    lines = process("-c", f"{code}finally: assert not {{'torch', 'numpy'}} & set(sys.modules)").stdout.splitlines()
    for name in ("prepare", *command.COMMANDS, *command.data_sets()):
        assert f" {name}" in " ".join(lines[-2:]), name


def test_sentences_name_the_commands_that_are_here(monkeypatch, tmp_path):
    said = "run: python data/text/prepare.py --input=a, or python train.py config/quickstart.py"
    assert home.as_called(said) == said
    monkeypatch.chdir(tmp_path)  # where these files were not found; config/a.py may be the user's own
    there = f"run: python {ROOT}/data/text/prepare.py --input=a, or python {ROOT}/train.py {ROOT}/config/quickstart.py"
    assert home.as_called(f"{said} and config/a.py").replace("'", "") == f"{there} and config/a.py"
    monkeypatch.setattr(home, "INSTALLED", True)
    assert home.as_called("torchrun --standalone train.py c.py") == "torchrun --standalone -m fusedgpt train c.py"
    assert home.as_called(said) == "run: fusedgpt prepare text --input=a, or fusedgpt train config/quickstart.py"


def test_data_go_beside_their_script_in_a_clone_and_here_without_one(tmp_path, monkeypatch):
    script = str(ROOT / "data" / "text" / "prepare.py")
    assert home.data_folder(script) == ROOT / "data" / "text" and home.SCRIPTS == home.ROOT == ROOT
    own = pathlib.Path(tmp_path.anchor) / "elsewhere" / "prepare.py"
    assert home.data_folder(str(own)) == own.parent
    monkeypatch.setattr(home, "ROOT", pathlib.Path())  # as in an installed package
    assert home.data_folder(script).parts == ("data", "text") and home.data_folder(str(own)) == own.parent
