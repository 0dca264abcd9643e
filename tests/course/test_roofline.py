"""A measurement takes the best of its turns."""

import pytest
from vramlab_course import roofline
from vramlab_course.roofline import best_seconds


def test_each_computation_has_the_best_of_its_turns(monkeypatch):
    """With a clock that says how long each turn took; the first run of each is not timed."""
    runs, turns = [], {"a": [5, 2, 9], "b": [7, 8, 6]}
    ticks = iter(
        tick for pair in zip(*turns.values(), strict=True) for took in pair for tick in (0, took)
    )
    for clock in ("perf_counter", "thread_time"):  # a GPU's and a CPU's
        monkeypatch.setattr(roofline.time, clock, lambda: next(ticks))
    monkeypatch.setattr(roofline, "ROUNDS", 3)
    found = best_seconds({name: lambda name=name: runs.append(name) for name in turns})
    assert found == {"a": 2, "b": 6} and runs == ["a", "b"] * 4


def test_one_core_and_then_the_readers_setting_again(monkeypatch):
    import torch

    seen, before = [], torch.get_num_threads()
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    with pytest.raises(ZeroDivisionError):
        best_seconds({"a": lambda: 1 / 0})
    assert seen == [1, before]
