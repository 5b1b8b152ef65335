"""The tables of the pages, printed from the rows in results/. cogapp puts them where a page calls these functions:

    python -m cogapp -r -P -I . README.md CONTRIBUTING.md docs/*.md results/study_calibration/README.md

A page has `<!-- [[[cog from tests.tables import contenders; contenders("h200/ladder") ]]] -->`, then the table, then
`<!-- [[[end]]] -->`.
"""

import csv
import pathlib
import re

from fusedgpt.bench import figures, report, rows
from fusedgpt.machine.files import read_jsonl

RESULTS = pathlib.Path(__file__).resolve().parents[1] / "results"


def contenders(folder: str, others: dict[str, dict[str, str]] | None = None) -> None:
    """Milliseconds, and how many times as fast as the baseline, with the interval.

    others: more columns, {heading: {contender: cell}}.
    """
    more = others or {}
    for result in rows.results(rows.read(RESULTS / folder / "rows.jsonl")[1]):
        found = [name for name in result.measured if result.ms(name)]
        cells = [[f"`{name}`", *_times(result, name), *(c.get(name, "") for c in more.values())] for name in found]
        head = [", ".join(map(str, result.workload.values())), "ms", f"times as fast as `{result.baseline}`", *more]
        print(*report.markdown(head, cells), sep="\n", end="\n" * (1 + bool(result.workload)))


def _times(result, name):
    ratio = result.ratio(name)
    return figures.milliseconds(result.ms(name)["median_ms"]), report.in_figures(ratio) if ratio else ""


def lengths(folder: str, *names: str) -> None:
    """How many times as fast as the baseline contenders are, with intervals: a line for each comparison."""
    found = rows.results(rows.read(RESULTS / folder / "rows.jsonl")[1])
    fields = list(found[0].workload)
    found.sort(key=lambda result: [str(result.workload[name]).zfill(9) for name in fields])
    cells = []
    for result in found:
        ratios = [result.ratio(name) for name in names]
        cells.append([*result.workload.values(), *(report.in_figures(ratio) if ratio else "" for ratio in ratios)])
    print(*report.markdown([*fields, *(f"`{name}`" for name in names)], cells), sep="\n")


def both(first: str, second: str) -> None:
    """How many times as fast contenders are in two folders, and whether they agree, as `bench.py check` says it."""
    results = [rows.results(rows.read(RESULTS / folder / "rows.jsonl")[1]) for folder in (first, second)]
    print(*report.markdown(["", first, second, ""], report.compare(*results)), sep="\n")


def of_studies(**folders: str) -> None:
    """How far variants are from the baseline, with intervals: a column for each {heading: folder of a study}."""
    found = {}
    for folder in folders.values():
        for line in _of_csv(folder):
            mean, *numbers = (f"{float(line[name] or 'nan'):+.3f}" for name in ("mean", "difference", "low", "high"))
            said = "{} ({} to {}), {}".format(*numbers, line["verdict"]) if line["difference"] else mean[1:]
            found.setdefault(line["variant"], {})[folder] = said.removesuffix(", no difference found")
    cells = [[variant, *(said.get(folder, "") for folder in folders.values())] for variant, said in found.items()]
    print(*report.markdown(["", *(each.replace("_", " ") for each in folders)], cells), sep="\n")


def _of_csv(folder):
    with open(RESULTS / folder / "table.csv", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def texts(**folders: str) -> None:
    """What a model learns of texts, {name: folder of a study}: its size, dropout, iterations, and time in turns."""
    cells = []
    for text, folder in folders.items():
        first = None
        for line in _of_csv(folder):
            s = dict(each.split("=") for each in line["variant"].split("+"))
            took = float(line["ms"]) * int(s["max_iters"])
            first = first or took
            size, mean = f"{s['n_layer']} × {s['n_embd']}", f"{float(line['mean']):.3f}"
            cells.append([text.replace("_", " "), size, s["dropout"], s["max_iters"], f"{took / first:.2g}", mean])
    head = ["text", "layers × channels", "dropout", "iterations", "times as long", "bits per byte, mean of 3 seeds"]
    print(*report.markdown(head, cells), sep="\n")


def fields(path: str, *names: str, **where) -> None:
    """The fields of the lines of a .jsonl that have the values `where`."""
    found = [line for line in read_jsonl(RESULTS / path) if where.items() <= line.items()]
    cells = [[_cell(line.get(name, "")) for name in names] for line in found]
    print(*report.markdown([name.replace("_", " ") for name in names], cells), sep="\n")


def in_a_browser(tour: pathlib.Path = RESULTS.parent / "docs" / "tour.ipynb") -> None:
    """Links that open the tour elsewhere. Its `URL` is the only place that has the project's address."""
    (url,) = re.findall(r'URL = \\"(.*)\\"', tour.read_text("utf-8"))
    place, colab = url.removeprefix("https://github.com/"), "https://colab.research.google.com/github"
    if place:
        link = f"[in Colab]({colab}/{place}/blob/main/docs/tour.ipynb)"
        print(f"Nothing to install: the tour {link}, the project [in a Codespace](https://codespaces.new/{place}).")
    else:
        print("The project has no public address yet. When `URL` in `docs/tour.ipynb` is one on GitHub, cogapp")
        print("([how](../CONTRIBUTING.md#adding-something)) writes links to the tour in Colab and Codespaces here.")


def _cell(value):
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else value
