"""Chapter 06's drawings show the numbers that they are given."""

import pytest
from vramlab import GiB
from vramlab_course.figures import figures_06

pytestmark = pytest.mark.usefixtures("no_figure_stays")


def test_each_weight_of_a_block_goes_to_the_nearest_level():
    figure = figures_06.one_block([0.5, -2.0, 0.1, 1.4], [-1, -0.25, 0.25, 1])
    arrows = [text for text in figure.axes[0].texts if not text.get_text()]
    assert [(arrow.xyann[0], arrow.xy[0]) for arrow in arrows] == [
        (0.5, 0.5),
        (-2.0, -2.0),
        (0.1, 0.5),
        (1.4, 2.0),
    ]


def test_a_line_over_length_has_each_size_in_gib():
    figure = figures_06.over_length({"a run": {1024: 2 * GiB, 2048: 3 * GiB}}, "", "", "T4")
    assert [[*line.get_ydata()] for line in figure.axes[0].lines] == [[2, 3], [14.5625] * 2]
