"""The page of a run and of several: what is on it, whatever their files hold."""

import html
import json
import re
import shutil
import time

import pytest

from fusedgpt.runs import report_page
from fusedgpt.runs.metrics import Run
from tests.conftest import rows
from tests.fusedgpt.runs.test_metrics import ODD, evaluation, run_of, step

EVIL = "</script><script>document.title = 'broken'</script><!-- &amp; \u2028 \ud800 {{title}} <b>"


def page_of(path):
    """What a page draws."""
    (content,) = re.findall(r'<script type="application/json" id="page">(.*?)</script>', path.read_text(), re.S)
    return json.loads(content)


def table(page, title):
    return {
        row[0]: row[1:] for each in page["summary"] + page["tables"] if each["title"] == title for row in each["rows"]
    }


def sample(n, text, prompt="\n"):
    return {"kind": "sample", "iter": n, "prompt": prompt, "text": text}


def some_run(folder, loss=2.0, ms=2000.0, **record):
    """A run of 40 steps, whose validation loss ends at `loss`, with samples after 20 and 40."""
    lines = [step(n, loss + 4 - n / 10, lr=0.1, ms=ms, tokens_per_s=1e6 / ms, peak_memory=2.0**30) for n in range(40)]
    lines += [evaluation(0, loss + 4), evaluation(20, loss - 0.5), evaluation(40, loss)]
    lines += [sample(20, "early"), sample(40, f"late {folder.name}")]
    record = dict(tokens_per_step=1000, model={"vocab_size": 256}, settings={"seed": 1}) | record
    return run_of(folder, lines, **record)


def compared(tmp_path, *runs):
    report_page.compare([*runs], tmp_path / "page.html")
    return page_of(tmp_path / "page.html")


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
    assert table(page, "Results")["validation loss"] == [f"{evals[-1]['val_loss']:.4f}"]
    assert "bits per byte" in table(page, "Results")
    state = page["state"]
    assert (state["now"], state["done"], state["planned"]) == ("Finished", 10, 10)
    said = {"asked for": ["sdpa"], "ran": ["sdpa"], "forward seen": ["flash"], "backward seen": ["flash"]}
    assert table(page, "Attention").items() >= said.items()
    changed = table(page, "Settings that are not the default")
    assert changed["n_layer"] == ["2", "12"] and "weight_decay" not in changed
    assert table(page, "All settings")["weight_decay"] == ["0.1"]


def test_the_figures_at_the_top_follow_from_the_rows(tmp_path):
    early, late = dict(ms=1000, tokens_per_s=60.0, mfu=0.2), dict(ms=3000, tokens_per_s=20.0, mfu=0.1)
    lines = [step(n, **(early if n < 60 else late), peak_memory=2.0**30 * (1 + n % 2)) for n in range(120)]
    run_of(tmp_path, [*lines, evaluation(0, 4.0), evaluation(10, 1.5), evaluation(20)], settings={"max_iters": 220})
    path = report_page.write(tmp_path, running=True)
    page = page_of(path)
    assert page["state"]["now"] == "Running" and report_page.RELOAD in path.read_text()  # it loads itself again
    assert table(page, "Results") == {
        "validation loss": ["2.0000"],
        "lowest validation loss": ["1.5000 at 10"],
        "tokens per second": ["40"],
        "ms a step": ["2,000"],
        "MFU": ["15.0%"],
        "peak memory of a process": ["2.00 GiB"],
        "time of the steps": ["4 min"],
    }
    # 100 steps of 3 s, as most of the last 100 took
    said = rf"iteration 120 of 220 · about 5 min of training left · written on {time.strftime('%Y-%m-%d')} at "
    assert page["state"]["said"].startswith(said)
    (memory,) = [chart["lines"][0]["y"] for chart in page["charts"] if chart["title"] == "peak memory (GiB)"]
    assert memory == [1, 2] * 60


def test_a_page_says_what_auto_timed_and_whom_it_refused(tmp_path):
    trials = {"manual": {"refused": None, "median_ms": 3.5}, "flash": {"refused": None, "median_ms": 1.25}}
    # the prompt of samples is a line end by default, which was an empty cell
    settings = {"attention": "auto", "sample_prompts": "\n"}
    trials["cudnn"] = {"refused": "on GPUs only"}
    run_of(tmp_path, [step(0)], attention="flash", attention_trials=trials, settings=settings)
    page = page_of(report_page.write(tmp_path))
    timed = {"auto: flash": ["1.25 ms"], "auto: manual": ["3.5 ms"], "auto: cudnn": ["on GPUs only"]}
    assert list(table(page, "Attention").items()) == [("asked for", ["auto"]), ("ran", ["flash"]), *timed.items()]
    assert table(page, "All settings") == {"attention": ["auto"], "sample_prompts": [r"'\n'"]}


def test_the_training_that_is_left_may_end_before(tmp_path):
    # of a run with a limit of five minutes and no other end, the page said only that 27 h of training were left
    for limit, unless in ((300.0, "; max_seconds=300 may end it before ·"), (None, " ·")):
        run_of(tmp_path, [step(0, ms=1000)], settings={"max_iters": 100_001, "max_seconds": limit})
        state = page_of(report_page.write(tmp_path, running=True))["state"]
        assert f"about 27 h 47 min of training left{unless}" in state["said"]
    assert "left" not in page_of(report_page.write(tmp_path))["state"]["said"]


def test_text_of_a_run_cannot_become_markup(tmp_path):
    folder = tmp_path / 'a<b>"&amp;{{page}}'
    run_of(folder, [sample(1, EVIL, EVIL), evaluation(1)], device=EVIL, settings={"dataset": EVIL})
    path = report_page.write(folder)
    page, text = page_of(path), path.read_text()
    assert page["samples"] == [{"run": 0, **sample(1, EVIL, EVIL)}] and table(page, "Run")["device"] == [EVIL]
    assert text.count("<script") == text.count("</script") == 2
    assert f"<title>{html.escape(folder.name)}</title>" in text and text.count("{{page}}") == 3  # the name, thrice


SECTIONS = ("settings", "model", "environment", "receipt", "attention_trials", "mfu", "time", "device", "parameters")
RECORDS = ["", "\x00\xff", '{"settings": ' * 300 + "1" + "}" * 300]
RECORDS += [json.dumps(dict.fromkeys(SECTIONS, bad)) for bad in (None, 5, [[]], {"x": {}}, {"max_iters": "x"})]
RECORDS += [json.dumps({"attention_trials": {"flash": {"median_ms": "x", "refused": 3}}, "parameters": -(10**300)})]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record[:30])
def test_a_damaged_record_costs_the_page_only_what_it_said(tmp_path, record):
    b = some_run(tmp_path / "b", 1.5)
    some_run(tmp_path / "a")
    (tmp_path / "a" / "run.json").write_text(record)
    page = page_of(report_page.write(tmp_path / "a", running=True))
    assert page["charts"][0]["lines"][1]["y"] == [6.0, 1.5, 2.0]
    assert compared(tmp_path, Run(tmp_path / "a"), b)["headline"].startswith("b ends lowest")


def odd(value):
    """Rows that have an odd value in every field."""
    # a list in place of each number ended the run that wrote the page, with a TypeError
    names = ("lr", "grad_norm", "ms", "tokens_per_s", "mfu", "peak_memory", "train_bits_per_byte", "val_bits_per_byte")
    found, more = dict.fromkeys(names, value), {"kind": "train", "iter": value, "loss": value}
    return [evaluation(0, **found), step(0, **found), more, evaluation(3, **found)]


METRICS = [
    [],
    ["{", "\x00", '{"kind": "train"'],
    [step(0, loss=None, ms=None), evaluation(0, None)],
    [step(0, loss=-1.7e308, tokens_per_s=1.7e308), step(1, loss=1.7e308, ms=1.7e308), step(2, loss=1.0)],
    [step(2**52), evaluation(0), evaluation(0), sample(5, "")],
    ['{"kind": "train", "iter": 1, "loss": 1e999, "lr": 1e400, "ms": NaN}'],
    *map(odd, ODD),
]


@pytest.mark.parametrize("lines", METRICS, ids=lambda lines: str(lines)[:60])
def test_damaged_metrics_cost_the_page_only_what_they_said(tmp_path, lines):
    run_of(tmp_path, lines, settings={"max_iters": 10})
    page = page_of(report_page.write(tmp_path, running=True))
    assert page["charts"][0]["title"].startswith("loss") and page["state"]["planned"] == 10


def test_a_long_run_makes_a_small_page_with_every_prompt(tmp_path):
    lines = [step(n, loss=3.0 + n % 7, lr=n * 1e-7, ms=1.5, grad_norm=0.1 * (n % 11)) for n in range(10_000)]
    lines[5000]["loss"], lines[6000]["loss"] = 50.0, None
    # with two prompts and 200 samples, one prompt had 99 samples on the page and the other a single one
    lines += [sample(n, f"text {n}", prompt) for n in range(1000) for prompt in ("a", "b", "c")]
    run_of(tmp_path, lines)
    path = report_page.write(tmp_path)
    page = page_of(path)
    training = page["charts"][0]["lines"][0]
    shown = [(each["iter"], each["prompt"]) for each in page["samples"]]
    assert path.stat().st_size < 250_000 and len(training["x"]["iterations"]) < 1000
    assert {5000: 50.0, 6000: None}.items() <= dict(zip(training["x"]["iterations"], training["y"])).items()
    its = list(dict.fromkeys(n for n, _ in shown))
    assert shown == [(n, prompt) for n in its for prompt in ("a", "b", "c")]
    assert 90 <= len(shown) <= 110 and (its[0], its[-1]) == (0, 999)


def test_a_page_puts_runs_beside_each_other(tmp_path):
    settings = {"seed": 1, "attention": "manual", "out_dir": "a", "weight_decay": None}
    a = some_run(tmp_path / "a", 2.0, settings=settings, attention="manual", receipt={"forward": ["unfused"]})
    there = {"attention": "flash", "out_dir": "b"}
    b = some_run(tmp_path / "b", 1.9, 500.0, settings=settings | there, attention="flash", receipt={"forward": "flash"})
    page = compared(tmp_path, a, b)
    assert page["runs"] == ["a", "b"] and page["headline"] == "b ends lowest, at 1.9000 nats per token."
    results = table(page, "Results")
    assert results["validation loss"] == ["2.0000", "1.9000"] and results["time of the steps"] == ["80 s", "20 s"]
    assert table(page, "Settings that differ") == {"attention": ["manual", "flash"]}  # out_dir differs in any two runs
    receipts = table(page, "Attention")
    assert (receipts["ran"], receipts["forward seen"]) == (["manual", "flash"], ["unfused", "flash"])
    assert [(each["run"], each["text"]) for each in page["samples"] if each["iter"] == 40] == [
        (0, "late a"),
        (1, "late b"),
    ]
    lines = page["charts"][0]["lines"]
    assert [(line["run"], line["name"][0]) for line in lines] == [(0, "t"), (0, "v"), (1, "t"), (1, "v")]
    assert lines[3]["x"] == {"iterations": [0, 20, 40], "time": [0, 10, 20], "tokens": [0, 20_000, 40_000]}
    assert lines[3]["y"] == [5.9, 1.4, 1.9] and page["axes"]["time"] == "seconds"
    slow = compared(tmp_path, a, some_run(tmp_path / "slow", ms=9000.0, tokens_per_step=None))
    assert slow["charts"][0]["lines"][3]["x"]["time"] == [0, 3, 6] and slow["axes"]["time"] == "minutes"
    assert "tokens" not in slow["axes"]  # one of them does not know


def test_equal_ends_are_not_ranked(tmp_path):
    # of two kernels with the same losses, the page named one the best by a rounding error
    a, b = some_run(tmp_path / "a", 2.00001), some_run(tmp_path / "b", 2.0)
    never = run_of(tmp_path / "never", [step(0)])  # has no end
    short = run_of(tmp_path / "short", [step(0), evaluation(0, 4.0), evaluation(10, 1.5)])
    for runs, said in (
        ((a, b), "All runs end at 2.0000 nats per token."),
        ((a, b, some_run(tmp_path / "c", 2.5)), "a and b end lowest, at 2.0000 nats per token."),
        ((a, b, never), "a and b end lowest, at 2.0000 nats per token."),
        ((a, never), "Fewer than two of these runs have been evaluated."),
        (
            (a, short),
            "short ends lowest, at 1.5000 nats per token. But they were last evaluated after 40 and 10 iterations.",
        ),
    ):
        assert report_page.headline([*runs], "loss") == said


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (dict(dataset="book"), dict(dataset="code"), "with different dataset, so these losses may not compare"),
        (dict(mask="document", eval_iters=0), dict(mask="causal", eval_iters=1), "different mask and eval_iters, so"),
        (dict(mask="causal"), dict(seed=2), None),
    ],
)
def test_what_makes_losses_differ_is_said(tmp_path, one, other, said):
    runs = [some_run(tmp_path / n, settings=dict(batch_size=12) | s) for n, s in (("a", one), ("b", other))]
    found = report_page.headline(runs, "loss")
    assert said in found if said else "But" not in found
