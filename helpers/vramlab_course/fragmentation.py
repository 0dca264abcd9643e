"""Reserved against allocated over time.

The requests of steps of many lengths are run through the allocator's model.

    from vramlab_course.expandable import ExpandableAllocator
    from vramlab_course.fragmentation import follow, requests_of

    requests = requests_of(Recipe("gpt2", batch_size=8), lengths)
    print(follow(requests, lengths, ExpandableAllocator()).peak_reserved)

The requests are those of the real training step on fake tensors (`simulate`), so the result is
simulated.
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
    """What a run asks the allocator for.

    Attributes:
        load: until the first step is done.
        steps: what a step asks for, by its tokens.
        backward: number of events before the backward pass, by the step's tokens.
    """

    load: Log
    steps: Mapping[int, Log]
    backward: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Followed:
    """What the allocator held in bytes after each event, and what each step did.

    Attributes:
        allocated, reserved: after each event.
        ends: number of events done at the end of the load and of each step.
        between: reserved at these ends.
        mallocs, given_back: calls to cudaMalloc and cudaFree in each step.
    """

    allocated: list[int]
    reserved: list[int]
    ends: list[int]
    between: list[int]
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
    """Simulate what `recipe` asks for on CUDA when its batches have these lengths (tokens).

    The training step runs on fake tensors with a batch of each length. A step's requests begin and
    end with only weights and states alive, so steps can follow each other in any order: what the
    loop keeps (loss and batch, some KiB) is left out.
    """
    from vramlab.simulation.fakes import fake_world
    from vramlab.simulation.simulate import load_libraries, make_tracker
    from vramlab.tracking.tracked import run_tracked
    from vramlab.training.training import build, make_batch

    distinct = list(dict.fromkeys(lengths))
    todo = [distinct[0], *distinct]  # the first step makes the optimizer's states
    load_libraries(recipe)  # or a GPU's kernels are not taken for TRL's loss
    with fake_world("cuda", None) as (_, kernels):
        # Fake tensors are on the CPU, with the kernels and the rounding of CUDA.
        training = build(recipe.replace(seq_len=todo[0]), "cpu", target="cuda")
        tracker = make_tracker(training, None, kernels)
        coming = iter(todo[1:])

        def next_batch() -> None:
            if tracker.phase == "step" and (length := next(coming, None)):  # the update is done
                training.batch = make_batch(recipe.replace(seq_len=length))

        # One run for all lengths: weights and states stay, so each step begins as the one before
        # ended.
        run_tracked(training, tracker, len(todo), "cuda", next_batch)
    ends = [position for position, phase in tracker.marks if phase == "between_steps"]
    steps = {}
    backward = {}
    for length, (start, end) in zip(distinct, pairwise(ends), strict=True):
        # Where the backward pass of this step begins.
        middle = next(
            at for at, phase in tracker.marks if phase == "backward" and start < at <= end
        )
        # Events of storages that outlive the step are left out, so that any order of steps closes.
        kept = _closed(tracker.log[start:end])
        steps[length] = [tracker.log[start + offset] for offset in kept]
        backward[length] = sum(start + offset < middle for offset in kept)
    return Requests(tracker.log[: ends[0]], steps, backward)


def _closed(log: Log) -> list[int]:
    """Positions of the events of storages that are both born and freed within `log`."""
    born = {id(storage) for size, storage, _ in log if size > 0}
    freed = {id(storage) for size, storage, _ in log if size <= 0}
    closed = born & freed
    # Both events of a storage hold the same object.
    return [position for position, event in enumerate(log) if id(event[1]) in closed]


def follow(
    requests: Requests,
    lengths: Sequence[int],
    allocator: Allocator | None = None,
    empty_cache: str = "",
) -> Followed:
    """Run the load, then a step of each of `lengths`, through `allocator`.

    Without an allocator it is one with default settings.

    `empty_cache` calls `torch.cuda.empty_cache()` in each step "after step" or, as the Trainer
    does, "before backward". Raises AllocatorError when the allocator's limit is too low.
    """
    allocator = allocator or Allocator()
    blocks = {}
    allocated = []
    reserved = []
    ends = []
    between = []
    mallocs = []
    given_back = []
    # None is the load, which has the first step in it
    for length in (None, *lengths):
        log = requests.load if length is None else requests.steps[length]
        # "after step" is after the last event; "before backward" after the events until then.
        empty_at = (
            requests.backward[length] if length and empty_cache == "before backward" else len(log)
        )
        before = allocator.mallocs, allocator.given_back
        for number, (size, storage, _) in enumerate(log, 1):
            if size > 0:
                blocks[id(storage)] = allocator.malloc(storage.asked)
            else:
                allocator.free(blocks.pop(id(storage)))
            allocated.append(allocator.allocated)
            reserved.append(allocator.reserved)
            if empty_cache and number == empty_at:
                allocator.empty_cache()
        ends.append(len(allocated))
        between.append(allocator.reserved)
        mallocs.append(allocator.mallocs - before[0])
        given_back.append(allocator.given_back - before[1])
    # The first entry is of the load.
    return Followed(allocated, reserved, ends, between, mallocs[1:], given_back[1:])
