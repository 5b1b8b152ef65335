"""The folder of a run: the lock, earlier checkpoints, earlier runs."""

import functools
import itertools
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch

import train
from fusedgpt.errors import UserError
from fusedgpt.machine.files import atomic, check_lock, lock
from fusedgpt.parallel.distributed import Ranks
from fusedgpt.runs import run_folder
from fusedgpt.runs.run_folder import is_this_launch, load_best, load_latest, set_aside
from tests.conftest import assert_same_bytes, checkpoint_of, rows, run, weights
from tests.kill_points import killed_before
from tests.launch import ROOT


def damage(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def test_the_second_process_is_refused_and_a_dead_one_is_no_obstacle(tmp_path):
    holds = "import sys, time; from fusedgpt.machine.files import lock; held = lock(sys.argv[1]); print(1, flush=True)"
    command = [sys.executable, "-c", f"{holds}; time.sleep(60)", tmp_path]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    child.stdout.readline()
    with pytest.raises(UserError, match="in use by another run: wait for it to end"):
        lock(tmp_path)
    child.send_signal(signal.SIGKILL)
    child.wait()
    lock(tmp_path).close()


def test_a_rank_that_writes_nothing_copies_nothing(tmp_path, monkeypatch):
    # each of eight ranks copied GPT-2 XL and its moments from its GPU: 150 GB at once
    monkeypatch.setattr(run_folder, "_on_cpu", None)
    saves = run_folder.Checkpoints(tmp_path, 1, None, print, Ranks(1, 1, 2))
    saves.save({"iter_num": 5, "model": {"w": torch.ones(2)}}, 2.0)
    assert saves.best == (2.0, 5) and not list(tmp_path.iterdir())


def at_step_7(monkeypatch, do):
    """Call `do` before that step of a run, after its first checkpoint; the iterations that it begins."""
    begun, step = [], train.train_step

    def watched(state, *args):
        begun.append(state.iteration)
        if state.iteration == 7:
            do()
        return step(state, *args)

    monkeypatch.setattr(train, "train_step", watched)
    return begun


def bytes_in(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def test_a_run_whose_folder_was_moved_ends_and_says_how_to_go_on(tmp_path, data, monkeypatch):
    # F25: it made the folder anew, without the lock, so a second run could start there
    out, moved = tmp_path / "out", tmp_path / "moved"
    begun = at_step_7(monkeypatch, lambda: out.rename(moved))
    with pytest.raises(UserError, match=rf"{out} was removed or moved, .* go on in the folder with its present name"):
        run(out, data)
    assert begun[-1] == 7 and not out.exists()
    monkeypatch.undo()
    run(moved, data, init_from="auto")  # the advice works, and nothing is missing
    assert [row["iter"] for row in rows(moved)] == list(range(10)) and checkpoint_of(moved)["iter_num"] == 10


@pytest.mark.parametrize("keep", [True, False])
def test_a_run_touches_nothing_that_another_may_have(tmp_path, data, small_run, monkeypatch, keep):
    # F25: both wrote, and the first one's last checkpoint was that of the second
    out, before = tmp_path / "out", {}

    def change():
        if not keep:
            out.rename(tmp_path / "moved")
            shutil.copytree(small_run, out)
        (out / ".lock").unlink()
        lock(out)  # another run begins; in one process, no lock refuses it
        before.update(bytes_in(out))

    begun = at_step_7(monkeypatch, change)
    with pytest.raises(UserError, match=r"or its \.lock replaced, while"):
        run(out, data)
    assert begun[-1] == 7 and bytes_in(out) == before and "ckpt.pt" in before


def test_a_checkpoint_under_way_does_not_land_in_the_folder_of_another_run(tmp_path):
    # writing a large one takes a minute, in which the folder can be moved: the last rename replaced the other's file
    held = lock(tmp_path / "out")
    with pytest.raises(UserError, match=r"cannot write .*ckpt\.pt"), atomic(tmp_path / "out" / "ckpt.pt") as file:
        file.write(b"of the first run")
        (tmp_path / "out").rename(tmp_path / "moved")
        lock(tmp_path / "out")
    assert bytes_in(tmp_path / "out") == {}
    with pytest.raises(UserError, match="was removed or moved"):
        check_lock(held)


def test_a_damaged_latest_falls_back_to_the_one_before(done, capsys):
    # best.pt was often the same file as ckpt.pt: one bad sector took both
    assert load_latest(done)[0]["iter_num"] == 10 and capsys.readouterr().out == ""
    damage(done / "ckpt.pt")
    shutil.copyfile(done / "ckpt.pt", done / "best.pt")  # in a run they are one file
    saved, path = load_latest(done)
    assert saved["iter_num"] == 5 and path == done / "ckpt-5.pt"
    said = capsys.readouterr().out
    assert f"ckpt.pt is damaged or gone. Taking {path}, of iteration 5, instead" in said
    (done / "ckpt.pt").unlink()
    assert load_latest(done)[0]["iter_num"] == 5
    damage(done / "ckpt-5.pt")
    with pytest.raises(UserError, match=r"ckpt\.pt does not exist"):
        load_latest(done)


@pytest.mark.parametrize("damaged", [["ckpt.pt"], ["ckpt.pt", "best.pt"]], ids=["to the best", "to the one before"])
def test_a_run_that_fell_back_ends_as_if_nothing_had_been(done, tmp_path, data, damaged):
    run(tmp_path / "whole", data, max_iters=20)
    for name in damaged:
        damage(done / name)
    run(done, data, max_iters=20, init_from="resume")
    assert sorted(os.listdir(done)) == sorted(os.listdir(tmp_path / "whole"))
    for name in ("ckpt.pt", "ckpt-15.pt", "best.pt"):
        assert_same_bytes(weights(done, name), weights(tmp_path / "whole", name))


def test_the_fallback_is_the_latest_by_its_content_and_not_by_its_name(done):
    os.rename(done / "ckpt-5.pt", done / "ckpt-7.pt")  # a copy that someone made
    later = checkpoint_of(done, "best.pt") | {"iter_num": 9}
    (done / "best.pt").unlink()
    torch.save(later, done / "best.pt")
    damage(done / "ckpt.pt")
    assert load_latest(done)[0]["iter_num"] == 9


def test_what_is_later_than_an_older_checkpoint_put_back_does_not_count_as_before_it(tmp_path, data):
    run(tmp_path, data, max_iters=20, eval_interval=4)
    shutil.copyfile(tmp_path / "ckpt-16.pt", tmp_path / "new")
    os.replace(tmp_path / "new", tmp_path / "ckpt.pt")
    shutil.copyfile(tmp_path / "ckpt.pt", tmp_path / "ckpt-18.pt")
    run(tmp_path, data, max_iters=17, init_from="resume", learning_rate=1e-4)
    assert sorted(path.name for path in tmp_path.glob("ckpt*")) == ["ckpt-16.pt", "ckpt-18.pt", "ckpt.pt"]


def test_the_best_is_the_latest_if_a_kill_left_best_pt_behind(done):
    saved = checkpoint_of(done)
    assert saved["best_iter"] == saved["iter_num"] == 10
    shutil.copyfile(done / "ckpt-5.pt", done / "best.pt.new")
    os.replace(done / "best.pt.new", done / "best.pt")
    assert load_best(done)[0]["iter_num"] == 10
    torch.save(saved | {"best_iter": 5}, done / "ckpt.pt")
    assert load_best(done)[0]["iter_num"] == 5
    (done / "best.pt").unlink()
    assert load_best(done)[0]["iter_num"] == 10


def test_a_kill_while_a_run_is_set_aside_leaves_one_that_resumes(done, tmp_path):
    def held(place):
        return {path.name: path.read_bytes() for path in place.rglob("*") if path.is_file() and path.name != ".lock"}

    for number in itertools.count():
        copy = shutil.copytree(done, tmp_path / str(number))
        change = killed_before(number, functools.partial(set_aside, copy, print), copy)
        assert held(copy) == held(done), change
        if change is None:
            break
        assert load_latest(copy)[0]["iter_num"] == 10, change
    assert number > 5 and load_latest(copy / "previous-1")[0]["iter_num"] == 10


def test_only_what_has_a_checkpoint_is_set_aside_under_the_next_number(done, capsys):
    # F2: two mistaken starts used to delete a finished run; a new run seemed to have the earlier one's scores, and its
    # figure of what a changed train_step returned
    before, theirs = (done / "ckpt.pt").read_bytes(), ("hf/config.json", "lm_eval_1.json")
    theirs += ("curves.png", "router_loss.png")
    for name in (*theirs, "mine/notes.txt"):
        (done / name).parent.mkdir(exist_ok=True)
        (done / name).write_text(name)
    set_aside(done, print)
    assert f"moved to {done / 'previous-1'}" in capsys.readouterr().out
    with pytest.raises(UserError, match="does not exist"):
        load_latest(done)
    (done / "metrics.jsonl").write_text("")
    set_aside(done, print)
    assert sorted(os.listdir(done)) == [".lock", "metrics.jsonl", "mine", "previous-1"]
    (done / "ckpt.pt").write_bytes(b"")
    set_aside(done, print)
    assert sorted(os.listdir(done)) == [".lock", "mine", "previous-1", "previous-2"]
    assert (done / "previous-1" / "ckpt.pt").read_bytes() == before
    for name in theirs:
        assert (done / "previous-1" / name).read_text() == name


@pytest.mark.parametrize(
    ("began", "launch", "restarted", "known"),
    [
        ('{"launch": {"id": "a", "torchrun": "host:1"}}', ("a", "host:1"), False, True),
        ('{"launch": {"id": "a", "torchrun": "host:1"}}', ("a", "other:2"), True, True),  # rank 0 moved
        ('{"launch": {"id": "a", "torchrun": "host:1"}}', ("a", "other:2"), False, False),  # an id that is used again
        ('{"launch": {"id": "a", "torchrun": "host:1"}}', ("b", "host:1"), True, False),
        ('{"launch": {"id": "a", "torchrun": "host:1"}}', None, False, False),
        ("", ("a", "host:1"), True, False),
    ],
)
def test_a_restarted_process_knows_its_own_run(tmp_path, began, launch, restarted, known):
    (tmp_path / "run.json").write_text(began)
    assert is_this_launch(tmp_path, launch and dict(zip(("id", "torchrun"), launch)), restarted) == known
