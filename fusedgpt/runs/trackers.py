"""Sends the metrics of a run to Weights & Biases and TensorBoard, under the same names."""

import html
import importlib.util
import pathlib
import uuid
from collections.abc import Callable

from fusedgpt.errors import UserError, first_line

NANOGPTS = {"train_loss": "train/loss", "val_loss": "val/loss", "lr": "lr", "mfu": "mfu"}  # nanoGPT's names


def names(metrics: dict) -> dict[str, float]:
    """`metrics` of a step or an evaluation under the names that dashboards of nanoGPT's runs expect.

    Bits per byte are under their split, as val/bits_per_byte; all else that nanoGPT does not log is under step/. MFU
    is in per cent.
    """
    found = {}
    for name, value in metrics.items():
        if name.endswith("_bits_per_byte"):
            found[name.replace("_", "/", 1)] = value
        elif name != "iter":
            found[NANOGPTS.get(name) or f"step/{name}"] = 100 * value if name == "mfu" else value
    return found


def start(
    s: dict, record: dict, out_dir: pathlib.Path, iteration: int, wandb_id: str | None, say: Callable[[str], None]
) -> list:
    """The trackers that the settings `s` ask for, from `iteration` on. If a package is missing, `say` says so.

    wandb_id: the id of the resumed run, whose curves go on; None: make a new id. `record` gets the id. Raises UserError
    if a package refuses.
    """
    trackers = []
    if s["wandb_log"] and _installed("wandb", say):
        record["wandb_id"] = wandb_id or uuid.uuid4().hex[:8]
        trackers.append(WeightsAndBiases(s, record))
    if s["tensorboard_log"] and _installed("tensorboard", say):
        trackers.append(TensorBoard(out_dir / "tensorboard", iteration))
    return trackers


def _installed(package, say):
    # config/train_gpt2.py asks for wandb, and a run on a lent machine should not end because it is missing
    if importlib.util.find_spec(package):
        return True
    say(f"{package} is not installed, so the run does not log to it: pip install {package}")
    return False


class WeightsAndBiases:
    """A run of wandb. Raises UserError if the package refuses."""

    def __init__(self, s: dict, record: dict):
        import wandb

        self.wandb = wandb
        names = dict(project=s["wandb_project"], name=s["wandb_run_name"], id=record["wandb_id"])
        try:
            wandb.init(**names, resume="allow", config=record)
        except wandb.errors.Error as error:
            raise UserError(
                f"wandb: {first_line(error)}. Run `wandb login`, set WANDB_MODE=offline, or turn it off with"
                " --wandb_log=False"
            ) from error

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.wandb.log({"iter": step, **metrics}, step=step)

    def text(self, name: str, text: str, step: int) -> None:
        self.wandb.log({name: self.wandb.Html(f"<pre>{html.escape(text)}</pre>")}, step=step)

    def close(self) -> None:
        self.wandb.finish()


class TensorBoard:
    """Like WeightsAndBiases, with event files in `folder`. Drops what an interrupted run logged after `iteration`."""

    def __init__(self, folder: pathlib.Path, iteration: int):
        from torch.utils.tensorboard import SummaryWriter

        if folder.is_symlink():  # in a run from elsewhere it could lead anywhere
            raise UserError(f"{folder} is a link: remove it, or give --tensorboard_log=False")
        self.writer = SummaryWriter(folder, purge_step=iteration)

    def log(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def text(self, name: str, text: str, step: int) -> None:
        self.writer.add_text(name, f"<pre>{html.escape(text)}</pre>", step)

    def close(self) -> None:
        self.writer.close()
