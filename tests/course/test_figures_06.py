"""Chapter 06's drawing shows the numbers that it is given."""

import pytest
from vramlab_course.figures import figures_06

pytestmark = pytest.mark.usefixtures("no_figure_stays")


def test_a_way_has_one_colour_and_is_dashed_without_checkpointing():
    sizes = {("LoRA", True): [1, 2], ("LoRA", False): [3, 4], ("QLoRA", True): [0.5, 1.5]}
    figure = figures_06.by_length((512, 1024), sizes, "A title", "about")
    with_, without, other, _ = figure.axes[0].lines
    assert (with_.get_color(), with_.get_linestyle()) == (without.get_color(), "-")
    assert without.get_linestyle() == "--" and other.get_color() != with_.get_color()
    assert [*without.get_ydata()] == [3, 4]
    assert figure.rows[2] == ("LoRA, no checkpointing", "3.0", "4.0")
