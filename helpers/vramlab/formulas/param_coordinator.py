"""How many elements DeepSpeed's stage 3 has gathered, by the rules of its parameter coordinator.

A module's weights are gathered before it runs, and the next ones prefetched, up to a bucket and
while fewer than `MOST` are gathered; after it they are released, unless they are used again within
`MOST` elements. Weights of up to ten times the hidden size are whole on every rank and not counted
(partitioned_param_coordinator.py, `_fetch_sub_module_impl`, `__params_to_release`).
"""

from collections import deque
from functools import lru_cache
from itertools import accumulate, groupby
from math import ceil, prod
from typing import NamedTuple

from ..recipe.deepspeed_config import HIDDEN
from ..recipe.shapes import Shape

MOST = 1_000_000_000  # stage3_max_live_parameters, and stage3_max_reuse_distance
PARTS = ("forward", "head", "backward", "front")  # "front" is the embedding's backward pass

Weights = dict[str, int]  # name to elements


class Module(NamedTuple):
    """A module with weights of its own.

    Attributes:
        layer: the layer that it is in, "" where it is in none.
        part: the part of the step that its backward pass is in.
    """

    layer: str
    part: str
    weights: Weights


class Use(NamedTuple):
    """A weight of `size` elements that the module of a step needs."""

    step: int
    name: str
    size: int


Run = tuple[str, Weights]  # the part of the step that a module runs in, and what it needs


@lru_cache(maxsize=64)
def gathered(shape: Shape, checkpoints: bool, ranks: int = 0) -> dict[str, int]:
    """Return the peak of gathered elements in each part of a steady step.

    With activation checkpointing backward first runs each layer again. Where parts are offloaded,
    each of `ranks` copies its part of a weight to the device before it is gathered; the largest of
    those fetched together counts.
    """
    runs = _runs(_modules(shape), checkpoints)
    bucket = HIDDEN["stage3_prefetch_bucket_size"](shape.hidden_size)
    coming: deque[Use] = deque()
    uses: dict[str, list[int]] = {}
    for step, (_, weights) in enumerate(runs):
        for name, size in weights.items():
            coming.append(Use(step, name, size))
            uses.setdefault(name, []).append(step)
    # Elements of all modules before each step, to tell how far away the next use of a weight is.
    elements = [sum(weights.values()) for _, weights in runs]
    passed = list(accumulate(elements, initial=0))

    live: Weights = {}
    fetched: dict[str, int] = {}  # the step that a weight was last fetched for
    most = dict.fromkeys(PARTS, 0)
    for step, (part, weights) in enumerate(runs):
        new = [size for name, size in weights.items() if name not in live]
        live |= weights
        ahead = 0
        room = min(MOST - sum(live.values()), bucket)
        while coming and (coming[0].step <= step or ahead < room):
            use = coming.popleft()
            fetched[use.name] = use.step
            if use.name not in live:
                live[use.name] = use.size
                ahead += use.size
                new.append(use.size)
        copied = 0
        if ranks:
            copied = ceil(max(new, default=0) / ranks)
        most[part] = max(most[part], sum(live.values()) + copied)
        for name in weights:
            again = next((other for other in uses[name] if other > step), None)
            soon = False
            if again is not None:
                soon = passed[again] - passed[step + 1] < MOST
            # One that was fetched for later was not prefetched, because it was still gathered.
            if not soon and fetched[name] <= step + 1:
                del live[name]
    return most


def _runs(modules: list[Module], checkpoints: bool) -> list[Run]:
    """List what runs in a step, forward and backward."""
    runs = []
    for module in modules:
        part = "head" if module.part == "head" else "forward"
        runs.append((part, module.weights))
    for layer, inside in groupby(reversed(modules), key=lambda module: module.layer):
        backward = [(module.part, module.weights) for module in inside]
        if checkpoints and layer:
            runs += reversed(backward)
        runs += backward
    return runs


def _modules(shape: Shape) -> list[Module]:
    """List the modules in the order in which they run forward."""
    persistent = HIDDEN["stage3_param_persistence_threshold"](shape.hidden_size)
    part = "front"
    weights_of: dict[str, tuple[str, Weights]] = {}
    for weight in shape.weights():
        if weight.layer is not None:
            part = "backward"
        elif part != "front":
            part = "head"
        *parts, _ = weight.name.split(".")
        names = list(accumulate(parts, "{}.{}".format))
        for name, inner in zip(names, [*names[1:], ""], strict=True):
            # A list of modules is not called.
            if not inner.rpartition(".")[2].isdigit():
                weights_of.setdefault(name, (part, {}))
        size = prod(weight.shape)
        if size > persistent:
            _, weights = weights_of[names[-1]]
            weights[weight.name] = size
    if shape.tied:
        embedding = next(weights for _, weights in weights_of.values() if weights)
        weights_of.setdefault(shape.head, ("head", embedding))
    modules = []
    for name, (part, weights) in weights_of.items():
        modules.append(Module(_layer(name), part, weights))
    return modules


def _layer(module: str) -> str:
    """Return the name of the layer that `module` is in, "" where it is in none."""
    parts = module.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return ""
