"""The folder of a run: one run at a time, its latest and its best checkpoint, and earlier runs set aside.

`ckpt.pt` is the latest checkpoint, `ckpt-<iteration>.pt` are those before it, `best.pt` is the best; folders
`shards-<iteration>` hold the tensors of checkpoints that ranks share.
"""

import contextlib
import os
import pathlib
import re
import shutil
from collections.abc import Callable

from fusedgpt.errors import UserError
from fusedgpt.machine.files import link
from fusedgpt.runs import checkpoint
from fusedgpt.runs.metrics import record_of, section

LATEST, BEST = "ckpt.pt", "best.pt"
# the other files of a run; a figure has the name of what it shows, also of what a changed train_step returns
NOT_CHECKPOINTS = ("metrics.jsonl", "run.json", "report.html", "trace.json", "lm_eval.json", "*.png")
FOLDERS = ("tensorboard", "hf", "gguf", "nanogpt")  # event files, and exports

Say = Callable[[str], None]


def before(iteration: int) -> str:
    """The name of an earlier checkpoint."""
    return f"ckpt-{iteration}.pt"


def earlier_ones(out_dir: str | os.PathLike) -> dict[int, pathlib.Path]:
    """The checkpoints ckpt-<iteration>.pt in a folder, by the iteration in their names."""
    numbers = {path: path.stem.removeprefix("ckpt-") for path in pathlib.Path(out_dir).glob("ckpt-*.pt")}
    return {int(number): path for path, number in numbers.items() if number.isdecimal() and path.is_file()}


def checkpoints(out_dir: str | os.PathLike) -> list[pathlib.Path]:
    """All checkpoints in a folder."""
    named = [pathlib.Path(out_dir) / name for name in (LATEST, BEST)]
    return [path for path in named if path.is_file()] + list(earlier_ones(out_dir).values())


def is_transformers(folder: str | os.PathLike) -> bool:
    """Whether `folder` has a model in Hugging Face's format and no run."""
    return (pathlib.Path(folder) / "config.json").is_file() and not checkpoints(folder)


def load_latest(out_dir: str | os.PathLike, say: Say = print, **how: bool) -> tuple[dict, pathlib.Path]:
    """The latest whole checkpoint and its path. Says if that is not ckpt.pt. Raises UserError if none is whole.

    how: verify, whole and optimizer, as for checkpoint.load.
    """
    return _first_whole(out_dir, pathlib.Path(out_dir) / LATEST, say, **how)


def load_best(out_dir: str | os.PathLike, say: Say = print) -> tuple[dict, pathlib.Path]:
    """The best checkpoint of a run, or its latest if there is no best yet, and its path.

    If the latest is the best, it is taken even if a kill kept it from getting the name best.pt too. The optimizer's
    shards are not read. Raises UserError if no checkpoint is whole.
    """
    latest, best = (pathlib.Path(out_dir) / name for name in (LATEST, BEST))
    with contextlib.suppress(UserError):
        if not best.exists() or is_best(checkpoint.load(latest, verify=False)):
            best = latest
    return _first_whole(out_dir, best, say, optimizer=False)


def is_best(saved: dict) -> bool:
    """Whether the checkpoint `saved` is the best of its run so far."""
    return saved["best_iter"] == saved["iter_num"]


def remove_unused_shards(out_dir: pathlib.Path) -> None:
    """Remove the folders of shards that no checkpoint in `out_dir` names.

    Their checkpoint is no longer kept, or a kill ended its save. While a checkpoint cannot be read, none is removed,
    because that checkpoint might name it.
    """
    with contextlib.suppress(UserError, OSError):
        used = set()
        for path in out_dir.glob("*.pt"):  # copies that somebody made too
            saved = checkpoint.load(path, verify=False)
            if "shards" in saved:
                used.add(out_dir / saved["shards"]["folder"])
        for folder in out_dir.glob("shards-*"):
            if folder not in used and re.fullmatch(r"shards-\d+(-\d+)?", folder.name):
                shutil.rmtree(folder, ignore_errors=True)


def _first_whole(out_dir, path, say, **how):
    """The checkpoint in `path`, or else the latest of all that are whole."""
    try:
        return checkpoint.load(path, **how), path
    except UserError as error:
        wrong = str(error)
    others = [other for other in checkpoints(out_dir) if other != path]
    for other in sorted(others, key=_iteration, reverse=True):
        with contextlib.suppress(UserError):
            saved = checkpoint.load(other, **how)
            say(f"{wrong}. Taking {other}, of iteration {saved['iter_num']}, instead")
            return saved, other
    earlier = [run.parent for run in sorted(pathlib.Path(out_dir).glob(f"previous-*/{LATEST}"))]
    hint = ""
    if earlier:
        hint = f". An earlier run is in {earlier[-1]}: name that folder"
    elif pathlib.Path(out_dir).is_file():
        hint = f". {out_dir} is a file: name the folder that it is in, {pathlib.Path(out_dir).parent}"
    elif here := sorted(pathlib.Path().glob(f"out*/{LATEST}")):
        hint = f", such as {here[0].parent}"
    if is_transformers(out_dir):
        hint = f". {out_dir} is a model in Hugging Face's format: name it with --init_from={out_dir}"
    raise UserError(wrong + hint)


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
    """Move an earlier run, if it has a checkpoint, to a folder previous-N of its own. Raises UserError if it cannot."""
    out_dir = pathlib.Path(out_dir)
    if saved := checkpoints(out_dir):
        others = [path for name in NOT_CHECKPOINTS for path in sorted(out_dir.glob(name)) if path.is_file()]
        # ckpt.pt leaves last: until then the run can be resumed in its old place
        aside = _move(out_dir, others + saved[::-1], [path for path in map(out_dir.joinpath, FOLDERS) if path.is_dir()])
        say(f"an earlier run in {out_dir} was moved to {aside}")


def set_aside_later_ones(out_dir: str | os.PathLike, iteration: int, say: Say) -> None:
    """Move checkpoints of later iterations to a folder previous-N: the run goes on from `iteration` without them.

    Such checkpoints exist if someone has put an older one in ckpt.pt's place. Raises UserError if it cannot move them.
    """
    later = [path for number, path in earlier_ones(out_dir).items() if number > iteration]
    if later:
        aside = _move(pathlib.Path(out_dir), later)
        say(f"checkpoints after iteration {iteration} in {out_dir} were moved to {aside}")


def _move(out_dir, files, folders=()):
    """Move `files` and `folders` to the next free previous-N in `out_dir`, and return that.

    At every instant, all files are in one of the two places: the new folder first gets links to them, then its name,
    and only then do they leave the old place. Folders, which cannot be linked, are renamed before the files leave.
    """
    numbers = [path.name.removeprefix("previous-") for path in out_dir.glob("previous-*")]
    aside = out_dir / f"previous-{1 + max((int(n) for n in numbers if n.isdecimal()), default=0)}"
    unfinished = out_dir / ".previous.tmp"
    try:
        shutil.rmtree(unfinished, ignore_errors=True)  # links of a start that was killed; the files are still here
        unfinished.mkdir()
        for file in files:
            link(file, unfinished / file.name)
        for folder in out_dir.glob("shards-*"):
            shutil.copytree(folder, unfinished / folder.name, copy_function=link)
        unfinished.rename(aside)
        for folder in folders:
            if folder.is_symlink():  # a relative link would lead elsewhere from `aside`
                (aside / folder.name).symlink_to(folder.resolve(), target_is_directory=True)
                folder.unlink()
            else:
                folder.rename(aside / folder.name)
        for file in files:
            file.unlink()
        remove_unused_shards(out_dir)
        remove_unused_shards(aside)
    except OSError as error:
        raise UserError(f"cannot move files in {out_dir} to {aside}: {error.strerror or error}") from error
    return aside
