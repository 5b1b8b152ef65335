"""How the pages of runs behave in a browser."""

import html
import re
import shutil
import subprocess

import pytest

from fusedgpt.runs import report_page
from tests.fusedgpt.runs.test_metrics import run_of, step
from tests.fusedgpt.runs.test_report_page import EVIL, compared, sample, some_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")


def in_chromium(path, script="", phone=False):
    """The document after a copy of the page at `path` has run, and then `script`; and what the console said.

    phone: in a frame of 390 pixels, because Chromium's windows are not narrower than 500, and with no storage, as in
    JupyterLab. The script there can only tell(text), which is then in the element #seen.
    """
    tells = "const tell = text => document.body.append(make('p', { id: 'seen' }, text));"
    if phone:
        tells = "const tell = text => parent.postMessage(text, '*');"
    text = path.read_text().replace("</body>", f"<script>{tells} {script}</script></body>")
    if phone:
        hears = "onmessage = event => document.querySelector('#seen').textContent = event.data"
        frame = f'sandbox="allow-scripts" width="390" height="844" style="border: 0" srcdoc="{html.escape(text)}"'
        text = f"<body><p id=seen></p><script>{hears}</script><iframe {frame}></iframe></body>"
    copy = path.with_name("copy.html")
    copy.write_text(text)
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=3000"]
    profile = f"--user-data-dir={path.parent / 'profile'}"
    command = [CHROMIUM, *flags, profile, "--window-size=1200,900", "--dump-dom", copy.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def text_in(document, element_id):
    """The text of an element, without the tags in it."""
    (found,) = re.findall(rf'<(\w+)[^>]* id="?{element_id}"?[^>]*>(.*?)</\1>', document, re.S)
    return html.unescape(re.sub("<[^>]*>", "", found[1]))


def test_marks_say_their_values_and_the_axis_can_be_changed(tmp_path):
    # 2 s and 0.5 s a step
    compared(tmp_path, some_run(tmp_path / "slow", 2.0), some_run(tmp_path / "fast", 1.9, 500.0))
    script = """
        const said = () => [...document.querySelectorAll(".dot title")].slice(0, 6).map(each => each.textContent);
        const before = said();
        document.querySelector("[data-axis=time]").click();
        tell([...before, ...said(), document.querySelector(".ends").textContent].join("|"));
    """
    document, console = in_chromium(tmp_path / "page.html", script)
    seen = text_in(document, "seen").split("|")
    losses = ("6.000", "1.500", "2.000", "5.900", "1.400", "1.900")
    assert seen[:6] == [f"iteration {n}: {y}" for n, y in zip((0, 20, 40, 0, 20, 40), losses)]
    assert seen[6:12] == [f"seconds {n}: {y}" for n, y in zip((0, 40, 80, 0, 10, 20), losses)]
    assert seen[12] == "2.0001.900" and console == []


def test_a_page_that_loads_itself_again_stays_at_the_sample_that_was_chosen(tmp_path):
    # a reader of an earlier sample was taken to the latest every 30 seconds
    run_of(tmp_path, [step(0), *(sample(n, f"text {n}", "a") for n in (50, 100, 150))])
    reload_twice = """
        const seen = [], choose = at => { slider.value = at; slider.dispatchEvent(new Event("input")); };
        for (const [at, iter] of [[1, 200], [3, 250]]) {
            choose(at);
            page.samples.push({ run: 0, iter, prompt: "a", text: "new" });
            document.querySelector("#samples").remove();
            samples();
            seen.push(document.querySelector("#when").textContent);
        }
        tell(seen.join("|"));
    """
    document, console = in_chromium(report_page.write(tmp_path, running=True), reload_twice)
    assert text_in(document, "seen") == "After 100 iterations|After 250 iterations" and console == []


def test_a_page_is_whole_on_a_phone_and_where_it_may_store_nothing(tmp_path):
    # JupyterLab shows a file in a frame without storage, where half of the page was missing
    long = {"dataset": "a" * 200, "sample_prompts": "b" * 200}
    steps = [step(n, lr=0.5, grad_norm=1.0, ms=9.0, tokens_per_s=9.0, mfu=0.1, peak_memory=9e9) for n in range(9)]
    run_of(tmp_path, [*steps, sample(9, "c" * 500)], settings=long)
    script = """
        const boxes = [...document.querySelectorAll("svg, details, pre, figure")].map(e => e.getBoundingClientRect());
        const inside = boxes.every(box => box.left >= 0 && box.right <= 390);
        const columns = new Set([...document.querySelectorAll("figure")].map(e => e.getBoundingClientRect().left)).size;
        const tables = document.querySelectorAll("#tables details").length;
        tell([inside, document.documentElement.scrollWidth <= 390, columns, tables].join(" "));
    """
    document, console = in_chromium(report_page.write(tmp_path), script, phone=True)
    assert text_in(document, "seen") == "true true 1 2" and console == []


def test_no_text_of_a_run_runs_in_a_browser(tmp_path):
    evil = EVIL.replace("\ud800", "")  # Chromium shows it, but --dump-dom crashes on half of a surrogate pair
    run_of(tmp_path / "<i>", [sample(1, evil, evil)], device=evil, settings={evil: evil})
    document, console = in_chromium(report_page.write(tmp_path / "<i>"))
    assert "<title>&lt;i&gt;</title>" in document and console == []
    assert text_in(document, "samples").count("document.title = 'broken'") == 2


def test_a_page_cannot_load_anything_and_its_errors_are_seen(tmp_path):
    # the other tests rely on it: a request is refused, and an error or a refusal is in the console
    run_of(tmp_path, [step(0)])
    asks = (
        "document.body.append(Object.assign(new Image(), { src: 'http://127.0.0.1:9/x.png' })); throw new Error('told')"
    )
    _, console = in_chromium(report_page.write(tmp_path), asks)
    assert any("told" in line for line in console) and any("Content Security Policy" in line for line in console)
