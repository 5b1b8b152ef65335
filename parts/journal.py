"""What a run says of itself: lines on the console, metrics.jsonl, wandb, and a bar on a terminal."""

import json
import pathlib
import sys

from tqdm import tqdm

from parts.files import atomic


class Journal:
    """One row an iteration and an evaluation, to every place that listens.

    metrics.jsonl holds {"kind": "train" | "eval", "iter": …, …} a line. A resumed run cuts off what it is to do again.
    """

    def __init__(self, out_dir, start, end, resumed, wandb=None):
        self.path = pathlib.Path(out_dir) / "metrics.jsonl"
        kept = []
        if resumed and self.path.exists():
            # a kill can leave half a line at the end
            lines = [line for line in self.path.read_text().splitlines() if line.endswith("}")]
            kept = [line for line in lines if json.loads(line)["iter"] < start]
        with atomic(self.path, "w") as file:
            file.writelines(line + "\n" for line in kept)
        # a line at a time: what was said survives a kill
        self.file = open(self.path, "a", buffering=1)  # noqa: SIM115
        self.wandb = wandb
        self.bar = tqdm(total=end, initial=start, disable=not sys.stderr.isatty(), unit="it", dynamic_ncols=True)

    def say(self, line):
        """A line on the console, above the bar."""
        tqdm.write(line)
        sys.stdout.flush()

    def iteration(self, row, aloud):
        """A row of a training step; on the console too if `aloud`."""
        self._write("train", row)
        self.bar.update()
        if aloud:
            mfu = "n/a" if row["mfu"] is None else f"{100 * row['mfu']:.2f}%"
            self.say(
                f"iter {row['iter']}: loss {row['loss']:.4f}, time {row['ms']:.2f}ms, mfu {mfu},"
                f" {row['tokens_per_s']:,.0f} tok/s"
            )

    def evaluation(self, row):
        """A row of an evaluation."""
        self._write("eval", row)
        self.bar.set_postfix_str(f"val {row['val_loss']:.4f}")
        self.say(f"step {row['iter']}: train loss {row['train_loss']:.4f}, val loss {row['val_loss']:.4f}")

    def _write(self, kind, row):
        self.file.write(json.dumps({"kind": kind, **row}) + "\n")
        if self.wandb:
            prefix = "" if kind == "train" else "eval/"
            self.wandb.log({prefix + name: value for name, value in row.items()}, step=row["iter"])

    def close(self):
        self.bar.close()
        self.file.close()
        if self.wandb:
            self.wandb.finish()


class Silence:
    """The journal of a rank that is not the first: it says nothing."""

    def say(self, line): ...

    def iteration(self, row, aloud): ...

    def evaluation(self, row): ...

    def close(self): ...
