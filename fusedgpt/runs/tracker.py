"""Sends the metrics of a run to Weights & Biases."""

from typing import Any

NAMES = {name: name for name in ("iter", "lr", "mfu")}  # nanoGPT's, but for bits per byte
NAMES |= {f"{split}_{what}": f"{split}/{what}" for split in ("train", "val") for what in ("loss", "bits_per_byte")}


def names(metrics: dict) -> dict[str, float]:
    """`metrics` under the names that dashboards of nanoGPT's runs expect; others under step/. MFU is in per cent."""
    scale = {"mfu": 100}
    return {NAMES.get(name, f"step/{name}"): scale.get(name, 1) * value for name, value in metrics.items()}


def begin(record: dict, wandb_id: str | None) -> Any:
    """wandb's run of an id, or a new one, for the content of run.json, which gets the id. Calls may raise anything."""
    import wandb

    s = record["settings"]
    named = dict(project=s["wandb_project"], name=s["wandb_run_name"], id=wandb_id)
    tracked = wandb.init(**named, resume="allow", config=record)
    record["wandb_id"] = tracked.id
    return tracked
