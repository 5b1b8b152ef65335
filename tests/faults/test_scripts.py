"""Kill export.py and convert.py before each change that they make to a file, and then repeat them."""

import functools
import itertools
import os
import shutil

import pytest
import torch

import convert
import export
from fusedgpt.runs import checkpoint
from tests.conftest import assert_same_bytes
from tests.faults.processes import rng
from tests.kill_points import killed_before
from tests.test_export import export_of_bytes, kill_and_repeat, loaded

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("over", ["nothing", "an older export"])
def test_export(over, small_run, tmp_path, tell):
    # 13 of 16 kills left a folder into which nothing could be exported any more
    before = None if over == "nothing" else export_of_bytes(tmp_path)
    each = (kill_and_repeat(number, small_run, before, tmp_path / str(number)) for number in itertools.count())
    kills = sum(1 for _ in itertools.takewhile(bool, each))  # after each kill, a whole export has to succeed
    assert kills > 10  # fewer would mean that changes of files were not seen
    tell(f"{kills} kills of an export over {over}")


def test_exports_of_two_runs_that_are_killed_again_and_again(small_run, tmp_path, tell):
    # what killed exports leave must not add up
    chance, folder, kills = rng("exports"), tmp_path / "exports" / "hf", 0
    other = export_of_bytes(tmp_path).with_name("run")
    for _ in range(60):
        one = functools.partial(export.main, chance.choice([small_run, other]), folder)
        kills += bool(killed_before(chance.randrange(36), one, folder.parent))
    export.main(small_run, folder)
    export.main(small_run, tmp_path / "alone")
    assert torch.equal(loaded(folder), loaded(tmp_path / "alone"))
    assert {file.name for file in folder.iterdir()} == {file.name for file in (tmp_path / "alone").iterdir()}
    assert list(folder.parent.iterdir()) == [folder]
    tell(f"{kills} kills of exports into one folder")


@pytest.mark.parametrize("form", convert.FORMS)
def test_convert(form, small_run, tmp_path, tell):
    source, names = tmp_path / "source", ("ckpt.pt", "best.pt", "ckpt-5.pt")
    shutil.copytree(small_run, source)
    if form == "file":
        convert.main(source, "shards")
    wanted = {name: checkpoint.load(source / name)["model"] for name in names}
    for number in itertools.count():
        folder = tmp_path / str(number)
        shutil.copytree(source, folder)
        os.remove(folder / "best.pt")  # copytree made a second file of this link
        os.link(folder / "ckpt.pt", folder / "best.pt")
        change = killed_before(number, functools.partial(convert.main, folder, form), folder)
        for name in names:
            assert_same_bytes(checkpoint.load(folder / name)["model"], wanted[name])
        convert.main(folder, form)
        used = set()
        for name in names:
            found = checkpoint.load(folder / name)
            assert_same_bytes(found["model"], wanted[name])
            assert ("shards" in found) == (form == "shards"), change
            used |= {found["shards"]["folder"]} if "shards" in found else set()
        assert {path.name for path in folder.glob("shards-*")} == used, change
        if change is None:
            break
    tell(f"{number} kills of a conversion to {form}")
