"""Peak and end of a step's phases by the CPU allocator's own events, and by the tracker.

The step runs twice from equal seeds, once under the tracker and once under the profiler alone,
which knows nothing of it.
"""

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function
from vramlab.recipe.recipe import Recipe
from vramlab.tracking.history import History
from vramlab.tracking.tracked import run_tracked
from vramlab.tracking.tracker import Tracker
from vramlab.training.quiet import no_collection
from vramlab.training.training import build, train_step

# Bytes that only the profiler sees: numbers that Python wrote as literals, sixteen at most in the
# tests' models.
LITERALS = 128


def nodes(found):
    for node in found:
        yield node
        yield from nodes(node.children)


def witnessed(recipe: Recipe) -> dict[str, tuple[int, int]]:
    """Phase to (peak, end) of the second step in bytes above its beginning, by the allocator's
    events.
    """
    torch.manual_seed(0)
    training = build(recipe, "cpu", target="cpu")

    def mark(name: str) -> None:
        with record_function("phase:" + name):
            pass

    with no_collection():
        train_step(training)
        training.loss = training.outputs = (
            None  # a profiler does not see the end of what began before it
        )
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
    """The same, by the tracker.

    The loss of the step before goes in this one's backward: four bytes less from there on.
    """
    torch.manual_seed(0)
    tracker = run_tracked(build(recipe, "cpu", target="cpu"), Tracker("cpu"), 2, "cpu")
    history = History(tracker.log, tracker.marks)
    before = history.live[history.last_step[0][1]]
    return {
        name: (int(history.live[history.highest(a, b)] - before), int(history.live[b] - before))
        for name, a, b in history.last_step
    }
