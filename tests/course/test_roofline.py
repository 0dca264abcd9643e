"""The roofline's arithmetic against the GPU table, and that a measurement takes the best of its
turns.
"""

import pytest
from vramlab.hardware.gpu import find_gpu
from vramlab_course import roofline
from vramlab_course.roofline import RooflineError, attainable, best_seconds


@pytest.mark.parametrize("name", ["T4", "A100", "H200"])
def test_it_bends_at_the_ridge(name):
    gpu = find_gpu(name)
    peak, ridge = gpu.flops("fp16"), gpu.ridge("fp16")
    assert attainable(ridge, peak, gpu.bandwidth) == pytest.approx(peak)
    assert attainable(ridge / 4, peak, gpu.bandwidth) == pytest.approx(peak / 4)
    assert attainable(ridge * 4, peak, gpu.bandwidth) == peak


@pytest.mark.parametrize("wrong", [(0, 1, 1), (1, -1, 1), (1, 1, 0)])
def test_figures_that_no_roofline_has(wrong):
    with pytest.raises(RooflineError, match="above zero"):
        attainable(*wrong)


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
