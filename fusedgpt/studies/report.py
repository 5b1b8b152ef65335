"""The report of a study: its verdict for programs, tables, figures and a page, from what its runs left."""

import dataclasses
import json
import pathlib

from fusedgpt.machine.files import atomic, json_line
from fusedgpt.studies import figures, outcomes, page, search, tables
from fusedgpt.studies.outcomes import Results
from fusedgpt.studies.words import summaries


def write(folder: str | pathlib.Path) -> list[pathlib.Path]:
    """Write the report of the study in a folder into it; returns the paths of its files.

    While runs are missing, it is a report of those that have ended. Raises UserError if the folder has no study, or if
    the disk refuses.
    """
    results = outcomes.read(folder)
    sentences = search.sentences(results) if results.design.kind == "search" else results.sentences()
    texts = {
        "verdict.json": _verdict(results, sentences),
        "table.csv": tables.as_csv(results),
        "table.md": tables.as_markdown(results),
        "table.tex": tables.as_latex(results),
    }
    for name, text in texts.items():
        with atomic(results.folder / name) as file:
            file.write(text.encode())
    written = [results.folder / name for name in texts]
    written += figures.write(results, results.folder)
    return [*written, page.write(results, sentences, written)]


def _verdict(results: Results, sentences: list[str]) -> str:
    statuses = [each.status for each in results.outcomes]
    found = {
        "baseline": results.design.baseline,
        "metric": results.design.metric,
        "comparisons": [dataclasses.asdict(each) for each in results.comparisons()],
        "summaries": [dataclasses.asdict(each) for each in summaries(results)],
        "differences": results.differences,
        "sentences": sentences,
        "warnings": results.warnings(),
        "missing": statuses.count("missing"),
    }
    return json.dumps(json.loads(json_line(found)), indent=1) + "\n"  # json_line makes null of NaN and infinity
