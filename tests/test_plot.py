"""Runs as figures."""

import itertools
import math
import os
import pathlib
import re
import shutil

import numpy as np
import pytest

import plot
from fusedgpt.errors import UserError
from fusedgpt.runs import style
from fusedgpt.runs.metrics import LoggedRun
from tests.fusedgpt.runs.test_metrics import evaluation, run_of, step
from tests.launch import fails, script

PNG = b"\x89PNG"


@pytest.fixture(autouse=True)
def _few_pixels(monkeypatch):
    """Drawing takes as long as a figure has pixels."""
    assert style.WIDTH * style.DPI == 2 * 832  # two pixels for each of a README's column
    for module in (style, plot):
        monkeypatch.setattr(module, "DPI", 50)


@pytest.fixture
def axes():
    from matplotlib.figure import Figure

    return Figure().subplots()


def some_run(folder, ratio=None, vocab_size=256, steps=30):
    """A run of `steps` steps, whose evaluations say `ratio` bits per byte for a loss of 1."""
    told = {}
    if ratio:
        told = dict.fromkeys(("train_bits_per_byte", "val_bits_per_byte"), 2.0 * ratio)
    lines = [step(n, lr=0.1, ms=2000, grad_norm=1.0) for n in range(steps)]
    lines += [evaluation(n, **told) for n in range(0, steps + 1, 10)]
    return run_of(folder, lines, tokens_per_step=1000, model={"vocab_size": vocab_size}, settings={})


def test_a_run_gets_its_curves_and_its_loss(done, tmp_path):
    said = script("plot.py", str(done)).stdout
    for name in ("curves.png", "loss.png"):  # loss.png is what the quick start has always left
        assert (done / name).read_bytes()[:4] == PNG and name in said
    script("plot.py", str(done), f"--out={tmp_path / 'mine.svg'}", "--y=lr", "--x=tokens")
    assert "learning rate" in (tmp_path / "mine.svg").read_text()
    assert sorted(path.name for path in done.glob("*.png")) == ["curves.png", "loss.png"]
    assert "python plot.py RUN" in script("plot.py", "--help").stdout


def test_several_runs_never_overwrite_the_figure_of_another(tmp_path, monkeypatch):
    # the figure used to be loss.png in the folder of the first; of many runs, others had the same file
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    runs = [some_run(tmp_path / name) for name in ("a/run", "b", "c")]
    files = [next(iter(plot.targets(each, "loss", None))) for each in (runs[:2], runs[1:], runs)]
    assert [str(file) for file in files] == ["a-run+b-loss.png", "b+c-loss.png", "a-run+b+c-loss.png"]
    assert plot.targets(runs[:1], "lr", None) == {tmp_path / "a" / "run" / "lr.png": "lr"}
    (name,), (other,) = (plot.targets([*runs * 20, last], None, None) for last in runs[:2])
    assert re.fullmatch(r"61 runs [0-9a-f]{8}-curves\.png", str(name)) and other != name
    # 100 characters were allowed, and of some scripts these are 300 or 400 bytes
    (name,) = plot.targets([some_run(pathlib.Path("語" * 85)), runs[1]], None, None)
    assert re.fullmatch(r"2 runs [0-9a-f]{8}-curves\.png", str(name))


def test_runs_of_the_same_name_are_told_apart(tmp_path, monkeypatch):
    # both were previous-1, in the legend and above it
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    runs = [some_run(tmp_path / name / "previous-1") for name in ("a", "b")]
    assert plot.names_of(runs) == ["a/previous-1", "b/previous-1"] and plot.names_of(runs[:1]) == ["previous-1"]


@pytest.mark.parametrize(("steps", "unit", "end"), [(30, "seconds", 58), (100, "minutes", 3.3)])
def test_an_axis_has_its_unit(tmp_path, axes, steps, unit, end):
    run = some_run(tmp_path / "a", steps=steps)  # of 2 s each
    plot.draw_panel(axes, [run], "loss", "time")
    assert axes.get_xlabel() == f"training time ({unit})" and axes.lines[0].get_xdata()[-1] == pytest.approx(end)
    plot.draw_panel(tokens := axes.figure.subplots(), [run], "loss", "tokens")
    assert tokens.xaxis.get_major_formatter()(1.2e6) == "1.2M"  # it was 1.2e+06


def test_the_legend_names_both_lines_of_each_run(tmp_path, axes):
    # it used to name the training line once, in grey, whatever the colour of the lines
    plot.draw_panel(axes, [some_run(tmp_path / "_a"), some_run(tmp_path / "b")], "loss", "time")
    labels = [text.get_text() for text in axes.legend().get_texts()]
    end = "validation, at the end 2.000"
    assert labels == [" _a: training", f" _a: {end}", "b: training", f"b: {end}"]
    a, _, b, validation = axes.lines
    assert b.get_color() == validation.get_color() != a.get_color()


@pytest.mark.parametrize(
    ("a", "b", "unit"),
    [
        ((1.4427, 256), (0.35, 256), "bits_per_byte"),  # a loss of 3.3 per token of GPT-2 is better than 1.2 per byte
        ((1.4427, 256), (1.4427 * 1.005, 256), "loss"),  # other windows of the same data
        ((1.4427, 256), (1.4427 * 1.02, 256), "bits_per_byte"),
        ((None, 256), (None, 256), "loss"),
        ((None, 256), (1.4427, 50304), "loss"),
    ],
)
def test_runs_of_different_tokenizers_are_drawn_in_bits_per_byte(tmp_path, a, b, unit):
    runs = [some_run(tmp_path / "silent", *a), some_run(tmp_path / "b", *b)]
    assert plot.losses_in(runs) == unit


def test_a_figure_in_bits_per_byte_says_so(tmp_path):
    # a $ in a name used to be a ParseFatalException
    runs = [some_run(tmp_path / r"a$\foo$", 1.4427), some_run(tmp_path / "b", 0.35)]
    plot.draw(runs, tmp_path / "both.svg", "loss")
    assert "bits per byte" in (tmp_path / "both.svg").read_text()


def test_a_gap_is_seen(tmp_path, axes):
    # null in metrics.jsonl is a gap, because JSON has no NaN
    run = run_of(tmp_path, [step(n, loss=None if n == 1 else 2.0) for n in range(5)] + [evaluation(0, None)])
    plot.draw_panel(axes, [run], "loss", "iterations")
    training, validation = axes.lines
    assert math.isnan(training.get_ydata()[1]) and training.get_alpha() < 1 and validation.get_marker() == "o"
    assert validation.get_label() == "validation, at the end not finite"


def test_a_run_that_has_just_begun_is_drawn(tmp_path, axes):
    runs = [run_of(tmp_path / name, lines) for name, lines in (("a", []), ("b", [evaluation(0)]), ("c", [step(0)]))]
    for run in runs:
        plot.draw_panel(axes.figure.subplots(), [run, run], "loss", "time")
    (tmp_path / "a" / "run.json").unlink()
    plot.draw([LoggedRun(tmp_path / "a")], tmp_path / "curves.png", x="time")
    assert int.from_bytes((tmp_path / "curves.png").read_bytes()[16:20]) == plot.WIDTH * 50


def test_a_caption_says_where_and_when_a_run_ran(small_run, tmp_path):
    record = plot.LoggedRun(small_run).record
    (caption,) = plot.captions([plot.LoggedRun(small_run)])
    for part in ("cpu (", "float32", "layers × channels: 2 × 32", "64 tokens a step", record["environment"]["torch"]):
        assert part in caption
    assert plot.captions([plot.LoggedRun(small_run)] * 2) == [caption]  # what is the same for all is said once
    copied = shutil.copytree(small_run, tmp_path / "copied")  # as git does: it used to become the date of the run
    os.utime(copied / "metrics.jsonl", (0, 0))
    assert plot.captions([plot.LoggedRun(copied)]) == [caption] and re.search(r", 20\d\d-\d\d-\d\d$", caption)


def test_a_title_says_the_finding(tmp_path):
    # a figure's first words used to be the name of the processor
    good, bad, young = some_run(tmp_path / "good"), some_run(tmp_path / "bad"), run_of(tmp_path / "young", [step(0)])
    bad.eval["val_loss"] = bad.eval["val_loss"] + 0.5
    last = good.eval["val_loss"][-1]
    assert plot.finding([good], "loss") == f"Validation loss {last:.3f} after 30 iterations"
    assert plot.finding([good, bad], "loss") == f"good ends lowest, at {last:.4f} nats per token"
    assert plot.finding([young], "loss") == "Validation loss: young has not been evaluated"
    assert plot.finding([good, bad], "memory") == "Peak memory (GiB): good, bad"  # it was (gib)
    lowest, good.eval["val_loss"][-1] = good.eval["val_loss"][:-1].min(), 9.0  # the title of an overfitted run
    assert plot.finding([good], "loss").endswith(f"after 30 iterations, the lowest {lowest:.3f}")
    good.eval["val_loss"][-1] = math.nan
    assert plot.finding([good], "loss") == "Validation loss not finite after 30 iterations"


def test_values_above_the_axis_are_named(tmp_path, axes):
    # the first losses are cut off, so that the later ones can be read; nothing used to say so
    falling = run_of(tmp_path / "falling", [step(n, loss=5.5 - 0.3 * min(n, 10)) for n in range(200)])
    for runs, said in (([falling], "▲ up to 5.5 above"), ([some_run(tmp_path / "flat")], "")):
        panel = axes.figure.subplots()
        plot.draw_panel(panel, runs, "loss", "iterations")
        assert panel.get_title(loc="right") == said


def test_html_writes_a_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a, b = (some_run(tmp_path / name) for name in "ab")
    # --html takes no value: the run after it used to be lost
    runs, options = plot.arguments(["--html", "a", "b"])
    assert [run.name for run in runs] == ["a", "b"] and "html" in options
    assert plot.write_page([a, b], None) == pathlib.Path("a+b.html")
    assert "<title>2 runs</title>" in (tmp_path / "a+b.html").read_text()
    assert plot.write_page([a, b], "mine.html") == pathlib.Path("mine.html")
    assert plot.write_page([a], None) == tmp_path / "a" / "report.html"
    assert "<title>a</title>" in (tmp_path / "a" / "report.html").read_text()
    for args in (["a", "b", "--html", "--y=lr"], ["a", "--html", "--out=x.html"], ["a", "b", "--html", "--out=x.png"]):
        with pytest.raises(UserError, match="html"):
            plot.arguments(args)


def test_a_head_is_named_by_the_distance_that_it_prefers():
    # the tour named heads by a mean in which the first rows dominate: attention to all of 35 bytes alike gave "itself:
    # 12%", and 10 of 16 heads had that name beside pictures of stripes
    T = 35
    alike, before, first = np.tri(T), np.eye(T, k=-1), np.zeros((T, T))
    before[0, 0], first[:, 0] = 1, 1
    alike /= alike.sum(1, keepdims=True)
    beyond, below = (alike + share * (before - alike) for share in (0.3, 0.15))
    near = [np.eye(T), before, np.eye(T, k=-4) + np.eye(T, k=30), beyond, below, alike, first]
    share = plot.by_distance(np.stack(near))
    for n, back in itertools.product(range(len(near)), (0, 1, 4, 12, 17)):
        rows = [near[n][i, i - back] for i in range(max(8, back), T)]
        assert share[back, n] == pytest.approx(sum(rows) / len(rows))
    names = [f"{place}{share}" for place, share in plot.places(np.stack(near)[None]).values()]
    assert names[:3] == ["itself: 100%", "1 back: 100%", "4 back: 100%"] and names[3].startswith("1 back: 3")
    assert names[4:] == ["no single distance"] * 3
    for T in (1, 2, 5):
        assert plot.places(np.eye(T)[None, None])[0, 0][0] == ("itself" if T > 1 else "no single distance")


def test_attention_of_any_run_is_drawn(done, monkeypatch):
    said = script("plot.py", str(done), "--attention=ABABAB").stdout
    assert said.endswith("attention.png\n") and (done / "attention.png").read_bytes()[:4] == PNG
    found, draw_heads = [], plot.draw_heads
    monkeypatch.setattr(plot, "draw_heads", lambda *args: found.append(draw_heads(*args)) or found[0])
    plot.write_heads(LoggedRun(done), "ABABAB", str(done / "mine.svg"))
    maps = [axes for axes in found[0].axes if axes.images]
    assert [axes.get_title().split("\n")[0] for axes in maps[1:3]] == ["layer 1, head 2", "layer 2, head 1"]
    for axes in maps:
        weights = np.asarray(axes.images[0].get_array())
        assert weights.shape == (6, 6) and weights.sum(1) == pytest.approx(np.ones(6))
        assert axes.images[0].get_clim() == (0, 1)  # the first row is 1 everywhere: colours must not depend on it
    for text, sentence in (("A" * 17, "more than block_size=16"), ("~", "~")):
        with pytest.raises(UserError, match=sentence):
            plot.write_heads(LoggedRun(done), text, None)


def test_bad_input_is_one_sentence(small_run, tmp_path):
    assert "metrics.jsonl does not exist" in fails("plot.py", str(tmp_path))
    for args, sentence in {
        (): "name the folder of a run",
        (small_run, "--y=losses"): "can be loss, bits_per_byte, lr, grad_norm, tokens_per_s, memory",
        (small_run, "--x=steps"): "can be iterations, tokens, time",
        (small_run, "--out"): "--out is unknown",
        (small_run, "--title=mine"): "--title is unknown",
        (small_run, "--out=figure.doc"): "must end in .png",
        (small_run, small_run, "--attention=A"): "--attention takes one run",
        (small_run, "--attention=A", "--y=lr"): "--attention takes one run, no --x, no --y",
    }.items():
        with pytest.raises(UserError, match=sentence):
            plot.arguments([str(arg) for arg in args])
