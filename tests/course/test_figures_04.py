"""Chapter 04's pictures of a world of ranks, and what they are computed from."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vramlab_course.chapters.figures_04 import (
    SECONDS,
    bubble,
    most_held,
    pipeline,
    pipeline_ends,
    stage_order,
    who_holds_what,
)

pytestmark = pytest.mark.usefixtures("no_figure_stays")
STAGES, MICRO = st.integers(1, 6), st.integers(1, 12)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["gpipe", "1f1b"]), STAGES, MICRO)
def test_a_schedule_does_all_work_once_in_an_order_that_can_be(schedule, stages, micro_batches):
    ends = pipeline_ends(
        [stage_order(schedule, stage, stages, micro_batches) for stage in range(stages)]
    )
    assert len(ends) == 2 * stages * micro_batches
    for (stage, kind, m), end in ends.items():
        start = end - SECONDS[kind]
        if kind == "backward":
            assert start >= ends[stage, "forward", m]
        before = stage - 1 if kind == "forward" else stage + 1
        if 0 <= before < stages:
            assert start >= ends[before, kind, m]
    for stage in range(stages):
        order = stage_order(schedule, stage, stages, micro_batches)
        assert all(
            ends[stage, *one] <= ends[stage, *other] - SECONDS[other[0]]
            for one, other in pairwise(order)
        )
        assert most_held(order) == (
            micro_batches if schedule == "gpipe" else min(stages - stage, micro_batches)
        )


@settings(max_examples=40, deadline=None)
@given(STAGES, MICRO)
def test_both_schedules_wait_as_long_as_the_formula_says(stages, micro_batches):
    for schedule in ("gpipe", "1f1b"):
        waiting = bubble(
            pipeline_ends(
                [stage_order(schedule, stage, stages, micro_batches) for stage in range(stages)]
            )
        )
        assert waiting == pytest.approx((stages - 1) / (micro_batches + stages - 1))


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


def test_the_timeline_of_a_pipeline_says_what_each_schedule_holds():
    rows = pipeline(4, 8).rows
    assert [row[-1] for row in rows[1:]] == ["8", "4"] and [row[2] for row in rows[1:]] == [
        "27.3%",
        "27.3%",
    ]
