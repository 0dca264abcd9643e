"""Reserved against allocated over time: a real sequence of requests, followed through the allocator's model.

    from vramlab.hardware.expandable import ExpandableAllocator
    from vramlab_course.fragmentation import follow, requests_of

    requests = requests_of(Recipe("gpt2", batch_size=8), lengths)
    print(follow(requests, lengths, ExpandableAllocator()).peak_reserved)

The requests are those of the real training step on fake tensors (`simulate`), so what comes of them is simulated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from vramlab.hardware.allocator import Allocator
from vramlab.recipe.recipe import Recipe
from vramlab.tracking.tracker import Storage

Log = list[tuple[int, Storage, str]]


@dataclass(frozen=True)
class Requests:
    """What a run asks the allocator for: `load` until the first step is done, `steps[n]` in one of n tokens.

    `backward[n]` is how many events of `steps[n]` come before the backward pass.
    """

    load: Log
    steps: Mapping[int, Log]
    backward: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Followed:
    """What the allocator held after each event, in bytes, and where the steps end (events).

    `mallocs` and `given_back` are the calls to cudaMalloc and cudaFree of each step.
    """

    allocated: list[int]
    reserved: list[int]
    ends: list[int]
    mallocs: list[int]
    given_back: list[int]

    @property
    def peak_allocated(self) -> int:
        """The most bytes in living blocks."""
        return max(self.allocated)

    @property
    def peak_reserved(self) -> int:
        """The most bytes in segments."""
        return max(self.reserved)

    @property
    def overhead(self) -> float:
        """How much more is reserved than allocated at their peaks: 0.25 is a quarter more."""
        return self.peak_reserved / self.peak_allocated - 1


def requests_of(recipe: Recipe, lengths: Sequence[int]) -> Requests:
    """What `recipe` asks for on CUDA when its batches have these lengths (tokens), simulated.

    The real training step runs on fake tensors, a batch of another length each time. A step's requests begin and end
    with nothing but weights and states alive: what the loop carries on (loss and batch, some KiB) is left out, so that
    steps can be put together in any order.
    """
    from vramlab.simulation.fakes import fake_world
    from vramlab.simulation.simulate import make_tracker
    from vramlab.tracking.tracked import run_tracked
    from vramlab.training.training import build, make_batch

    distinct = list(dict.fromkeys(lengths))
    todo = [distinct[0], *distinct]  # the first step makes the optimizer's states
    with fake_world("cuda", None) as (_, kernels):
        training = build(recipe.replace(seq_len=todo[0]), "cpu", target="cuda")
        tracker, coming = make_tracker(training, None, kernels), iter(todo[1:])

        def next_batch() -> None:
            if tracker.phase == "step" and (length := next(coming, None)):  # the update is done
                training.batch = make_batch(recipe.replace(seq_len=length))

        run_tracked(training, tracker, len(todo), "cuda", next_batch)
    ends = [position for position, phase in tracker.marks if phase == "between_steps"]
    steps, backward = {}, {}
    for length, (start, end) in zip(distinct, pairwise(ends), strict=True):
        middle = next(at for at, phase in tracker.marks if phase == "backward" and start < at <= end)
        kept = _closed(tracker.log[start:end])
        steps[length] = [tracker.log[start + offset] for offset in kept]
        backward[length] = sum(start + offset < middle for offset in kept)
    return Requests(tracker.log[: ends[0]], steps, backward)


def _closed(log: Log) -> list[int]:
    """The positions of the events of what is born and freed within `log`."""
    born, freed = ({id(storage) for size, storage, _ in log if (size > 0) is birth} for birth in (True, False))
    closed = born & freed
    return [position for position, event in enumerate(log) if id(event[1]) in closed]


def follow(requests: Requests, lengths: Sequence[int], allocator: Allocator | None = None) -> Followed:
    """Run the load, then a step of each of `lengths`, through `allocator` (one with default settings if left out).

    Raises AllocatorError when the allocator's limit is too low.
    """
    allocator = allocator or Allocator()
    blocks, allocated, reserved = {}, [], []
    ends, mallocs, given_back = [], [], []
    for log in (requests.load, *(requests.steps[length] for length in lengths)):
        before = allocator.mallocs, allocator.given_back
        for size, storage, _ in log:
            if size > 0:
                blocks[id(storage)] = allocator.malloc(storage.asked)
            else:
                allocator.free(blocks.pop(id(storage)))
            allocated.append(allocator.allocated)
            reserved.append(allocator.reserved)
        ends.append(len(allocated))
        mallocs.append(allocator.mallocs - before[0])
        given_back.append(allocator.given_back - before[1])
    return Followed(allocated, reserved, ends, mallocs[1:], given_back[1:])
