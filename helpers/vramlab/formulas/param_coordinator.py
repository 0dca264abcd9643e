"""How many elements DeepSpeed's stage 3 has gathered at a time, by the rules of its parameter coordinator.

A module's weights are gathered before it runs, and the next ones prefetched, up to a bucket and while fewer than `MOST`
are gathered; after it they are released, unless they are used again within `MOST` elements. Weights of up to ten times
the hidden size are whole on every rank and not counted (partitioned_param_coordinator.py, `_fetch_sub_module_impl`,
`__params_to_release`).
"""

from bisect import bisect_left
from collections import deque
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import NamedTuple

from ..recipe.deepspeed_config import HIDDEN
from ..recipe.shapes import Shape

MOST = 1_000_000_000  # stage3_max_live_parameters, and stage3_max_reuse_distance

Weights = tuple[tuple[str, int], ...]  # names and elements


class Gathered(NamedTuple):
    """Peaks of gathered elements: layers' forward, head's passes, layers' backward, embedding's backward."""

    forward: int = 0
    head: int = 0
    backward: int = 0
    front: int = 0


@lru_cache(maxsize=64)
def gathered(shape: Shape) -> Gathered:
    """Return the peaks of a steady step, from the model's own weights."""
    events = _events(shape)
    runs = [weights for weights, begins, _ in events if begins]
    passed = [0, *accumulate(sum(n for _, n in weights) for weights in runs)]  # elements until each module runs
    coming = deque((weight, step) for step, weights in enumerate(runs) for weight in weights)
    uses: dict[tuple[str, int], list[int]] = {}
    for weight, step in coming:
        uses.setdefault(weight, []).append(step)

    def stays(weight: tuple[str, int]) -> bool:
        """Tell whether it is used again soon, or was not prefetched because it was still gathered."""
        again = bisect_left(uses[weight], step)
        soon = again < len(uses[weight]) and passed[uses[weight][again]] - passed[step] < MOST
        return soon or fetched[weight] > step

    live, fetched, most, total, step = set(), {}, Gathered()._asdict(), 0, 0
    for weights, begins, part in events:
        if begins:
            new = {weight: None for weight in weights if weight not in live}
            for _ in [weight for weight in weights if fetched.get(weight, -1) < step]:
                weight, used = coming.popleft()
                fetched[weight] = used
            bucket = HIDDEN["stage3_prefetch_bucket_size"](shape.hidden_size)
            ahead, room = 0, min(MOST - total - sum(n for _, n in new), bucket)
            while coming and ahead < room:
                weight, used = coming.popleft()
                fetched[weight] = max(used, fetched.get(weight, -1))
                if weight not in live and weight not in new:
                    new[weight] = None
                    ahead += weight[1]
            live.update(new)
            total += sum(n for _, n in new)
            step += 1
        else:
            gone = {weight for weight in weights if weight in live and not stays(weight)}
            live -= gone
            total -= sum(n for _, n in gone)
        most[part] = max(most[part], total)
    return Gathered(**most)


def _events(shape: Shape) -> list[tuple[Weights, bool, str]]:
    """List one step's events in order: (a module's weights, whether it begins, part of the step)."""
    front, layers, back = _modules(shape)
    forward = [(m, "forward") for part in (front, *layers) for m in part] + [(m, "head") for m in back]
    backward = [(m, "head") for m in reversed(back)]
    for layer in reversed(layers):
        backward += [(m, "backward") for m in reversed(layer)]
    backward += [(m, "front") for m in reversed(front)]
    return [(m, begins, part) for m, part in (*forward, *backward) for begins in (True, False)]


def _modules(shape: Shape) -> tuple[list[Weights], list[list[Weights]], list[Weights]]:
    """List the weights of every module that is called: of those before the layers, of each layer, of those after."""
    persistent = HIDDEN["stage3_param_persistence_threshold"](shape.hidden_size)
    called: dict[str, tuple[int | None, list]] = {"": (None, [])}
    for weight in shape.weights():
        parts = weight.name.split(".")[:-1]
        for length in range(1, len(parts) + 1):
            if length == len(parts) or not parts[length].isdigit():  # a list of modules is not called
                called.setdefault(".".join(parts[:length]), (weight.layer, []))
        if (size := prod(weight.shape)) > persistent:
            called[".".join(parts)][1].append((weight.name, size))
    if shape.tied:
        embedding = next(found for _, found in called.values() if found)
        called.setdefault(shape.head, (None, [embedding[0]]))
    front, layers, back = [], {}, []
    for layer, weights in called.values():
        place = layers.setdefault(layer, []) if layer is not None else back if layers else front
        place.append(tuple(weights))
    return front, [*layers.values()], back
