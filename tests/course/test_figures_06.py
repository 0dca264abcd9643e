"""Chapter 06's drawings show the numbers that they are given."""

from dataclasses import replace

import pytest
from sample_reports import measured
from vramlab.report.report import Bytes, MiB, Moment
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


def test_a_steps_memory_is_drawn_with_both_phases_equally_wide():
    phases = ["load", *["forward"] * 4, *["backward"] * 2, "step"]
    moments = [
        Moment(i, phase, Bytes(activations=i * MiB, buffers=MiB)) for i, phase in enumerate(phases)
    ]
    step = replace(measured(), timeline=moments)
    figure = figures_06.over_a_step({"A layer": step}, 3 * MiB, "A title", "about")
    curve, full, _ = figure.axes[0].lines
    assert [*curve.get_xdata()] == [0, 0.25, 0.5, 0.75, 1, 1.5]
    assert [*curve.get_ydata()] == [2, 3, 4, 5, 6, 7]
    assert {*full.get_ydata()} == {3}
