"""bench.py check: do two folders of one kind of benchmark say the same? For example, the published one and yours.

A ratio agrees if its interval meets the other's, widened by one per cent.
"""

import pathlib

from fusedgpt.bench import rows
from fusedgpt.bench.report import in_figures, machine, markdown
from fusedgpt.errors import UserError

MARGIN = 0.01  # a share of the ratio, by which its interval is widened


def compare(one: list[rows.Result], other: list[rows.Result]) -> list[tuple[str, str, str, str]]:
    """(contender, what one folder says, what the other says, whether they agree) of each contender in both."""
    others, found = {tuple(result.of.items()): result for result in other}, []
    for result in one:
        mine = others.get(tuple(result.of.items()))
        for name in result.contenders if mine else ():
            if name in mine.contenders:
                verdict = _verdict(result, mine, name)
                label = ", ".join(map(str, (*result.of.values(), name)))
                found += [(label, *verdict)] if verdict else []
    return found


def _verdict(one, other, name):
    """(what one says, what the other says, whether they agree) of a contender; None if nothing can be compared."""
    lines = one.contenders[name], other.contenders[name]
    if {line["status"] for line in lines} != {"measured"}:
        status = [line["status"] for line in lines]
        return (*status, "agrees" if status[0] == status[1] else "differs")
    ratios = one.ratio(name), other.ratio(name)
    if all(ratios):
        low, high = ratios[0].low * (1 - MARGIN), ratios[0].high * (1 + MARGIN)
        verdict = "agrees" if ratios[1].low <= high and low <= ratios[1].high else "differs"
        if not all(ratio.known for ratio in ratios):
            verdict = "too few laps"
        return (*map(in_figures, ratios), verdict)
    return None


def report(folders: list[pathlib.Path]) -> list[str]:
    """The lines that say how two folders compare. Raises UserError if they are of two kinds, or share no contender."""
    (one, mine), (other, theirs) = (rows.read(folder / "rows.jsonl") for folder in folders)
    if one["benchmark"] != other["benchmark"]:
        raise UserError(f"{folders[0]} is of {one['benchmark']}, {folders[1]} of {other['benchmark']}: name two of one")
    results = rows.results(mine), rows.results(theirs)
    found = compare(*results)
    if not found:
        raise UserError(f"{folders[0]} and {folders[1]} have no contender in common")
    agree = sum(verdict == "agrees" for *_, verdict in found)
    told = sum(verdict != "too few laps" for *_, verdict in found)
    return [
        *(f"{folder}: {machine(*each)}" for folder, each in zip(folders, ((one, results[0]), (other, results[1])))),
        "",
        *markdown(["contender", *map(str, folders), ""], found),
        "",
        f"{agree} of {told} agree",
    ]
