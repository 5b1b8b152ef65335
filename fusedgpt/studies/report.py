"""The report of a study, from study.json and outcomes.jsonl alone: verdict, table, figures and a page."""

import csv
import dataclasses
import html
import io
import json
import math
import pathlib
from typing import Any

import numpy as np

from fusedgpt.machine.files import atomic, json_line
from fusedgpt.runs.pages import fill
from fusedgpt.settings import Settings
from fusedgpt.studies import figures, words
from fusedgpt.studies.outcomes import Results

HEAD = ("variant", "n", "mean", "sd", "ms a step", "seconds", "difference", "95 % interval", "p", "verdict")


def write(results: Results, sentences: list[str]) -> list[pathlib.Path]:
    """Write the report of a study into its folder, with `sentences` as its verdict; returns the paths.

    While runs are missing, it is a report of those that have ended. Raises UserError if the disk refuses.
    """
    below = [words.method(results), *(f"Note: {each}." for each in results.warnings())]
    drawn = dict(figures.draw(results))
    content = {}
    for name, figure in drawn.items():
        content |= {f"{name}.{form}": figures.saved(figure, form) for form in ("png", "pdf")}
    verdict = words.facts(results) | {"comparisons": [dataclasses.asdict(each) for each in results.comparisons]}
    verdict = json_line(verdict | {"sentences": sentences, "warnings": results.warnings()})  # null for NaN
    head = ["% needs \\usepackage{booktabs}", *(f"% {line}" for line in below)]
    texts = {
        "verdict.json": json.dumps(json.loads(verdict), indent=1) + "\n",
        "table.csv": _csv(rows(results)),
        "table.md": "\n\n".join([markdown(results), *below]) + "\n",
        "table.tex": "\n".join([*head, _tabulated(cells(results), "latex_booktabs"), ""]),
    }
    content |= {name: text.encode() for name, text in texts.items()}
    content["study.html"] = _page(results, sentences, drawn)
    for name, each in content.items():
        with atomic(results.folder / name) as file:
            file.write(each)
    return [results.folder / name for name in content]


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
        found[c.variant] |= {"difference": c.mean, "low": c.low, "high": c.high, "p": c.p, "verdict": words.word(c)}
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
        ms, longer = words.number(row["ms"], 4), words.times_as_long(results, row["variant"])
        numbers = [str(row["n"]), words.number(row["mean"], 5), words.number(row["sd"], 2)]
        numbers += [f"{ms}, {longer}".removesuffix(", "), words.number(row["seconds"], 4)]
        p = words.probability(row["p"]).removeprefix("= ")
        found.append([row["variant"], *numbers, words.number(row["difference"], 3, "+")])
        found[-1] += [words.interval(row["low"], row["high"]), p, row["verdict"]]
    return found


def _tabulated(texts, form):
    from tabulate import tabulate

    align = ["left", *["right"] * (len(HEAD) - 2), "left"]
    return tabulate(texts, HEAD, form, colalign=align, disable_numparse=True)


def markdown(results: Results) -> str:
    """The table for a README and for a console."""
    texts = [[f"`{name}`".replace("|", r"\|"), *rest] for name, *rest in cells(results)]  # _ and * are no emphasis
    return _tabulated(texts, "github")


def _page(results, sentences, drawn):
    """study.html: one file that loads nothing."""
    plan, defaults = results.design, dataclasses.asdict(Settings())
    changed = [(n, v) for n, v in plan.settings.items() if n not in defaults or v != defaults[n]]
    runs = [(o.variant, o.seed, o.status, o.value, o.why) for o in results.outcomes]
    made = [(name, value) for name, value in words.facts(results).items() if name not in ("settings", "variants")]
    parts = [f"<p class='lead'>{html.escape(words.headline(results))}.</p>"]
    if warnings := results.warnings():
        parts.append(f"<section class='card warning'><b>Before you believe it</b>{_list(warnings)}</section>")
    parts += [_list(sentences), f"<div class='scroll'>{_tabulated(cells(results), 'html')}</div>"]
    parts.append(f"<p class='muted'>{html.escape(words.method(results))}</p>")
    parts += [f"<figure>{figures.svg(figure)}</figure>" for figure in drawn.values()]
    parts.append("<p class='muted'>Each run has a page: runs/VARIANT/seed-N/report.html</p>")
    parts += [_details("How it was made", made), _details("Settings of all runs that are not the default", changed)]
    parts.append(_details("All runs", runs))
    title = f"A study of {', '.join(plan.varied) or plan.baseline}"
    return fill(title, f"<div class='study'>{''.join(parts)}</div>")


def _list(texts):
    return f"<ul>{''.join(f'<li>{html.escape(each)}.</li>' for each in texts)}</ul>"


def _details(title, table):
    from tabulate import tabulate

    texts = [[str(each) for each in row] for row in table]
    return f"<details><summary>{title}</summary>{tabulate(texts, tablefmt='html', disable_numparse=True)}</details>"
