"""Figures that can be forwarded: each says what was measured, where and when, and fits into a README."""

import itertools
import json
import re

import pytest

from fusedgpt.attention.table import KERNELS
from fusedgpt.bench import disturbance, drawing, kinds, ladder, max_batch, peers, prefill, report, sweep
from fusedgpt.machine.files import read_jsonl
from tests.fusedgpt.bench.small import CPU_RESULTS, published


@pytest.mark.parametrize(
    ("kind", "date", "freed", "said"),
    [
        ("max_batch", None, None, False),
        # the figures of the two ways looked alike; rows from before it was a setting returned it
        ("numerics", "2026-11-22", "kept", False),
        ("prefill", None, "returned", "freed memory returned, "),
        # training.png said so too, of runs of train.py, which keep it
        ("sweep", None, None, "freed memory returned in attention alone"),
    ],
)
def test_a_figure_says_what_was_measured_where_and_when(kind, date, freed, said, tmp_path, monkeypatch):
    # a figure that was forwarded named nothing but its axes
    saved = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: saved.append(figure))
    monkeypatch.setattr(drawing, "_compress", lambda path: None)
    header, *lines = read_jsonl(CPU_RESULTS / kind / "rows.jsonl")
    for part, name, value in (("environment", "date", date), ("settings", "freed_memory", freed)):
        header[part].pop(name, None)
        header[part] |= {name: value} if value else {}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [header, *lines]))
    report.write(tmp_path, kinds.KINDS[kind])
    assert saved
    for figure in saved:
        title, subtitle = (text.get_text().replace("\n", " ") for text in figure.texts[-2:])
        assert title and figure.get_figwidth() == drawing.WIDTH
        ends = [text.get_window_extent(dpi=drawing.DPI).x1 for text in figure.texts[-2:]]
        assert max(ends) < drawing.DPI * drawing.WIDTH - 10  # a title of wide letters was cut off
        there = header["environment"]
        for part in (there["device"], "2 threads", "torch 2.13.0+cpu", there["commit"], date or "no date recorded"):
            assert part in subtitle, name
        assert said in subtitle if said else "freed memory returned" not in subtitle, name
        texts = [label.get_text() for axes in figure.axes for label in axes.get_yticklabels()]
        texts += [text.get_text() for legend in figure.legends for text in legend.get_texts()]
        assert any("bfloat16" in text for text in [subtitle, *texts]), name


def test_each_bar_of_peers_has_its_dtype_and_each_panel_what_it_measures():
    # "ours" had no dtype, and the third panel another model than the title of the figure says
    settings, rows = published("peers")
    ((*_, figure),) = peers.figures(rows, settings)
    training, generation, recipe = figure.axes
    for axes in figure.axes:
        assert all(re.search("float(16|32)", label.get_text()) for label in axes.get_yticklabels())
    names = [label.get_text() for label in generation.get_yticklabels()]
    assert any(name.startswith("ours, bfloat16 / float") for name in names)  # of the prompt, and of the tokens after it
    assert training.get_xlabel().startswith("ms per training step: ")
    assert generation.get_xlabel().startswith("ms per sample of 128 tokens after 32: ")
    assert recipe.get_xlabel().startswith("ms per iteration of 4 layers, 128 channels, 12 × 64 tokens: ")


def test_the_ladder_cuts_a_bar_that_would_squash_the_others_and_folds_the_rungs_that_were_refused():
    # one rung in float32 took four times as long as all others, whose differences could not be seen; and rungs without
    # a time took a third of the figure
    settings, rows = published("../cpu_avx512_bf16/ladder_124M")
    ((_, _, subject, figure),) = ladder.figures(rows, settings)
    (axes,) = figure.axes
    widths = [bar.get_width() for bar in axes.patches]
    measured = [row["median_ms"] for row in ladder.pooled(rows).values() if row["status"] == "measured"]
    assert max(widths) < 0.7 * max(measured) and sorted(widths)[:-1] == sorted(measured)[:-1]
    assert any(re.fullmatch(r"5,384 ms, 3.\d+ times as long", text.get_text()) for text in axes.texts)  # it read -69 %
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names[:3] == ["manual, float32, eager", "manual, eager", "manual"] and len(names) == len(measured)
    assert names[-2] == "auto + padded vocabulary (took blocked)"
    assert "bfloat16, compiled unless a rung says otherwise" in subject
    assert "Refused here: efficient, cudnn, flash3, flash4 (PyTorch has this kernel on GPUs only); " in subject


def test_what_a_figure_leaves_out_is_said_shortly():
    rows = [{"rung": f"r{n}", "status": "refused", "reason": "out of resource: shared memory, " * 6} for n in (1, 2)]
    rows += [{"path": "p", "status": "parity failed", "reason": "y is off"}, {"rung": "fine", "status": "measured"}]
    said = drawing.left_out(rows)
    assert said.startswith(" Refused here: r1, r2 (out of resource") and said.endswith(
        "…). Parity failed: p (y is off)."
    )
    assert len(said) < 130 and drawing.left_out(rows[-1:]) == ""


@pytest.mark.parametrize("kind", ["ladder", "peers"])
def test_no_text_of_a_bar_leaves_the_figure_or_lies_on_another(kind):
    # a bar's number was cut off at the edge of the figure, and names took half of its width
    from matplotlib import rc_context

    settings, rows = published(kind)
    with rc_context(drawing.STYLE):
        figure = next(iter(kinds.KINDS[kind].figures(rows, settings)))[-1]
        figure.canvas.draw()
    for axes in figure.axes:
        names = [label.get_window_extent() for label in axes.get_yticklabels()]
        said = [text.get_window_extent() for text in axes.texts]
        assert len(names) == len(said) == len(axes.patches)
        for name, number in zip(names, said):
            assert name.x0 >= 0 and name.x1 < number.x0 and number.x1 <= figure.bbox.x1
        for above, below in itertools.pairwise(names):
            assert above.y0 > below.y1


def test_a_long_name_is_cut_at_its_beginning():
    axes = drawing.new(1)[1]
    row = {"status": "measured", "median_ms": 1.0, "p10_ms": 1.0, "p90_ms": 1.0}
    drawing.times(axes, {"/a/long/path/" * 9 + "mine.py:attend": row}, ["1 ms"], ["red"])
    (label,) = axes.get_yticklabels()
    assert len(label.get_text()) == drawing.NAME and label.get_text().endswith("mine.py:attend")


def test_png_files_have_two_pixels_for_each_of_a_column_and_stay_small(tmp_path, drawn):
    from matplotlib import image

    settings, rows = published("ladder")
    paths = drawing.save(ladder.figures(rows, settings), tmp_path, "a machine")
    assert [path.name for path in paths] == ["ladder.png", "ladder.svg"]
    assert image.imread(paths[0]).shape[1] == 2 * 832 and paths[0].stat().st_size < 300_000
    for path in (CPU_RESULTS.parent).rglob("*.png"):
        assert path.stat().st_size < 300_000, path


def test_colours_differ_in_grey_too():
    # three kernels were three greys, and pieces of bars too
    def lightness(colour):
        red, green, blue = to_rgb(colour)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    from matplotlib.colors import to_rgb

    found = {name: kernel.color for name, kernel in KERNELS.items()}
    assert len(set(found.values())) == len(found)
    assert len({kernel.mark for kernel in KERNELS.values()}) == len(found)
    coloured = [colour for colour in found.values() if len(set(to_rgb(colour))) > 1]
    assert len(coloured) == len(found) - 2  # manual is black; sdpa, which is no kernel of its own, is grey
    looks = [drawing.bar_style(n) for n in range(6)]
    for one, other in itertools.pairwise(looks):
        assert one["hatch"] != other["hatch"] and abs(lightness(one["color"]) - lightness(other["color"])) > 0.04


def test_speedups_share_their_axes_and_have_a_spread():
    # four panels, each with an axis of its own
    settings, rows = published("sweep")
    figure = {name: figure for name, _, _, figure in sweep.figures(rows, settings)}["speedup"]
    assert len({axes.get_ylim() for axes in figure.axes}) == len({axes.get_xlim() for axes in figure.axes}) == 1
    assert {axes.get_yscale() for axes in figure.axes} == {"log"}
    manual, flash = ({**rows[0], "median_ms": m, "p10_ms": a, "p90_ms": b} for a, m, b in ((8, 9, 10), (2, 3, 4)))
    assert disturbance.speedup(flash, manual) == (3, 2, 5)
    baselines = [line for axes in figure.axes for line in axes.lines if line.get_label() == "manual"]
    assert len(baselines) == 4 and {y for line in baselines for y in line.get_ydata()} == {1}
    assert all(axes.collections for axes in figure.axes)


def test_losses_are_compared_after_the_same_time():
    # one run ended after 42 seconds, the other after 45
    settings, rows = published("max_batch")
    assert max_batch.common_end(rows) == pytest.approx(41.88, abs=0.01)
    assert max_batch.loss_at([[0, 4.0], [10, 3.0], [20, 2.0]], 15) == 2.5
    figure = {name: figure for name, _, _, figure in max_batch.figures(rows, settings)}["curves"]
    (axes,) = figure.axes
    assert {line.get_xdata()[-1] for line in axes.lines} == {max_batch.common_end(rows)}
    assert axes.get_ylim()[1] < 5  # the untrained model, at 5.3, is not drawn, and a mark says so
    assert [text.get_text() for text in axes.texts] == ["↑ above the axis: 5.3 to 5.31 before the first step"]
    assert [text.get_color() for text in axes.get_legend().get_texts()] == [line.get_color() for line in axes.lines]
    table = max_batch.table(rows)
    assert "and after 42 s" in table[0] and "| 2.6376 |" in table[3]


def test_a_run_that_was_too_short_for_an_evaluation_can_be_drawn():
    settings, rows = published("max_batch")
    short = [{**row, "curve": row["curve"][:1]} for row in rows]
    figures = {name: figure for name, _, _, figure in max_batch.figures(short, settings)}
    drawn = [set(line.get_ydata()) for line in figures["curves"].axes[0].lines]
    assert drawn == [{row["curve"][0][1]} for row in short]  # the one loss that is known, to the end


def test_a_figure_whose_rows_are_all_disturbed_can_be_drawn(tmp_path, drawn):
    # a logarithmic axis without values ended the report of prefill, and with it a step of make gpu
    settings, rows = published("prefill")
    rows = [row | {"disturbed": True, "reason": "another program"} for row in rows]
    png, _ = drawing.save(prefill.figures(rows, settings), tmp_path, "a machine")
    assert png.stat().st_size > 1000
