"""Chapter 03: cached simulations for an A100, what autograd keeps, and an allocator whose cache is emptied."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from vramlab.hardware.allocator import Allocator
from vramlab.recipe.recipe import Recipe
from vramlab.report.report import Report
from vramlab.simulation.simulate import simulate

from vramlab_course.fragmentation import Requests, requests_of

CARD = "A100"
LENGTHS = (320, 384, 576, 320, 832, 128, 448, 192)


@cache
def simulation(recipe: Recipe) -> Report:
    """`simulate` on CARD, once for each recipe."""
    return simulate(recipe, gpu=CARD)


def backends() -> list[str]:
    """The backends that torch.compile has here, hidden ones too."""
    import torch._dynamo

    return torch._dynamo.list_backends(exclude_tags=())


def saved_bytes(function: Callable[[], Any], own: Iterable[Any] = ()) -> tuple[int, Any]:
    """Bytes of the storages that autograd keeps for the backward pass of `function()`, without those of the tensors
    `own`; and what it returned.

    `watch` would see an eager model: under it torch.compile steps aside.
    """
    import torch

    known = {tensor.untyped_storage().data_ptr() for tensor in own}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    return sum(size for pointer, size in kept.items() if pointer not in known), result


@dataclass(frozen=True)
class Held:
    """What the allocator held over a run: bytes at the peak and between steps, and its calls to the driver."""

    allocated: int
    reserved: int
    between: int
    calls: int


@cache
def requests() -> Requests:
    """What gpt2 of four layers asks for at each of LENGTHS."""
    return requests_of(Recipe("gpt2", batch_size=8, seq_len=1024, precision="fp16-mixed", num_layers=4), LENGTHS)


@cache
def replayed(emptied: bool, limit: int | None = None, before_backward: bool = False) -> Held:
    """The steps of LENGTHS through the allocator's model; `emptied` calls `empty_cache()` in each step, after it or, as
    the Trainer does, between the forward and the backward pass. Raises AllocatorError when `limit` is too low."""
    asked, allocator, blocks, between = requests(), Allocator(limit=limit), {}, 0
    for length in (None, *LENGTHS):
        log = asked.load if length is None else asked.steps[length]
        empty_at = asked.backward[length] if before_backward and length else len(log)
        for number, (size, storage, _) in enumerate(log, 1):
            if size > 0:
                blocks[id(storage)] = allocator.malloc(storage.asked)
            else:
                allocator.free(blocks.pop(id(storage)))
            if emptied and number == empty_at:
                allocator.empty_cache()
        between = max(between, allocator.reserved)
    return Held(allocator.peak_allocated, allocator.peak_reserved, between, allocator.mallocs + allocator.given_back)
