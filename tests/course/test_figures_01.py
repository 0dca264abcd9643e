"""The drawings of chapter 01 show the data that they are given, and say it in words."""

import pytest
from matplotlib.colors import to_hex
from vramlab_course.figures import figures_01

pytestmark = pytest.mark.usefixtures("no_figure_stays")


def test_levels_are_strokes_and_each_number_has_an_arrow_to_its_own():
    ways = {"even": ([-1, 0, 1], [0.2, 0.6]), "dense": ([0, 0.1, 1], [0.5])}
    figure = figures_01.levels(ways, "a title", "about")
    marks, dots, _, _ = figure.axes[0].lines
    assert marks.get_xdata().tolist() == [-1, 0, 1] and dots.get_xdata().tolist() == [0.2, 0.6]
    arrows = [(arrow.xyann[0], arrow.xy[0]) for arrow in figure.axes[0].texts]
    assert arrows == [(0.2, 0), (0.6, 1), (0.5, 0.1)]


def test_bars_are_blue_where_the_second_ways_levels_are_closer():
    ways = {"even": [-1, 0, 1], "dense at the right": [-1, 0.2, 0.6, 1]}
    figure = figures_01.density(ways, [0.11] * 30 + [0.91] * 10, "a title", "about")
    bars = {round(bar.get_x(), 3): bar for bar in figure.axes[0].patches if bar.get_height()}
    # The axis points down, so a bar grows from its foot to a smaller height.
    assert {at: bar.get_height() for at, bar in bars.items()} == pytest.approx(
        {0.1: -1.6, 0.9: -1.6 / 3}
    )
    colours = [to_hex(bars[at].get_facecolor()).upper() for at in (0.1, 0.9)]
    assert colours == [figures_01.GREY, figures_01.BLUE]
