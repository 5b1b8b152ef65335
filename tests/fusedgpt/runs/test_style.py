"""Titles across a figure."""

import pytest

from fusedgpt.runs import style

pytest.importorskip("matplotlib")


def test_a_title_shows_every_letter_and_leaves_room_for_itself():
    from matplotlib.figure import Figure

    figure = Figure(figsize=(style.WIDTH, 2), dpi=style.DPI, layout="constrained")
    axes = figure.subplots()
    words = "Muon 1.2e-2, 350 iterations with QK norm ends lowest, at 1.8263 nats per token, of $HOME and $PATH. "
    style.title(figure, 3 * words, ["a paragraph", 5 * words])
    figure.draw_without_rendering()
    above, below = figure.texts
    assert above.get_text().replace("\n", " ").replace(r"\$", "$") == (3 * words).strip()
    assert below.get_text().startswith("a paragraph\nMuon") and r"\$HOME" in below.get_text()
    assert above.get_window_extent().y0 > below.get_window_extent().y1 - 5
    assert below.get_window_extent().y0 > axes.get_window_extent().y1
    room = figure.bbox.width - 2 * style.DPI * style.MARGIN
    for text in figure.texts:
        assert 0.8 * room < text.get_window_extent().width < room
