"""Sends the metrics of a run to Weights & Biases."""

import html
import importlib.util
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


def start(s: dict, record: dict, wandb_id: str | None, say: Callable[[str], None]) -> "WeightsAndBiases | None":
    """The run of wandb that the settings `s` ask for. If wandb is not installed, `say` says so.

    wandb_id: the id of the resumed run, whose curves go on; None: make a new id. `record` gets the id. Raises UserError
    if wandb refuses.
    """
    if not s["wandb_log"]:
        return None
    # config/train_gpt2.py asks for wandb, and a run on a lent machine should not end because it is missing
    if not importlib.util.find_spec("wandb"):
        return say("wandb is not installed, so the run does not log to it: pip install wandb")
    record["wandb_id"] = wandb_id or uuid.uuid4().hex[:8]
    return WeightsAndBiases(s, record)


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

    def log(self, metrics: dict) -> None:
        self.wandb.log({"iter": metrics["iter"], **names(metrics)}, step=metrics["iter"])

    def text(self, name: str, text: str, step: int) -> None:
        self.wandb.log({name: self.wandb.Html(f"<pre>{html.escape(text)}</pre>")}, step=step)

    def close(self) -> None:
        self.wandb.finish()
