"""How a model's layers repeat, found from the layers themselves on the meta device.

Two layers are of one kind if their modules have the same classes, settings, parameters and buffers,
and the configuration's lists with an entry a layer say the same of both.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from math import ceil
from typing import TYPE_CHECKING, Any

from ..private import of_torch
from ..recipe import configuration
from ..recipe.from_transformers import build

if TYPE_CHECKING:
    import torch

    from ..recipe.shapes import Shape

# Groups of a shallow model whose first and last layers may be of other kinds than those between.
GROUPS = 4
FEW = 3  # layers ahead: further ahead even the third layer's fetches differ from later ones'
Description = dict[tuple[str, str, str], Any]  # a layer's settings and tensors


class NotRegular(Exception):
    """Some layer, or what is logged of it, is not like the others; the message says what."""


@dataclass(frozen=True)
class Repetition:
    """A model's layers as `groups` (`deepen.py`).

    They are the `first` layers, periods of which number `middle` repeats, and the `last` layers. A
    middle group needs one like it before it: group 1, or the first layer where all are alike. What
    a group frees was made at most `reach` groups away. An engine that fetches weights ahead finds
    nothing more to fetch in the last groups of a pass.
    """

    lists: tuple[str, ...]  # names of the module lists that hold the layers
    depth: int
    first: int
    period: int
    last: int
    groups: int = GROUPS
    middle: int = 2
    reach: int = 1
    fetches_ahead: bool = False

    @property
    def shallow(self) -> int:
        """Layers of the shallow model."""
        return self.first + (self.groups - 2) * self.period + self.last

    @property
    def more(self) -> int:
        """Groups that the whole model has more than the shallow one."""
        return (self.depth - self.shallow) // self.period

    def kept(self, extra: int = 0) -> list[int]:
        """Return the whole model's layers that make the shallow model, with `extra` more groups."""
        end = self.first + (self.middle + extra) * self.period
        left_out = (self.more - extra) * self.period
        return [*range(end), *range(end + left_out, self.depth)]

    def widened(self, ahead: int, last: int, least: bool = False) -> "Repetition":
        """Return it for an engine that fetches weights up to `ahead` layers ahead.

        The first ones have fewer layers before them and the embedding, and of the `last` ones
        weights are still there in backward. Where it fetches up to `FEW` ahead, the `least` that
        may do are two at either end. Raises NotRegular where no group is left to repeat.
        """
        period = self.period
        reach = ceil(ahead / period)
        first = ahead + 1
        if least and period == 1 and 1 < ahead <= FEW:
            first = 2
            last = 2
        first = self.first + period * ceil(max(0, first - self.first) / period)
        last = self.last + period * ceil(max(0, last - self.last) / period)
        groups = 2 * reach + 3
        wide = replace(
            self,
            first=first,
            last=last,
            groups=groups,
            middle=reach + 1,
            reach=reach,
            fetches_ahead=True,
        )
        if wide.more < 1:
            raise NotRegular(f"weights are fetched {ahead} layers ahead")
        return wide

    @property
    def is_least(self) -> bool:
        """Whether more layers may stand for all where these do not."""
        return self.first <= self.reach if self.fetches_ahead else self.middle == 1

    @cached_property
    def _numbered(self) -> re.Pattern:
        """Matches a name inside a layer: what is before its number, the number, what is after."""
        names = "|".join(map(re.escape, self.lists))
        return re.compile(rf"((?:.*?\.)?(?:{names})\.)(\d+)((?:\..*)?)")

    def group(self, name: str) -> int | None:
        """Return the shallow model's group of the module or parameter `name`.

        It is None outside the layers.
        """
        match = self._numbered.fullmatch(name)
        if not match:
            return None
        number = int(match[2])
        if number < self.first:
            return 0
        if number >= self.shallow - self.last:
            return self.groups - 1
        return 1 + (number - self.first) // self.period

    def renumbered(self, name: str, groups: int) -> str:
        """Return the module's or parameter's `name` so many groups further up."""
        match = self._numbered.fullmatch(name)
        if not match:
            return name
        number = int(match[2]) + groups * self.period
        return f"{match[1]}{number}{match[3]}"


@lru_cache(maxsize=64)
def find(shape: "Shape", frees_late: bool = False, may_be_alike: bool = True) -> Repetition:
    """Return how the layers of `shape` repeat. Raises NotRegular.

    Args:
        frees_late: as FSDP does: one group more, which keeps the last one's events apart.
        may_be_alike: let the first layer stand for group 1 where all are of one kind.
    """
    depth = shape.num_layers
    if shape.num_decoder_layers not in (0, depth):
        raise NotRegular("encoder and decoder are not of one depth")
    model = build(shape)
    lists, layers = _layers(model, depth)
    kinds = _kinds(layers, model.config)
    # kind 0 is that of the first layer
    are_alike = not any(kinds)
    middle = 1 if may_be_alike and are_alike else 2
    groups = middle + 2 + frees_late
    pattern = longest_pattern(kinds, groups)
    if pattern is None:
        raise NotRegular("the kinds of layers have no pattern that repeats often enough")
    # what follows compares the shallow model with the whole one, module by module
    repetition = Repetition(tuple(lists), depth, *pattern, groups, middle)
    shallow = build(cut(shape, repetition.kept()))
    _check_layers(repetition, layers, shallow)
    _check_rest(repetition, model, shallow)
    return repetition


def _kinds(layers: list[Description], config: Any) -> list[int]:
    """Return the kind of each layer: the number of the first one that is like it."""
    depth = len(layers)
    lists = []
    text = getattr(config, "text_config", config)
    for value in vars(text).values():
        if isinstance(value, list) and len(value) == depth:
            lists.append(value)
    # Qwen3-VL adds what some of its tower's layers see after the first layers of the text, and in
    # backward that comes after the layer that follows
    tower = getattr(config, "vision_config", None)
    added = len(getattr(tower, "deepstack_visual_indexes", ()))
    lists.append([added > 0 and layer <= added for layer in range(depth)])
    described = []
    for i, layer in enumerate(layers):
        described.append((layer, [values[i] for values in lists]))
    return [described.index(layer) for layer in described]


def _check_layers(repetition: Repetition, layers: list[Description], shallow: Any) -> None:
    """Raise NotRegular unless the shallow model's layers are those of the whole one."""
    _, shallow_layers = _layers(shallow, repetition.shallow)
    depths = (repetition.depth, repetition.shallow)
    for number, shallow_layer in zip(repetition.kept(), shallow_layers, strict=True):
        layer = layers[number]
        is_like = layer.keys() == shallow_layer.keys()
        for key in layer.keys() & shallow_layer.keys():
            pair = (layer[key], shallow_layer[key])
            # a setting may be the model's depth
            if pair[0] != pair[1] and pair != depths:
                is_like = False
        if not is_like:
            raise NotRegular(f"a model of {repetition.shallow} layers has others")


def _check_rest(repetition: Repetition, model: Any, shallow: Any) -> None:
    """Raise NotRegular unless the models differ by the middle group's parameters alone."""
    size = 0
    in_middle = 0
    for name, parameter in shallow.named_parameters():
        size += parameter.numel()
        if repetition.group(name) == repetition.middle:
            in_middle += parameter.numel()
    whole = sum(parameter.numel() for parameter in model.parameters())
    if whole != size + repetition.more * in_middle:
        raise NotRegular("what stands outside the layers depends on their number")


def cut(shape: "Shape", kept: list[int]) -> "Shape":
    """Return `shape` with the layers `kept` alone."""
    from ..recipe.shapes import read_shape

    config = shape.config
    configuration.keep_layers(config.get("text_config") or config, kept)
    return read_shape(config, task=shape.task)


def longest_pattern(kinds: list[int], groups: int = GROUPS) -> tuple[int, int, int] | None:
    """Return (first, period, last) of the shallowest model that can stand for such layers.

    The shallow model has `groups` groups.
    """
    depth = len(kinds)
    best = None
    least = depth + 1  # layers of the best one
    for period in range(1, (depth - 2) // (groups - 1) + 1):
        # The layers of the run and one more period after it follow the pattern; the model's first
        # and last layer are always left to the ends.
        length, end = _longest_run(kinds, period)
        first = max(end - length, 1)
        times = (min(end + period, depth - 1) - first) // period
        last = depth - first - times * period
        shallow = first + (groups - 2) * period + last
        if times >= groups - 1 and shallow < least:
            least = shallow
            best = (first, period, last)
    return best


def _longest_run(kinds: list[int], period: int) -> tuple[int, int]:
    """Return the most layers in a row that are like the one a period later, and the run's end.

    Of several runs as long it is the last one.
    """
    run = 0
    longest = (0, 1)
    for i in range(len(kinds) - period):
        run = run + 1 if kinds[i] == kinds[i + period] else 0
        longest = max(longest, (run, i + 1))
    return longest


def _layers(model: "torch.nn.Module", depth: int) -> tuple[list[str], list[Description]]:
    """Return the names of the lists that hold the layers of `model`, and each layer described.

    Raises NotRegular where there is no such list.
    """
    from torch import nn

    lists: list[str] = []
    layers: list[Description] = [{} for _ in range(depth)]
    # a tower's layers have numbers too
    names = [name for name, _ in model.named_modules()]
    of_text = next((name for name in names if name.endswith("language_model")), "")
    for name, module in model.named_modules():
        is_list = isinstance(module, nn.ModuleList | nn.Sequential) and len(module) == depth
        # a list inside a layer is the layer's
        is_inner = name.startswith(tuple(f"{outer}." for outer in lists))
        if not is_list or is_inner or not name.startswith(of_text):
            continue
        lists.append(name)
        tops: Any = module
        for layer, top in zip(layers, tops, strict=True):
            for inside, part in top.named_modules():
                for key, setting in _settings(part):
                    layer[name, inside, key] = setting
    if not lists:
        raise NotRegular("the model has no list with a module for each layer")
    return lists, layers


def _settings(part: "torch.nn.Module") -> Iterator[tuple[str, Any]]:
    """Return what is said of a module: its class and tensors as "", and its attributes by name."""
    tensors = []
    for key, tensor in (*of_torch.parameters_of(part).items(), *of_torch.buffers_of(part).items()):
        tensors.append((key, None if tensor is None else (tensor.shape, tensor.dtype)))
    yield "", (type(part).__qualname__, tensors)
    for key, value in vars(part).items():
        if key not in _says_nothing():
            yield key, _setting(value)


@cache
def _says_nothing() -> set[str]:
    """Return the attributes that every module has, and a layer's number."""
    from torch import nn

    return {*vars(nn.Module()), "layer_idx"}


def _setting(value: Any) -> Any:
    """Return what a module's attribute says of its kind.

    A rate or scale says only whether it is zero.
    """
    if isinstance(value, float):
        return bool(value)
    if isinstance(value, list | tuple):
        return repr(value)
    if value is None or isinstance(value, int | str):
        return value
    return getattr(value, "__qualname__", type(value).__qualname__)
