"""Ratios of times, and what the step does between its phases for them to be worth comparing."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from tiny_models import config
from vramlab import Loop, Recipe
from vramlab.training.training import build, train_step
from vramlab_course import pace


@pytest.fixture
def clock(monkeypatch):
    """Time passes only where a test says so."""
    now = [0.0]
    monkeypatch.setattr(pace.time, "perf_counter", lambda: now[0])
    return now


def spends(clock, *amounts):
    seconds = itertools.cycle(amounts)

    def call():
        clock[0] += next(seconds)

    return call


def test_the_ratio_is_that_of_the_times(clock):
    found = pace.pace(spends(clock, 3.0), spends(clock, 2.0))
    assert found == pace.Pace(1.5, 1.5, 1.5)
    assert str(found) == "1.50 × as long (1.50 to 1.50)"


def test_the_first_call_of_each_is_not_counted_and_one_slow_round_does_not_decide(clock):
    found = pace.pace(spends(clock, 90.0, 3.0, 30.0, 3.0, 3.0, 3.0), spends(clock, 50.0, 1.0, 1.0, 1.0, 1.0, 1.0))
    assert found == pace.Pace(3.0, 3.0, 30.0)


def test_both_take_their_turn_first():
    order = []
    pace.pace(lambda: order.append("a"), lambda: order.append("b"), rounds=2)
    assert order[2:] in (["a", "b", "b", "a"], ["b", "a", "a", "b"])


def test_a_batch_twice_as_large_may_take_twice_as_long():
    assert pace.Pace(3.0, 2.0, 4.0).per(2) == pace.Pace(1.5, 1.0, 2.0)
    with pytest.raises(ValueError, match="a round at least"):
        pace.pace(int, int, rounds=0)


def test_a_stepper_trains():
    step = pace.stepper(Recipe(config("gpt2"), batch_size=1, seq_len=8, num_layers=1, optim="sgd", optim_args="lr=0.5"))
    assert step() > step() > step()


def test_the_cache_is_emptied_where_the_trainer_does_it(monkeypatch):
    recipe = Recipe(config("gpt2"), batch_size=1, seq_len=8, num_layers=1, loop=Loop(empty_cache_steps=2))
    training, seen = build(recipe), []
    train_step(training, seen.append)
    assert training.steps == 1  # on a CPU there is nothing to empty
    training.device, training.steps = SimpleNamespace(type="cuda"), 0
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append("emptied"))
    seen.clear()
    for _ in range(3):
        train_step(training, seen.append)
    emptied = ["forward", "emptied", "backward", "step", "between_steps"]
    assert seen == [*emptied, *(name for name in emptied if name != "emptied"), *emptied]
