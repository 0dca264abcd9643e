"""How many elements DeepSpeed's stage 3 has gathered, by the rules of its parameter coordinator.

A module's weights are gathered before it runs, and the next ones prefetched, up to a bucket and
while fewer than `MOST` are gathered; after it they are released, unless they are used again within
`MOST` elements. Weights of up to ten times the hidden size are whole on every rank and not counted
(partitioned_param_coordinator.py, `_fetch_sub_module_impl`, `__params_to_release`).

Forward calls a module before those inside it. Backward comes to a module before those inside it
too, but to the last of these first (parameter_offload.py, `_pre_backward_module_hook`).
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, groupby
from math import ceil, prod
from operator import attrgetter
from typing import NamedTuple

from ..recipe.deepspeed_config import HIDDEN
from ..recipe.deepspeed_config import MOST_GATHERED as MOST
from ..recipe.shapes import Shape
from ..recipe.weights import Weight

# "front" is the embedding's backward pass. The gradient of a head is "reduced" when the next one
# comes, its own bias's or that of the norm before it.
PARTS = ("forward", "head", "reduced", "backward", "front")

# Roles of a layer's modules as it calls them; "" is a module without, as the norms of heads are.
CALLED = (
    *("norm1", "q", "k", "v", "qkv", "", "out", "after1"),
    *("norm2", "gate", "gate_up", "up", "down", "after2"),
)

Weights = dict[str, int]  # name to elements


@dataclass
class Module:
    """A module with weights of its own or inside it.

    Attributes:
        layer: the layer that it is in, "" where it is in none.
        part: the part of the step that its backward pass is in, "" where it has none.
        inside: the modules that it calls, in order.
        has_bias: it has a bias, however small.
    """

    layer: str
    part: str
    weights: Weights = field(default_factory=dict)
    inside: list["Module"] = field(default_factory=list)
    has_bias: bool = False

    def forward(self) -> Iterator["Module"]:
        """Yield this module and those inside it as the forward pass comes to them."""
        yield self
        for module in self.inside:
            yield from module.forward()

    def backward(self) -> Iterator["Module"]:
        """Yield them as the backward pass comes to them."""
        yield self
        for module in reversed(self.inside):
            yield from module.backward()


class Use(NamedTuple):
    """A weight of `size` elements that the module of a step needs."""

    step: int
    name: str
    size: int


class Run(NamedTuple):
    """A module that runs in a step, in a part of it, with the weights that it needs."""

    part: str
    weights: Weights
    reduces_head: bool = False  # its gradient has the head's reduced


@lru_cache(maxsize=64)
def gathered(
    shape: Shape,
    checkpoints: bool,
    ranks: int = 0,
    head_in_root: bool = False,
) -> dict[str, tuple[int, int]]:
    """Return the peak of gathered elements in each part of a steady step, and what copies add.

    With activation checkpointing backward first runs each layer again. Where parts are offloaded,
    each of `ranks` copies its part of a weight to the device before it is gathered; the largest of
    those fetched together counts. `head_in_root`: the whole model multiplies with the head's
    weight, and nothing calls the head. Such a weight is never released (`is_external_param`).
    """
    root, head = _tree(shape)
    kept: Weights = {}
    if head_in_root:
        kept = head.weights
        head.weights = {}
        root.weights |= kept
    runs = _runs(root, head, checkpoints)
    bucket = HIDDEN["stage3_prefetch_bucket_size"](shape.hidden_size)
    coming: deque[Use] = deque()
    uses: dict[str, list[int]] = {}
    # The trace of a step, by which DeepSpeed prefetches: every use of every weight in the order in
    # which modules run.
    for step, run in enumerate(runs):
        for name, size in run.weights.items():
            coming.append(Use(step, name, size))
            uses.setdefault(name, []).append(step)
    # Elements of all modules before each step, to tell how far away the next use of a weight is.
    elements = [sum(run.weights.values()) for run in runs]
    passed = list(accumulate(elements, initial=0))

    live: Weights = {}
    fetched: dict[str, int] = {}  # the step that a weight was last fetched for
    most = dict.fromkeys(PARTS, 0)
    with_copies = dict.fromkeys(PARTS, 0)
    for step, (part, weights, reduces_head) in enumerate(runs):
        # What the module needs and prefetching has not brought is gathered first.
        new = [size for name, size in weights.items() if name not in live]
        live |= weights
        ahead = 0
        room = min(MOST - sum(live.values()), bucket)
        # Uses up to this module leave the queue without being gathered again; then it is emptied
        # until a bucket of elements is on its way or `MOST` are gathered.
        while coming and (coming[0].step <= step or ahead < room):
            use = coming.popleft()
            fetched[use.name] = use.step
            if use.name not in live:
                live[use.name] = use.size
                ahead += use.size
                new.append(use.size)
        copied = ceil(max(new, default=0) / ranks) if ranks else 0
        most[part] = max(most[part], sum(live.values()))
        with_copies[part] = max(with_copies[part], sum(live.values()) + copied)
        if reduces_head:
            most["reduced"] = sum(live.values())
        # A weight is released unless it is used again within the next `MOST` elements.
        for name in weights.keys() - kept.keys():
            later = [passed[other] - passed[step + 1] for other in uses[name] if other > step]
            # One that was fetched for later was not prefetched, because it was still gathered.
            if min(later, default=MOST) >= MOST and fetched[name] <= step + 1:
                del live[name]
    return {part: (most[part], max(0, with_copies[part] - most[part])) for part in PARTS}


def _runs(root: Module, head: Module, checkpoints: bool) -> list[Run]:
    """List what runs in a step, forward and backward."""
    runs = []
    for module in root.forward():
        part = "head" if module.part == "head" else "forward"
        runs.append(Run(part, module.weights))
    # The head's gradient is reduced when the next gradient comes: that of its own bias, or else
    # that of the first innermost module after it.
    waits = False
    with_backward = (module for module in root.backward() if module.part)
    for layer, inside in groupby(with_backward, key=attrgetter("layer")):
        modules = list(inside)
        again = []
        if checkpoints and layer:
            # The last one with weights has saved its input, for which the layer runs again.
            again = [Run(module.part, module.weights) for module in modules[0].forward()][1:]
        for module in modules:
            innermost = not module.inside
            waits |= module is head and head.has_bias
            reduces_head = waits and innermost
            runs.append(Run(module.part, module.weights, reduces_head))
            if module is head:
                waits = not reduces_head
            elif innermost:
                waits = False
            if again and innermost:
                runs += again
                again = []
    return runs


class _Tree:
    """The modules of a model by name, each made with those around it.

    Attributes:
        root: the whole model.
    """

    def __init__(self) -> None:
        self.root = Module("", "backward")
        self.modules = {"": self.root}

    def module(self, name: str, part: str) -> Module:
        """Return the module `name`, whose backward pass is in `part` of the step."""
        # "a.b.c" gives a, a.b and a.b.c: the module and all those around it.
        names = list(accumulate(name.split("."), "{}.{}".format))
        around = self.root
        for name, inner in zip(names, [*names[1:], ""], strict=True):
            # A list of modules is not called.
            if inner.rpartition(".")[2].isdigit():
                continue
            if name not in self.modules:
                self.modules[name] = Module(_layer(name), part)
                around.inside.append(self.modules[name])
            around = self.modules[name]
            if part == "backward":  # also what began with an embedding
                around.part = part
        return around


def _tree(shape: Shape) -> tuple[Module, Module]:
    """Return the whole model and its head, in the order in which modules are called.

    Modules without weights prefetch too: of these it has the rotary embedding and activations.
    """
    persistent = HIDDEN["stage3_param_persistence_threshold"](shape.hidden_size)
    stack = shape.known_layout.stacks[0]
    backbone, _, _ = stack.prefix.rpartition(".")
    roles = ("gate", "gate_up", "up")
    activated = next((stack.parts[role] for role in roles if role in stack.parts), "none")
    tree = _Tree()
    part = "front"
    for weight in _in_order_of_calls(shape, stack.parts):
        name, _, kind = weight.name.rpartition(".")
        if weight.layer is not None:
            if part == "front" and shape.rotary_dim:
                tree.module(f"{backbone}.rotary", "")
            part = "backward"
        elif part != "front":
            part = "head"
        module = tree.module(name, part)
        module.has_bias |= kind == "bias"
        size = prod(weight.shape)
        if size > persistent:
            module.weights[weight.name] = size
        if name.endswith(f".{activated}") and kind == "weight":
            around, _, _ = name.rpartition(".")
            tree.module(f"{around}.activation", part)
    head = tree.module(shape.head, "head")
    if shape.tied:
        # A tied head multiplies with the embedding's weight, which both modules then use under one
        # name.
        embedding = next(module for module in tree.modules.values() if module.weights)
        head.weights |= embedding.weights
    return tree.root, head


def _in_order_of_calls(shape: Shape, parts: dict[str, str]) -> list[Weight]:
    """List the weights of `shape` as its modules are called, which is not how they are listed.

    A layer whose norms come after a sum lists them so.
    """
    weights: list[Weight] = []
    for layer, of_layer in groupby(shape.weights(), key=attrgetter("layer")):
        if layer is None or shape.known_layout.post_norm:
            weights += of_layer
        else:
            weights += sorted(of_layer, key=lambda weight: _place(weight, parts))
    return weights


def _place(weight: Weight, parts: dict[str, str]) -> int:
    """Return where in `CALLED` the module of `weight` is."""
    module, _, _ = weight.name.rpartition(".")
    inside = module.removeprefix(f"{_layer(module)}.")
    role = next((role for role, name in parts.items() if name == inside), "")
    return CALLED.index(role if role in CALLED else "")


def _layer(module: str) -> str:
    """Return the name of the layer that `module` is in, "" where it is in none."""
    parts = module.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return ""
