"""Sends the metrics of a run to Weights & Biases."""

from typing import Any

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


def begin(record: dict, wandb_id: str | None) -> Any:
    """A run of wandb, for the content of run.json, which gets its id. Any call may raise anything.

    wandb_id: the id of the resumed run, whose curves go on; None: a new one.
    """
    import wandb

    s = record["settings"]
    named = dict(project=s["wandb_project"], name=s["wandb_run_name"], id=wandb_id)
    tracked = wandb.init(**named, resume="allow", config=record)
    record["wandb_id"] = tracked.id
    return tracked
