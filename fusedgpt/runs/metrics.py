"""Read what figures show of a run: the columns of metrics.jsonl, run.json, and what follows from both."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
from typing import Any

import numpy as np

from fusedgpt.errors import UserError
from fusedgpt.machine.files import read_jsonl

# fields of lines in metrics.jsonl beside `kind` and `iter`
TRAIN = ("loss", "lr", "grad_norm", "ms", "tokens_per_s", "mfu", "peak_memory")
EVAL = ("train_loss", "val_loss", "train_bits_per_byte", "val_bits_per_byte")
MEANING = {  # {what can be drawn: the label of its axis}
    "loss": "loss (nats per token)",
    "bits_per_byte": "bits per byte",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_s": "tokens per second",
    "memory": "peak memory (GiB)",
}
OVERFITS = 0.01  # a validation loss that rose by this share, while the training loss fell by more, is said
FROM_ZERO = ("tokens_per_s", "memory")  # axes that start at zero, because readers compare ratios


def read_metrics(out_dir: str | pathlib.Path, kind: str | None = None) -> list[dict]:
    """A run's metrics.jsonl: all of it, or one `kind`, such as 'eval'. Raises UserError if there is none.

    A number that was not finite is None. A line that was cut short, or is another program's, is left out.
    """
    path = pathlib.Path(out_dir) / "metrics.jsonl"
    if not path.exists():
        raise UserError(f"{path} does not exist: name the folder of a run")
    return [row for row in read_jsonl(path) if {"kind", "iter"} <= row.keys() and kind in (None, row["kind"])]


def losses_at(out_dir: str | pathlib.Path, iteration: int) -> dict[str, str]:
    """The validation losses at an iteration of a run: {what: four decimals}. What metrics.jsonl lacks is left out."""
    rows = []
    with contextlib.suppress(UserError):  # there is no metrics.jsonl
        rows = [row for row in read_metrics(out_dir, "eval") if row["iter"] == iteration]
    names = {"validation loss": "val_loss", "validation bits per byte": "val_bits_per_byte"}
    found = {what: number(row.get(name)) for row in rows for what, name in names.items()}
    return {what: f"{loss:.4f}" for what, loss in found.items() if not math.isnan(loss)}


def record_of(out_dir: str | pathlib.Path) -> dict:
    """A run's run.json; {} if it is absent or damaged."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        record = json.loads((pathlib.Path(out_dir) / "run.json").read_text(encoding="utf-8", errors="replace"))
        return record if isinstance(record, dict) else {}
    return {}


def number(value: Any) -> float:
    """`value` of a JSON file as a float: NaN if it is no number, or not finite."""
    return float(value) if type(value) in (int, float) and math.isfinite(value) else math.nan


def section(record: dict, name: str) -> dict:
    """The object `name` of a run.json; {} if it is absent, or no object."""
    return record[name] if isinstance(record.get(name), dict) else {}


def median(values: np.ndarray) -> float:
    """The median of the finite values; NaN if there is none."""
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else math.nan


@dataclasses.dataclass
class Line:
    """A line of a figure: its values at iterations, float64; a value that was not finite is NaN."""

    name: str  # "training" (each step) or "validation" (each evaluation)
    iters: np.ndarray
    values: np.ndarray


class LoggedRun:
    """The run in a folder. Raises UserError if it has no metrics.jsonl; an absent or damaged run.json is {}."""

    def __init__(self, out_dir: str | pathlib.Path):
        self.folder = pathlib.Path(out_dir)
        rows = read_metrics(out_dir)
        self.train, self.eval = _columns(rows, "train", TRAIN), _columns(rows, "eval", EVAL)
        self.scores = _columns(rows, "score", ())
        found = self.scores | self.train  # with the scores of eval_tasks, and what a changed train_step adds
        others = sorted(found.keys() - {"iter", *TRAIN})
        self.others = [name for name in others if np.isfinite(found[name]).any()]
        self.samples = sorted((row for row in rows if row["kind"] == "sample"), key=lambda row: row["iter"])
        self.record = record_of(out_dir)
        self.name = self.folder.resolve().name
        self.tokens_per_step = number(self.record.get("tokens_per_step"))  # NaN if run.json does not say

    @functools.cached_property
    def bits_per_byte_of_a_nat(self) -> float:
        """Bits per byte for a loss of 1 nat per token. They depend on the tokenizer; NaN if no evaluation has them."""
        with np.errstate(all="ignore"):
            ratios = self.eval["train_bits_per_byte"] / self.eval["train_loss"]
        return median(ratios[ratios > 0])

    def lines(self, y: str) -> list[Line]:
        """What to draw for `y`, a key of MEANING or one of `others`: training, and validation for losses and scores."""
        if y in self.scores:
            return [Line("validation", self.scores["iter"], self.scores[y])]
        column = {"bits_per_byte": "loss", "memory": "peak_memory"}.get(y, y)
        scale = {"bits_per_byte": self.bits_per_byte_of_a_nat, "memory": 2**-30}.get(y, 1.0)
        values = self.train.get(column, np.full(len(self.train["iter"]), np.nan))  # NaN if only another run has `y`
        known = np.isfinite(values) | (y in MEANING)  # a step that did not return another number is no gap
        lines = [Line("training", self.train["iter"][known], scale * values[known])]
        validation = {"loss": "val_loss", "bits_per_byte": "val_bits_per_byte"}.get(y)
        return lines + ([Line("validation", self.eval["iter"], self.eval[validation])] if validation else [])

    def position(self, iters: np.ndarray, axis: str) -> np.ndarray:
        """Where the state after `iters` steps lies on an axis: iterations, tokens, or time.

        tokens: the tokens trained on, if all steps had the run's last batch. time: seconds of the training steps,
        without evaluations. NaN if run.json does not say how many tokens a step has.
        """
        if axis == "iterations":
            return iters
        if axis == "tokens":
            return iters * self.tokens_per_step
        done = np.cumsum(np.nan_to_num(self.train["ms"])) / 1e3
        return np.interp(iters, np.append(0, self.train["iter"] + 1), np.append(0, done))


def names_of(runs: list[LoggedRun]) -> list[str]:
    """The names of the runs beside each other: those of their folders, or their paths if two folders have one name."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [os.path.relpath(run.folder) for run in runs]


def losses_in(runs: list[LoggedRun]) -> str:
    """The loss that compares the `runs`: 'loss', or 'bits_per_byte' if their tokenizers differ.

    They differ if a nat per token is another number of bits per byte, by more than the 1 % that other windows make.
    """
    ratios = [run.bits_per_byte_of_a_nat for run in runs if math.isfinite(run.bits_per_byte_of_a_nat)]
    differ = max(ratios, default=1) > 1.01 * min(ratios, default=1)
    return "bits_per_byte" if differ else "loss"


def _columns(rows, kind, names):
    """{name: its values in the lines of one `kind`, in the order of the iterations}, with `iter` and other names."""
    rows = sorted((row for row in rows if row["kind"] == kind), key=lambda row: row["iter"])
    found = {"iter", *names}.union(*rows) - {"kind"}
    return {name: np.array([row.get(name) for row in rows], float) for name in found}  # None becomes NaN


def view(lines: list[Line], y: str) -> tuple[float, float]:
    """The part of the y-axis that shows `lines` of `y` well.

    A loss falls from 10.8 to 6 within its first steps, and from 3.4 to 3.3 in its last thousands; a gradient may
    explode once. So peaks in the first tenth of a run, and in 1 training step of 200, may be cut off. A run of fewer
    than 20 steps is shown whole.
    """
    values = np.concatenate([np.empty(0), *(line.values[np.isfinite(line.values)] for line in lines)])
    if not len(values):
        return 0.0, 1.0
    low, high = values.min(), values.max()
    if y in FROM_ZERO:
        return 0.0, float(1.08 * high) or 1.0
    if y != "lr":
        high = max([low, *map(_usual_top, lines)])
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 0.05
    return float(low - margin), float(high + margin)


def _usual_top(line):
    """The largest value after a line's first tenth, without the largest 1 in 200; -inf if there is none."""
    begins, ends = line.iters[:1].sum(), line.iters[-1:].sum()
    late = line.values[line.iters >= begins + 0.1 * (ends - begins) * (ends - begins >= 20)]
    late = np.sort(late[np.isfinite(late)])
    return late[: len(late) - len(late) // 200].max(initial=-math.inf)


def above(lines: list[Line], view: tuple[float, float]) -> float | None:
    """The largest value of `lines` above the `view` of them, so that a figure can say so; None if there is none."""
    top = max((np.nanmax(line.values, initial=view[1]) for line in lines), default=view[1])
    return float(top) if top > view[1] else None


def thinned(values: np.ndarray, limit: int = 1000) -> np.ndarray:
    """Indices of about `limit` of the values, which draw the same curve as all of them.

    Each stretch keeps its smallest and largest value, and a NaN if it has one, so that a gap stays a gap.
    """
    if len(values) <= limit:
        return np.arange(len(values))
    kept = {0, len(values) - 1}
    for stretch in np.array_split(np.arange(len(values)), limit // 3):
        v = values[stretch]
        found = v.argmin(), np.where(np.isnan(v), np.inf, v).argmin(), np.where(np.isnan(v), -np.inf, v).argmax()
        kept.update(stretch[[*found]].tolist())  # the first is a NaN if there is one
    return np.array(sorted(kept))
