"""Kill convert.py before changes that it makes to files, and then repeat it. Exports: tests/test_export.py."""

import functools
import itertools
import os
import shutil

import pytest

import convert
from fusedgpt.runs import checkpoint
from tests.conftest import assert_same_bytes
from tests.kill_points import killed_before

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("form", convert.FORMS)
def test_a_conversion_that_is_killed_can_be_repeated(form, small_run, tmp_path, tell):
    source, names = tmp_path / "source", ("ckpt.pt", "best.pt", "ckpt-5.pt")
    shutil.copytree(small_run, source)
    if form == "file":
        convert.main(source, "shards")
    wanted = {name: checkpoint.load(source / name)["model"] for name in names}
    for number in itertools.count(step=2):
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
    tell(f"a conversion to {form} was killed before every other of its {number} changes")
