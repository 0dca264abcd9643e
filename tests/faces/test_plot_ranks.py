"""The pictures of a world of ranks, and what they are computed from."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vramlab import plot
from vramlab.faces.plot.ranks import bubble, most_held, pipeline_slots
from vramlab.report.errors import RecipeError

STAGES, MICRO = st.integers(1, 6), st.integers(1, 12)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["gpipe", "1f1b"]), STAGES, MICRO, st.sampled_from([1.0, 2.0, 3.5]))
def test_a_schedule_does_all_work_once_in_an_order_that_can_be(schedule, stages, micro_batches, backward):
    slots = pipeline_slots(schedule, stages, micro_batches, backward)
    end = {(slot.kind, slot.stage, slot.micro_batch): slot.end for slot in slots}
    assert len(slots) == len(end) == 2 * stages * micro_batches
    for slot in slots:
        if slot.kind == "backward":
            assert slot.start >= end["forward", slot.stage, slot.micro_batch]
        before = slot.stage - 1 if slot.kind == "forward" else slot.stage + 1
        if 0 <= before < stages:
            assert slot.start >= end[slot.kind, before, slot.micro_batch]
    for stage in range(stages):
        mine = [slot for slot in slots if slot.stage == stage]
        assert all(one.end <= other.start for one, other in pairwise(mine))
        held = micro_batches if schedule == "gpipe" else min(stages - stage, micro_batches)
        assert most_held(slots, stage) == held


@settings(max_examples=40, deadline=None)
@given(STAGES, MICRO)
def test_both_schedules_wait_as_long_as_the_formula_says(stages, micro_batches):
    for schedule in ("gpipe", "1f1b"):
        waiting = bubble(pipeline_slots(schedule, stages, micro_batches))
        assert waiting == pytest.approx((stages - 1) / (micro_batches + stages - 1))


def test_who_holds_what_draws_each_share():
    figure = plot.who_holds_what(4)
    rows = {row[0]: row[1:] for row in figure.rows[1:]}
    assert rows["data parallel"] == ("all", "all", "all")
    assert rows["ZeRO-2"] == ("all", "1/4", "1/4")
    assert rows["tensor"] == rows["ZeRO-3"] == rows["pipeline"] == ("1/4",) * 3
    filled = [patch for patch in figure.axes[0].patches if patch.get_hatch() or patch.get_facecolor()[:3] != (1, 1, 1)]
    areas = sum(patch.get_width() * patch.get_height() for patch in filled)
    assert areas == pytest.approx(12 + 9 + 6 + 3 + 3 + 3)


def test_the_timeline_of_a_pipeline_says_what_each_schedule_holds():
    rows = plot.pipeline(4, 8).rows
    assert [row[-1] for row in rows[1:]] == ["8", "4"] and [row[2] for row in rows[1:]] == ["27.3%", "27.3%"]


@pytest.mark.parametrize(
    "wrong",
    [lambda: plot.who_holds_what(4, ["ZeRO-4"]), lambda: plot.who_holds_what(64), lambda: pipeline_slots("2f2b", 2, 2)],
)
def test_what_cannot_be_drawn_is_said(wrong):
    with pytest.raises(RecipeError, match=r"ZeRO-4|64|2f2b"):
        wrong()
