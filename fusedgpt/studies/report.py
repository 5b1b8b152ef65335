"""The report of a study, from study.json and outcomes.jsonl alone: verdict, table, figures and a page."""

import csv
import dataclasses
import html
import io
import json
import math
import pathlib
from typing import Any

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
    table = rows(results)
    below = "\n\n".join([words.method(results), *(f"Note: {each}." for each in results.warnings())])
    texts = {
        "verdict.json": _verdict(results, sentences),
        "table.csv": _csv(table),
        "table.md": f"{markdown(results)}\n\n{below}\n",
        "table.tex": "\n".join(
            [
                "% needs \\usepackage{booktabs}",
                *(f"% {line}" for line in below.splitlines() if line),
                _tabulated(results, "latex_booktabs"),
                "",
            ]
        ),
    }
    drawn, paths = dict(figures.draw(results)), []
    for name, figure in drawn.items():
        for suffix in (".png", ".pdf"):
            with atomic(results.folder / f"{name}{suffix}") as file:
                figures.save(figure, file, suffix[1:])
            paths.append(results.folder / f"{name}{suffix}")
    texts["study.html"] = _page(results, sentences, drawn)
    for name, text in texts.items():
        with atomic(results.folder / name) as file:
            file.write(text if isinstance(text, bytes) else text.encode())
    return [*paths, *(results.folder / name for name in texts)]


def rows(results: Results) -> list[dict[str, Any]]:
    """The table with all digits, in the order of the design; NaN where there is no number."""
    compared, found = {c.variant: c for c in results.comparisons}, []
    for name, (n, mean, sd) in words.means(results).items():
        row = {"variant": name, "n": n, "mean": mean, "sd": sd}
        row |= {"ms": results.ms(name), "seconds": results.seconds(name)}
        c = compared.get(name)
        numbers = (c.mean, c.low, c.high, c.p) if c else (math.nan,) * 4
        row |= dict(zip(("difference", "low", "high", "p"), numbers))
        found.append(row | {"verdict": words.word(c) if c else "baseline"})
    return found


def _csv(table):
    text = io.StringIO()
    writer = csv.DictWriter(text, table[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: "" if v != v else v for k, v in row.items()} for row in table)  # NaN is not itself
    return text.getvalue()


def cells(results: Results) -> list[list[str]]:
    """The texts of the table, a list for each row, under HEAD."""
    places, found = words.decimals(results), []
    for row in rows(results):
        around = [words.shown(row[name], places, "+") for name in ("low", "high")]
        ms = "" if math.isnan(row["ms"]) else f"{row['ms']:.4g}"
        if longer := words.times_as_long(results, row["variant"]):
            ms += f", {longer}"
        found.append(
            [
                row["variant"],
                str(row["n"]),
                words.shown(row["mean"], places),
                words.shown(row["sd"], places),
                ms,
                "" if math.isnan(row["seconds"]) else f"{row['seconds']:.4g}",
                words.shown(row["difference"], places, "+"),
                f"{around[0]} to {around[1]}" if around[0] else "",
                "" if math.isnan(row["p"]) else f"{row['p']:.3g}" if row["p"] >= 1e-4 else "<0.0001",
                row["verdict"],
            ]
        )
    return found


def _tabulated(results, form, texts=None):
    from tabulate import tabulate

    align = ["left", *["right"] * (len(HEAD) - 2), "left"]
    return tabulate(texts or cells(results), HEAD, form, colalign=align, disable_numparse=True)


def markdown(results: Results) -> str:
    """The table for a README and for a console."""
    texts = [[f"`{name}`".replace("|", r"\|"), *rest] for name, *rest in cells(results)]  # _ and * are no emphasis
    return _tabulated(results, "github", texts)


def _verdict(results, sentences):
    found = words.facts(results) | {
        "comparisons": [dataclasses.asdict(each) for each in results.comparisons],
        "sentences": sentences,
        "warnings": results.warnings(),
    }
    return json.dumps(json.loads(json_line(found)), indent=1) + "\n"  # json_line makes null of NaN and infinity


def _page(results, sentences, drawn):
    """study.html: one file that loads nothing."""
    plan, defaults = results.design, dataclasses.asdict(Settings())
    changed = [(n, v) for n, v in plan.settings.items() if n not in defaults or v != defaults[n]]
    runs = [(o.variant, o.seed, o.status, o.value, o.why) for o in results.outcomes]
    parts = [f"<p class='lead'>{html.escape(words.headline(results))}.</p>"]
    if warnings := results.warnings():
        parts.append(f"<section class='card warning'><b>Before you believe it</b>{_list(warnings)}</section>")
    parts += [_list(sentences), f"<div class='scroll'>{_tabulated(results, 'html')}</div>"]
    parts.append(f"<p class='muted'>{html.escape(words.method(results))}</p>")
    parts += [f"<figure>{figures.svg(figure)}</figure>" for figure in drawn.values()]
    parts.append("<p class='muted'>Each run has a page: runs/VARIANT/seed-N/report.html</p>")
    made = [(name, value) for name, value in words.facts(results).items() if value not in (None, "", [])]
    parts += [_details("How it was made", made), _details("Settings of all runs that are not the default", changed)]
    parts.append(_details("All runs", runs))
    title = "A study of " + (", ".join(plan.varied) or "two versions" if len(plan.variants) > 1 else plan.baseline)
    return fill(title, f"<div class='study'>{''.join(parts)}</div>")


def _list(texts):
    return f"<ul>{''.join(f'<li>{html.escape(each)}.</li>' for each in texts)}</ul>"


def _details(title, table):
    from tabulate import tabulate

    texts = [[str(each) for each in row] for row in table]
    return f"<details><summary>{title}</summary>{tabulate(texts, tablefmt='html', disable_numparse=True)}</details>"
