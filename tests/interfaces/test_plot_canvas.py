"""Figures that a notebook draws itself look like the others, carry their words, and leave nothing
behind.
"""

import matplotlib.pyplot as plt
import pytest
from tiny_models import config
from vramlab import Recipe, plot, predict
from vramlab.interfaces.plot import style

pytestmark = pytest.mark.usefixtures("no_figure_stays")


def test_it_has_the_style_the_legend_and_the_words():
    before = dict(plt.rcParams)
    with plot.canvas(
        "A title", "A line\n  that falls.", "about it", [("x", "y"), ("0", "4")]
    ) as ax:
        ax.plot([0, 1], [4, 2], label="a line")
        assert plt.rcParams["font.size"] == style.RC["font.size"]
    assert ax.lines[0].get_color() == style.LINES[0][0]
    assert dict(plt.rcParams) == before
    assert ax.figure.alt == "A line that falls." and "4" in plot.table(ax.figure)
    assert [text.get_text() for legend in ax.figure.legends for text in legend.get_texts()] == [
        "a line"
    ]
    assert ax.get_title(loc="left") == "about it" and repr(ax.figure) == "<Figure: A title>"


def test_a_failing_cell_leaves_the_readers_settings():
    before = dict(plt.rcParams)
    with pytest.raises(ZeroDivisionError), plot.canvas("A title", "Words."):
        1 / 0  # noqa: B018
    assert dict(plt.rcParams) == before


def test_a_dollar_in_a_name_is_no_formula():
    """Matplotlib would read the words between two as one, and fail at what is none."""
    report = predict(
        Recipe(config("llama") | {"_name_or_path": r"$\frac{$ a_$x^$b"}, 2, seq_len=16)
    )
    plot.compare(report)
    with plot.canvas(r"$\frac{$", "Words.", r"$x^$") as ax:
        ax.bar([r"$\frac{$", "b"], [1, 2], label=r"$x^$")
        ax.text(0, 0, r"$\frac{$")
    with plot.canvas("A title", "Words.") as ax:
        ax.set(xscale="log", xlim=(1, 100))
    assert ax.get_xticklabels()[1].get_parse_math()
