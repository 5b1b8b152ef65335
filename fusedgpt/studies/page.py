"""Writes study.html in a study's folder: verdict, table, curves and settings on one page, with links to its runs."""

import dataclasses
import math
import pathlib
import time
import urllib.parse

import numpy as np

from fusedgpt.machine.files import atomic
from fusedgpt.machine.timing import in_words
from fusedgpt.runs.pages import fill, table
from fusedgpt.runs.style import time_unit
from fusedgpt.settings import Settings
from fusedgpt.studies import drawn, tables
from fusedgpt.studies.outcomes import Results, folder_of
from fusedgpt.studies.words import decimals, head, headline, labels, shown, summaries, what, without_value, word

TEMPLATE = pathlib.Path(__file__).with_suffix(".html")  # how the page looks; this file says what is on it
POINTS = 6000  # of all curves together, at most about so many


def write(results: Results, sentences: list[str], files: list[pathlib.Path]) -> pathlib.Path:
    """Write study.html into the folder of a study, with its verdict in `sentences` and links to `files` there.

    Returns its path. Raises UserError if the disk refuses.
    """
    path = results.folder / "study.html"
    content = fill(TEMPLATE, results.folder.resolve().name, _page(results, sentences, [file.name for file in files]))
    with atomic(path) as file:
        file.write(content)
    return path


def _page(results, sentences, files):
    """What the template's script draws: texts, and numbers that are all finite or null."""
    return {
        "name": results.folder.resolve().name,
        "written": time.time(),
        "headline": _capital(sentences[0]) if results.design.kind == "search" else headline(results),
        "warnings": results.warnings(),
        "sentences": _sentences(results, sentences),
        "tiles": _tiles(results),
        "search": results.design.kind == "search",
        "what": what(results.design),
        "head": head(results.design),
        "note": tables.note(results),
        "columns": tables.HEAD,
        "variants": _variants(results),
        "curves": _curves(results),
        "differences": _differences(results),
        "settings": _settings(results),
        "importance": _importance(results),
        "files": files,
        "tables": [each for each in _tables(results) if each["rows"]],
    }


def _finite(value):
    return value if math.isfinite(value) else None


def _floats(values):
    return [_finite(float(f"{value:.6g}")) for value in values.tolist()]


def _capital(text):
    return text[0].upper() + text[1:]


def _sentences(results, sentences):
    """[word, sentence] for each variant; a search has other sentences, without a word."""
    if results.design.kind == "search":
        return [["", text] for text in sentences[1:]]
    return [[word(each), text] for each, text in zip(results.comparisons(), sentences)]


def _tiles(results):
    """The figures at the top of the page: [what, value, remark]."""
    statuses = [each.status for each in results.outcomes]
    ended = [status for status in statuses if status != "missing"]
    others = [f"{ended.count(status)} {status}" for status in dict.fromkeys(ended) if status != "finished"]
    tiles = [
        ["runs", f"{len(ended)} of {len(statuses)}", ", ".join(others) or ("none diverged" if ended else "none yet")]
    ]
    seeds = results.design.seeds
    tiles.append(["seeds", str(len(seeds)), ", ".join(map(str, seeds[:8])) + ", …" * (len(seeds) > 8)])
    known = [each for each in summaries(results) if not math.isnan(each.mean)]
    if known:
        best = min(known, key=lambda each: each.mean)
        name = labels(results.design)[best.variant]
        tiles.append([f"lowest mean {what(results.design)}", shown(best.mean, decimals(known)), name])
    seconds = sum(float(np.nansum(each.run.train["ms"])) for each in results.outcomes if each.run) / 1e3
    if seconds > 0:
        tiles.append(["training time", in_words(seconds), "of the steps of all runs"])
    return tiles


def _variants(results):
    """A row of the table for each variant: its texts, what each column is sorted by, and its runs."""
    colours, names = drawn.coloured(results), labels(results.design)
    return [
        {
            "name": row.variant,
            "label": names[row.variant],
            "colour": colours.get(row.variant),
            "baseline": row.variant == results.design.baseline,
            "cells": [text.replace("-", "−") if n else text for n, text in enumerate(cells[:-1])] + cells[-1:],
            "keys": [row.variant, *(_finite(getattr(row, name)) for name in _KEYS), row.verdict],
            "runs": [_run(results, each) for each in results.outcomes if each.variant == row.variant],
        }
        for row, cells in zip(tables.rows(results), tables.cells(results))
    ]


_KEYS = ("n", "mean", "sd", "stand_ins", "difference", "low", "p")  # what a column of tables.HEAD is sorted by


def _run(results, outcome):
    page = folder_of(results.folder, outcome.variant, outcome.seed) / "report.html"
    link = urllib.parse.quote(page.relative_to(results.folder).as_posix(), safe="/=,+") if page.exists() else None
    value = shown(outcome.value, decimals(summaries(results)))
    return {"seed": outcome.seed, "status": outcome.status, "why": outcome.why, "value": value, "link": link}


def _curves(results):
    found = drawn.curves(results)
    axes = drawn.axes_of(found)
    if not axes:
        return None
    unit, seconds = time_unit(drawn.runs_in(results)) if "time" in axes else ("", 1)
    numbers = {name: n for n, name in enumerate(results.design.variants)}
    limit, lines = max(20, POINTS // len(found)), []
    for curve in (drawn.thin(each, limit) for each in found):
        x = {axis: _floats(curve.x[axis] / (seconds if axis == "time" else 1)) for axis in axes}
        sides = {name: _floats(getattr(curve, name)) for name in ("mean", "low", "high")}
        lines.append({"variant": numbers[curve.variant], "status": curve.status, "runs": curve.runs, "x": x, **sides})
    named = {"iterations": "iteration", "tokens": "tokens", "time": unit}
    return {
        "title": drawn.curves_title(results, found),
        "y": drawn.curves_show(results),
        "range": drawn.loss_view(found),
        "above": drawn.cut_off(found),
        "axes": {axis: named[axis] for axis in axes},
        "lines": lines,
    }


def _differences(results):
    comparisons = [each for each in results.comparisons() if each.n]
    if not any(each.tested for each in comparisons):
        return None
    numbers, places = {name: n for n, name in enumerate(results.design.variants)}, decimals(summaries(results))
    rows = [
        {
            "variant": numbers[each.variant],
            "mean": each.mean,
            "low": _finite(each.low),
            "high": _finite(each.high),
            "text": shown(each.mean, places, "+").replace("-", "−"),
            "word": word(each),
        }
        for each in comparisons
    ]
    return {"extent": drawn.extent(comparisons), "rows": rows}


def _settings(results):
    axes = drawn.coordinates(results)
    if len(axes) < 3 or len(axes[-1].at) < 2:
        return None
    numbers = {name: n for n, name in enumerate(results.design.variants)}
    worst = {each.variant for each in summaries(results) if each.stand_ins}
    lines = [
        {"variant": numbers[name], "at": [axis.at[name] for axis in axes], "dotted": name in worst}
        for name in sorted(axes[-1].at, key=axes[-1].at.get, reverse=True)  # the best lies on top
    ]
    named = [{"name": axis.name, "ticks": axis.ticks} for axis in axes]
    dotted = f"dotted: a run {without_value(results.design)}"
    return {"title": drawn.settings_title(results), "axes": named, "lines": lines, "dotted": dotted}


def _importance(results):
    shares = drawn.importance(results)
    if len(shares) < 2:
        return None
    said = {"title": drawn.importance_title(shares), "subject": drawn.importance_subject(results, shares)}
    return {**said, "shares": shares}


def _tables(results):
    """Tables of texts, most of them folded."""
    plan, defaults = results.design, dataclasses.asdict(Settings())
    changed = [[n, v, defaults.get(n)] for n, v in plan.settings.items() if n not in defaults or v != defaults[n]]
    made = {"command": plan.command, "baseline": plan.baseline, "metric": what(plan), "intervals": plan.interval}
    made |= {"seeds": plan.seeds, "CPU threads of a run": plan.threads, "SHA-256 of the code": plan.code}
    made |= {f"SHA-256 of {name}": digest for name, digest in plan.data.items()}
    made |= plan.against or {}
    runs = [
        [o.variant, o.seed, o.status, shown(o.value, decimals(summaries(results))), o.why] for o in results.outcomes
    ]
    return [
        table("What made this study", [[n, v] for n, v in made.items() if v not in (None, "")], open=True),
        table("What auto became, in all runs", (plan.settled or {}).items(), open=True),
        table("Settings of all runs that are not the default", changed, ["setting", "value", "default"], open=True),
        table("All settings that all runs share", plan.settings.items(), ["setting", "value"]),
        table("All runs", runs, ["variant", "seed", "status", what(plan), "why"]),
    ]
