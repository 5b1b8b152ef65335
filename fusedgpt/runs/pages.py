"""What the pages of runs and of studies share: how a template becomes one file, its curves, tables and numbers."""

import html
import json
import math
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fusedgpt.errors import shown
from fusedgpt.runs.metrics import MEANING, Run, above, thinned, view

HERE = pathlib.Path(__file__).parent


def fill(template: pathlib.Path, title: str, page: dict[str, Any], refresh: str = "", body: str = "") -> bytes:
    """A page: the `template` with the shared head, style and scripts, with `page`, which its script draws, and `body`.

    Raises ValueError if a number in `page` is not finite.
    """
    data = json.dumps(page, allow_nan=False).replace("<", "\\u003c")  # no text of a run can end the script
    parts = {"title": html.escape(title), "refresh": refresh, "page": data, "body": body}
    parts |= {"style": _read("page.css"), "script": _read("page.js"), "curves": _read("curves.js")}
    text = template.read_text(encoding="utf-8").replace("{{head}}", _read("head.html"))
    text = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], text)
    return text.encode("utf-8", "replace")  # a folder's name may not be UTF-8


def _read(name):
    return (HERE / name).read_text(encoding="utf-8").rstrip()


def charts(runs: list[Run], loss: str, axes: dict[str, float], points: int = 1000) -> list[dict[str, Any]]:
    """The charts of the runs as curves.js draws them: the loss first, then what else a run has values of.

    loss: 'loss' or 'bits_per_byte', which are one curve in two units. axes: {one of style.AXES: what a position on it
    is divided by}. points: of a line, at most about so many.
    """
    others = sorted({name for run in runs for name in run.others})
    names = [loss, *(y for y in (*MEANING, *others) if y not in ("loss", "bits_per_byte"))]
    return [_chart(runs, y, axes, points) for y in names if y == loss or _known(runs, y)]


def _known(runs, y):
    return any(np.isfinite(line.values).any() for run in runs for line in run.lines(y))


def _chart(runs, y, axes, points):
    lines, drawn = [(n, line) for n, run in enumerate(runs) for line in run.lines(y)], []
    seen = view([line for _, line in lines], y)
    top = above([line for _, line in lines], seen)
    for n, line in lines:
        kept = thinned(line.values, points)
        x = {axis: _rounded(runs[n].position(line.iters[kept], axis) / scale) for axis, scale in axes.items()}
        drawn.append({"run": n, "name": line.name, "x": x, "y": _rounded(line.values[kept])})
    return {"title": MEANING.get(y, y), "range": seen, "above": None if math.isnan(top) else top, "lines": drawn}


def _rounded(values):
    """`values` as JSON has them: null in place of NaN, whole numbers in full, others to six digits."""
    return [
        None if math.isnan(value) else int(value) if value % 1 == 0 and abs(value) < 2**53 else float(f"{value:.6g}")
        for value in values.tolist()
    ]


def table(title: str, rows: Iterable[Sequence], head: Sequence[str] = (), open: bool = False) -> dict[str, Any]:
    """A table of texts as the script draws it: title, whether it is open, the heads of its columns, its rows."""
    return {"title": title, "open": open, "head": list(head), "rows": [[text(each) for each in row] for row in rows]}


def text(value: Any) -> str:
    """A value of run.json as a page shows it, of at most some 1,000 characters."""
    values = value if isinstance(value, list) else [value]
    said = ", ".join(shown(each) if not isinstance(each, str) or each.isspace() else each for each in values)
    return said if len(said) <= 1000 else f"{said[:1000]}…"


def median(values: np.ndarray) -> float:
    """The median of the finite values; NaN if there is none."""
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else math.nan


def duration(seconds: float) -> str:
    """'2 h 5 min' for 7500."""
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} {seconds % size // part:.0f} {smaller}"
    return f"{seconds:.1f} s"
