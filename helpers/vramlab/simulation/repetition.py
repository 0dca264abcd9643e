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

GROUPS, MIDDLE = 5, 2  # groups of layers in a shallow model, and the one that is repeated (`deepen.py`)


class NotRegular(Exception):
    """Some layer, or what is logged of it, is not like the others; the message says what."""


@dataclass(frozen=True)
class Repetition:
    """A model's layers as five groups: the `first` layers, three periods of which the middle one repeats, the `last`."""

    lists: tuple[str, ...]  # names of the module lists that hold the layers
    depth: int
    first: int
    period: int
    last: int
    parameters: int = 0  # elements of the whole model's

    @property
    def shallow(self) -> int:
        """Layers of the shallow model."""
        return self.first + (GROUPS - 2) * self.period + self.last

    @property
    def more(self) -> int:
        """Groups that the whole model has more than the shallow one."""
        return (self.depth - self.shallow) // self.period

    def kept(self, extra: int = 0) -> list[int]:
        """The whole model's layers that make the shallow model, with `extra` more groups."""
        cut = self.first + (MIDDLE + extra) * self.period
        return [*range(cut), *range(cut + (self.more - extra) * self.period, self.depth)]

    @cached_property
    def _numbered(self) -> re.Pattern:
        return re.compile(rf"((?:.*?\.)?(?:{'|'.join(map(re.escape, self.lists))})\.)(\d+)((?:\..*)?)")

    def split(self, name: str) -> tuple[str, int | None, str]:
        """A module's or parameter's `name` before, in and after its layer's number; (name, None, "") without one."""
        found = self._numbered.fullmatch(name)
        return (found[1], int(found[2]), found[3]) if found else (name, None, "")

    def group(self, name: str) -> int | None:
        """The shallow model's group to which the module or parameter `name` belongs, None outside the layers."""
        number = self.split(name)[1]
        if number is None:
            return None
        if number < self.first:
            return 0
        return GROUPS - 1 if number >= self.shallow - self.last else 1 + (number - self.first) // self.period


@lru_cache(maxsize=64)
def find(shape: "Shape") -> Repetition:
    """How the layers of `shape` repeat. Raises NotRegular where no shallow model can stand for the deep one."""
    depth = shape.num_layers
    if shape.num_decoder_layers not in (0, depth):
        raise NotRegular("encoder and decoder are not of one depth")
    model = build(shape)
    lists, layers, rest = structure(model, depth)
    said = [value for value in vars(model.config).values() if isinstance(value, list) and len(value) == depth]
    known = [(layer, [of[i] for of in said]) for i, layer in enumerate(layers)]
    found = longest_pattern([known.index(each) for each in known])  # a kind is the number of its first layer
    if found is None:
        raise NotRegular("the kinds of layers have no pattern that repeats often enough")
    repetition = Repetition(tuple(lists), depth, *found, sum(p.numel() for p in model.parameters()))
    shallow_lists, shallow_layers, shallow_rest = structure(build(cut(shape, repetition.kept())), repetition.shallow)
    if (shallow_lists, shallow_rest) != (lists, rest):
        raise NotRegular("what stands outside the layers depends on their number")
    for i, kept in enumerate(repetition.kept()):
        deep, shallow = layers[kept], shallow_layers[i]
        same = all(v == shallow.get(k) or (v, shallow.get(k)) == (depth, repetition.shallow) for k, v in deep.items())
        if deep.keys() != shallow.keys() or not same:
            raise NotRegular(f"a model of {repetition.shallow} layers has another layer {i}")
    return repetition


def cut(shape: "Shape", kept: list[int]) -> "Shape":
    """`shape` with the layers `kept` alone."""
    from ..recipe.shapes import read_shape

    config = shape.config
    configuration.keep_layers(config, kept)
    return read_shape(config, task=shape.task)


def longest_pattern(kinds: list[int]) -> tuple[int, int, int] | None:
    """(first, period, last) of the shallowest model with five groups that can stand for layers of these kinds."""
    depth, best = len(kinds), None
    for period in range(1, (depth - 2) // (GROUPS - 1) + 1):
        # how many layers before i, and i, are like the one a period later
        like_next = (kinds[i] == kinds[i + period] for i in range(depth - period))
        runs = accumulate(like_next, lambda n, same: n + 1 if same else 0)
        length, end = max((n, i + 1) for i, n in enumerate(runs))
        first = max(end - length, 1)
        times = (min(end + period, depth - 1) - first) // period
        last = depth - first - times * period
        shallow = first + (GROUPS - 2) * period + last
        if times >= GROUPS - 1 and (best is None or shallow < best[0]):
            best = shallow, (first, period, last)
    return best and best[1]


def structure(model: "torch.nn.Module", depth: int) -> tuple[list[str], list[dict[tuple, Any]], list[tuple]]:
    """What `model` is made of: the names of the lists that hold its layers, each layer's settings and tensors (module in
    the layer and attribute to value), and the modules outside. Raises NotRegular where layers share weights.
    """
    from torch import nn

    lists, layers, rest = [], [{} for _ in range(depth)], []
    bare, holders, configs = set(vars(nn.Module())), {}, {}
    for name, module in model.named_modules(remove_duplicate=False):
        parent = next((each for each in lists if name.startswith(f"{each}.")), None)
        if parent is None and isinstance(module, nn.ModuleList | nn.Sequential) and len(module) == depth:
            lists.append(name)
            continue
        number, _, inside = name[len(parent) + 1 :].partition(".") if parent is not None else (None, "", "")
        if any(holders.setdefault(id(p), number) != number for p in module._parameters.values() if p is not None):
            raise NotRegular("layers share weights")
        tensors = [
            (key, t if t is None else (tuple(t.shape), str(t.dtype)))
            for key, t in (*module._parameters.items(), *module._buffers.items())
        ]
        if parent is None:
            rest.append((name, type(module).__qualname__, tensors))
            continue
        held = layers[int(number)]
        held[parent, inside, ""] = type(module).__qualname__, tensors
        held |= {(parent, inside, k): _setting(v, configs) for k, v in vars(module).items() if k not in bare}
    if not lists:
        raise NotRegular("the model has no list with a module for each layer")
    for key in set().union(*layers):  # a layer's own number, counted from wherever, is no setting
        numbers = {layer[key] - i for i, layer in enumerate(layers) if type(layer.get(key)) is int}
        for layer in layers:
            if len(numbers) == 1 and type(layer.get(key)) is int:
                layer[key] = "number"
    return lists, layers, rest


def _setting(value: Any, configs: dict[int, int]) -> Any:
    """What a module's attribute says of its kind; of a rate or scale only whether it is zero."""
    if isinstance(value, float):
        return bool(value)
    if isinstance(value, list | tuple):
        return repr(value)
    if hasattr(value, "to_dict"):
        return "configuration", configs.setdefault(id(value), len(configs))
    return value if isinstance(value, int | str | None) else getattr(value, "__qualname__", type(value).__qualname__)
