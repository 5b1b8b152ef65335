"""The page of a run: what is on it, whatever its files hold, and how it behaves in a browser."""

import html
import json
import os
import re
import shutil
import subprocess
import time

import pytest

from fusedgpt.runs import report_page
from tests.conftest import rows
from tests.fusedgpt.runs.test_metrics import ODD, evaluation, run_of, step

EVIL = "</script><script>document.title = 'broken'</script><!-- &amp; \u2028 \ud800 {{title}} <b>"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_browser = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")


def page_of(path):
    """What the page of a run draws."""
    (content,) = re.findall(r'<script type="application/json" id="page">(.*?)</script>', path.read_text(), re.S)
    return json.loads(content)


def table(page, title):
    return {row[0]: row[1:] for each in page["tables"] if each["title"] == title for row in each["rows"]}


def validation_of(page):
    """{iteration: validation loss} in the first chart of a page."""
    (line,) = [line for line in page["charts"][0]["lines"] if line["name"] == "validation"]
    return dict(zip(line["x"]["iterations"], line["y"]))


def sample(n, text, prompt="\n"):
    return {"kind": "sample", "iter": n, "prompt": prompt, "text": text}


def test_a_page_shows_what_a_run_left(small_run, tmp_path):
    run = shutil.copytree(small_run, tmp_path / "run")
    path = report_page.write(run)
    page = page_of(path)
    assert report_page.RELOAD not in path.read_text()
    training, validation = page["charts"][0]["lines"]
    train, evals = rows(run), rows(run, "eval")
    assert training["x"]["iterations"] == [m["iter"] for m in train]
    assert validation["x"]["iterations"] == [m["iter"] for m in evals]
    assert training["y"] == pytest.approx([m["loss"] for m in train], rel=1e-5)
    assert validation["y"] == pytest.approx([m["val_loss"] for m in evals], rel=1e-5)
    titles = [chart["title"] for chart in page["charts"]]
    # bits per byte used to be drawn too, which is the curve of the loss in another unit
    assert titles[1:] == ["learning rate", "gradient norm", "tokens per second", "peak memory (GiB)"]
    assert "bits per byte" in [tile[0] for tile in page["tiles"]]
    assert (page["done"], page["planned"], page["running"]) == (10, 10, False)
    assert dict(page["attention"]["receipt"]).items() >= {
        ("asked for", "sdpa"),
        ("ran", "sdpa"),
        ("forward seen", "flash"),
        ("backward seen", "flash"),
    }
    assert page["attention"]["timed"] == []  # sdpa was named
    changed = table(page, "Settings that are not the default")
    assert changed["n_layer"] == ["2", "12"] and "weight_decay" not in changed
    assert table(page, "All settings")["weight_decay"] == ["0.1"]
    assert ["validation loss", f"{evals[-1]['val_loss']:.4f}"] in [tile[:2] for tile in page["tiles"]]


def test_the_figures_at_the_top_follow_from_the_rows(tmp_path):
    early, late = dict(ms=1000, tokens_per_s=60.0, mfu=0.2), dict(ms=3000, tokens_per_s=20.0, mfu=0.1)
    lines = [step(n, **(early if n < 60 else late), peak_memory=2.0**30 * (1 + n % 2)) for n in range(120)]
    run_of(tmp_path, [*lines, evaluation(0, 4.0), evaluation(10, 1.5), evaluation(20)], settings={"max_iters": 220})
    path = report_page.write(tmp_path, running=True)
    page = page_of(path)
    assert page["running"] and report_page.RELOAD in path.read_text()  # it loads itself again
    assert page["tiles"] == [
        ["validation loss", "2.0000", "lowest 1.5000 at 10"],
        ["tokens per second", "40", "median; 2,000 ms a step"],
        ["MFU", "15.0 %", ""],
        ["peak memory", "2.00 GiB", "of a process"],
        ["training time", "4 min 0 s", "of the steps alone"],
    ]
    assert (page["done"], page["planned"]) == (120, 220)
    assert page["left"] == "about 5 min 0 s of training left"  # 100 steps of 3 s, as most of the last 100 took
    (memory,) = [chart["lines"][0]["y"] for chart in page["charts"] if chart["title"] == "peak memory (GiB)"]
    assert memory == [1, 2] * 60


def test_a_page_says_what_auto_timed_and_whom_it_refused(tmp_path):
    trials = {"manual": {"refused": None, "median_ms": 3.5}, "flash": {"refused": None, "median_ms": 1.25}}
    trials |= {name: {"refused": "on GPUs only"} for name in ("cudnn", "flash3")} | {"flex": {"refused": "no backward"}}
    run_of(tmp_path, [step(0)], attention="flash", attention_trials=trials, settings={"attention": "auto"})
    attention = page_of(report_page.write(tmp_path))["attention"]
    assert attention["timed"] == [["flash", 1.25], ["manual", 3.5]]
    assert attention["refused"] == ["cudnn, flash3: on GPUs only", "flex: no backward"]
    assert attention["receipt"] == [["asked for", "auto"], ["ran", "flash"]]


def test_a_setting_of_blanks_is_seen(tmp_path):
    # the prompt of samples is a line end by default, which was an empty cell
    run_of(tmp_path, [step(0)], settings={"sample_prompts": "\n", "dataset": "mine"})
    settings = table(page_of(report_page.write(tmp_path)), "All settings")
    assert settings == {"sample_prompts": [r"'\n'"], "dataset": ["mine"]}


@pytest.mark.parametrize(("limit", "unless"), [(300.0, "; max_seconds=300 may end it before"), (None, "")])
def test_the_training_that_is_left_may_end_before(tmp_path, limit, unless):
    # of a run with a limit of five minutes and no other end, the page said only that 27 h of training were left
    run_of(tmp_path, [step(0, ms=1000)], settings={"max_iters": 100_001, "max_seconds": limit})
    page = page_of(report_page.write(tmp_path, running=True))
    assert page["left"] == f"about 1 d 3 h of training left{unless}"
    assert page_of(report_page.write(tmp_path))["left"] == ""


def cycle(seconds):
    """Training of so many seconds between two evaluations."""
    return [evaluation(0), *(step(n, ms=1000) for n in range(seconds)), evaluation(seconds)]


@pytest.mark.parametrize(
    ("lines", "run_began", "page_before", "patience"),
    [
        # 15 s of training and 200 s of evaluation: the page gave the run up after 120 s, in each cycle
        (cycle(15), 9999, 215, 5 * 215),
        (cycle(15), 9999, 0, 120),  # at least
        (cycle(60), 9999, 5, 300),  # the start of a resumed run, whose first evaluation comes at once
        (cycle(60), 0, 99999, 300),  # the time that a resumed run stood still does not count
        ([evaluation(0), step(0)], 9999, 5, 86400),  # killed before its second evaluation, it was "running" for ever
    ],
)
def test_a_run_is_given_up_after_five_of_its_longest_silences(tmp_path, lines, run_began, page_before, patience):
    run_of(tmp_path, lines)
    (tmp_path / "report.html").write_text("the page before")
    for name, ago in (("run.json", run_began), ("report.html", page_before)):
        os.utime(tmp_path / name, (time.time() - ago,) * 2)
    assert patience <= page_of(report_page.write(tmp_path, running=True))["patience"] < patience + 50


def test_a_child_writes_no_page_once_its_run_is_killed(tmp_path):
    # it wrote over the page of the resumed run, or into that page's unfinished file
    run_of(tmp_path, [step(0)])
    (tmp_path / ".report.html.tmp").write_text("half a page of the resumed run")
    report_page.write(tmp_path, True, os.getpid())  # a parent that is not that of this process
    assert not (tmp_path / "report.html").exists()
    report_page.write(tmp_path, True, os.getppid())
    assert page_of(tmp_path / "report.html")["running"]
    assert (tmp_path / ".report.html.tmp").read_text() == "half a page of the resumed run"


@pytest.mark.parametrize("value", ODD, ids=str)
def test_odd_values_in_every_field_cost_only_what_they_said(value, tmp_path):
    # a list in place of each number ended the run that wrote the page, with a TypeError
    names = ("lr", "grad_norm", "ms", "tokens_per_s", "mfu", "peak_memory", "train_bits_per_byte", "val_bits_per_byte")
    odd, more = dict.fromkeys(names, value), {"kind": "train", "iter": value, "loss": value}
    run_of(tmp_path, [evaluation(0, **odd), *(step(n, **odd) for n in range(3)), more, evaluation(3, **odd)])
    page = page_of(report_page.write(tmp_path, running=True))
    assert validation_of(page) == {0: 2.0, 3: 2.0}


def test_a_child_does_not_bring_a_folder_back(tmp_path, monkeypatch):
    # reading a long run takes seconds, in which its folder can be moved
    class Moved(report_page.Run):
        def __init__(self, out_dir):
            super().__init__(out_dir)
            out_dir.rename(tmp_path / "moved")

    run_of(tmp_path / "out", [step(0)])
    monkeypatch.setattr(report_page, "Run", Moved)
    report_page.write(tmp_path / "out", True, os.getppid())
    assert os.listdir(tmp_path) == ["moved"]


def test_text_of_a_run_cannot_become_markup(tmp_path):
    folder = tmp_path / 'a<b>"&amp;{{page}}'
    run_of(folder, [sample(1, EVIL, EVIL), evaluation(1)], device=EVIL, settings={"dataset": EVIL})
    path = report_page.write(folder)
    page, text = page_of(path), path.read_text()
    assert page["samples"] == [sample(1, EVIL, EVIL)] and table(page, "Machine")["device"] == [EVIL]
    assert text.count("<script") == text.count("</script") == 2
    assert f"<title>{html.escape(folder.name)}</title>" in text and text.count("{{page}}") == 3  # the name, thrice


SECTIONS = ("settings", "model", "environment", "receipt", "attention_trials", "mfu", "time", "device", "parameters")
RECORDS = ["", "[]", "\x00\xff", '{"settings": ' * 300 + "1" + "}" * 300]
RECORDS += [json.dumps(dict.fromkeys(SECTIONS, bad)) for bad in (None, 5, "text", [[]], {"x": {}}, {"max_iters": "x"})]
RECORDS += [json.dumps({"attention_trials": {"flash": {"p10_ms": "x", "refused": 3}}, "parameters": -(10**300)})]
METRICS = [
    [],
    ["{", "\x00", '{"kind": "train"'],
    [step(0, loss=None, ms=None), evaluation(0, None)],
    [step(0, ms=0.0), step(1, ms=-1.0), evaluation(2, val_bits_per_byte="x")],
    [step(0, loss=-1.7e308, tokens_per_s=1.7e308), step(1, loss=1.7e308, ms=1.7e308), step(2, loss=1.0)],
    [step(2**52), evaluation(0), evaluation(0), sample(5, "")],
    ['{"kind": "train", "iter": 1, "loss": 1e999, "lr": 1e400, "ms": NaN}'],
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record[:30])
def test_a_damaged_record_costs_the_page_only_what_it_said(tmp_path, record):
    run_of(tmp_path, [step(0), evaluation(1)])
    (tmp_path / "run.json").write_text(record)
    assert validation_of(page_of(report_page.write(tmp_path, running=True))) == {1: 2.0}


@pytest.mark.parametrize("lines", METRICS, ids=lambda lines: str(lines)[:30])
def test_damaged_metrics_cost_the_page_only_what_they_said(tmp_path, lines):
    run_of(tmp_path, lines, settings={"max_iters": 10})
    page = page_of(report_page.write(tmp_path, running=True))
    assert page["charts"][0]["title"].startswith("loss") and page["planned"] == 10


def test_a_long_run_makes_a_small_page(tmp_path):
    lines = [step(n, loss=3.0 + n % 7, lr=n * 1e-7, ms=1.5, grad_norm=0.1 * (n % 11)) for n in range(10_000)]
    lines[5000]["loss"], lines[6000]["loss"] = 50.0, None
    run_of(tmp_path, [*lines, *(sample(n, f"text {n}") for n in range(0, 10_000, 10))])
    path = report_page.write(tmp_path)
    page = page_of(path)
    training, shown = page["charts"][0]["lines"][0], [each["iter"] for each in page["samples"]]
    assert path.stat().st_size < 250_000 and len(training["x"]["iterations"]) < 1500
    assert {5000: 50.0, 6000: None}.items() <= dict(zip(training["x"]["iterations"], training["y"])).items()
    assert len(shown) == 100 and (shown[0], shown[-1]) == (0, 9990)


def test_every_prompt_is_on_the_page_at_each_iteration(tmp_path):
    # with two prompts and 200 samples, one prompt had 99 samples on the page and the other a single one
    lines = [step(n) for n in range(10)]
    lines += [sample(n, f"text {n}", prompt) for n in range(1000) for prompt in ("a", "b", "c")]
    run_of(tmp_path, lines)
    shown = [(each["iter"], each["prompt"]) for each in page_of(report_page.write(tmp_path))["samples"]]
    its = list(dict.fromkeys(n for n, _ in shown))
    assert shown == [(n, prompt) for n in its for prompt in ("a", "b", "c")]
    assert 90 <= len(shown) <= 110 and (its[0], its[-1]) == (0, 999)


def in_chromium(path, script=""):
    """The document after a copy of the page at `path` has run, and then `script`; and what the console said."""
    copy = path.with_name("copy.html")
    copy.write_text(path.read_text().replace("</body>", f"<script>{script}</script></body>"))
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=3000"]
    profile = f"--user-data-dir={path.parent / 'profile'}"
    command = [CHROMIUM, *flags, profile, "--window-size=1200,900", "--dump-dom", copy.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def text_in(document, element_id):
    """The text of an element, without the tags in it."""
    (found,) = re.findall(rf'<(\w+)[^>]* id="{element_id}"[^>]*>(.*?)</\1>', document, re.S)
    return html.unescape(re.sub("<[^>]*>", "", found[1]))


def on_a_phone(path, within, *more):
    """What the page at `path` shows in a frame of 390 pixels, because Chromium's windows are not narrower than 500.

    Whether all that the selector `within` finds lies inside it, whether nothing is wider, and the values of `more`
    expressions, which may use boxes(selector) and columns(selector). The console must stay empty.
    """
    tells = f"""<script>
        const boxes = what => [...document.querySelectorAll(what)].map(each => each.getBoundingClientRect());
        const columns = what => new Set(boxes(what).map(box => box.left)).size;
        const inside = boxes("{within}").every(box => box.left >= 0 && box.right <= 390);
        const narrow = document.documentElement.scrollWidth <= 390;
        parent.postMessage([inside, narrow, {", ".join(more)}].join(" "), "*");
    </script></body>"""
    document, console = in_frame(path, tells, 'width="390" height="844" style="border: 0"')
    assert console == []
    return text_in(document, "seen")


def in_frame(path, tells, attributes):
    """The document around a frame with these attributes, after the page in it has run; and what the console said.

    tells: what stands at the end of the page in place of </body>. What it posts to its parent is in the element #seen.
    """
    inside = html.escape(path.read_text().replace("</body>", tells))
    hears = """
        const seen = Object.assign(document.body.appendChild(document.createElement("p")), { id: "seen" });
        onmessage = event => seen.textContent = event.data;
    """
    frame = path.with_name("frame.html")
    frame.write_text(f'<body><script>{hears}</script><iframe {attributes} srcdoc="{inside}"></iframe></body>')
    return in_chromium(frame)


@in_browser
def test_a_page_that_may_store_nothing_is_whole(tmp_path):
    # JupyterLab shows a file in a frame without storage, where half of the page was missing
    run_of(tmp_path, [step(0), evaluation(0), sample(1, "first"), sample(2, "last")], settings={"dataset": "mine"})
    tells = "<script>parent.postMessage(document.body.innerText, '*')</script></body>"
    document, console = in_frame(report_page.write(tmp_path), tells, 'sandbox="allow-scripts"')
    assert "last" in text_in(document, "seen") and "mine" in text_in(document, "seen")
    assert not console


@in_browser
def test_the_pointer_shows_the_values_at_an_iteration_in_all_curves(tmp_path):
    run_of(
        tmp_path,
        [step(n, loss=5 - n / 100, lr=0.5 + n / 1000, grad_norm=None if n == 100 else 1.0) for n in range(200)]
        + [evaluation(n, 5.5 - n / 100) for n in range(0, 201, 50)]
        + [sample(50, "early"), sample(200, "late")],
    )
    over_the_third_evaluation = """
        const svg = document.querySelector("svg"), dot = svg.querySelectorAll(".dot")[2];
        const x = svg.getBoundingClientRect().left + Number(dot.getAttribute("cx"));
        svg.dispatchEvent(new PointerEvent("pointermove", { clientX: x, bubbles: true }));
        const readouts = [...document.querySelectorAll(".readout, .at")].map(each => each.textContent);
        document.body.append(make("p", { id: "seen" }, readouts.join("|")));
        svg.dispatchEvent(new PointerEvent("pointerleave"));
        slider.value = 0;
        slider.dispatchEvent(new Event("input"));
        document.body.dataset.requests = performance.getEntriesByType("resource").length;
        document.body.dataset.wide = document.documentElement.scrollWidth > innerWidth;
    """
    document, console = in_chromium(report_page.write(tmp_path, running=True), over_the_third_evaluation)
    seen = text_in(document, "seen").split("|")
    assert seen[::2] == ["training 4.000validation 4.500", "0.6000", "not finite"]  # loss, learning rate, gradient norm
    assert seen[1::2] == ["iteration 100"] * 3
    assert "training <b>3.010</b>" in document and "validation <b>3.500</b>" in document  # the last, once it has left
    assert text_in(document, "text") == "\nearly" and text_in(document, "when") == "After 50 iterations"
    assert 'data-requests="0"' in document and 'data-wide="false"' in document
    assert console == []


@in_browser
def test_a_page_is_readable_on_a_phone(tmp_path):
    long = {"dataset": "a" * 200, "sample_prompts": "b" * 200}
    steps = [step(n, lr=0.5, grad_norm=1.0, ms=9.0, tokens_per_s=9.0, mfu=0.1, peak_memory=9e9) for n in range(9)]
    run_of(tmp_path, [*steps, sample(9, "c" * 500)], settings=long)
    path = report_page.write(tmp_path)
    assert '<meta name="viewport" content="width=device-width' in path.read_text()
    size = "parseFloat(getComputedStyle(document.body).fontSize) >= 13"
    seen = on_a_phone(path, "svg, .tile, pre, figure", size, 'columns("figure")', 'columns(".tile")')
    assert seen == "true true true 1 2"


@in_browser
def test_a_page_that_loads_itself_again_stays_at_the_sample_that_was_chosen(tmp_path):
    # a reader of an earlier sample was taken to the latest every 30 seconds
    run_of(tmp_path, [step(0), *(sample(n, f"{p} {n}", p) for n in (50, 100, 150) for p in "ab")])
    reload_three_times = """
        const seen = [], load = () => { samples(); seen.push(byId("text").textContent); };
        const choose = at => { slider.value = at; slider.dispatchEvent(new Event("input")); };
        choose(2);
        page.samples.push({ iter: 200, prompt: "a", text: "new" });
        load();
        page.samples.splice(2, 1);
        load();
        choose(page.samples.length - 1);
        page.samples.push({ iter: 250, prompt: "a", text: "newer" });
        load();
        document.body.append(make("p", { id: "seen" }, seen.join("|")));
    """
    document, console = in_chromium(report_page.write(tmp_path, running=True), reload_three_times)
    assert text_in(document, "seen") == "aa 100|bb 100|anewer" and console == []


@in_browser
def test_no_text_of_a_run_runs_in_a_browser(tmp_path):
    evil = EVIL.replace("\ud800", "")  # Chromium shows it, but --dump-dom crashes on half of a surrogate pair
    run_of(tmp_path / "<i>", [sample(1, evil, evil)], device=evil, settings={evil: evil})
    document, console = in_chromium(report_page.write(tmp_path / "<i>"))
    assert "<title>&lt;i&gt;</title>" in document and console == []
    assert text_in(document, "text").count("document.title = 'broken'") == 2


@in_browser
def test_a_page_cannot_load_anything_and_its_errors_are_seen(tmp_path):
    # the other tests rely on it: a request is refused, and an error or a refusal is in the console
    run_of(tmp_path, [step(0)])
    asks = (
        "document.body.append(Object.assign(new Image(), { src: 'http://127.0.0.1:9/x.png' })); throw new Error('told')"
    )
    _, console = in_chromium(report_page.write(tmp_path), asks)
    assert any("told" in line for line in console) and any("Content Security Policy" in line for line in console)
