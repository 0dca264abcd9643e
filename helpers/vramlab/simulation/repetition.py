"""How a model's layers repeat, found from the layers themselves on the meta device.

Two layers are of one kind if their modules have the same classes, settings, parameters and buffers, and the
configuration's lists with an entry a layer say the same of both.
"""

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ..recipe import configuration
from ..recipe.from_transformers import build

if TYPE_CHECKING:
    import torch

    from ..recipe.shapes import Shape

GROUPS = 4  # of a shallow model whose first and last layers may be of other kinds than those between


class NotRegular(Exception):
    """Some layer, or what is logged of it, is not like the others; the message says what."""


@dataclass(frozen=True)
class Repetition:
    """A model's layers as `groups` (`deepen.py`): the `first` layers, periods of which number `middle` repeats, the `last`
    layers. A middle group needs one like it before it: group 1, or the first layer where all are alike."""

    lists: tuple[str, ...]  # names of the module lists that hold the layers
    depth: int
    first: int
    period: int
    last: int
    groups: int = GROUPS
    middle: int = 2

    @property
    def shallow(self) -> int:
        """Layers of the shallow model."""
        return self.first + (self.groups - 2) * self.period + self.last

    @property
    def more(self) -> int:
        """Groups that the whole model has more than the shallow one."""
        return (self.depth - self.shallow) // self.period

    def kept(self, extra: int = 0) -> list[int]:
        """The whole model's layers that make the shallow model, with `extra` more groups."""
        cut = self.first + (self.middle + extra) * self.period
        return [*range(cut), *range(cut + (self.more - extra) * self.period, self.depth)]

    @cached_property
    def _numbered(self) -> re.Pattern:
        return re.compile(rf"((?:.*?\.)?(?:{'|'.join(map(re.escape, self.lists))})\.)(\d+)((?:\..*)?)")

    def group(self, name: str) -> int | None:
        """The shallow model's group to which the module or parameter `name` belongs, None outside the layers."""
        found = self._numbered.fullmatch(name)
        if not found:
            return None
        number = int(found[2])
        if number < self.first:
            return 0
        return self.groups - 1 if number >= self.shallow - self.last else 1 + (number - self.first) // self.period

    def renumbered(self, name: str, groups: int) -> str:
        """The module's or parameter's `name` so many groups further up."""
        found = self._numbered.fullmatch(name)
        return f"{found[1]}{int(found[2]) + groups * self.period}{found[3]}" if found else name


@lru_cache(maxsize=64)
def find(shape: "Shape", frees_late: bool = False, may_be_alike: bool = True) -> Repetition:
    """How the layers of `shape` repeat. `frees_late`, as FSDP does: one group more, which keeps the last one's events apart.
    `may_be_alike`: let the first layer stand for group 1 where all are of one kind. Raises NotRegular."""
    depth = shape.num_layers
    if shape.num_decoder_layers not in (0, depth):
        raise NotRegular("encoder and decoder are not of one depth")
    model = build(shape)
    lists, layers = _layers(model, depth)
    said = [value for value in vars(model.config).values() if isinstance(value, list) and len(value) == depth]
    known = [(layer, [of[i] for of in said]) for i, layer in enumerate(layers)]
    kinds = [known.index(each) for each in known]  # a kind is the number of its first layer
    middle = 1 if may_be_alike and not any(kinds) else 2
    groups = middle + 2 + frees_late
    found = longest_pattern(kinds, groups)
    if found is None:
        raise NotRegular("the kinds of layers have no pattern that repeats often enough")
    repetition = Repetition(tuple(lists), depth, *found, groups, middle)
    shallow = build(cut(shape, repetition.kept()))
    for kept, layer in zip(repetition.kept(), _layers(shallow, repetition.shallow)[1], strict=True):
        pairs = [(value, layer.get(key)) for key, value in layers[kept].items()]
        if len(pairs) != len(layer) or any(a != b and (a, b) != (depth, repetition.shallow) for a, b in pairs):
            raise NotRegular(f"a model of {repetition.shallow} layers has others")
    sizes = {name: parameter.numel() for name, parameter in shallow.named_parameters()}
    missing = repetition.more * sum(size for name, size in sizes.items() if repetition.group(name) == middle)
    if sum(p.numel() for p in model.parameters()) != sum(sizes.values()) + missing:
        raise NotRegular("what stands outside the layers depends on their number")
    return repetition


def cut(shape: "Shape", kept: list[int]) -> "Shape":
    """`shape` with the layers `kept` alone."""
    from ..recipe.shapes import read_shape

    config = shape.config
    configuration.keep_layers(config, kept)
    return read_shape(config, task=shape.task)


def longest_pattern(kinds: list[int], groups: int = GROUPS) -> tuple[int, int, int] | None:
    """(first, period, last) of the shallowest model with so many groups that can stand for layers of these kinds."""
    depth, best = len(kinds), None
    for period in range(1, (depth - 2) // (groups - 1) + 1):
        # how many layers before i, and i, are like the one a period later
        like_next = (kinds[i] == kinds[i + period] for i in range(depth - period))
        runs = accumulate(like_next, lambda n, same: n + 1 if same else 0)
        length, end = max((n, i + 1) for i, n in enumerate(runs))
        first = max(end - length, 1)
        times = (min(end + period, depth - 1) - first) // period
        last = depth - first - times * period
        shallow = first + (groups - 2) * period + last
        if times >= groups - 1 and (best is None or shallow < best[0]):
            best = shallow, (first, period, last)
    return best and best[1]


def _layers(model: "torch.nn.Module", depth: int) -> tuple[list[str], list[dict[tuple, Any]]]:
    """The names of the lists that hold the layers of `model`, and each layer's settings and tensors."""
    from torch import nn

    lists, layers = [], [{} for _ in range(depth)]
    bare = {*vars(nn.Module()), "layer_idx"}
    for name, module in model.named_modules():
        is_list = isinstance(module, nn.ModuleList | nn.Sequential) and len(module) == depth
        if not is_list or name.startswith(tuple(f"{outer}." for outer in lists)):
            continue
        lists.append(name)
        for layer, (inside, part) in (
            (layers[i], each) for i, top in enumerate(module) for each in top.named_modules()
        ):
            tensors = (*part._parameters.items(), *part._buffers.items())
            sizes = [(key, t if t is None else (t.shape, t.dtype)) for key, t in tensors]
            layer[name, inside, ""] = type(part).__qualname__, sizes
            layer |= {(name, inside, key): _setting(value) for key, value in vars(part).items() if key not in bare}
    if not lists:
        raise NotRegular("the model has no list with a module for each layer")
    return lists, layers


def _setting(value: Any) -> Any:
    """What a module's attribute says of its kind; of a rate or scale only whether it is zero."""
    if isinstance(value, float):
        return bool(value)
    if isinstance(value, list | tuple):
        return repr(value)
    return value if isinstance(value, int | str | None) else getattr(value, "__qualname__", type(value).__qualname__)
