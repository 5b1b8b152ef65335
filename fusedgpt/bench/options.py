"""Settings that several kinds of benchmark share, and functions that read the lists in them."""

import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from fusedgpt.attention.functions import load
from fusedgpt.attention.table import is_own
from fusedgpt.bench.comparison import Comparison
from fusedgpt.errors import UserError


@dataclass
class Common:
    """Settings of every kind."""

    results: str = "out-bench"  # folder for results; each kind has its own folder there: rows.jsonl, report.md, figures
    only: str = ""  # measure only contenders with one of these names, values or patterns, such as flash,manual
    device: str = "auto"  # device: auto (a GPU if there is one), cpu, cuda, cuda:1, mps
    precision: float = 0.01  # take turns until every ratio's interval is within this share of it,
    seconds: float = 120.0  # or for so many seconds of laps in each comparison; the same command adds laps
    max_seconds: float | None = None  # begin no lap after this many seconds in all; the same command continues


def own_kernel(attention: str) -> tuple[str, ...]:
    """The setting `attention` in a tuple if it names a kernel of the user's own, otherwise ().

    Raises UserError if the kernel cannot be loaded.
    """
    if not is_own(attention):
        return ()
    load(attention)
    return (attention,)


def lengths(text: str) -> list[int]:
    """'256,512' or '256-4096-64' (first-last-step) as a list. Raises UserError for anything else."""
    words, found = text.split(","), []
    if all(re.fullmatch(r"[1-9]\d*(-\d+-[1-9]\d*)?", word) for word in words):
        for word in words:
            first, *rest = map(int, word.split("-"))
            last, step = rest or (first, 1)
            found += range(first, last + 1, step)
    if not found:
        raise UserError(f"lengths={text!r} must be like 256,512 or 256-4096-64 (first-last-step)")
    return found


def heads(text: str) -> list[tuple[int, int]]:
    """'32x128,12x64' as pairs (heads, head size). Raises UserError for anything else."""
    if not all(re.fullmatch(r"[1-9]\d*x[1-9]\d*", word) for word in text.split(",")):
        raise UserError(f"heads={text!r} must be like 32x128,12x64 (heads x head size)")
    return [tuple(map(int, word.split("x"))) for word in text.split(",")]


def admitted(comparisons: list[Comparison], only: str) -> list[Comparison]:
    """`comparisons` with those contenders that `only` names, and their baselines; all if `only` is empty.

    `only` is a comma-separated list of names and values, or of patterns with * and ?. 'flash&1024' names the contenders
    that have both. A comma before a space belongs to a name, as in 'manual, eager'. Raises UserError for a name that no
    contender has.
    """
    if not only:
        return comparisons
    words, found, used = [name.strip() for name in re.split(",(?! )", only)], [], set()
    for each in comparisons:
        chosen = {name: [word for word in words if _has([name, *each.workload.values()], word)] for name in each.names}
        used.update(*chosen.values())
        names = tuple(name for name in each.names if chosen[name] or (name == each.baseline and any(chosen.values())))
        found += [replace(each, names=names)] if names else []
    for word in words:
        if word not in used:
            names = dict.fromkeys(str(v) for each in comparisons for v in (*each.names, *each.workload.values()))
            raise UserError(
                f"only={word!r} names no contender: it can be a pattern, such as 'flash*', or {' | '.join(names)}"
            )
    return found


def _has(values, word):
    return all(any(fnmatchcase(str(value), each) for value in values) for each in word.split("&"))
