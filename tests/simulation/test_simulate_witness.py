"""The tracker against a witness that knows nothing of it: the CPU allocator's own events, from
torch's profiler.

The step runs twice from equal seeds, once under the tracker and once under the profiler alone. What
the profiler sees besides has names: numbers that Python wrote as literals, saved by autograd as
tensors of eight bytes, and what oneDNN's half-precision products need while they run.
"""

import numpy as np
import pytest
import torch
from allocator_events import LITERALS, tracked, witnessed
from tiny_models import config
from vramlab.recipe.recipe import Recipe, Sharding
from vramlab.simulation.simulate import trace
from vramlab.training.process_group import one_rank_of

CHANGES = {
    "default": {},
    "checkpointing": {"gradient_checkpointing": True},
    "eager": {"attn_implementation": "eager"},
    "sgd": {"optim": "sgd"},
    "autocast": {"precision": "bf16-mixed"},
}


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "mixtral"])
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_the_allocator_says_the_same(family, changes):
    recipe = Recipe(config(family), 2, 32, num_layers=2, **changes)
    seen, claimed = witnessed(recipe), tracked(recipe)
    assert list(seen) == list(claimed) == ["forward", "backward", "step", "between_steps"]
    assert max(end for _, end in claimed.values()) > 1_000_000 or recipe.gradient_checkpointing
    for phase, (peak, end) in seen.items():
        # oneDNN repacks one operand of a product at a time; no matrix here is larger than the
        # head's
        packing = 2 * 1000 * 128 if recipe.precision == "bf16-mixed" else 0
        assert 0 <= peak - claimed[phase][0] <= LITERALS + packing, phase
        assert 0 <= end - claimed[phase][1] <= LITERALS, phase


def test_what_names_fsdps_gradients_holds_none_of_them():
    """The last of a unit was alive while the unit was reduced: here 192,000 bytes too much."""
    sharding = Sharding(3, 1, "fsdp")
    recipe = Recipe(config("llama"), 2, 24, "bf16-mixed", num_layers=2, sharding=sharding)
    with one_rank_of(sharding):
        (seen, _), (claimed, _) = (ask(recipe)["backward"] for ask in (witnessed, tracked))
    assert 0 <= seen - claimed <= LITERALS


def test_a_checkpoint_keeps_the_generators_state_where_it_trains_on_cpu():
    """One a layer until it is recomputed. On CUDA both generators' states are on the host."""
    recipe = Recipe(config("llama"), 2, 32, num_layers=2, gradient_checkpointing=True)
    size = torch.get_rng_state().nbytes
    kept = {}
    for target in ("cpu", "cuda"):
        history = trace(recipe, target, full=True)
        kept[target] = [
            s.asked for change, s, _ in history.log if s.op == "get_rng_state" and change > 0
        ]
    assert kept == {"cpu": [size] * 8, "cuda": []}  # two layers, two steps, kept and to be restored


def test_a_missing_tensor_would_be_seen():
    """The bounds are narrow enough: one vector less, and the two witnesses part."""
    recipe = Recipe(config("gpt2"), 2, 32, num_layers=2)
    peak, _ = witnessed(recipe)["forward"]
    smallest = 4 * 2 * 32  # a layer norm's statistics
    assert not 0 <= peak - (tracked(recipe)["forward"][0] - smallest) <= LITERALS
    assert np.sign(peak) == 1
