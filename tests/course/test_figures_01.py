"""The drawings of chapter 01 show the data that they are given, and say it in words."""

import pytest
from matplotlib.colors import to_hex
from vramlab import plot
from vramlab_course.figures import figures_01
from vramlab_course.number_formats import BF16, FP16, FP32

pytestmark = pytest.mark.usefixtures("no_figure_stays")


def test_a_format_reaches_from_its_smallest_to_its_largest_number():
    figure = figures_01.ranges()
    subnormal, normal = figure.axes[0].patches[::2], figure.axes[0].patches[1::2]
    formats, labels = (FP32, FP16, BF16), figure.axes[0].texts
    for f, low, high, label in zip(formats, subnormal, normal, labels, strict=True):
        assert low.get_x() == pytest.approx(f.smallest) and high.get_x() == pytest.approx(
            f.smallest_normal
        )
        assert high.get_x() + high.get_width() == pytest.approx(f.max)
        assert label.get_text().strip() == f"1/{2**f.fraction_bits:,}"
    assert "fp16 6.0e-08 65,504 1/1,024" in " ".join(plot.table(figure).split())


def test_levels_are_strokes_and_each_number_has_an_arrow_to_its_own():
    ways = {"even": ([-1, 0, 1], [0.2, 0.6]), "dense": ([0, 0.1, 1], [0.5])}
    figure = figures_01.levels(ways, "a title", "about")
    marks, dots, _, _ = figure.axes[0].lines
    assert marks.get_xdata().tolist() == [-1, 0, 1] and dots.get_xdata().tolist() == [0.2, 0.6]
    arrows = [(arrow.xyann[0], arrow.xy[0]) for arrow in figure.axes[0].texts]
    assert arrows == [(0.2, 0), (0.6, 1), (0.5, 0.1)]
    assert figure.rows[1:] == [("even", "3", "1.00", "1.00"), ("dense", "3", "0.10", "0.90")]


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
    assert figure.rows[1:] == [
        ("even", "3", "1.00", "1.00"),
        ("dense at the right", "4", "0.40", "1.20"),
    ]
