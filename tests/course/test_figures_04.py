"""Chapter 04's picture of a world of ranks."""

import pytest
from vramlab_course.figures.figures_04 import who_holds_what

pytestmark = pytest.mark.usefixtures("no_figure_stays")


def test_who_holds_what_draws_each_share():
    figure = who_holds_what(4)
    rows = {row[0]: row[1:] for row in figure.rows[1:]}
    assert rows["data parallel"] == ("all", "all", "all")
    assert rows["ZeRO-2"] == ("all", "1/4", "1/4")
    assert rows["tensor"] == rows["ZeRO-3"] == rows["pipeline"] == ("1/4",) * 3
    filled = [
        patch
        for patch in figure.axes[0].patches
        if patch.get_hatch() or patch.get_facecolor()[:3] != (1, 1, 1)
    ]
    chosen = who_holds_what(4, ways=("data parallel", "ZeRO-3"))
    assert [row[0] for row in chosen.rows[1:]] == ["data parallel", "ZeRO-3"]
    areas = sum(patch.get_width() * patch.get_height() for patch in filled)
    assert areas == pytest.approx(12 + 9 + 6 + 3 + 3 + 3)
    by_bytes = who_holds_what(4, ways=("data parallel",), sizes=(2, 2, 12))
    widths = {round(patch.get_width(), 3) for patch in by_bytes.axes[0].patches}
    assert widths == {0.375, 2.25}
