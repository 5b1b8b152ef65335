"""Checkpoints that are written while training goes on."""

import concurrent.futures
import datetime
import os
import pathlib
from collections.abc import Callable

import torch

from fusedgpt.errors import UserError
from fusedgpt.machine.files import Lock, link
from fusedgpt.parallel.distributed import Ranks, local, others_needed
from fusedgpt.runs import checkpoint
from fusedgpt.runs.run_folder import BEST, LATEST, before, is_best, remove_unused_shards, set_aside_later_ones


class Saver:
    """Writes the checkpoints of a run to `out_dir`: the latest, `keep` - 1 before it, and the best.

    `save` returns as soon as the state is copied to memory; a thread writes the copy. A disk that refuses does not end
    the run: the saver says what failed, and the next save tries again. Only the main rank has the folder's `lock`, and
    no checkpoint is written without it. The saver keeps the lock until the last write has ended. If another process
    took the folder, the next call raises UserError. If `ranks` share the model, each writes its own tensors, and all
    have to call `save` and `wait` together.
    """

    def __init__(
        self, out_dir: str | os.PathLike, keep: int, lock: Lock | None, say: Callable[[str], None], ranks: Ranks
    ):
        self.out_dir, self.keep, self.lock, self.say = pathlib.Path(out_dir), keep, lock, say
        self.ranks, self.together = ranks, ranks.shards > 1
        limit = datetime.timedelta(seconds=ranks.timeout)
        with others_needed("getting ready to save"):
            self.group = torch.distributed.new_group(backend="gloo", timeout=limit) if self.together else None
        self.saved_at = 0  # iteration of the last save
        self.latest: int | None = None  # iteration of ckpt.pt
        self.best = float("inf"), None  # lowest validation loss on the disk, and its iteration
        self.kept: list[int] = []  # iterations of this run's earlier checkpoints, oldest first
        self.failed: UserError | None = None  # why the last save failed, if it did
        self.thread = concurrent.futures.ThreadPoolExecutor(max_workers=1)
        self.writing = None

    def resume(self, saved: dict, path: pathlib.Path) -> None:
        """Go on after the checkpoint `saved`, which was loaded from `path`."""
        self.saved_at, self.kept = saved["iter_num"], saved["kept"]
        self.best = saved["best_val_loss"], saved["best_iter"]
        if not self.lock:
            return
        self.lock.check()
        set_aside_later_ones(self.out_dir, saved["iter_num"], self.say)
        remove_unused_shards(self.out_dir)  # left by a save that was killed
        if path.name == LATEST:
            self.latest = saved["iter_num"]
            if is_best(saved):  # a kill may have kept it from being linked to best.pt
                link(path, self.out_dir / BEST)
        elif path.name == before(saved["iter_num"]):  # ckpt.pt is damaged, and with `latest` None no save keeps it
            self.kept = [*self.kept, saved["iter_num"]]

    def save(self, state: dict) -> None:
        """Write a copy of `state` once the previous checkpoint is written. The caller may change the tensors at once.

        Raises what the previous write raised, except if the disk refused.
        """
        self.saved_at = state["iter_num"]
        if self.together:
            self.wait()
            self._save_together(state)
        elif self.lock:
            self.wait()
            self.writing = self.thread.submit(self._write, _copy(state))

    def _save_together(self, state):
        from fusedgpt.parallel import shard_files  # takes a second to import

        if self.lock:
            self.lock.check()  # if the folder is gone, each rank would make it anew
        state, tensors = shard_files.split(_copy(state))
        name = self.ranks.broadcast(shard_files.free_name(self.out_dir, state["iter_num"]))

        def write():
            """Write the tensors of this rank, then the checkpoint that names those of all."""
            try:
                files = shard_files.write_together(self.out_dir / name, tensors, self.group)
            except UserError as error:
                self._not_saved(state, error)
            else:
                if self.lock:
                    self._write({**state, "shards": {"folder": name, "files": files}})
            if self.lock:
                self.lock.check()
                remove_unused_shards(self.out_dir)

        self.writing = self.thread.submit(write)

    def recovery_advice(self) -> str:
        """How to go on if the run has diverged: from which checkpoint, and with which changes."""
        self.wait()
        calmer = "with a lower learning_rate, a grad_clip, or dtype=float32"
        latest, (_, best_iter) = self.latest if self.lock else self.saved_at, self.best
        if not latest:
            return f"there is no checkpoint yet, so start again {calmer}"
        advice = f"resume from {self.out_dir / LATEST}, of iteration {latest}, {calmer}"
        if best_iter is not None and best_iter < latest:
            advice += f"; if it diverges again, first copy {self.out_dir / BEST}, of iteration {best_iter}, over it"
        return advice

    def wait(self) -> None:
        """Wait until nothing is being written. Raises what the write raised, except if the disk refused."""
        if self.writing and self.together:
            writing, self.writing = self.writing, None
            with others_needed("saving"):
                writing.result()
            self.failed, self.best = self.ranks.broadcast((self.failed, self.best))  # only the main rank knows
        elif self.writing:
            self.writing.result()

    def close(self) -> None:
        """Wait for the last save. Raises UserError if it failed."""
        self.wait()
        self.thread.shutdown()
        if self.lock:
            self.lock.close()
        if self.failed:
            raise self.failed

    def _write(self, state):
        self.lock.check()
        try:
            self._replace_latest(state)
            if is_best(state):
                link(self.out_dir / LATEST, self.out_dir / BEST)
            while len(self.kept) > self.keep - 1:
                (self.out_dir / before(self.kept[0])).unlink(missing_ok=True)
                del self.kept[0]
        except (UserError, OSError) as error:
            self._not_saved(state, error)
        else:
            self.failed, self.best = None, (state["best_val_loss"], state["best_iter"])

    def _not_saved(self, state, error):
        self.failed = UserError(str(error))  # not the error itself, whose traceback would keep the state in memory
        self.say(f"NOT SAVED at iteration {state['iter_num']}: {self.failed}. The next save, if any, tries again")

    def _replace_latest(self, state):
        latest = self.out_dir / LATEST
        if self.latest not in (None, state["iter_num"]) and latest.exists():
            name = self.out_dir / before(self.latest)
            if not name.exists() or name.samefile(latest):  # another file of that name is not ours to replace
                link(latest, name)
                self.kept = [*(n for n in self.kept if n != self.latest), self.latest]
        # this one replacement decides what is the latest, what is the best and which earlier ones are ours
        checkpoint.save(latest, {**state, "kept": list(self.kept)})
        self.latest = state["iter_num"]


def _copy(state):
    copied = _copied(state, {})
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()  # once for all copies, which were only queued
    return copied


def _copied(value, copies):
    """A copy of nested dicts and lists with their tensors in new memory; tied tensors stay tied.

    Copies from a CUDA device are queued, and go to pinned memory, which PyTorch keeps for the next save.
    """
    if isinstance(value, torch.Tensor):
        place = local(value).data_ptr(), value.shape
        if place not in copies:
            copies[place] = value.detach().to("cpu", copy=True, non_blocking=value.is_cuda)
        return copies[place]
    if isinstance(value, dict):
        return {key: _copied(each, copies) for key, each in value.items()}
    if isinstance(value, list):
        return [_copied(each, copies) for each in value]
    return value
