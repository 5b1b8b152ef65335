"""The page of a run and of several: what is on it."""

import html
import re
import time
from xml.etree import ElementTree

import pytest

from fusedgpt.runs import report_page
from tests.conftest import rows
from tests.fusedgpt.runs.test_metrics import evaluation, run_of, step

EVIL = "</pre></svg><script>document.title = 'broken'</script><!-- &amp; \u2028 \ud800 $title <b onclick='x'>"


def words(text):
    """What a page shows, without its tags."""
    return html.unescape(re.sub("<[^>]*>", " ", text.partition("<body>")[2]))


def cells(text, name):
    """The cells of the table's row that begins with `name`."""
    (row,) = re.findall(rf"<tr><th>{re.escape(name)}</th>(.*?)</tr>", text.replace("<wbr>", ""))
    return [html.unescape(cell) for cell in re.findall("<td>(.*?)</td>", row)]


def charts(text):
    """[(caption, [the points of each line])] of a page, as its SVGs have them."""
    found = re.findall("<figure><figcaption>(.*?)</figcaption>(<svg.*?</svg>)</figure>", text, re.S)
    lines = [[path.get("d") for path in ElementTree.fromstring(svg).iter("path")] for _, svg in found]
    points = [
        [[[*map(float, at.split())] for at in re.findall(r"[ML]([\d.]+ [\d.]+)", d)] for d in each] for each in lines
    ]
    return [(" ".join(words(f"<body>{caption}").split()), each) for (caption, _), each in zip(found, points)]


def sample(n, text, prompt="\n"):
    return {"kind": "sample", "iter": n, "prompt": prompt, "text": text}


def some_run(folder, loss=2.0, ms=2000.0, **record):
    """A run of 40 steps, whose validation loss ends at `loss`, with samples after 20 and 40."""
    lines = [step(n, loss + 4 - n / 10, lr=0.1, ms=ms, tokens_per_s=1e6 / ms, peak_memory=2.0**30) for n in range(40)]
    lines += [evaluation(0, loss + 4), evaluation(20, loss - 0.5), evaluation(40, loss)]
    lines += [sample(20, "early"), sample(40, f"late {folder.name}")]
    record = dict(tokens_per_step=1000, model={"vocab_size": 256}, settings={"seed": 1}) | record
    return run_of(folder, lines, **record)


def test_a_page_shows_what_a_run_left(done):
    text = report_page.write(done).read_text()
    assert report_page.RELOAD not in text and "Finished · iteration 10 of 10 · written on" in " ".join(
        words(text).split()
    )
    (loss, (training, validation)), *others = charts(text)
    assert loss.startswith("loss (nats per token) over iterations") and len(training) == 10
    assert [x for x, _ in validation] == [training[0][0], training[5][0], report_page.RIGHT]
    (x, y), *_ = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', text)
    assert [float(x), float(y)] == max(validation, key=lambda at: at[1])  # a dot at the lowest loss
    # bits per byte used to be drawn too, which is the curve of the loss in another unit
    wanted = ["learning rate", "gradient norm", "tokens per second", "peak memory (GiB)"]
    assert [caption.partition(" over")[0] for caption, _ in others] == wanted
    last = f"{rows(done, 'eval')[-1]['val_loss']:.4f}"
    assert cells(text, "validation loss") == [last] and cells(text, "bits per byte")
    assert (cells(text, "ran"), cells(text, "backward seen"), cells(text, "n_layer")) == (["sdpa"], ["flash"], ["2"])
    assert "weight_decay" not in text and "layers × channels: 2 × 32" in text


def test_the_figures_at_the_top_follow_from_the_rows(tmp_path):
    early, late = dict(ms=1000, tokens_per_s=60.0, mfu=0.2), dict(ms=3000, tokens_per_s=20.0, mfu=0.1)
    lines = [step(n, **(early if n < 60 else late), peak_memory=2.0**30 * (1 + n % 2)) for n in range(120)]
    run_of(tmp_path, [*lines, evaluation(0, 4.0), evaluation(10, 1.5), evaluation(20)], settings={"max_iters": 220})
    text = report_page.write(tmp_path, running=True).read_text()
    for name, value in {
        "validation loss": "2.0000",
        "lowest validation loss": "1.5000 at 10",
        "tokens per second": "40",
        "ms a step": "2,000",
        "MFU": "15.0%",
        "peak memory of a process": "2.00 GiB",
        "time of the steps": "4 min",
    }.items():
        assert cells(text, name) == [value]
    said = f"iteration 120 of 220 · written on {time.strftime('%Y-%m-%d')} at "
    assert f"<b>Running</b> · {said}" in text and report_page.RELOAD in text


def test_a_page_says_what_auto_timed_and_whom_it_refused(tmp_path):
    trials = {"manual": {"refused": None, "median_ms": 3.5}, "flash": {"refused": None, "median_ms": 1.25}}
    # the prompt of samples is a line end by default, which was an empty cell
    settings = {"attention": "auto", "sample_prompts": "\n\n"}
    trials["cudnn"] = {"refused": "on GPUs only"}
    run_of(tmp_path, [step(0)], attention="flash", attention_trials=trials, settings=settings)
    text = report_page.write(tmp_path).read_text()
    named = re.findall(r"<th>(auto: \w+)</th><td>(.*?)</td>", text)
    assert named == [("auto: flash", "1.25 ms"), ("auto: manual", "3.5 ms"), ("auto: cudnn", "on GPUs only")]
    assert (cells(text, "asked for"), cells(text, "sample_prompts")) == (["auto"], [r"'\n\n'"])


def test_a_phone_breaks_names_between_their_words(tmp_path):
    # it showed always_save_checkpoin t; and the last tokens per second were 6.412e+04
    settings = {"gradient_accumulation_steps": 8, "dataset": "data/my_text"}
    run_of(tmp_path, [step(0, tokens_per_s=64123.0)], settings=settings)
    text = report_page.write(tmp_path).read_text()
    assert "<th>gradient_<wbr>accumulation_<wbr>steps</th><td>8</td>" in text and "data/<wbr>my_<wbr>text" in text
    assert "tokens per second over iterations 64,120" in [caption for caption, _ in charts(text)]


def test_text_of_a_run_cannot_become_markup(tmp_path):
    folder = tmp_path / 'a<b>"&amp;$body'
    added = step(1, **{EVIL: 1.0})
    run_of(folder, [sample(1, EVIL, EVIL), evaluation(1), added], device=EVIL, attention=EVIL, settings={EVIL: EVIL})
    text = report_page.write(folder).read_text()
    assert "<script" not in text and "<b onclick" not in text
    assert f"<title>{html.escape(folder.name)}</title>" in text
    assert words(text).count("document.title = 'broken'") == 7


@pytest.mark.parametrize(
    "lines",
    [
        [],
        ["{", '{"kind": "train"'],
        [step(0, loss=None, ms=None), evaluation(0, None)],
        [step(0, loss=-3e38, tokens_per_s=3e38), step(1, loss=3e38, ms=3e38), step(2, loss=1.0)],
        [evaluation(0), evaluation(0), sample(5, "")],
    ],
    ids=str,
)
@pytest.mark.parametrize("record", ["", "{", "{}", '{"settings": null, "receipt": null, "mfu": null}'])
def test_a_page_is_written_whatever_is_missing(tmp_path, lines, record):
    run_of(tmp_path, lines)
    (tmp_path / "run.json").write_text(record)
    text = report_page.write(tmp_path, running=True).read_text()
    assert "Running" in text and "nan " not in " ".join(d for _, lines in charts(text) for d in map(str, lines))


def test_a_long_run_makes_a_small_page(tmp_path):
    lines = [step(n, loss=3.0 + n % 7, lr=n * 1e-7, ms=1.5, grad_norm=0.1 * (n % 11)) for n in range(10_000)]
    lines[5000]["loss"], lines[6000]["loss"] = 50.0, None
    lines += [sample(n, f"text {n}", prompt) for n in range(1000) for prompt in ("a", "b", "c")]
    run_of(tmp_path, lines)
    path = report_page.write(tmp_path)
    text = path.read_text()
    (caption, (training, _)), *_ = charts(text)
    assert path.stat().st_size < 250_000 and 300 < len(training) < 1000
    assert "▲ up to 50 above" in caption and min(y for _, y in training) >= 0
    shown = [int(n) for n in re.findall(r"<b>b</b>text (\d+)", text)]  # each with every prompt
    assert 40 <= len(shown) <= 50 and shown == sorted(shown, reverse=True) and shown[0] == 999
    assert text.count("<details open>") == 1


def test_a_page_puts_runs_beside_each_other(tmp_path):
    settings = {"seed": 1, "attention": "manual", "out_dir": "a", "weight_decay": None}
    a = some_run(tmp_path / "a", 2.0, settings=settings, attention="manual", receipt={"forward": ["unfused"]})
    there = {"attention": "flash", "out_dir": "b"}
    b = some_run(tmp_path / "b", 1.9, 500.0, settings=settings | there, attention="flash", receipt={"forward": "flash"})
    report_page.compare([a, b], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "b ends lowest, at 1.9000 nats per token." in text
    assert cells(text, "validation loss") == ["2.0000", "1.9000"]
    assert cells(text, "time of the steps") == ["80 s", "20 s"]
    assert cells(text, "attention") == ["manual", "flash"]
    assert "out_dir" not in text and "seed" not in text  # the one differs in any two runs, the other in none
    assert cells(text, "forward seen") == ["unfused", "flash"]
    assert text.index("late a") < text.index("late b") < text.index("early")
    (over_steps, steps), (over_time, times), *_ = charts(text)
    assert "over iterations" in over_steps and "over seconds" in over_time and "2 1.9" in over_steps
    right = report_page.RIGHT
    assert [line[-1][0] for line in (steps[1], steps[3], times[1])] == [right] * 3
    assert times[3][-1][0] == pytest.approx(report_page.LEFT + (right - report_page.LEFT) / 4, abs=0.1)


def test_equal_ends_are_not_ranked(tmp_path):
    # of two kernels with the same losses, the page named one the best by a rounding error
    a, b = some_run(tmp_path / "a", 2.00001), some_run(tmp_path / "b", 2.0)
    never = run_of(tmp_path / "never", [step(0)])  # has no end
    short = run_of(tmp_path / "short", [step(0), evaluation(0, 4.0), evaluation(10, 1.5)])
    for runs, said in (
        ((a, b), "a and b end lowest, at 2.0000 nats per token."),
        ((a, b, some_run(tmp_path / "c", 2.5)), "a and b end lowest, at 2.0000 nats per token."),
        ((a, b, never), "a and b end lowest, at 2.0000 nats per token."),
        ((a, never), "Fewer than two of these runs end with a loss that is finite."),
        (
            (a, short),
            "short ends lowest, at 1.5000 nats per token. But they were last evaluated after 40 and 10 iterations.",
        ),
    ):
        assert report_page.headline([*runs], "loss") == said
