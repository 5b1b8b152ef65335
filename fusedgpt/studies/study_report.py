"""The report of a study, from study.json and outcomes.jsonl alone: verdict, tables and figure."""

import csv
import dataclasses
import io
import json
import math
import os
import pathlib
import re
import textwrap
from typing import Any

import numpy as np

from fusedgpt.errors import UserError
from fusedgpt.machine.files import atomic, json_line
from fusedgpt.runs import style
from fusedgpt.runs.style import COLOURS, DPI, WIDTH, plain
from fusedgpt.studies.outcomes import Results, read
from fusedgpt.studies.verdict import METHOD

WHAT = {"val_loss": "validation loss", "bits_per_byte": "validation bits per byte"}
SIZES = {
    "equivalent": "; surely less than --matters={:g}",
    "no worse": "; surely not worse by --matters={:g}",
    "matters": "; surely more than --matters={:g}",
    "": "",
}
HEAD = ("variant", "n", "mean", "sd", "ms a step", "seconds", "difference", "95 % interval", "p", "verdict")
STYLE = {"font.size": 8.5, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}
STYLE |= {"grid.alpha": 0.3, "pdf.fonttype": 42}  # TrueType: conferences refuse matplotlib's default, Type 3
UNDATED = {"png": None, "pdf": {"CreationDate": None}}
WORDS = {"better": (COLOURS[6], "o"), "worse": (COLOURS[4], "X")}  # colour and mark of a verdict; otherwise grey
NO_WORD = ("0.45", "s")


def write(results: Results, sentences: list[str]) -> list[pathlib.Path]:
    """Write the report of the runs that have ended, with `sentences` as its verdict; returns the paths."""
    below = [method(results), *(f"Note: {each}." for each in results.warnings())]
    verdict = facts(results) | {"comparisons": [dataclasses.asdict(each) for each in results.comparisons]}
    verdict = json_line(verdict | {"sentences": sentences, "warnings": results.warnings()})  # null for NaN
    texts = {
        "verdict.json": json.dumps(json.loads(verdict), indent=1) + "\n",
        "table.csv": _csv(rows(results)),
        "table.md": "\n\n".join([markdown(results), *below]) + "\n",
    }
    content = images(results) | {name: text.encode() for name, text in texts.items()}
    for name, each in content.items():
        with atomic(results.folder / name, aside=f".{os.getpid()}") as file:  # workers may end at once
            file.write(each)
    return [results.folder / name for name in content]


def number(value: float, digits: int = 3, sign: str = "-") -> str:
    """A number with so many digits, or all of its whole part; empty for NaN. sign: '+' for a difference."""
    if math.isnan(value):
        return ""
    return f"{value:{sign},.0f}" if abs(value) >= 1000 else f"{value:{sign}.{digits}g}"


def interval(low: float, high: float) -> str:
    """'-0.06 to -0.04'; empty for NaN."""
    return "" if math.isnan(low) else f"{number(low, 3, '+')} to {number(high, 3, '+')}"


def word(c: Any) -> str:
    """The verdict of a Finding, in a few words."""
    said = f"{c.word}, {c.size}".removesuffix(", ")
    return said if c.planned or not c.tested else f"exploratory: {said}"


def times_as_long(results: Results, variant: str) -> str:
    """How many times the baseline's time of a step a variant's is, with its interval; empty if it was not measured."""
    found, of_base = (results.design.times.get(name, {}) for name in (variant, results.design.baseline))
    if "times" not in found or "times" in of_base:  # the turns had another baseline
        return ""
    return f"{found['times']:.3g} times ({found['low']:.3g} to {found['high']:.3g})"


def method(results: Results) -> str:
    """How the verdict was made, in three sentences."""
    looks = ", ".join(map(str, results.design.looks))
    return METHOD.format(baseline=results.design.baseline, looks=looks)


def sentences(results: Results) -> list[str]:
    """The verdict on each variant, in words."""
    return [_sentence(results, each) if each.tested else _untested(results, each) for each in results.comparisons]


def _untested(results, c):
    plan = results.design
    until = next((look for look in plan.looks if look > results.counted), plan.looks[-1])
    why = f"runs of the first {until} seeds are missing"
    if len(plan.seeds) == 1:
        why = "one seed decides nothing"
    for name in (c.variant, plan.baseline):
        for how, n in results.without(name).items():
            why = f"{name} {how} with {n} of {len(plan.seeds)} seeds"
    return f"no verdict on {c.variant}: {why}"


def _sentence(results, c):
    plan = results.design
    text = f"{c.variant} is {c.word} than {plan.baseline}"
    if c.word == "no difference found":
        text = f"no difference found between {c.variant} and {plan.baseline}"
    spread = interval(c.low, c.high) or "unknown, all pairs are alike"
    text += f": {plan.metric} {number(c.mean, 3, '+')} (95 % interval {spread}, {c.n} seeds, p {probability(c.p)})"
    text += SIZES[c.size].format(plan.matters)
    if longer := times_as_long(results, c.variant):
        text += f"; a step takes {longer} as long"
    if c.found and c.word == "no difference found":
        text += f"; {c.n} seeds find {number(c.found[0])} to {number(c.found[1])} in 80 % of studies"
    return text if c.planned else f"exploratory, because it was not planned: {text}"


def probability(p: float) -> str:
    """'= 0.031' or '< 0.0001'; empty for NaN."""
    if math.isnan(p):
        return ""
    return f"= {p:.3g}" if p >= 1e-4 else "< 0.0001"


def facts(results: Results) -> dict[str, Any]:
    """How the study was made: {what: value}, for verdict.json and the page."""
    ran = {}
    for each in results.outcomes:
        for name, value in each.row.get("ran", {}).items():
            if value not in ran.setdefault(name, []):
                ran[name].append(value)
    made = {"method": method(results), "level": "5 %", "seeds that count": results.counted}
    return dataclasses.asdict(results.design) | made | ran


def rows(results: Results) -> list[dict[str, Any]]:
    """The table with all digits, in the order of the design; NaN where there is no number."""
    found = {}
    for name, by_seed in results.values().items():
        values, sd = list(by_seed.values()), math.nan
        if len(values) > 1:
            sd = float(np.std(values, ddof=1))
        found[name] = {"variant": name, "n": len(values), "mean": float(np.mean(values or [math.nan])), "sd": sd}
        found[name] |= {"ms": results.ms(name), "seconds": results.seconds(name)}
        found[name] |= dict.fromkeys(("difference", "low", "high", "p"), math.nan) | {"verdict": "baseline"}
    for c in results.comparisons:
        found[c.variant] |= {"difference": c.mean, "low": c.low, "high": c.high, "p": c.p, "verdict": word(c)}
    return list(found.values())


def _csv(table):
    text = io.StringIO()
    writer = csv.DictWriter(text, table[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: "" if v != v else v for k, v in row.items()} for row in table)  # NaN is not itself
    return text.getvalue()


def cells(results: Results) -> list[list[str]]:
    """The texts of the table, a list for each row, under HEAD."""
    found = []
    for row in rows(results):
        ms, longer = number(row["ms"], 4), times_as_long(results, row["variant"])
        numbers = [str(row["n"]), number(row["mean"], 5), number(row["sd"], 2)]
        numbers += [f"{ms}, {longer}".removesuffix(", "), number(row["seconds"], 4)]
        p = probability(row["p"]).removeprefix("= ")
        found.append([row["variant"], *numbers, number(row["difference"], 3, "+")])
        found[-1] += [interval(row["low"], row["high"]), p, row["verdict"]]
    return found


def markdown(results: Results) -> str:
    """The table for a README and for a console."""
    from tabulate import tabulate

    align = ["left", *["right"] * (len(HEAD) - 2), "left"]
    texts = [[f"`{name}`".replace("|", r"\|"), *rest] for name, *rest in cells(results)]  # _ and * are no emphasis
    return tabulate(texts, HEAD, "github", colalign=align, disable_numparse=True)


def images(*studies: Results) -> dict[str, bytes]:
    """{name of a file: what it holds} of the figure, with the same bytes each time; empty before there is a verdict."""
    from matplotlib import rc_context

    found = {}
    if any(c.tested for results in studies for c in results.comparisons):
        with rc_context(STYLE):
            figure = differences(*studies)
            for form, metadata in UNDATED.items():
                file = io.BytesIO()
                figure.savefig(file, format=form, dpi=DPI, metadata=metadata)
                found[f"differences.{form}"] = file.getvalue()
    return found


def differences(*studies: Results) -> Any:
    """The difference of each variant to the baseline, with its interval, the best first; a panel for each study."""
    from matplotlib.figure import Figure

    plan, means = studies[0].design, {}
    for c in (c for results in studies for c in results.comparisons if c.n):
        means.setdefault(c.variant, []).append(c.mean)
    rows = sorted(means, key=lambda name: np.mean(means[name]))
    baseline, *variants = labels([plan.baseline, *rows])
    names = [textwrap.wrap(name, 26, max_lines=3, placeholder="…") for name in variants]
    height = 0.4 if any(len(lines) > 2 for lines in names) else 0.3
    figure = Figure(figsize=(WIDTH, 0.5 + height * len(rows)), layout="constrained")
    several, notes = len(studies) > 1, ["paired by seed; 95 % intervals"]
    notes += [f"Note: {each}" for each in studies[0].warnings()[:3]] * (not several)  # or they are longer than it
    style.title(figure, f"Difference in {WHAT[plan.metric]} to {baseline}", notes)
    panels = figure.subplots(1, len(studies), sharex=True, sharey=True, squeeze=False)[0]
    for axes, results in zip(panels, studies):
        for each in (c for c in results.comparisons if c.n):
            row, (color, mark) = rows.index(each.variant), WORDS.get(each.word * each.planned, NO_WORD)
            axes.plot([each.low, each.high], [row, row], color=color, linewidth=2.2, solid_capstyle="butt")
            axes.plot([each.mean], [row], color=color, marker=mark, markersize=5)
            said = f"{number(each.mean, 3, '+')}  {word(each)}".replace("-", "−") * (not several)
            axes.annotate(said, (1.02, row), xycoords=("axes fraction", "data"), va="center", color=color, fontsize=8)
        axes.set_title(plain(results.folder.name.replace("_", "\n")) * several, fontsize=8)  # five fit side by side
        axes.axvline(0, color="0.3", linewidth=0.9)
        axes.grid(True, axis="x")
        axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    figure.supxlabel(f"difference in {WHAT[plan.metric]}: left is better", fontsize=8.5)
    panels[0].set_yticks(range(len(rows)), [plain("\n".join(lines)) for lines in names], fontsize=8)
    return figure


def side_by_side(folders: list[pathlib.Path]) -> pathlib.Path:
    """Draw the figures of several studies as one, beside the first folder; returns its path.

    Raises UserError if they do not compare the same with the same, or if none has a verdict.
    """
    studies, path = [read(folder) for folder in folders], folders[0].resolve().parent / "differences.png"
    if len({(results.design.metric, results.design.baseline) for results in studies}) > 1:
        raise UserError("these studies have another --metric or another baseline: draw each in a figure of its own")
    if not (drawn := images(*studies)):
        raise UserError("none of these studies has a verdict yet: draw them once their runs have ended")
    with atomic(path) as file:
        file.write(drawn["differences.png"])
    return path


def labels(names: list[str]) -> list[str]:
    """The names of variants for a figure. Names made of settings lose those that all have."""
    parts = [re.split(r"[+,](?=\w+=)", name) for name in names]
    same = set.intersection(*map(set, parts))
    return [" ".join(part for part in each if part not in same) or name for each, name in zip(parts, names)]
