"""Requests of a real step at several lengths: they close, they follow each other, and the order of
lengths matters.
"""

import json
import runpy
from pathlib import Path

import pytest
from vramlab import Recipe
from vramlab.base.data import data_path
from vramlab.hardware.allocator import Allocator, AllocatorError
from vramlab.simulation.simulate import simulate
from vramlab_course.chapters import chapter_07
from vramlab_course.expandable import ExpandableAllocator
from vramlab_course.fragmentation import follow, requests_of

RECIPE = Recipe("pythia-70m", batch_size=4, num_layers=2)
LENGTHS = [64, 512, 256]


@pytest.fixture(scope="module")
def requests():
    return requests_of(RECIPE, LENGTHS)


def test_a_step_leaves_nothing_behind(requests):
    assert list(requests.steps) == LENGTHS
    for log in requests.steps.values():
        assert sum(size for size, _, _ in log) == 0 and len(log) > 300


def test_the_peak_is_what_simulate_says(requests):
    for length in LENGTHS:
        report = simulate(RECIPE.replace(seq_len=length))
        found = follow(requests, [length])
        assert max(found.allocated[found.ends[0] :]) == pytest.approx(report.allocated, rel=0.002)


def test_longer_and_longer_reserves_most_and_longest_first_least(requests):
    up, down = (follow(requests, sorted(LENGTHS, reverse=back)) for back in (False, True))
    assert up.peak_allocated == pytest.approx(down.peak_allocated, rel=0.01)
    assert up.overhead > down.overhead >= 0
    grown = follow(requests, sorted(LENGTHS), ExpandableAllocator())
    assert grown.peak_reserved < up.peak_reserved


def test_the_second_time_round_asks_for_nothing(requests):
    found = follow(requests, [512, 512, 512])
    assert found.mallocs[1:] == [0, 0] and sum(found.given_back) == 0
    assert len(found.ends) == 4 and found.ends[-1] == len(found.reserved) == len(found.allocated)


def test_a_small_card_makes_it_give_back_or_refuses(requests):
    free = follow(requests, sorted(LENGTHS))
    tight = follow(requests, sorted(LENGTHS), Allocator(limit=int(free.peak_allocated * 1.25)))
    assert (
        sum(tight.given_back) > 0
        and tight.peak_reserved <= free.peak_allocated * 1.25 < free.peak_reserved
    )
    with pytest.raises(AllocatorError, match="out of memory"):
        follow(requests, sorted(LENGTHS), Allocator(limit=free.peak_allocated // 2))


def stored():
    return json.loads(data_path("many_lengths.json").read_text())


def test_the_stored_runs_are_of_chapter_07_s_recipe_and_lengths():
    found = stored()
    assert found["recipe"] == chapter_07.WHOLE.to_dict()
    assert found["lengths"] == chapter_07.LENGTHS


@pytest.mark.slow  # all layers: two minutes for both
@pytest.mark.parametrize(
    ("part", "made"), [("runs", "whole_runs"), ("small_card", "on_small_card")]
)
def test_the_stored_runs_are_what_the_whole_8b_does_now(part, made):
    script = Path(__file__).parents[2] / "benchmarks" / "many_lengths.py"
    assert runpy.run_path(str(script))[made]() == stored()[part]
