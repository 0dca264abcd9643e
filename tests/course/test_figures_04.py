"""Chapter 04's pictures: a world of ranks, two collectives, and the two lanes of a step."""

import pytest
from vramlab_course.figures.figures_04 import (
    backward_in_units,
    gather_use_free,
    two_collectives,
    two_lanes,
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
    # each of four ranks holds 16, 7, 5.5 and 4 of 16 bytes
    assert areas == pytest.approx(4 * 3 * (16 + 7 + 5.5 + 4) / 16)


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


def test_fsdps_backward_pass_has_three_layers_on_their_way():
    first, middle, last = backward_in_units(4, "A title").rows[1:]
    assert first[2:] == ("shard", "shard", "arriving", "weights")
    assert middle[1:] == ("weights", "shard", "arriving", "weights", "gradients")
    assert last[2:] == ("arriving", "weights", "gradients", "shard")


def test_two_lanes_shows_what_the_longer_of_both_leaves_waiting():
    steps = {"short": {"forward": (1.0, 2.0), "backward": (3.0, 4.0)}, "long": {"forward": (4, 2)}}
    figure = two_lanes(steps, "A title", "about")
    assert figure.rows[1:] == [
        ("short, forward", "1.00", "2.00", "2.00"),
        ("short, backward", "3.00", "4.00", "4.00"),
        ("long, forward", "4.00", "2.00", "4.00"),
    ]
    frames, computing, sending = figure.axes[0].collections[:3]
    assert frames.get_paths()[0].get_extents().width == 2
    for bars, seconds in ((computing, 1.0), (sending, 2.0)):
        assert sum(path.get_extents().width for path in bars.get_paths()) == pytest.approx(seconds)
    # the backward pass begins where the longer lane ends
    assert figure.axes[0].collections[3].get_paths()[0].get_extents().x0 == 2
    assert "6.00 s" in "".join(text.get_text() for text in figure.axes[0].texts)
