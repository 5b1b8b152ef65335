"""A run folder from a stranger, in which any file may be a link: nothing outside of it is written."""

import contextlib
import pathlib
import shutil

import pytest

import export
from fusedgpt.errors import UserError
from tests.conftest import run
from tests.launch import script

VICTIM = b"what somebody else keeps outside of the folder\n"
EXTRAS = dict(sample_interval=4, sample_prompts="!", profile=True)
REFUSED = (".lock",)  # it ends what would go on to write the others
# of killed processes, beside a file for each name
LEFT = (".trace.json", ".trace.json.tmp", ".link.tmp")


@pytest.fixture(scope="module")
def names(small_run, data, tmp_path_factory):
    """Every name that a run folder may hold and `small_run` has not: of files, and of what is being written."""
    folder = shutil.copytree(small_run, tmp_path_factory.mktemp("names") / "run")
    run(folder, data, init_from="resume", max_iters=12, **EXTRAS)
    script("plot.py", folder)
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    unfinished = {file.with_name(f".{file.name}.tmp") for file in files}
    found = {*files, *unfinished, *map(pathlib.Path, LEFT)} - set(map(pathlib.Path, REFUSED))
    return [name for name in sorted(found) if not (small_run / name).exists()]


@pytest.mark.parametrize("which", ["all that a run has not yet", *REFUSED])
def test_no_link_is_written_through(which, done, data, names):
    # .lock, temporary files, trace.json and figures were: a checkpoint from the net could empty any file
    assert len(names) > 12
    victim = done.with_name("victim")
    victim.write_bytes(VICTIM)
    for name in [which] if which in REFUSED else names:
        (done / name).parent.mkdir(parents=True, exist_ok=True)
        (done / name).unlink(missing_ok=True)
        (done / name).symlink_to(victim)
    for use in (  # each works or is refused
        lambda: run(done, data, init_from="resume", max_iters=12, **EXTRAS),
        lambda: script("plot.py", done),
        lambda: export.main(done, done / "hf"),
        lambda: run(done, data, max_iters=2, **EXTRAS),
    ):
        with contextlib.suppress(UserError, OSError, AssertionError):
            use()
        assert victim.read_bytes() == VICTIM
