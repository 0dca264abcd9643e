"""What a log is replayed to: bytes by category at every moment, phases, peaks, the timeline."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from vramlab.report.report import Bytes, Cause, MiB, Phase
from vramlab.tracking.history import History, Log, _apart, merge
from vramlab.tracking.tracker import Storage


def storage(
    size: int, category: str | None, op: str = "mm", shape: tuple = (), where: str = ""
) -> Storage:
    return Storage(size, size, category, op, where, shape, "float32")


WEIGHT = storage(1000, "parameters", "given")
SAVED = storage(300, "activations")
PASSING = storage(700, None)
GRADIENT = storage(1000, "gradients")
STATE = storage(2000, "optimizer_states")


def one_step(first: bool) -> list:
    """Forward keeps 300 and needs 700 for a moment, backward makes 1,000 and frees 300, the step
    keeps 2,000 once.
    """
    saved, passing, gradient = (
        storage(s.size, s.category, s.op) for s in (SAVED, PASSING, GRADIENT)
    )
    events = [("forward", [(300, saved), (700, passing), (-700, passing)])]
    events.append(("backward", [(1000, gradient), (-300, saved)]))
    events.append(("step", [(2000, STATE)] if first else []))
    events[-1][1].append((-1000, gradient))
    return [*events, ("between_steps", [])]


def two_steps() -> History:
    log, marks = [(1000, WEIGHT, "given")], []
    for name, events in (*one_step(True), *one_step(False)):
        marks.append((len(log), name))
        log += [(size, s, s.op if size > 0 else "free") for size, s in events]
    return History(log, marks)


def test_every_moment_by_category():
    history = two_steps()
    assert history.live.tolist() == [
        *(0, 1000, 1300, 2000, 1300, 2300, 2000, 4000, 3000),
        *(3300, 4000, 3300, 4300, 4000, 3000),
    ]
    assert history.split(3) == Bytes(parameters=1000, activations=300, temporaries=700)
    assert (history.splits.sum(axis=1) == history.live).all()


def test_phases_are_the_last_steps():
    phases = two_steps().phases()
    kept = {"parameters": 1000, "optimizer_states": 2000}
    assert phases["load"] == Phase(Bytes(parameters=1000), Bytes(parameters=1000))
    assert phases["forward"].peak == Bytes(**kept, activations=300, temporaries=700)
    assert phases["forward"].end == Bytes(**kept, activations=300)
    assert phases["backward"].peak == Bytes(**kept, activations=300, gradients=1000)
    assert phases["backward"].end == Bytes(**kept, gradients=1000)
    assert phases["step"].end == phases["between_steps"].peak == Bytes(**kept)


def test_the_peak_is_the_first_highest_moment_of_the_whole_run():
    history = two_steps()
    at = history.highest()
    assert (at, history.live[at], history.phase_at(at)) == (12, 4300, "backward")
    assert (
        history.phase_at(0) == "load"
        and history.phase_at(1) == "load"
        and history.phase_at(2) == "forward"
    )


def test_largest_are_what_is_alive_there():
    history = two_steps()
    alive = history.largest(12)
    assert sum(group.size * group.count for group in alive) == history.live[12]
    assert {group.category for group in alive} == {
        "parameters",
        "optimizer_states",
        "activations",
        "gradients",
    }


def test_a_micro_batch_has_its_phases_merged():
    low, high = Bytes(activations=1), Bytes(activations=5)
    cause = Cause("forward", "mm", "up_proj", 5, "activations")
    stretches = [
        ("forward", Phase(high, low, cause)),
        ("backward", Phase(low, low)),
        ("forward", Phase(low, high)),
    ]
    assert merge(stretches)["forward"] == Phase(peak=high, end=high, cause=cause)


def causes_of(*events: tuple[int, Storage, str], begin: int = 0) -> Cause | None:
    """The cause of the highest moment of a backward pass that these events are."""
    history = History(list(events), [(begin, "backward")])
    return history.cause(history.highest(begin), begin)


def test_a_cause_is_what_the_last_operator_made_in_its_module():
    saved = storage(300, "activations", where="up")
    small, large = (storage(size, None, "mm", (size,), "down") for size in (100, 700))
    made = [(300, saved, "mm"), (100, small, "mm"), (700, large, "mm"), (-100, small, "free")]
    cause = Cause("backward", "mm", "down", 800, "temporaries", 2, (700,), "float32")
    assert causes_of(*made) == cause
    large.recomputed = True
    assert causes_of(*made).direction == "recomputation"


def test_an_operator_of_many_tensors_has_no_place():
    roots = [
        storage(size, None, "_foreach_sqrt", where=name) for size, name in ((5, "a"), (9, "b"))
    ]
    cause = causes_of(*((root.size, root, root.op) for root in roots))
    assert (cause.size, cause.count, cause.where) == (14, 2, "")
    several = [(5, storage(5, None, where="a"), "mm"), (9, storage(9, None, where="b"), "mm")]
    assert (causes_of(*several).size, causes_of(*several).where) == (9, "b")


def test_a_peak_at_a_phases_begin_is_of_the_phase_before():
    events = [(300, SAVED, "mm"), (-300, SAVED, "free")]
    assert causes_of(*events, begin=1) is None
    assert causes_of(*events).op == "mm"


def test_largest_counts_every_birth_that_no_free_follows():
    """A micro-batch's storages have the same numbers in each step, and a module may keep what it
    made.
    """
    events = [(700, PASSING, "mm"), (-700, PASSING, "free")]
    order = np.array([0, 1, 0, 0, 1, 0, 0])
    keys, shifts = np.array([0, 0, 0, 1, 1, 2, 0]), np.array([0, 0, 0, 1, 1, 2, 0])
    history = History(Log(events, order, keys, shifts, lambda name, groups: f"layer {groups}"), [])
    assert [[(g.count, g.where) for g in history.largest(at)] for at in (1, 2, 3, 4, 5, 7)] == [
        [(1, "layer 0")],
        [],
        [(1, "layer 0")],
        [(2, "layer 0")],
        [(1, "layer 0")],
        [(3, "layer 0")],
    ]


def test_largest_counts_equal_tensors_together_and_ranks_by_their_sum():
    made = [storage(10, "activations", where=where) for where in "axyzw"] + [
        storage(40, "parameters", "given", where="b")
    ]
    ranked = History([(s.size, s, s.op) for s in made], []).largest(6)
    assert [(t.size, t.count, t.where) for t in ranked] == [(10, 5, "a"), (40, 1, "b")]
    many = [storage(i, "inputs") for i in range(1, 30)]
    assert len(History([(s.size, s, s.op) for s in many], []).largest(29)) == 24


@pytest.mark.parametrize("points", [4, 40, 400])
def test_the_timeline_keeps_peaks_and_ends(points):
    history = two_steps()
    moments = history.timeline(points)
    assert max(m.bytes.total for m in moments) == 4300
    assert [m.index for m in moments] == sorted({m.index for m in moments})
    assert (moments[0].index, moments[0].bytes.total) == (0, 3000)
    assert moments[-1].bytes.total == 3000
    assert {"forward", "backward", "step"} <= {m.phase for m in moments}


def test_slack_of_the_allocator_is_workspace():
    weight = storage(11 * MiB, "parameters", "given")
    history = History([(11 * MiB, weight, "given")], [], allocator=True)
    assert history.split(1) == Bytes(parameters=11 * MiB, workspace=MiB)
    assert (history.live.max(), history.live[1], history.requested) == (
        12 * MiB,
        12 * MiB,
        11 * MiB,
    )


def test_a_cache_that_grows_gives_back_what_the_card_has_not():
    """Each token's cache is born before the last one's is freed."""
    cache = SimpleNamespace(category="kv_cache")
    sizes = [40 * MiB, 20 * MiB]  # of a weight first
    keys = [100, 0]
    for key in range(1, 30):
        sizes += [(20 + 2 * key) * MiB, -(18 + 2 * key) * MiB]
        keys += [key, key - 1]
    log = SimpleNamespace(
        events=[(sizes[0], WEIGHT, ""), *((size, cache, "") for size in sizes[1:])],
        order=np.arange(len(sizes)),
        sizes=np.array(sizes),
        keys=np.array(keys),
        streams=np.zeros(len(sizes), int),
    )
    free = _apart(log, len(sizes), math.inf)
    # the last two alone are 154 MiB, beside 40 of the weight
    within = _apart(log, len(sizes), 240 * MiB)
    assert 194 * MiB <= within <= 240 * MiB < free
    # where they do not fit, or the weight alone does not, the card has twice as much for them
    for too_little in (100, 30):
        assert 194 * MiB <= _apart(log, len(sizes), too_little * MiB) <= (40 + 2 * 154) * MiB < free
