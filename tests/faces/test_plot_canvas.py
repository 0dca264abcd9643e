"""Figures that a notebook draws itself look like the others, carry their words, and leave nothing behind."""

import matplotlib.pyplot as plt
import pytest
from vramlab import plot
from vramlab.faces.plot import style

pytestmark = pytest.mark.usefixtures("no_figure_stays")


def test_it_has_the_style_the_legend_and_the_words():
    before = dict(plt.rcParams)
    with plot.canvas("A title", "A line\n  that falls.", "about it", [("x", "y"), ("0", "4")]) as ax:
        ax.plot([0, 1], [4, 2], label="a line")
        assert plt.rcParams["font.size"] == style.RC["font.size"]
    assert ax.lines[0].get_color() == style.LINES[0][0]
    assert dict(plt.rcParams) == before
    assert ax.figure.alt == "A line that falls." and "4" in plot.table(ax.figure)
    assert [text.get_text() for legend in ax.figure.legends for text in legend.get_texts()] == ["a line"]
    assert ax.get_title(loc="left") == "about it" and repr(ax.figure) == "<Figure: A title>"


def test_a_failing_cell_leaves_the_readers_settings():
    before = dict(plt.rcParams)
    with pytest.raises(ZeroDivisionError), plot.canvas("A title", "Words."):
        1 / 0  # noqa: B018
    assert dict(plt.rcParams) == before
