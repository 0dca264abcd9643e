"""Chapter 09's timelines of a pipeline, and its picture of all ways to cut."""

from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vramlab_course.chapters.chapter_09 import Ways
from vramlab_course.figures.figures_09 import (
    SECONDS,
    bubble,
    map_of_cuts,
    most_held,
    pipeline,
    pipeline_ends,
    ring,
    stage_order,
    tensor_cut,
    waiting,
    ways_to_cut,
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


def test_a_schedule_waits_for_its_share():
    assert waiting(partial(stage_order, "1f1b"), 4, 8) == pytest.approx(3 / 11)


def colours(figure) -> list[tuple]:
    return [bar.get_facecolor() for bar in figure.axes[0].patches]


def test_the_map_gives_each_card_its_half_of_what_is_cut():
    figure = map_of_cuts("Ways")
    found = colours(figure)
    # Each drawing has 8 tokens, then 4 layers × 4 columns × 2 halves.
    drawings = [found[40 * at : 40 * at + 40] for at in range(6)]
    first, second = drawings[0][0], drawings[0][4]
    assert first != second
    for name, drawing in zip(figure.rows[1:], drawings, strict=True):
        counts = [drawing.count(card) for card in (first, second)]
        halves = {"DDP (chapter 04)": 4, "4 · context": 4, "5 · experts": 12}
        whole = {"1 · FSDP": 20}
        assert counts == [(halves | whole).get(name[0], 16)] * 2, name


def test_the_ring_shows_each_rank_the_keys_before_its_queries_and_no_later_ones():
    rows = ring("A ring").rows
    assert [row[1] for row in rows[1:]] == [
        "keys 0",
        "keys 3, not looked at",
        "keys 2, not looked at",
        "keys 1, not looked at",
    ]
    assert sorted(row[4] for row in rows[1:]) == ["keys 0", "keys 1", "keys 2", "keys 3"]


def test_the_cut_matrices_are_half_on_each_rank():
    found = colours(tensor_cut("Cut"))
    # x and y are on both; each rank has its part of up, the wide numbers, down and the sum.
    assert sorted(map(found.count, set(found))) == [2, 4, 4]


def test_the_timeline_of_a_pipeline_says_what_each_schedule_holds():
    rows = pipeline(4, 8).rows
    assert [row[-1] for row in rows[1:]] == ["8", "4"] and [row[2] for row in rows[1:]] == [
        "27.3%",
        "27.3%",
    ]


def test_the_timeline_follows_the_order_that_it_is_given():
    def slow(stage, stages, micro_batches):
        return [(kind, m) for m in range(micro_batches) for kind in ("forward", "backward")]

    rows = pipeline(4, 8, own=partial(stage_order, "gpipe")).rows
    assert rows[1][1:] == rows[2][1:] == ("33", "27.3%", "8")
    assert pipeline(4, 8, own=slow).rows[2][3] == "1"


def test_the_picture_of_the_ways_draws_what_its_table_says():
    ways = Ways(token=1.72 / 2048, link=3.4e9)
    figure = ways_to_cut(ways, "Ways", "made up")
    upper, lower = (ax.lines for ax in figure.axes)
    names = [text.get_text() for ax in figure.axes for text in ax.texts]
    assert names[:5] == [row[0] for row in figure.rows[1:]]
    assert names[5:] == ["↑ 6,804: all is hidden", "pipeline = FSDP: 3,732 ↑"]
    assert ways.pipeline(3732) == pytest.approx(ways.hidden(3732), rel=1e-3)
    drawn = [
        [f"{y:.2f}" for x, y in line.get_xydata() if round(x) in (2048, 8192, 32_768)]
        for line in (*upper[:2], *lower)
    ]
    assert [[f"{more} ×" for more in line] for line in drawn] == [
        list(row[1:]) for row in figure.rows[1:]
    ]
    assert "LoRA: published 1.37 × with 12,288" in figure.alt
