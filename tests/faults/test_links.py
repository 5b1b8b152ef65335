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
EXTRAS = dict(tensorboard_log=True, sample_interval=4, sample_prompts="!", profile=True)
REFUSED = (".lock", ".previous.tmp")  # each ends what would go on to write the others
LEFT = (
    ".trace.json",
    ".trace.json.tmp",
    ".link.tmp",
    ".report.html.child.tmp",
)  # of killed processes, beside a file for each name


@pytest.fixture(scope="module")
def names(small_run, data, tmp_path_factory):
    """Every name that a run folder may hold: of files, and of what is being written."""
    folder = shutil.copytree(small_run, tmp_path_factory.mktemp("names") / "run")
    run(folder, data, init_from="resume", max_iters=12, **EXTRAS)
    script("plot.py", folder)
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    unfinished = {file.with_name(f".{file.name}.tmp") for file in files}
    return sorted({*files, *unfinished, *map(pathlib.Path, LEFT)} - set(map(pathlib.Path, REFUSED)))


def attacks(out, data):
    """What a user may do with a folder from elsewhere; each either works or is refused."""
    yield lambda: run(out, data, init_from="resume", max_iters=12, **EXTRAS)
    yield lambda: script("plot.py", out)
    yield lambda: script("sample.py", out, "--num_samples=1", "--max_new_tokens=2", "--start=!")
    yield lambda: export.main(out, out / "hf")
    yield lambda: run(out, data, max_iters=2, **EXTRAS)


def assert_no_harm(out, data, links):
    victim = out.with_name(f"{out.name}.victim")
    victim.write_bytes(VICTIM)
    for name in links:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).unlink(missing_ok=True)
        (out / name).symlink_to(victim)
    for attack in attacks(out, data):
        with contextlib.suppress(UserError, OSError, AssertionError):
            attack()
        assert victim.read_bytes() == VICTIM, links


@pytest.mark.parametrize("which", ["all that a run has not yet", *REFUSED])
def test_no_link_is_written_through(which, done, data, names):
    # .lock, temporary files, trace.json and figures were: a checkpoint from the net could empty any file
    absent = [name for name in names if not (done / name).exists()]
    assert len(absent) > 12
    assert_no_harm(done, data, [which] if which in REFUSED else absent)


def test_no_event_file_is_written_through_a_link(done, data, tmp_path):
    (tmp_path / "outside").mkdir()
    (done / "tensorboard").symlink_to(tmp_path / "outside")
    with pytest.raises(UserError, match=r"tensorboard is a link: remove it"):
        run(done, data, init_from="resume", max_iters=12, tensorboard_log=True)
    assert not list((tmp_path / "outside").iterdir())


@pytest.mark.slow
def test_no_file_of_a_run_is_written_through_if_it_is_a_link(small_run, data, tmp_path, names):
    there = [name for name in names if (small_run / name).exists()]
    assert len(there) > 4
    for name in there:
        assert_no_harm(shutil.copytree(small_run, tmp_path / name), data, [name])
