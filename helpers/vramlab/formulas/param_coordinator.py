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

from ..recipe.deepspeed_config import HIDDEN
from ..recipe.shapes import Shape

MOST = 1_000_000_000  # stage3_max_live_parameters, and stage3_max_reuse_distance

Weights = tuple[tuple[str, int], ...]  # names and elements
# Place of a module to the part of the step that its forward and its backward pass are in.
PARTS = {"front": ("forward", "front"), "layers": ("forward", "backward"), "back": ("head", "head")}


@lru_cache(maxsize=64)
def gathered(shape: Shape) -> dict[str, int]:
    """Return the peak of gathered elements in each part of a steady step: see PARTS; "front" is the embedding's backward."""
    modules, bucket = _modules(shape), HIDDEN["stage3_prefetch_bucket_size"](shape.hidden_size)
    runs = [(PARTS[place][0], weights) for place, weights in modules]
    runs += [(PARTS[place][1], weights) for place, weights in reversed(modules)]
    passed = [0, *accumulate(sum(n for _, n in weights) for _, weights in runs)]  # elements until each module runs
    coming = deque((weight, step) for step, (_, weights) in enumerate(runs) for weight in weights)
    uses: dict[tuple[str, int], list[int]] = {}
    for weight, step in coming:
        uses.setdefault(weight, []).append(step)

    def stays(weight: tuple[str, int], step: int) -> bool:
        """Tell whether it is used again soon, or was not prefetched because it was still gathered."""
        again = bisect_left(uses[weight], step)
        soon = again < len(uses[weight]) and passed[uses[weight][again]] - passed[step] < MOST
        return soon or fetched[weight] > step

    live, fetched, most, total = set(), {}, dict.fromkeys(("forward", "head", "backward", "front"), 0), 0
    for step, (part, weights) in enumerate(runs):
        new = {weight: None for weight in weights if weight not in live}
        for _ in [weight for weight in weights if fetched.get(weight, -1) < step]:
            weight, used = coming.popleft()
            fetched[weight] = used
        ahead, room = 0, min(MOST - total - sum(n for _, n in new), bucket)
        while coming and ahead < room:
            weight, used = coming.popleft()
            fetched[weight] = max(used, fetched.get(weight, -1))
            if weight not in live and weight not in new:
                new[weight] = None
                ahead += weight[1]
        live.update(new)
        total += sum(n for _, n in new)
        most[part] = max(most[part], total)
        gone = {weight for weight in weights if weight in live and not stays(weight, step + 1)}
        live -= gone
        total -= sum(n for _, n in gone)
    return most


def _modules(shape: Shape) -> list[tuple[str, Weights]]:
    """List (place, weights) of every module that is called, in the order of the forward pass."""
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
    place, found = "front", []
    for layer, weights in called.values():
        place = "layers" if layer is not None else "front" if place == "front" else "back"
        found.append((place, tuple(weights)))
    return found
