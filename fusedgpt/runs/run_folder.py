"""The folder of a run: its checkpoints, and earlier runs set aside.

`ckpt.pt` is the latest checkpoint, `ckpt-<iteration>.pt` are those before it, `best.pt` is the best; folders
`shards-<iteration>` hold the tensors of checkpoints that ranks share.
"""

import contextlib
import datetime
import math
import os
import pathlib
import re
import shutil
from collections.abc import Callable
from typing import IO

import torch
from torch.utils._pytree import tree_map_only

from fusedgpt.errors import UserError
from fusedgpt.machine.files import check_lock, link
from fusedgpt.parallel.distributed import Ranks, local
from fusedgpt.runs import checkpoint
from fusedgpt.runs.metrics import record_of, section

LATEST, BEST = "ckpt.pt", "best.pt"
# what else a run leaves; a figure has the name of what it shows, also of what a changed train_step returns
BESIDE = ("hf", "nanogpt", "lm_eval*.json", "*.png", "trace.json", "report.html", "run.json", "metrics.jsonl")

Say = Callable[[str], None]


def checkpoints(out_dir: str | os.PathLike) -> list[pathlib.Path]:
    """All checkpoints in a folder."""
    named = [pathlib.Path(out_dir) / name for name in (LATEST, BEST)]
    return [path for path in named if path.is_file()] + list(_earlier_ones(out_dir).values())


def _earlier_ones(out_dir):
    """{iteration in the name: the checkpoint ckpt-<iteration>.pt}."""
    numbers = {path: path.stem.removeprefix("ckpt-") for path in pathlib.Path(out_dir).glob("ckpt-*.pt")}
    return {int(number): path for path, number in numbers.items() if number.isdecimal() and path.is_file()}


def is_transformers(folder: str | os.PathLike) -> bool:
    """Whether `folder` has a model in Hugging Face's format and no run."""
    return (pathlib.Path(folder) / "config.json").is_file() and not checkpoints(folder)


def load_latest(out_dir: str | os.PathLike, say: Say = print, **how: bool) -> tuple[dict, pathlib.Path]:
    """The latest whole checkpoint and its path. Says if that is not ckpt.pt. Raises UserError if none is whole.

    how: verify, whole and optimizer, as for checkpoint.load.
    """
    return _first_whole(out_dir, pathlib.Path(out_dir) / LATEST, say, **how)


def load_best(out_dir: str | os.PathLike) -> tuple[dict, pathlib.Path]:
    """The best checkpoint of a run, or its latest if there is no best yet, and its path.

    If the latest is the best, it is taken even if a kill kept it from getting the name best.pt too. The optimizer's
    shards are not read. Raises UserError if no checkpoint is whole.
    """
    latest, best = (pathlib.Path(out_dir) / name for name in (LATEST, BEST))
    with contextlib.suppress(UserError):
        if not best.exists() or _is_best(checkpoint.load(latest, verify=False)):
            best = latest
    return _first_whole(out_dir, best, print, optimizer=False)


def remove_unused_shards(out_dir: pathlib.Path) -> None:
    """Remove the folders of shards that no checkpoint in `out_dir` names.

    Their checkpoint is no longer kept, or a kill ended its save. While a checkpoint cannot be read, none is removed,
    because that checkpoint might name it.
    """
    with contextlib.suppress(UserError, OSError):
        loaded = [checkpoint.load(path, verify=False) for path in out_dir.glob("*.pt")]  # copies that somebody made too
        used = {saved["shards"]["folder"] for saved in loaded if "shards" in saved}
        for folder in out_dir.glob("shards-*"):
            if folder.name not in used and re.fullmatch(r"shards-\d+(-\d+)?", folder.name):
                shutil.rmtree(folder, ignore_errors=True)


def _first_whole(out_dir, path, say, **how):
    """The checkpoint in `path`, or else the latest of all that are whole."""
    with contextlib.suppress(UserError):
        return checkpoint.load(path, **how), path
    others = [other for other in checkpoints(out_dir) if other != path]
    for other in sorted(others, key=_iteration, reverse=True):
        with contextlib.suppress(UserError):
            saved = checkpoint.load(other, **how)
            say(f"{path} is damaged or gone. Taking {other}, of iteration {saved['iter_num']}, instead")
            return saved, other
    return checkpoint.load(path, **how), path  # raises the reason


def _iteration(path):
    """The iteration that a checkpoint holds, whatever its name; -1 if that cannot be read."""
    with contextlib.suppress(UserError):
        return checkpoint.load(path, verify=False)["iter_num"]
    return -1


def is_this_launch(out_dir: str | os.PathLike, launch: dict | None, restarted: bool) -> bool:
    """Whether the run in a folder was begun by the `launch` (distributed.launch) that this process is part of."""
    began = section(record_of(out_dir), "launch")
    if not launch or began.get("id") != launch["id"]:
        return False
    # two launches may have one id, such as torchrun's default, but then torchrun is another process
    return began.get("torchrun") == launch["torchrun"] or (restarted and launch["id"] != "none")


def set_aside(out_dir: str | os.PathLike, say: Say) -> None:
    """Move an earlier run, if it has a checkpoint, to a folder previous-N of its own. Raises OSError if it cannot.

    ckpt.pt goes last: if a kill ends the moves earlier, the run resumes where it was. But shards go before all that
    names them, so that none is ever unused: a kill in between leaves them in previous-N, to be moved back by hand.
    """
    out_dir = pathlib.Path(out_dir)
    if saved := checkpoints(out_dir):
        found = [path for name in (*BESIDE, "shards-*") for path in sorted(out_dir.glob(name))]
        numbers = [path.name.removeprefix("previous-") for path in out_dir.glob("previous-*")]
        aside = out_dir / f"previous-{1 + max((int(n) for n in numbers if n.isdecimal()), default=0)}"
        aside.mkdir()
        for path in found + saved[::-1]:
            path.rename(aside / path.name)
        say(f"an earlier run in {out_dir} was moved to {aside}")


class Checkpoints:
    """Writes the checkpoints of a run to `out_dir`: the latest, `keep` - 1 before it, and the best.

    A disk that refuses does not end the run: what failed is said, and the next save tries again. Only the main rank has
    the folder's `lock`, and no checkpoint is written without it. If another process took the folder, `save` raises
    UserError. If `ranks` share the model, each writes its own tensors, and all have to call `save` together.
    """

    def __init__(self, out_dir: str | os.PathLike, keep: int, lock: IO | None, say: Say, ranks: Ranks):
        self.out_dir, self.keep, self.lock, self.say = pathlib.Path(out_dir), keep, lock, say
        self.ranks, self.together = ranks, ranks.shards > 1
        limit = datetime.timedelta(seconds=ranks.timeout)
        self.group = torch.distributed.new_group(backend="gloo", timeout=limit) if self.together else None
        self.saved_at = 0  # iteration of the last save, also of one that failed
        self.latest: int | None = None  # iteration of ckpt.pt
        self.best: tuple[float, int | None] = math.inf, None  # lowest validation loss on the disk, and its iteration
        self.failed: UserError | None = None  # why the last save failed, if it did

    def resume(self, saved: dict, path: pathlib.Path) -> None:
        """Go on after the checkpoint `saved`, which was loaded from `path`."""
        self.saved_at, self.best = saved["iter_num"], (saved["best_val_loss"], saved["best_iter"])
        if not self.lock:
            return
        check_lock(self.lock)
        remove_unused_shards(self.out_dir)  # left by a save that was killed
        if path.name == LATEST:  # otherwise ckpt.pt is damaged, and with `latest` None no save keeps it
            self.latest = saved["iter_num"]
            if _is_best(saved):  # a kill may have kept it from being linked to best.pt
                link(path, self.out_dir / BEST)

    def save(self, state: dict, val_loss: float = math.inf) -> None:
        """Write `state`. val_loss: of this state, if it was evaluated."""
        self.saved_at, self.failed, best = state["iter_num"], None, self.best
        if val_loss < best[0]:
            best = val_loss, state["iter_num"]
        state = {**state, "best_val_loss": best[0], "best_iter": best[1]}
        check_lock(self.lock)  # if the folder is gone, a write would make it anew
        try:
            if self.together:
                state = self._with_shards(_on_cpu(state))
            if self.lock:  # other ranks need no copy
                self._write(_on_cpu(state))
        except (UserError, OSError) as error:
            self.failed = UserError(str(error))  # not the error itself, whose traceback would keep the state in memory
        if self.together:
            check_lock(self.lock)
            if self.lock:
                remove_unused_shards(self.out_dir)
            self.failed = self.ranks.broadcast(self.failed)  # only the main rank knows
        if self.failed:
            self.say(f"NOT SAVED at iteration {state['iter_num']}: {self.failed}. The next save, if any, tries again")
        else:
            self.best = best

    def _with_shards(self, state):
        """Write the tensors of this rank; returns `state` with the names of all ranks' files in place of tensors."""
        from fusedgpt.parallel import shard_files  # takes a second to import

        state, tensors = shard_files.split(state)
        name = self.ranks.broadcast(shard_files.free_name(self.out_dir, state["iter_num"]))
        files = shard_files.write_together(self.out_dir / name, tensors, self.group)
        check_lock(self.lock)
        return {**state, "shards": {"folder": name, "files": files}}

    def _write(self, state):
        """Write ckpt.pt, whose replacement decides what is the latest and the best; then the other names."""
        latest = self.out_dir / LATEST
        if self.latest not in (None, state["iter_num"]) and latest.exists():
            link(latest, self.out_dir / f"ckpt-{self.latest}.pt")
        checkpoint.save(latest, state)
        self.latest = state["iter_num"]
        if _is_best(state):
            link(latest, self.out_dir / BEST)
        # a later one exists if someone has put an older one in ckpt.pt's place
        earlier = {n: path for n, path in _earlier_ones(self.out_dir).items() if n < state["iter_num"]}
        for iteration in sorted(earlier, reverse=True)[self.keep - 1 :]:
            earlier[iteration].unlink()

    def recovery_advice(self) -> str:
        """How to go on if the run has diverged: from which checkpoint, and with which changes."""
        calmer = "with a lower learning_rate, a grad_clip, or dtype=float32"
        latest = self.latest if self.lock else self.saved_at
        if not latest:
            return f"there is no checkpoint yet, so start again {calmer}"
        return f"resume from {self.out_dir / LATEST}, of iteration {latest}, {calmer}"


def _is_best(saved):
    return saved["best_iter"] == saved["iter_num"]


def _on_cpu(state):
    """`state` with its tensors on the CPU; tied tensors stay tied."""
    copies = {}

    def copied(tensor):
        place = local(tensor).data_ptr(), tensor.shape
        if place not in copies:
            copies[place] = tensor.detach().cpu()
        return copies[place]

    return tree_map_only(torch.Tensor, copied, state)
