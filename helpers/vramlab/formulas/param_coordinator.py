"""How many elements DeepSpeed's stage 3 has gathered at a time, by the rules of its parameter coordinator.

A module's weights are gathered before it runs, and the next ones prefetched, up to a bucket and while fewer than `MOST`
are gathered; after it they are released, unless they are used again within `MOST` elements. Weights of up to ten times
the hidden size are whole on every rank and not counted (partitioned_param_coordinator.py, `_fetch_sub_module_impl`,
`__params_to_release`).
"""

from collections import deque
from functools import lru_cache
from itertools import accumulate, groupby
from math import ceil, prod

from ..recipe.deepspeed_config import HIDDEN
from ..recipe.shapes import Shape

MOST = 1_000_000_000  # stage3_max_live_parameters, and stage3_max_reuse_distance


@lru_cache(maxsize=64)
def gathered(shape: Shape, checkpoints: bool, ranks: int = 0) -> dict[str, int]:
    """Return the peak of gathered elements in each part of a steady step; "front" is the embedding's backward pass.

    With activation checkpointing backward first runs each layer again. Where parts are offloaded, each of `ranks` copies
    its part of a weight to the device before it is gathered; the largest of those fetched together counts.
    """
    modules, bucket = _modules(shape), HIDDEN["stage3_prefetch_bucket_size"](shape.hidden_size)
    runs = [("head" if place == "head" else "forward", weights) for _, place, weights in modules]
    for layer, inside in groupby(reversed(modules), key=lambda module: module[0]):
        backward = [(place, weights) for _, place, weights in inside]
        runs += backward[::-1] + backward if checkpoints and layer else backward
    passed = [
        0,
        *accumulate(sum(weights.values()) for _, weights in runs),
    ]  # elements until each module runs
    coming = deque(
        (step, weight) for step, (_, weights) in enumerate(runs) for weight in weights.items()
    )
    uses: dict[str, list[int]] = {}
    for step, (name, _) in coming:
        uses.setdefault(name, []).append(step)
    live: dict[str, int] = {}
    fetched, most = {}, dict.fromkeys(("forward", "head", "backward", "front"), 0)
    for step, (part, weights) in enumerate(runs):
        new = [size for name, size in weights.items() if name not in live]
        live |= weights
        ahead, room = 0, min(MOST - sum(live.values()), bucket)
        while coming and (coming[0][0] <= step or ahead < room):
            used, (name, size) = coming.popleft()
            fetched[name] = used
            if name not in live:
                live[name] = size
                ahead += size
                new.append(size)
        copied = ceil(max(new, default=0) / ranks) if ranks else 0
        most[part] = max(most[part], sum(live.values()) + copied)
        for name in weights:
            again = next((use for use in uses[name] if use > step), None)
            soon = again is not None and passed[again] - passed[step + 1] < MOST
            if (
                not soon and fetched[name] <= step + 1
            ):  # else it was not prefetched because it was still gathered
                del live[name]
    return most


def _modules(shape: Shape) -> list[tuple[str, str, dict[str, int]]]:
    """List (layer or "", part of the step that its backward pass is in, weights' elements) of modules in forward's order."""
    persistent, part = HIDDEN["stage3_param_persistence_threshold"](shape.hidden_size), "front"
    found: dict[str, tuple[str, dict[str, int]]] = {}
    for weight in shape.weights():
        part = "backward" if weight.layer is not None else "front" if part == "front" else "head"
        names = list(accumulate(weight.name.split(".")[:-1], "{}.{}".format))
        for name, inner in zip(names, [*names[1:], ""], strict=True):
            if not inner.rpartition(".")[2].isdigit():  # a list of modules is not called
                found.setdefault(name, (part, {}))
        if (size := prod(weight.shape)) > persistent:
            found[names[-1]][1][weight.name] = size
    if shape.tied:
        found.setdefault(
            shape.head, ("head", next(weights for _, weights in found.values() if weights))
        )
    return [(_layer(name), *about) for name, about in found.items()]


def _layer(module: str) -> str:
    """Return the name of the layer that `module` is in, "" where it is in none."""
    parts = module.split(".")
    number = next((at for at, part in enumerate(parts) if part.isdigit()), -1)
    return ".".join(parts[: number + 1])
