"""The page of a study: what is on it, whatever its names hold, and how it behaves in a browser."""

import html
import json
import math
import re
import shutil
import subprocess
import urllib.parse

import pytest

from fusedgpt.studies import outcomes, page, report
from tests.fusedgpt.runs.test_report_page import in_browser, in_chromium, on_a_phone, page_of, text_in
from tests.fusedgpt.studies import by_hand, fakes
from tests.fusedgpt.studies.by_hand import renamed, study, three

EVIL = "</script><b>{{page}}&amp;<!--"
ADAMW, MUON = "learning_rate=0.01,optimizer=adamw", "learning_rate=0.01,optimizer=muon"
FAST = "learning_rate=0.1,optimizer=muon"


@pytest.fixture(scope="module", autouse=True)
def cheap():
    with fakes.blank_figures():
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """The page of a study of three variants. Tests only read it."""
    return report.write(three(tmp_path_factory.mktemp("study")))[-1]


def evil(folder):
    """The page of a study whose texts are all markup."""
    losses = {name: {seed: [4.0, 3.0, 2.0 + seed] for seed in (1, 2)} for name in "ab"}
    losses["b"][2] = [4.0, math.nan]
    variants = {"a": {"n_layer": 1}, "b": {"n_layer": 2}}
    design = dict(command=EVIL, settings={"dataset": EVIL}, settled={EVIL: EVIL})
    results = outcomes.read(study(folder / EVIL.replace("/", ""), variants, losses, **design))
    for each in results.outcomes:
        each.why = EVIL
    results = renamed(results, {"a": EVIL, "b": f"b{EVIL}"})
    return page.write(results, results.sentences(), [])


def test_the_page_says_what_the_study_found(path):
    content = page_of(path)
    results = outcomes.read(path.parent)
    assert content["headline"].startswith(f"1 of 2 variants is better than {ADAMW}: {MUON} by 0.2000")
    assert [text for _, text in content["sentences"]] == results.sentences()
    assert [word for word, _ in content["sentences"]] == ["better", "no difference found"]
    assert content["warnings"] == results.warnings() and len(content["warnings"]) == 2
    assert content["tiles"][0] == ["runs", "8 of 9", "1 diverged"]
    assert content["tiles"][2] == ["lowest mean validation loss", "1.9000", "0.01, muon"]
    names = [table["title"] for table in content["tables"]]
    assert "Settings of all runs that are not the default" in names and "What auto became, in all runs" in names


def test_a_row_has_its_numbers_and_the_pages_of_its_runs(path):
    baseline, muon, fast = page_of(path)["variants"]
    assert (baseline["name"], baseline["label"], baseline["baseline"]) == (ADAMW, "0.01, adamw", True)
    assert muon["cells"][5:] == ["−0.2000", "[−0.2248, −0.1752]", "0.00166", "better"]
    assert muon["keys"][5] == pytest.approx(-0.2) and baseline["keys"][5] is None
    first, second, third = fast["runs"]
    assert (second["status"], second["why"], third["status"]) == ("diverged", "the weights are not finite", "missing")
    assert third["link"] is None and first["link"] == f"runs/{FAST}/seed-1/report.html"
    assert (path.parent / first["link"]).read_text() == "the page of the run"


def test_the_curves_are_those_of_the_figures(path):
    curves = page_of(path)["curves"]
    adamw = curves["lines"][0]
    assert adamw["mean"] == pytest.approx([4.1, 3.2, 2.1]) and adamw["low"] == pytest.approx([4.0, 3.0, 2.0])
    assert adamw["x"] == {"iterations": [0, 50, 100], "tokens": [0, 50_000, 100_000], "time": [0, 1, 2]}
    assert curves["axes"] == {"iterations": "iteration", "tokens": "tokens", "time": "seconds"}
    assert [line["status"] for line in curves["lines"]] == ["finished"] * 3 + ["diverged"]
    assert curves["lines"][3]["mean"] == [4.1, 3.9, None]


def test_links_are_quoted_and_lead_to_files(tmp_path):
    losses = {name: {seed: [4.0, 3.0, 2.0 + seed] for seed in (1, 2)} for name in ("a b+ü=1", "c")}
    folder = study(tmp_path, {"a b+ü=1": {"n_layer": 1}, "c": {"n_layer": 2}}, losses)
    path = report.write(folder)[-1]
    link = page_of(path)["variants"][0]["runs"][0]["link"]
    assert link == "runs/a%20b+%C3%BC=1/seed-1/report.html" and (folder / urllib.parse.unquote(link)).exists()
    files = page_of(path)["files"]
    assert {"table.csv", "table.md", "table.tex", "curves_time.pdf"} <= {*files}
    assert all((path.parent / name).exists() for name in files)


def test_text_of_a_study_cannot_become_markup(tmp_path):
    path = evil(tmp_path)
    text = path.read_text()
    assert text.count("<script") == text.count("</script") == 2
    assert f"<title>{html.escape(path.parent.name)}</title>" in text
    assert page_of(path)["variants"][0]["name"] == EVIL


def test_a_search_says_what_it_found_in_its_own_words(tmp_path):
    variants = {"learning_rate=0.1": {"learning_rate": 0.1}, "learning_rate=0.2": {"learning_rate": 0.2}}
    losses = {name: {1: [4.0, 2.0 - changes["learning_rate"]]} for name, changes in variants.items()}
    design = dict(kind="search", space="learning_rate=0.1..0.5", command="python study.py --search=x")
    content = page_of(report.write(study(tmp_path, variants, losses, **design))[-1])
    assert content["headline"].startswith("The best of 2 trials that ran to their end is learning_rate=0.2")
    assert content["search"] and any("--seed=2.." in text for _, text in content["sentences"])


def test_a_large_study_makes_a_page_that_a_browser_can_take(tmp_path, monkeypatch):
    monkeypatch.setattr(by_hand, "EVERY", 1)
    variants = {f"n_layer={n}": {"n_layer": n, "n_head": n % 3} for n in range(60)}
    losses = {name: {1: [4.0 / (n + 1) for n in range(150)]} for name in variants}
    folder = study(tmp_path, variants, losses)
    path = page.write(outcomes.read(folder), [], [])
    assert path.stat().st_size < 800_000
    assert all(len(line["mean"]) <= 110 for line in page_of(path)["curves"]["lines"])


NODE = shutil.which("node")


@pytest.mark.skipif(not NODE, reason="needs node")
@pytest.mark.parametrize("down", [False, True])
def test_what_is_not_there_is_sorted_to_the_end(down):
    (function,) = re.findall(r"^function sorted\(.*?^}", page.TEMPLATE.read_text(), re.M | re.S)
    keys = [["b10", 3.0], ["b9", None], ["a", -1.0], ["", 2.0]]
    variants = json.dumps([{"keys": each} for each in keys])
    code = f"const variants = {variants};{function};"
    code += f"console.log(JSON.stringify([sorted(0, {str(down).lower()}), sorted(1, {str(down).lower()})]))"
    done = subprocess.run([NODE, "-e", code], capture_output=True, text=True, check=True, timeout=60)
    names, numbers = json.loads(done.stdout)
    assert names == ([0, 1, 2, 3] if down else [2, 1, 0, 3])  # b9 before b10
    assert numbers == ([0, 3, 2, 1] if down else [2, 3, 0, 1])


@in_browser
def test_the_table_is_sorted_by_a_click_on_its_head(path):
    click = """
        const said = [], order = () => [...document.querySelectorAll("#table tbody th")].map(each => each.textContent);
        const head = name => [...document.querySelectorAll("#table thead th")].find(each => each.textContent === name);
        const press = name => {
            head(name).querySelector("button").click();
            said.push([order(), head(name).ariaSort]);
        };
        said.push([order()]);
        press("mean"), press("mean"), press("difference");
        document.body.append(make("p", { id: "seen" }, JSON.stringify(said)));
    """
    document, console = in_chromium(path, click)
    adamw, muon, fast = "0.01, adamw", "0.01, muon", "0.1, muon"
    assert json.loads(text_in(document, "seen")) == [
        [[adamw, muon, fast]],
        [[muon, adamw, fast], "ascending"],
        [[fast, adamw, muon], "descending"],
        [[muon, fast, adamw], "ascending"],  # the baseline has no difference
    ]
    assert console == []


@in_browser
def test_the_curves_change_their_axis_and_show_values_under_the_pointer(path):
    script = """
        const svg = document.querySelector("#curves svg"), seen = [];
        const legend = () => [...document.querySelectorAll(".legend b")].map(each => each.textContent).join(" ");
        const files = () => [...document.querySelectorAll("#curves .files a")].map(each => each.getAttribute("href"));
        seen.push(legend(), files()[0]);
        const [, , time] = document.querySelectorAll("#curves .switch button");
        time.click();
        const box = svg.getBoundingClientRect(), x = box.left + 54 + (box.width - 54 - 12) / 2; // half way
        svg.dispatchEvent(new PointerEvent("pointermove", { clientX: x, bubbles: true }));
        seen.push(legend(), svg.querySelector(".at").textContent, files()[1]);
        svg.dispatchEvent(new PointerEvent("pointerleave"));
        seen.push(legend());
        svg.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft" }));
        svg.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft" }));
        seen.push(svg.querySelector(".at").textContent);
        seen.push(svg.querySelectorAll(".band").length, svg.querySelectorAll(".unfinished").length);
        document.body.dataset.requests = performance.getEntriesByType("resource").length;
        document.body.append(make("p", { id: "seen" }, seen.join("|")));
    """
    document, console = in_chromium(path, script)
    assert text_in(document, "seen").split("|") == [
        *("2.100 1.900 2.300", "curves_iterations.png", "3.200 2.700 2.400", "1 seconds", "curves_time.pdf"),
        *("2.100 1.900 2.300", "1 seconds", "2", "1"),
    ]
    assert 'data-requests="0"' in document and console == []


@in_browser
def test_a_row_under_the_pointer_lights_its_variant_everywhere(path):
    script = """
        const row = document.querySelectorAll("#table tbody tr")[1];
        row.dispatchEvent(new PointerEvent("pointerenter"));
        const lit = [...document.querySelectorAll(".lit")].map(each => each.dataset.variant);
        const dim = [...document.querySelectorAll(".dim")].map(each => each.dataset.variant);
        row.dispatchEvent(new PointerEvent("pointerleave"));
        const left = document.querySelectorAll(".lit, .dim").length;
        document.body.append(make("p", { id: "seen" }, JSON.stringify([[...new Set(lit)], [...new Set(dim)], left])));
    """
    document, console = in_chromium(path, script)
    lit, dim, left = json.loads(text_in(document, "seen"))
    assert lit == ["1"] and sorted(dim) == ["0", "2"] and left == 0 and console == []


@in_browser
def test_warnings_are_seen_and_no_name_runs_as_markup(tmp_path):
    document, console = in_chromium(evil(tmp_path), "document.body.dataset.bold = byId('tables').querySelector('b')")
    assert console == [] and 'data-bold="null"' in document and "<b>{{page}}" not in document
    losses = {"a": {1: [4.0, 2.0], 2: [4.0, math.nan]}, "b": {1: [4.0, 2.0], 2: [4.0, 2.0]}}
    folder = study(tmp_path / "diverged", {"a": {"n_layer": 1}, "b": {"n_layer": 2}}, losses)
    seen = """
        const box = byId("warnings").getBoundingClientRect(), inside = box.height > 0 && box.top < innerHeight;
        document.body.append(make("p", { id: "seen" }, `${inside} ${byId("warnings").textContent}`));
    """
    document, console = in_chromium(report.write(folder)[-1], seen)
    said = text_in(document, "seen")
    assert said.startswith("true") and "a with seed 2 diverged" in said and console == []


@in_browser
@pytest.mark.parametrize("case", ["alone", "none", "long", "odd"])
def test_a_page_of_any_study_is_readable_on_a_phone(case, tmp_path):
    fall = {seed: [4.0, 3.0, 2.0 + seed] for seed in (1, 2)}
    name = "learning_rate=0.001,name=" + "x" * 90
    variants, losses = {
        "alone": ({"config": {}}, {"config": fall}),
        "none": ({"a": {"n_layer": 1}, "b": {"n_layer": 2}}, {"a": {1: None}, "b": {1: None}}),
        "long": ({name: {"n_layer": 1}, "b": {"n_layer": 2}}, {name: fall, "b": fall}),
        "odd": ({"a": {"n_layer": 1}, "b": {"n_layer": 2}}, {"a": {1: [math.nan]}, "b": {1: [4.0, math.nan]}}),
    }[case]
    path = report.write(study(tmp_path / "study", variants, losses))[-1]
    seen = on_a_phone(path, "svg, .tile, figure, li, h1, #headline", 'boxes("#table tr").length')
    assert seen == f"true true {1 + len(variants)}"
