"""The quick fake mode is taken where it fits the installed torch; torch's own, with the same bytes,
where it does not.
"""

from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from vramlab.recipe.recipe import Recipe
from vramlab.simulation import fake_mode
from vramlab.simulation.fake_mode import QuickFakeMode
from vramlab.simulation.simulate import simulate

RECIPE = Recipe("gpt2", seq_len=32, precision="bf16-mixed")


@pytest.fixture(autouse=True)
def untried():
    """Let the next simulation try the quick mode again, and so the first one after the test."""
    fake_mode.quick_mode_fits.cache_clear()
    yield
    fake_mode.quick_mode_fits.cache_clear()


def another_argument(self, state, key, func, args, kwargs, output, reason):
    """`FakeTensorMode._make_cache_entry` of a torch to come."""


def other_strides(self, state, key, func, args, kwargs, output):
    """The same of another torch: it keeps strides in another order."""
    entry = FakeTensorMode._make_cache_entry(self, state, key, func, args, kwargs, output)
    for made in entry.output_infos:
        if made.metadata:
            made.metadata.stride = made.metadata.stride[::-1]
    return entry


def no_shared_storage(self, state, key, func, args, kwargs, output):
    """The same of another torch: it does not say which argument's storage a view shares."""
    entry = FakeTensorMode._make_cache_entry(self, state, key, func, args, kwargs, output)
    for made in entry.output_infos:
        made.view_idx = None
    return entry


def test_the_installed_torch_takes_the_quick_mode():
    assert type(fake_mode.fake_mode("cpu")) is QuickFakeMode


def test_the_trial_does_not_depend_on_a_callers_modes():
    with torch.inference_mode():
        assert fake_mode.quick_mode_fits()


@pytest.mark.parametrize("changed", [another_argument, other_strides, no_shared_storage])
def test_a_change_of_private_parts_is_found(changed):
    with patch.object(QuickFakeMode, "_make_cache_entry", changed):
        assert type(fake_mode.fake_mode("cpu")) is fake_mode.RuledFakeMode


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_torchs_own_mode_gives_the_same_bytes(target):
    quick = simulate(RECIPE, target=target)
    fake_mode.quick_mode_fits.cache_clear()
    with patch.object(QuickFakeMode, "_make_cache_entry", another_argument):
        assert simulate(RECIPE, target=target) == quick
        assert not fake_mode.quick_mode_fits()


def test_slices_of_one_buffer_are_found_out_once():
    mode = QuickFakeMode({}, {})
    with mode:
        buffer = torch.empty(100)
        halves = [buffer[start : start + 10].to(torch.bfloat16) for start in (0, 10, 20)]
        rows = [buffer.as_strided((10,), (1,), start) for start in (0, 10, 20)]
        again = [row.unsqueeze(0) for row in rows]
    casts = [key for key in mode._entries if key[0] == torch.ops.aten._to_copy.default]
    assert len(casts) == 1
    assert [half.storage_offset() for half in halves] == [0, 0, 0]
    # a view's place in the storage is its base's
    assert [view.storage_offset() for view in again] == [0, 10, 20]


def test_a_collective_of_a_fake_group_has_a_rule():
    broadcast = torch.ops.c10d.broadcast_.default
    rule = fake_mode.rules_of("cuda")[broadcast]
    tensors = [torch.empty(2)]
    assert rule(tensors)[0] is tensors
