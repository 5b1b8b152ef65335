"""Draw the loss of one run, or of several together: OUT_DIR/loss.png, in the folder of the first.

    python plot.py OUT_DIR [OUT_DIR ...]

The training loss is a pale line, the validation loss is drawn as marks.
"""

import math
import pathlib
import sys

from fusedgpt.errors import UserError, one_sentence
from fusedgpt.logger import read_metrics

MARKERS = "os^vDP*X"


def series(out_dir: str, kind: str, name: str) -> tuple[list[int], list[float]]:
    """The iterations of a run's metrics of one `kind`, and their loss `name`; NaN for null."""
    metrics = read_metrics(out_dir, kind)
    return [m["iter"] for m in metrics], [math.nan if m[name] is None else m[name] for m in metrics]


def draw(out_dirs: list[str], path: pathlib.Path) -> None:
    """Draw to `path`: the training loss of each run as a pale line, its validation loss as marks, against iterations.

    A loss that was not finite, null in metrics.jsonl, is a gap. Raises UserError if a folder has no metrics.jsonl.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    for n, out_dir in enumerate(out_dirs):
        steps, losses = series(out_dir, "train", "loss")
        axes.plot(steps, losses, color=f"C{n}", alpha=0.35, linewidth=0.8)
        name = f"{pathlib.Path(out_dir).name}: " if len(out_dirs) > 1 else ""
        steps, losses = series(out_dir, "eval", "val_loss")
        axes.plot(
            steps,
            losses,
            color=f"C{n}",
            marker=MARKERS[n % len(MARKERS)],
            markersize=4,
            label=f"{name}validation, at the end {losses[-1]:.3f}" if losses else None,
        )
    axes.plot([], [], color="0.5", alpha=0.5, linewidth=0.8, label="training, each step")
    axes.set(xlabel="iteration", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    with one_sentence():
        if "-h" in sys.argv or "--help" in sys.argv:
            sys.exit(print(__doc__))
        if len(sys.argv) < 2 or any(arg.startswith("-") for arg in sys.argv):
            raise UserError("name the folder of a run: python plot.py OUT_DIR [OUT_DIR ...]")
        target = pathlib.Path(sys.argv[1]) / "loss.png"
        draw(sys.argv[1:], target)
        print(f"drew {target}")
