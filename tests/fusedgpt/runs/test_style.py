"""Titles across a figure: whole, whatever their letters."""

import pytest

from fusedgpt.runs import style

pytest.importorskip("matplotlib")


@pytest.mark.parametrize("text", ["mmmm " * 30, "iiii " * 60, "lr=1e-3,seed=" * 30])
def test_lines_are_as_long_as_their_letters_permit(text):
    # lines had so many letters, whatever these were: those of a title of many wide ones were cut off
    from matplotlib.figure import Figure

    lines = style.wrapped(text, size=10, weight="bold")
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    figure = Figure(figsize=(style.WIDTH, 1), dpi=style.DPI)
    widths = [figure.text(0, 0, line, fontsize=10, weight="bold").get_window_extent().width for line in lines]
    room = figure.bbox.width - 2 * style.DPI * style.MARGIN
    assert 0.85 * room < max(widths) < 1.005 * room  # letters on a screen are a little wider or narrower


def test_a_title_shows_every_letter_and_leaves_room_for_itself():
    from matplotlib.figure import Figure

    figure = Figure(figsize=(style.WIDTH, 2), layout="constrained")
    axes = figure.subplots()
    style.title(figure, "$HOME and $PATH are no formula", ["a paragraph", "another"])
    figure.draw_without_rendering()
    above, below = figure.texts
    assert above.get_text() == r"\$HOME and \$PATH are no formula" and below.get_text() == "a paragraph\nanother"
    bottom = below.get_window_extent().y0
    assert above.get_window_extent().y0 > bottom > axes.get_window_extent().y1
