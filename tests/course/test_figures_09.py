"""Chapter 09's timelines of a pipeline, and its picture of all ways to cut."""

from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vramlab import Recipe, find_gpu
from vramlab_course.chapters.chapter_09 import Way, idle_in_pipeline, ways_of_eight
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

LAYERS = [5, 4, 4, 4, 4, 4, 4, 3]  # of the drawn pipeline's stages
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


def test_a_way_waits_for_what_each_pass_does_not_hide():
    way = Way(sent=(30e9, 60e9), computing=4e12)
    # A quarter of the computing is forward: one second hides 30 GB, and three hide 60.
    assert way.times(1e12, 30e9) == 1
    assert way.times(1e12, 20e9) == 1 + 0.5 / 4  # only the forward pass waits
    assert way.times(1e12, 10e9) == way.times(2e12, 20e9) == 1 + (2 + 3) / 4
    bare = Way(sent=(30e9, 60e9), computing=4e12, exposed=1)
    assert bare.times(1e12, 30e9) == 1 + 3 / 4
    idle = Way(sent=(0, 0), computing=2e12, idle=0.5)
    assert idle.times(1e12, 1) == 2


def times_of_1f1b(layers, rate, bandwidth):
    """How many times its computing a step of Llama 3.1 8B takes, pass by pass, with its sends."""
    shape = Recipe("llama-3.1-8b").shape
    way = ways_of_eight(shape)["pipeline, 32 samples"]
    weights = 128_256 * 4096
    head = 6 / 8 * weights * 32 / (shape.num_parameters - 2 * weights)  # in layers
    stages = [*layers[:-1], layers[-1] + head]
    unit = way.computing / rate / 4 / sum(stages)  # of a layer and a micro-batch: 32 by 8 ranks
    seconds = {"forward": 0.25 * unit, "backward": 0.75 * unit}
    sending = way.sent[0] / 32 / bandwidth
    queues = [list(stage_order("1f1b", stage, 8, 32)) for stage in range(8)]
    free = [0.0] * 8
    ends = {}
    while any(queues):
        for stage, queue in enumerate(queues):
            if not queue:
                continue
            kind, m = queue[0]
            before = stage - 1 if kind == "forward" else stage + 1
            arrives = 0.0
            if 0 <= before < 8:
                if (before, kind, m) not in ends:
                    continue
                arrives = ends[before, kind, m] + sending
            free[stage] = max(free[stage], arrives) + seconds[kind] * stages[stage]
            ends[stage, kind, m] = free[stage]
            queue.pop(0)
    return max(free) / (4 * unit * sum(stages))


def test_the_figures_pipeline_waits_as_long_as_one_that_is_followed_pass_by_pass():
    card = find_gpu("H100 PCIe")
    rate = 0.4 * card.flops("bf16")
    way = ways_of_eight(Recipe("llama-3.1-8b").shape)["pipeline, 32 samples"]
    for bandwidth in (450e9, 63e9, 25e9 / 8):
        found = times_of_1f1b(LAYERS, rate, bandwidth)
        estimated = way.times(rate, bandwidth)
        assert estimated == pytest.approx(found, abs=0.05)
        assert f"{estimated:.1f}" == f"{found:.1f}"  # what the picture says


def test_what_a_pipeline_waits_is_the_bubble_and_what_its_longest_stage_is_longer():
    shape = Recipe("llama-3.1-8b").shape
    weights = 128_256 * 4096
    layer = (shape.num_parameters - 2 * weights) / 32
    # Checkpointing repeats the layers' forward pass only: 8 operations a weight, and 6 in the head.
    head = 6 / 8 * weights
    idle = ways_of_eight(shape)["pipeline, 32 samples"].idle
    # The first stage takes 32 micro-batches one after the other, and one passes the other seven.
    assert max(LAYERS) * layer > LAYERS[-1] * layer + head
    longest = 32 * 5 * layer + 27 * layer + head
    assert 1 / (1 - idle) == pytest.approx(longest / (32 * (32 * layer + head) / 8))
    assert idle_in_pipeline([4] * 8, head=0) == pytest.approx(7 / (32 + 7))


def test_the_picture_of_the_ways_draws_what_its_table_says():
    ways = {
        "whole, 1 sample": Way((0, 30e9), 4e12 / 3),
        "cut": Way((2e9, 2e9), 2e12, 1),
    }
    links = {"fast": (1e12, 30e9), "slow": (1e12, 10e9)}
    figure = ways_to_cut(ways, links, "Ways", "made up")
    assert figure.rows[1:] == [
        ("whole, 1 sample", "30.0", "1.0 ×", "2.5 ×"),
        ("cut", "4.0", "1.1 ×", "1.2 ×"),
    ]
    (ax,) = figure.axes
    heights = [round(height, 3) for dots in ax.lines for height in dots.get_ydata()]
    assert heights == [1, 1.067, 2.5, 1.2] and ax.get_yscale() == "log"
    assert [text.get_text() for text in ax.texts] == ["1.0", "1.1", "2.5", "1.2"]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["over fast", "over slow"]
    assert "whole, 1 sample" in figure.alt
