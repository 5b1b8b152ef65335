"""Checkpoints in the background."""

import threading

import pytest
import torch

from fusedgpt import checkpoint, saver
from fusedgpt.errors import UserError
from fusedgpt.saver import Saver


def state(iteration, w=None, best_iter=None):
    return {"iter_num": iteration, "best_iter": best_iter, "model": {"w": torch.zeros(3) if w is None else w}}


def read(path):
    return torch.load(path, weights_only=True)


def test_it_saves_what_the_state_was_and_not_what_it_became(tmp_path, monkeypatch):
    may_write, save = threading.Event(), checkpoint.save

    def late(*args):
        may_write.wait(60)
        save(*args)

    monkeypatch.setattr(checkpoint, "save", late)
    w = torch.ones(3)
    it = Saver(tmp_path, 2, True, print)
    it.save({**state(5, w), "tied": w.view(3)})
    w += 1  # training goes on
    assert not (tmp_path / "ckpt.pt").exists()
    may_write.set()
    it.close()
    saved = read(tmp_path / "ckpt.pt")
    assert saved["model"]["w"].tolist() == [1, 1, 1]
    assert saved["tied"].data_ptr() == saved["model"]["w"].data_ptr()  # or the file would hold tied weights twice


def test_writes_never_overlap(tmp_path, monkeypatch):
    running, save = [], checkpoint.save

    def alone(*args):
        running.append(1)
        assert len(running) == 1
        save(*args)
        running.pop()

    monkeypatch.setattr(checkpoint, "save", alone)
    it = Saver(tmp_path, 2, True, print)
    for iteration in range(20):
        it.save(state(iteration))
    it.close()
    assert read(tmp_path / "ckpt.pt")["iter_num"] == 19 and read(tmp_path / "ckpt-18.pt")["iter_num"] == 18


def test_a_disk_that_refuses_is_said_and_tried_again(tmp_path, monkeypatch):
    said, save = [], checkpoint.save

    def refuse(*_):
        raise UserError("cannot write ckpt.pt: no")

    it = Saver(tmp_path, 2, True, said.append)
    it.save(state(5))
    monkeypatch.setattr(checkpoint, "save", refuse)
    it.save(state(10))
    it.save(state(15))
    with pytest.raises(UserError, match="cannot write"):
        it.close()
    assert [line.split(":")[0] for line in said] == ["NOT SAVED at iteration 10", "NOT SAVED at iteration 15"]
    assert read(tmp_path / "ckpt.pt")["iter_num"] == 5
    monkeypatch.setattr(checkpoint, "save", save)
    it = Saver(tmp_path, 2, True, said.append)
    it.resume(checkpoint_of(tmp_path), tmp_path / "ckpt.pt")
    it.save(state(20))
    it.close()
    assert it.failed is None and len(said) == 2
    assert read(tmp_path / "ckpt-5.pt")["iter_num"] == 5 and read(tmp_path / "ckpt.pt")["iter_num"] == 20


def checkpoint_of(folder):
    return read(folder / "ckpt.pt")


def test_any_other_failure_of_a_write_ends_the_run(tmp_path, monkeypatch):
    def fails(*_):
        raise TypeError("a mistake of ours")

    monkeypatch.setattr(checkpoint, "save", fails)
    it = Saver(tmp_path, 2, True, print)
    it.save(state(5))
    with pytest.raises(TypeError, match="ours"):
        it.save(state(10))


def test_the_best_is_written_once(tmp_path, monkeypatch):
    # an improving evaluation used to write twice
    written, save = [], checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda *args: (written.append(args), save(*args)))
    it = Saver(tmp_path, 2, True, print)
    it.save(state(5, best_iter=5))
    it.save(state(10, best_iter=5))
    it.close()
    assert len(written) == 2
    assert read(tmp_path / "best.pt")["iter_num"] == 5


def test_only_the_main_rank_writes(tmp_path):
    it = Saver(tmp_path, 2, False, print)
    it.resume({"iter_num": 3, "best_iter": 3, "kept": []}, tmp_path / "ckpt.pt")
    it.save(state(5, best_iter=5))
    it.close()
    assert list(tmp_path.iterdir()) == [] and it.saved_at == 5


def test_advice_names_a_checkpoint_that_works(tmp_path):
    it = Saver(tmp_path, 2, True, print)
    assert it.last_good(None).startswith("there is no checkpoint yet, so start again with a lower learning_rate")
    it.saved_at = 20
    assert it.last_good(20).startswith(f"resume from {tmp_path / 'ckpt.pt'}, of iteration 20, with a lower")
    assert it.last_good(15).endswith(f"first copy {tmp_path / 'best.pt'}, of iteration 15, over it")


def test_copies_share_nothing_with_what_they_were_made_of():
    w = torch.ones(2)
    nested = {"a": [w, {"b": w}], "n": 3}
    copied = saver._copied(nested, {})
    w.zero_()
    assert copied["a"][0].tolist() == [1, 1] and copied["a"][1]["b"] is copied["a"][0] and copied["n"] == 3
