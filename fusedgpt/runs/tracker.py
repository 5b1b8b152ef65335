"""Sends the metrics of a run to Weights & Biases."""

import uuid

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


class WeightsAndBiases:
    """A run of wandb. Any call may raise anything."""

    def begin(self, s: dict, record: dict, wandb_id: str | None) -> None:
        """Begin as the settings `s` say. `record`, the content of run.json, gets the id.

        wandb_id: the id of the resumed run, whose curves go on; None: make a new id.
        """
        import wandb

        self.wandb, record["wandb_id"] = wandb, wandb_id or uuid.uuid4().hex[:8]
        named = dict(project=s["wandb_project"], name=s["wandb_run_name"], id=record["wandb_id"])
        wandb.init(**named, resume="allow", config=record)

    def log(self, metrics: dict) -> None:
        self.wandb.log({"iter": metrics["iter"], **names(metrics)}, step=metrics["iter"])

    def close(self) -> None:
        self.wandb.finish()
