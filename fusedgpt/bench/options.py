"""Settings that several kinds of benchmark share, and functions that read the lists in them."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from fusedgpt.attention.functions import load
from fusedgpt.attention.table import OWN, is_own
from fusedgpt.dimensions import FAMILIES
from fusedgpt.errors import UserError
from fusedgpt.settings import Settings as TrainSettings

# settings that headers of earlier versions lack, with their values then; any other missing one has today's default
EARLIER = {"rounds": 1, "freed_memory": "returned"}
# why ladder, sweep and numerics take no --attention, unless it names a kernel of the user's own
EACH_ROW_NAMES_IT = f"each row names its kernel; to measure one of your own too, give --attention={OWN}"


@dataclass
class Common:
    """Settings of every kind."""

    results: str = "out-bench"  # folder for results; each kind has its own folder there: rows.jsonl, report.md, figures
    only: str = ""  # measure only rows with one of these values or patterns, such as flash,manual; empty: all
    device: str = "auto"  # device: auto (a GPU if there is one), cpu, cuda, cuda:1, mps
    profile: bool = False  # write a profile of each row to traces/, for ui.perfetto.dev
    max_seconds: float | None = None  # begin no row after this many seconds; the same command continues


@dataclass
class Timed(Common):
    """Settings of the kinds that time calls of their own."""

    repeats: int = 256  # timed calls of each row
    warmup: int = 4  # untimed calls before the timed ones
    # what happens to memory that a call frees on a CPU; kept: the next call gets it, as in training; returned: it
    # goes back to the system, as by default in glibc, and each call of a kernel with large tensors pays for new pages
    freed_memory: Literal["kept", "returned"] = "kept"


@dataclass
class Trained(Common):
    """Settings of the kinds that train."""

    steps: int = 25  # training steps of each run; the first 5 do not count


def own_kernel(attention: str) -> tuple[str, ...]:
    """The setting `attention` in a tuple if it names a kernel of the user's own, otherwise ().

    Raises UserError if the kernel cannot be loaded.
    """
    if not is_own(attention):
        return ()
    load(attention)
    return (attention,)


def family(s: Mapping) -> dict[str, str]:
    """What makes the model of the settings `s` no GPT-2, for a row: {'model': 'n_kv_head=4, norm=rmsnorm'}, or {}.

    Headers of earlier versions lack these settings, which then had GPT-2's values.
    """
    said = changed(s, FAMILIES)
    return {"model": ", ".join(said)} if said else {}


def changed(s: Mapping, names: Iterable[str]) -> list[str]:
    """'name=value' for each of `names` whose value in the settings `s` is not train.py's default.

    A setting that a header of an earlier version lacks had today's default.
    """
    defaults = {name: getattr(TrainSettings, name) for name in names}
    return [f"{name}={s[name]}" for name, default in defaults.items() if s.get(name, default) != default]


def lengths(text: str, setting: str = "lengths") -> list[int]:
    """'256,512' or '256-4096-64' (first-last-step) as a list. Raises UserError for anything else.

    setting: the name of the setting that `text` is the value of.
    """
    try:
        found = []
        for word in text.split(","):
            first, *rest = map(int, word.split("-"))
            last, step = rest or (first, 1)
            found += range(first, last + 1, step)
        if not found or min(found) < 1:
            raise ValueError
    except ValueError:
        raise UserError(f"{setting}={text!r} must be like 256,512 or 256-4096-64 (first-last-step)") from None
    return found


def heads(text: str) -> list[tuple[int, int]]:
    """'32x128,12x64' as pairs (heads, head size). Raises UserError for anything else."""
    try:
        found = [tuple(map(int, word.split("x"))) for word in text.split(",")]
        if any(len(pair) != 2 or min(pair) < 1 for pair in found):
            raise ValueError
    except ValueError:
        raise UserError(f"heads={text!r} must be like 32x128,12x64 (heads x head size)") from None
    return found


def admitted(plan: list[dict], only: str) -> list[dict]:
    """The rows of `plan` with a value that `only` names; all if `only` is empty.

    `only` is a comma-separated list of whole values, or of patterns with * and ?. 'flash&1024' names the rows that have
    both. A comma before a space belongs to a value, as in 'manual, again'. Raises UserError for a name that no row has.
    """
    if not only:
        return plan
    names = [name.strip() for name in re.split(",(?! )", only)]
    for name in names:
        if not any(_has(spec, name) for spec in plan):
            raise UserError(f"only={name!r} names no row: it can be a pattern, such as 'flash*', or {_values(plan)}")
    return [spec for spec in plan if any(_has(spec, name) for name in names)]


def _has(spec, name):
    return all(any(fnmatchcase(str(value), each) for value in spec.values()) for each in name.split("&"))


def _values(plan):
    """The values of each field in the rows of `plan`, as a text; for numbers, only their range."""
    found = {}
    for spec in plan:
        for key, value in spec.items():
            found.setdefault(key, {})[value] = None
    numbers = {key for key, values in found.items() if all(isinstance(value, int) for value in values)}
    said = {key: f"{min(each)} to {max(each)}" if key in numbers else " | ".join(each) for key, each in found.items()}
    return "; ".join(f"{key}: {values}" for key, values in said.items())
