"""Chapter 04's pictures: a world of ranks, two collectives, a layer that is gathered, and when."""

import pytest
from vramlab_course.figures.figures_04 import (
    gather_use_free,
    gathers_in_time,
    two_collectives,
    who_holds_what,
)

pytestmark = pytest.mark.usefixtures("no_figure_stays")


def test_who_holds_what_draws_each_share():
    figure = who_holds_what(4, "A title")
    rows = {row[0]: row[1:] for row in figure.rows[1:]}
    assert rows["data parallel"] == ("all", "all", "all")
    assert rows["ZeRO-2"] == ("all", "1/4", "1/4")
    assert rows["ZeRO-3"] == ("1/4",) * 3
    filled = [
        patch
        for patch in figure.axes[0].patches
        if patch.get_hatch() or patch.get_facecolor()[:3] != (1, 1, 1)
    ]
    areas = sum(patch.get_width() * patch.get_height() for patch in filled)
    # each of four ranks holds 16, 10, 7 and 4 of 16 bytes
    assert areas == pytest.approx(4 * 3 * (16 + 10 + 7 + 4) / 16)


def test_two_collectives_shows_each_number_where_it_is_held():
    given = [[1, 2, 3, 4], [10, 20, 30, 40]]
    figure = two_collectives(given, [[11, 22], [33, 44]], [[11, 22, 33, 44]] * 2, "A title")
    words = [text.get_text() for text in figure.axes[0].texts]
    assert words.count("11") == 3
    filled = [patch for patch in figure.axes[0].patches if patch.get_facecolor()[3] < 1]
    # In the middle column rank 1 has the third and the fourth block, and those alone.
    middle = [patch for patch in filled if 5 < patch.get_x() < 10 and patch.get_y() == -1]
    assert [patch.get_x() for patch in middle] == pytest.approx([7.2, 8.2])
    assert figure.rows[2] == ("1", "[10, 20, 30, 40]", "[33, 44]", "[11, 22, 33, 44]")
    assert "[33, 44]" in figure.alt


def test_a_layer_is_whole_in_two_columns_and_a_shard_in_all():
    figure = gather_use_free(3, "A title")
    whole = [row.index("whole") for row in figure.rows[1:]]
    assert whole == [1, 2, 3, 3, 2, 1]
    pale = [patch for patch in figure.axes[0].patches if patch.get_facecolor()[3] < 1]
    assert [(round(patch.get_x()), patch.get_y()) for patch in pale] == [
        (0, -1),
        (1, -2),
        (2, -3),
        (3, -3),
        (4, -2),
        (5, -1),
    ]
    assert "layer 3 shard, sent gather, then reduce-scatter" in figure.alt


def test_a_layer_waits_for_its_gather_which_starts_with_the_layer_before():
    figure = gathers_in_time(3, (1, 3, 4), "A title")
    # computing and gathering by turns
    starts = [[box.get_x() for box in boxes] for boxes in figure.axes[0].containers]
    assert starts == [
        [3, 6, 9, 12],
        [0, 3, 6, 9],
        [3, 6, 9, 12],
        [0, 3, 6, 9],
        [3, 7, 11, 15],
        [0, 3, 7, 11],
    ]
    assert "4: layers compute from, ms [3, 7, 11, 15]" in figure.alt
