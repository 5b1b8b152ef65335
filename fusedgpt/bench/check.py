"""bench.py check: what a published benchmark claims, and whether that holds on this machine.

Each kind derives its claims from rows alone (`claims`). This module compares each claim of published rows with the same
claim of rows measured here. A claim keeps the rows that it rests on, because they tell why it may be missing here.
"""

import dataclasses
import math
import pathlib
import types
from collections.abc import Iterable

import torch

from fusedgpt.bench.disturbance import speedup
from fusedgpt.bench.options import admitted
from fusedgpt.bench.report import markdown
from fusedgpt.bench.rows import key_of, name_of, spec_of
from fusedgpt.errors import UserError
from fusedgpt.machine.device import cpu_multiplies_bfloat16
from fusedgpt.machine.files import atomic

RATIO = 1.1  # factor by which two ratios of times may differ
ERROR = 4.0  # factor by which two errors may differ; it is large, because each is the largest error of many
REFUSED = "refused"
NOWHERE = "at no length"  # there is no crossover, or none that is sure
HOW = f"A ratio holds if it differs by at most {100 * (RATIO - 1):.0f} %, an error if it differs by at most a factor of"
HOW += f" {ERROR:g}, and anything else if it is the same. Within noise means that it differs by more, but the spreads"
HOW += " (p10 to p90, or the range of the rounds) overlap."
# verdicts; a reason may follow after a colon
HOLDS, NOISE, FAILS, DISTURBED = "holds", "within noise", "does not hold", "disturbed"
CANNOT = "cannot be measured here"
LATER = "not measured yet"
VERDICTS = (HOLDS, NOISE, FAILS, DISTURBED, CANNOT, LATER)


@dataclasses.dataclass
class Settings:
    """The settings of `bench.py check`."""

    results: str = "out-check"  # folder for the new rows; each published folder gets a folder of its name in it
    only: str = ""  # check only claims about rows with one of these values or patterns, such as flash,math; empty: all
    max_seconds: float | None = None  # begin no row after this many seconds; the same command continues


@dataclasses.dataclass(frozen=True)
class Claim:
    """What rows say: a number with its spread, or a word. Two words agree only if they are the same."""

    name: str  # the same on every machine
    rows: list[dict]  # the rows that the claim rests on; it is about the last one
    value: float | str
    low: float | None = None
    high: float | None = None
    error: bool = False  # whether the value is an error, not a ratio
    speed: bool = False  # whether the ratio is how many times as fast as another the last row is
    timed: bool = True  # whether the claim is about times, which a disturbed row cannot show
    whole: bool = False  # whether the claim is about all its rows, not only the last one

    def __str__(self) -> str:
        """'1.75x (1.70-1.80)' or '1.11x as long (1.04-1.18)' for a ratio, '1.3e-02' for an error, or the word."""
        if isinstance(self.value, str):
            return self.value
        if self.error:
            return f"{self.value:.1e}"
        times, low, high, word = self.value, self.low, self.high, ""
        if self.speed and times < 1:
            times, low, high, word = 1 / times, low and 1 / high, low and 1 / low, " as long"
        return f"{times:.2f}x{word}" + ("" if low is None else f" ({low:.2f}-{high:.2f})")


def ratio(name: str, row: dict, base: dict | None) -> list[Claim]:
    """A claim about how many times as fast as `base` a row is; none if one of them was disturbed or has no time."""
    found = None if row is base else speedup(row, base)
    return [Claim(name, [base, row], *found, speed=True)] if found else []


def same_loss(name: str, row: dict, base: dict | None) -> list[Claim]:
    """A claim about whether the last losses of two runs are within one per cent; none if one was not measured."""
    if row is base or base is None or {row["status"], base["status"]} != {"measured"}:
        return []
    same = math.isclose(row["final_loss"], base["final_loss"], rel_tol=0.01)
    return [Claim(name, [base, row], "the same" if same else "another", timed=False)]


def refusals(rows: Iterable[dict]) -> list[Claim]:
    """The claim that a row is refused, for each refused row."""
    return [Claim(name_of(row), [row], REFUSED, timed=False) for row in rows if row["status"] == REFUSED]


def dtype_of(row: dict) -> str | None:
    """The dtype that a row ran in; None if the row does not say."""
    return row.get("ran", row).get("dtype")


def published(kind: types.ModuleType, rows: list[dict], only: str) -> list[Claim]:
    """The claims of published rows about those rows that `only` names; all claims if `only` is empty.

    Raises UserError if there is no such claim, or if the rows lack what a claim needs.
    """
    try:
        claims = [claim for claim in kind.claims(rows) if claim.value != NOWHERE]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            "no claim can be drawn from these rows, which are damaged or of another version:"
            f" {type(error).__name__}: {error}"
        ) from error
    if not claims:
        raise UserError("these rows make no claim: none is refused, none was measured undisturbed with its baseline")
    specs = [spec_of(row) for claim in claims for row in claim.rows]
    chosen = {tuple(spec.items()) for spec in admitted(specs, only)}
    about = [claim for claim in claims if {key_of(row) for row in claim.rows[0 if claim.whole else -1 :]} <= chosen]
    if not about:
        raise UserError(f"only={only!r} names no row that a claim is about, only baselines or a part of a crossover")
    return about


def obstacles(wanted: dict[tuple, dict], s, device: torch.device, plan: list[dict]) -> dict[tuple, str]:
    """{key of a row: why it cannot be measured here with the settings `s`}, for those `wanted` rows that cannot."""
    found = {}
    # numerics has no setting `dtype`: its rows name their dtypes, and are quick even if bfloat16 is emulated
    slow = hasattr(s, "dtype") and device.type == "cpu" and not cpu_multiplies_bfloat16()
    for key, row in wanted.items():
        if spec_of(row) not in plan:
            found[key] = "this version has no such row on this machine"
        elif slow and row["status"] == "measured" and dtype_of(row) == "bfloat16":
            found[key] = "this CPU has no instructions for bfloat16 and would take many times as long"
    return found


def measurable(claims: list[Claim], obstacles: dict[tuple, str]) -> list[dict]:
    """The published rows of those claims whose rows can all be measured here."""
    possible = [claim for claim in claims if not any(key_of(row) in obstacles for row in claim.rows)]
    return list({key_of(row): row for claim in possible for row in claim.rows}.values())


def outlook(claims: list[Claim], todo: list[dict]) -> str:
    """A line that says what is about to be measured, and how long it took on the published machine."""
    if not todo:
        return f"{len(claims)} claims; none can be measured here"
    seconds = sum(sum(row.get("samples_ms", [])) for row in todo) / 1e3
    return (
        f"{len(claims)} claims need {len(todo)} rows. Their samples alone took {seconds:.3g} s on the other machine."
        " --only= checks some claims, --max_seconds= ends early, and the same command continues"
    )


def compare(
    published: list[Claim], found: list[Claim], here: list[dict], obstacles: dict[tuple, str]
) -> list[tuple[str, str, str, str]]:
    """(name, published value, value here, verdict) of each published claim.

    found: the claims of the rows `here`. obstacles: {key of a row: why it cannot be measured here}.
    """
    rows, counterparts = {key_of(row): row for row in here}, {claim.name: claim for claim in found}
    return [(c.name, str(c), *_judged(c, counterparts.get(c.name), rows, obstacles)) for c in published]


def _judged(claim, found, here, obstacles):
    """(the value here, the verdict with its reason) for a claim."""
    # the claim could be drawn here from the same rows, so not all rounds were disturbed
    calm = found is not None and not claim.whole and _compared(found) == _compared(claim)
    hindrances = [_hindered(claim, row, here.get(key_of(row)), obstacles.get(key_of(row)), calm) for row in claim.rows]
    hindrances = list(filter(None, hindrances))
    if hindrances:
        return "", min(hindrances, key=lambda verdict: verdict == LATER)  # prefer a verdict with a reason to LATER
    if claim.value == REFUSED and found is None:
        return "runs", FAILS
    if found is None:  # there is no crossover, or no round without a disturbed row
        return (NOWHERE, FAILS) if claim.whole else ("", f"{DISTURBED}: no round here is whole")
    if claim.value == REFUSED and found.rows[0]["reason"] != claim.rows[0]["reason"]:
        return str(found), f"{HOLDS}: refused here because {found.rows[0]['reason']}"
    return str(found), _verdict(claim, found)


def _compared(claim):
    """What identifies the base of a claim, and the row that it is about, in any round."""
    return [{k: v for k, v in spec_of(row).items() if k != "round"} for row in (claim.rows[0], claim.rows[-1])]


def _hindered(claim, row, mine, obstacle, calm):
    """The verdict if `mine`, the row here, cannot be compared with the published `row` of a claim; otherwise None.

    calm: whether the claim could be drawn here from undisturbed rounds.
    """
    if mine is None:
        return f"{CANNOT}: {obstacle}" if obstacle else LATER
    if mine["status"] == "parity failed" != row["status"]:
        return f"{FAILS}: it fails parity here: {mine['reason']}"
    if mine["status"] not in ("measured", row["status"]):
        return f"{CANNOT}: {mine['status']}: {mine['reason']}"
    if mine.get("disturbed") and claim.timed and not calm:
        return f"{DISTURBED}: {mine['reason']}"
    if row["status"] == "measured" and dtype_of(mine) != dtype_of(row):
        return f"{CANNOT}: it runs in {dtype_of(mine)} here, in {dtype_of(row)} there"
    return None


def _verdict(claim, found):
    """Whether two values agree; if not, by how much they differ."""
    if claim.value == found.value:
        return HOLDS
    meet = claim.low is not None and found.low <= claim.high and claim.low <= found.high
    verdict = NOISE if meet else FAILS
    if isinstance(claim.value, str) or isinstance(found.value, str) or not claim.value or not found.value:
        return verdict
    times, allowed = found.value / claim.value, ERROR if claim.error else RATIO
    if 1 / allowed <= times <= allowed:
        return HOLDS
    if times > 1:
        return f"{verdict}: {times:.2g} times the published value"
    return f"{verdict}: the published value is {1 / times:.2g} times this"


def summary(verdicts: list[tuple]) -> str:
    """How many claims have which verdict, in a line."""
    words = [verdict.partition(":")[0] for *_, verdict in verdicts]
    said = [f"{words.count(word)} {word}" for word in VERDICTS if word in words]
    return f"{len(verdicts)} claims: {', '.join(said)}."


def write(
    folder: pathlib.Path, source: pathlib.Path, verdicts: list[tuple], there: str, here: str, assumed: dict
) -> pathlib.Path:
    """Write check.md to `folder`; returns its path. source: the published folder; there, here: the two machines.

    assumed: the settings that the published header does not name.
    """
    lines = [f"# check of {source}", "", f"- Published: {there}", f"- Here: {here}"]
    if assumed:
        values = ", ".join(f"{name} {value}" for name, value in assumed.items())
        lines.append(f"- Settings that the published header lacks, as they were then or are by default today: {values}")
    lines += ["", f"**{summary(verdicts)}** {HOW}", ""]
    lines += markdown(["claim", "published", "here", "verdict"], verdicts)
    with atomic(folder / "check.md", "w") as file:
        file.write("\n".join(lines) + "\n")
    return folder / "check.md"


def columns(verdicts: list[tuple]) -> list[str]:
    """The verdicts in columns, as lines for a console."""
    lines = [("claim", "published", "here", "verdict"), *verdicts]
    widths = [max(len(line[n]) for line in lines) for n in range(3)]
    return ["  ".join([*(cell.ljust(width) for cell, width in zip(line, widths)), line[3]]) for line in lines]
