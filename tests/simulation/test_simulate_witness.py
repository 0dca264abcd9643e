"""The tracker against a witness that knows nothing of it: the CPU allocator's own events, from torch's profiler.

The step runs twice from equal seeds, once under the tracker and once under the profiler alone. What the profiler sees
besides has names: numbers that Python wrote as literals, saved by autograd as tensors of eight bytes, and what oneDNN's
half-precision products need while they run.
"""

import numpy as np
import pytest
import torch
from tiny_models import config, quick_collections  # noqa: F401
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function
from vramlab.recipe.recipe import Recipe
from vramlab.simulation.simulate import trace
from vramlab.tracking.history import History
from vramlab.tracking.tracked import no_collection, run_tracked
from vramlab.tracking.tracker import Tracker
from vramlab.training.training import build, train_step

CHANGES = {
    "default": {},
    "checkpointing": {"gradient_checkpointing": True},
    "eager": {"attn_implementation": "eager"},
    "sgd": {"optim": "sgd"},
    "autocast": {"precision": "bf16-mixed"},
}
LITERALS = 128  # bytes: sixteen numbers at most in these models


def nodes(found):
    for node in found:
        yield node
        yield from nodes(node.children)


def witnessed(recipe: Recipe) -> dict[str, tuple[int, int]]:
    """Phase to (peak, end) of the second step in bytes above its beginning, by the allocator's events."""
    torch.manual_seed(0)
    training = build(recipe, "cpu", target="cpu")

    def mark(name: str) -> None:
        with record_function("phase:" + name):
            pass

    with no_collection():
        train_step(training)
        training.loss = training.outputs = None  # a profiler does not see the end of what began before it
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            train_step(training, mark)
            mark("")
    events = []
    for node in nodes(profiler.profiler.kineto_results.experimental_event_tree()):
        if node.tag == _EventType.Allocation:
            events.append((node.start_time_ns, node.extra_fields.alloc_size, ""))
        elif node.name.startswith("phase:"):
            events.append((node.start_time_ns, 0, node.name.removeprefix("phase:")))
    phases, name, live, peak = {}, "", 0, 0
    for _, size, begins in sorted(events, key=lambda event: event[0]):
        if begins or (not size and name):
            phases[name] = (peak, live)
            name, peak = begins, live
        live += size
        peak = max(peak, live)
    phases.pop("", None)
    return phases


def tracked(recipe: Recipe) -> dict[str, tuple[int, int]]:
    """The same, by the tracker. The loss of the step before goes in this one's backward: four bytes less from there on."""
    torch.manual_seed(0)
    tracker = run_tracked(build(recipe, "cpu", target="cpu"), Tracker("cpu"), 2, "cpu")
    history = History(tracker.log, tracker.marks)
    before = history.live[history.last_step[0][1]]
    return {
        name: (int(history.live[history.highest(a, b)] - before), int(history.live[b] - before))
        for name, a, b in history.last_step
    }


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "mixtral"])
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_the_allocator_says_the_same(family, changes):
    recipe = Recipe(config(family), 2, 32, num_layers=2, **changes)
    seen, claimed = witnessed(recipe), tracked(recipe)
    assert list(seen) == list(claimed) == ["forward", "backward", "step", "between_steps"]
    assert max(end for _, end in claimed.values()) > 1_000_000 or recipe.gradient_checkpointing
    for phase, (peak, end) in seen.items():
        # oneDNN repacks one operand of a product at a time; no matrix here is larger than the head's
        packing = 2 * 1000 * 128 if recipe.precision == "bf16-mixed" else 0
        assert 0 <= peak - claimed[phase][0] <= LITERALS + packing, phase
        assert 0 <= end - claimed[phase][1] <= LITERALS, phase


def test_a_checkpoint_keeps_the_generators_state_where_it_trains_on_cpu():
    """One a layer until it is recomputed. On CUDA both generators' states are on the host."""
    recipe = Recipe(config("llama"), 2, 32, num_layers=2, gradient_checkpointing=True)
    size = torch.get_rng_state().nbytes
    kept = {}
    for target in ("cpu", "cuda"):
        history = trace(recipe, target, full=True)
        kept[target] = [s.asked for change, s, _ in history.log if s.op == "get_rng_state" and change > 0]
    assert kept == {"cpu": [size] * 8, "cuda": []}  # two layers, two steps, kept and to be restored


def test_a_missing_tensor_would_be_seen():
    """The bounds are narrow enough: one vector less, and the two witnesses part."""
    recipe = Recipe(config("gpt2"), 2, 32, num_layers=2)
    peak, _ = witnessed(recipe)["forward"]
    smallest = 4 * 2 * 32  # a layer norm's statistics
    assert not 0 <= peak - (tracked(recipe)["forward"][0] - smallest) <= LITERALS
    assert np.sign(peak) == 1
