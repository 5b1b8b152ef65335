"""Draw the loss of runs, from metrics.jsonl: `python -m parts.curve OUT_DIR [OUT_DIR ...]` leaves OUT_DIR/loss.png."""

import pathlib
import sys

from parts.errors import UserError, one_sentence
from parts.journal import read_rows


def read(out_dir):
    """The rows of a run's metrics.jsonl: those of training steps, and those of evaluations."""
    rows = read_rows(out_dir)
    return [r for r in rows if r["kind"] == "train"], [r for r in rows if r["kind"] == "eval"]


def draw(out_dirs, path):
    """One figure: the training loss of each run as a pale line, its validation loss as marks, against iterations."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    markers = "os^vDP*X"
    for n, out_dir in enumerate(out_dirs):
        steps, evaluations = read(out_dir)
        name = f"{pathlib.Path(out_dir).name}: " if len(out_dirs) > 1 else ""
        axes.plot([r["iter"] for r in steps], [r["loss"] for r in steps], color=f"C{n}", alpha=0.35, linewidth=0.8)
        axes.plot(
            [r["iter"] for r in evaluations],
            [r["val_loss"] for r in evaluations],
            color=f"C{n}",
            marker=markers[n % len(markers)],
            markersize=4,
            label=f"{name}validation, at the end {evaluations[-1]['val_loss']:.3f}" if evaluations else None,
        )
    axes.plot([], [], color="0.5", alpha=0.5, linewidth=0.8, label="training, each step")
    axes.set(xlabel="iteration", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    with one_sentence():
        if len(sys.argv) < 2:
            raise UserError("name the folder of a run: python -m parts.curve OUT_DIR [OUT_DIR ...]")
        target = pathlib.Path(sys.argv[1]) / "loss.png"
        draw(sys.argv[1:], target)
        print(f"drew {target}")
