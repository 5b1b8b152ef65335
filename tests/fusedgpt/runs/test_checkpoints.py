"""Checkpoints on a disk that may refuse."""

import gc
import weakref

import pytest
import torch

from fusedgpt.errors import UserError
from fusedgpt.machine.files import lock
from fusedgpt.parallel.distributed import Ranks
from fusedgpt.runs import checkpoint, run_folder
from fusedgpt.runs.run_folder import Checkpoints
from tests.conftest import checkpoint_of

W = torch.zeros(3)


def state(iteration, w=W):
    return {"iter_num": iteration, "model": {"w": w}}


def checkpoints_of(out_dir, say=print):
    return Checkpoints(out_dir, 2, lock(out_dir), say, Ranks())


def refused(*_):
    raise UserError("cannot write ckpt.pt: no")


class OnGPU(torch.Tensor):
    """A tensor whose copy on the CPU is a new one, as that of a CUDA tensor is."""

    def cpu(self):
        return self.as_subclass(torch.Tensor).clone()


def test_tied_weights_are_in_the_file_once(tmp_path):
    w = torch.ones(3).as_subclass(OnGPU)
    checkpoints_of(tmp_path).save({**state(5, w), "optimizer": {"state": {0: {"step": w[0]}}}, "tied": w.view(3)})
    saved = checkpoint_of(tmp_path)
    assert saved["model"]["w"].tolist() == [1, 1, 1] and saved["optimizer"]["state"][0]["step"] == 1
    assert saved["tied"].data_ptr() == saved["model"]["w"].data_ptr()


def test_a_disk_that_refuses_is_said_and_tried_again(tmp_path, monkeypatch):
    said = []
    it = checkpoints_of(tmp_path, said.append)
    it.save(state(5))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", refused)
        it.save(state(10))
        it.save(state(15))
    assert "cannot write" in str(it.failed)
    it.lock.close()
    assert [line.split(":")[0] for line in said] == ["NOT SAVED at iteration 10", "NOT SAVED at iteration 15"]
    assert checkpoint_of(tmp_path)["iter_num"] == 5
    it = checkpoints_of(tmp_path, said.append)
    it.resume(checkpoint_of(tmp_path), tmp_path / "ckpt.pt")
    it.save(state(20))
    it.lock.close()
    assert len(said) == 2
    assert checkpoint_of(tmp_path, "ckpt-5.pt")["iter_num"] == 5 and checkpoint_of(tmp_path)["iter_num"] == 20


def test_only_the_main_rank_writes(tmp_path):
    it = Checkpoints(tmp_path, 2, None, print, Ranks())
    it.resume({"iter_num": 3, "best_iter": 3, "best_val_loss": 1.0}, tmp_path / "ckpt.pt")
    it.save(state(5), 0.5)
    assert list(tmp_path.iterdir()) == [] and (it.saved_at, it.best) == (5, (0.5, 5))


def test_advice_names_a_checkpoint_that_works(tmp_path):
    it = checkpoints_of(tmp_path)
    assert it.recovery_advice().startswith("there is no checkpoint yet, so start again with a lower learning_rate")
    it.save(state(15), 1.0)
    assert it.recovery_advice().startswith(f"resume from {tmp_path / 'ckpt.pt'}, of iteration 15, with a lower")


@pytest.mark.parametrize(("module", "name"), [(checkpoint, "save"), (run_folder, "link")])
def test_what_could_not_be_saved_is_neither_the_best_nor_the_advice(tmp_path, monkeypatch, module, name):
    # a best state whose write failed used to raise the bar, and no checkpoint had it
    it = checkpoints_of(tmp_path)
    it.save(state(5), 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(module, name, refused)
        it.save(state(10), 0.5)
    assert it.failed and it.best == (1.0, 5)
    assert "of iteration 10" not in it.recovery_advice()
    it.save(state(10), 0.5)  # at the end of a run
    it.lock.close()
    assert it.best == (0.5, 10) and checkpoint_of(tmp_path, "best.pt")["iter_num"] == 10


def test_a_failed_write_frees_the_state(tmp_path, monkeypatch):
    # the exception that was kept held the frames of the write, and with them 1.5 GB
    monkeypatch.setattr(checkpoint, "save", refused)
    w, it = torch.ones(3), checkpoints_of(tmp_path)
    kept = weakref.ref(w)
    it.save(state(5, w))
    del w
    gc.collect()
    assert it.failed and kept() is None
