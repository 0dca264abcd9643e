"""How a model's layers repeat, found from the layers themselves on the meta device.

Two layers are of one kind if their modules have the same classes, settings, parameters and buffers, and the
configuration's lists with an entry a layer say the same of both. `find` looks for the longest stretch of layers in
which a pattern of kinds repeats, and holds the shallow model that would stand for it against the deep one.
"""

import re
from collections.abc import Iterator
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
    """A model's layers as five groups: the `first` layers, three periods of which the middle one repeats, the `last`.

    Attributes:
        lists: names of the module lists that hold the layers.
        depth: layers of the whole model.
        first, last: layers before and after those that repeat, at least one of each.
        period: layers after which their kinds repeat.
        parameters: elements of the whole model's parameters.
    """

    lists: tuple[str, ...]
    depth: int
    first: int
    period: int
    last: int
    parameters: int = 0

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
    def number(self) -> re.Pattern:
        """What matches a layer's number (group 2) in the names of its modules and parameters."""
        return re.compile(rf"((?:^|\.)(?:{'|'.join(map(re.escape, self.lists))})\.)(\d+)(?=\.|$)")

    def group(self, name: str) -> int | None:
        """The shallow model's group to which the module or parameter `name` belongs, None outside the layers."""
        found = self.number.search(name)
        if found is None:
            return None
        number = int(found[2])
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
    whole = _Structure(model, depth)
    found = longest_pattern(whole.kinds(vars(model.config)))
    if found is None:
        raise NotRegular("the kinds of layers have no pattern that repeats often enough")
    parameters = sum(p.numel() for p in model.parameters())
    repetition = Repetition(tuple(whole.lists), depth, *found, parameters)
    shallow = _Structure(build(cut(shape, repetition.kept())), repetition.shallow)
    if shallow.lists != whole.lists or shallow.rest != whole.rest:
        raise NotRegular("what stands outside the layers depends on their number")
    for i, kept in enumerate(repetition.kept()):
        if not _alike(whole.layers[kept], shallow.layers[i], depth, repetition.shallow):
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
        runs = accumulate(
            (kinds[i] == kinds[i + period] for i in range(depth - period)), lambda n, same: n + 1 if same else 0
        )
        length, end = max((n, i + 1) for i, n in enumerate(runs))
        first = max(end - length, 1)
        times = (min(end + period, depth - 1) - first) // period
        last = depth - first - times * period
        shallow = first + (GROUPS - 2) * period + last
        if times >= GROUPS - 1 and (best is None or shallow < best[0]):
            best = shallow, (first, period, last)
    return best and best[1]


class _Structure:
    """What `model` is made of: `layers`, by their number (module's name in the layer, and what of it) to a value; the
    names of the `lists` that hold them; and `rest`, the classes and tensors outside.
    """

    def __init__(self, model: "torch.nn.Module", depth: int):
        from torch import nn

        self.lists: list[str] = []
        self.layers: list[dict[tuple, Any]] = [{} for _ in range(depth)]
        self.rest: list[tuple] = []
        self._configs: dict[int, int] = {}
        self._bare = set(vars(nn.Module()))
        holders: dict[int, int | None] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            place = self._place(name)
            if place is None and isinstance(module, nn.ModuleList | nn.Sequential) and len(module) == depth:
                self.lists.append(name)
                continue
            number = place and place[1]
            if any(holders.setdefault(id(p), number) != number for p in module._parameters.values() if p is not None):
                raise NotRegular("layers share weights")
            tensors = tuple(
                (key, t if t is None else (tuple(t.shape), str(t.dtype)))
                for key, t in (*module._parameters.items(), *module._buffers.items())
            )
            if place is None:
                self.rest.append((name, type(module).__qualname__, tensors))
                continue
            self.layers[number][place[0], ""] = type(module).__qualname__, tensors
            for key, value in self._settings(module):
                self.layers[number][place[0], key] = value
        if not self.lists:
            raise NotRegular("the model has no list with a module for each layer")
        self._drop_numbers()

    def _place(self, name: str) -> tuple[str, int] | None:
        """(list and name in the layer, the layer's number) of a module in a layer."""
        for parent in self.lists:
            if name.startswith(f"{parent}."):
                number, _, inside = name[len(parent) + 1 :].partition(".")
                return f"{parent}.*.{inside}", int(number)
        return None

    def _settings(self, module: "torch.nn.Module") -> Iterator[tuple[str, Any]]:
        for key, value in vars(module).items():
            if key in self._bare:
                continue
            if isinstance(value, float):  # dropout or a scale: it counts whether there is any
                value = bool(value)
            elif isinstance(value, list | tuple):
                value = repr(value)
            elif hasattr(value, "to_dict"):
                value = "configuration", self._configs.setdefault(id(value), len(self._configs))
            elif not isinstance(value, int | str | None):
                value = getattr(value, "__qualname__", type(value).__qualname__)
            yield key, value

    def _drop_numbers(self) -> None:
        """Leave out what is only the layer's own number, counted from wherever."""
        offsets: dict[tuple, set] = {}
        for i, layer in enumerate(self.layers):
            for key, value in layer.items():
                if type(value) is int:
                    offsets.setdefault(key, set()).add(value - i)
        for key in [key for key, found in offsets.items() if len(found) == 1]:
            for layer in self.layers:
                if key in layer:
                    layer[key] = "number"

    def kinds(self, config: dict[str, Any]) -> list[int]:
        """Each layer's kind as a number; a kind is also what the lists in `config` say of a layer."""
        said = [v for v in config.values() if isinstance(v, list) and len(v) == len(self.layers)]
        kinds = [(*layer.items(), repr([v[i] for v in said])) for i, layer in enumerate(self.layers)]
        numbers: dict[tuple, int] = {}
        return [numbers.setdefault(kind, len(numbers)) for kind in kinds]


def _alike(deep: dict, shallow: dict, *depths: int) -> bool:
    """Whether a layer is the same in both models, of the given depths, but for settings that are the depth."""
    return deep.keys() == shallow.keys() and all(
        value == shallow[key] or (value, shallow[key]) == depths for key, value in deep.items()
    )
