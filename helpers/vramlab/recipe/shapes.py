"""The shapes of models: sizes, heads, layers and every tensor, without torch.

They follow from a published configuration. Names, shapes and order of parameters follow from the
architecture's layout (`families.py`); the tests hold every list against the model of `transformers`
5.23 on the meta device. What no layout covers is read off that model.
"""

import dataclasses
import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from math import prod
from pathlib import Path
from typing import Any

from ..report.data import data_path
from ..report.errors import FileError, RecipeError, needing
from ..report.files import read_text
from . import configuration
from .configuration import plain
from .families import TASKS, Layout, Stack, layout_of
from .from_transformers import describe, read_off
from .sizes import Sizes

# Kinds of modules with a weight; other kinds are the tensor itself.
MODULES = ("linear", "conv1d", "embedding", "norm")
Tensor = tuple[str, tuple[int, ...], str]  # name, shape, kind
Buffer = tuple[str, tuple[int, ...], str]  # name, shape, dtype


@dataclass(frozen=True)
class Weight:
    """One parameter tensor.

    Kinds: "linear" (out × in), "conv1d" (GPT-2's in × out), "embedding" (a shared output head is
    one too), "norm", "bias", "conv", "expert" (experts × out × in) and "other".
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    layer: int | None = None  # its block

    @property
    def size(self) -> int:
        """How many numbers it holds."""
        return prod(self.shape)


# Kind and sizes of what plays a role in a layer. A cross-attention's roles begin with "cross_";
# "position" is in a stack's first layer only.
ROLES = json.loads(data_path("layer_roles.json").read_text(encoding="utf-8"))


@dataclass(frozen=True, eq=False)
class Shape(Sizes):
    """The sizes of one model with one head, and what follows from them."""

    @cached_property
    def layout(self) -> Layout | None:
        """The modules by the roles they play.

        None for a family, or a variant of one, that is not written down.
        """
        return layout_of(self, self.settings)

    @lru_cache(maxsize=512)  # noqa: B019 — shapes are kept anyway
    def weights(self) -> tuple[Weight, ...]:
        """Return every parameter tensor, named and ordered as transformers' `named_parameters()`.

        Shared ones are listed once.
        """
        if self.layout is None:
            rows, _ = read_off(self)
            return tuple(Weight(*row) for row in rows)
        weights: list[Weight] = []
        sizes = _sizes_by_word(self)
        for item in self.layout.items:
            if isinstance(item, str):
                for name, kind, words in _modules_in(item):
                    weights += (Weight(*row) for row in _tensors(self, sizes, name, kind, words))
            else:
                weights += self._in_layers(item, self.layout, sizes)
        return tuple(weights)

    def _in_layers(self, stack: Stack, layout: Layout, sizes: Mapping[str, Any]) -> list[Weight]:
        """Return the tensors of equal layers."""
        rows: list[Tensor] = []
        for role, name in stack.parts.items():
            kind, usual = ROLES[role]
            words = stack.sizes.get(role, usual).replace(".", " ").split()
            if kind == "linear":
                kind = layout.linear + ("+" if role in layout.biased else "")
            rows += _tensors(self, sizes, name, kind, words)
        weights = []
        for i in range(stack.first, stack.first + stack.count):
            for name, shape, kind in rows:
                weights.append(Weight(f"{stack.prefix}.{i}.{name}", shape, kind, i))
        return weights

    @lru_cache(maxsize=512)  # noqa: B019
    def buffers(self) -> tuple[Buffer, ...]:
        """Return every buffer as (name, shape, dtype), whether or not it is saved with the weights.

        Gemma's `embed_scale` follows the weights' dtype; fp32 is given.
        """
        if self.layout is None:
            _, buffers = read_off(self)
            return buffers
        rows: list[Buffer] = []
        for name in self.layout.buffers:
            rows.append((name, (1, self.max_positions or 0), "int64"))
        if self.layout.scaled_embedding is True:
            embedding, _ = self.layout.modules[0]
            rows.append((f"{embedding}.embed_scale", (), "float32"))
        if self.layout.sigmoid_router:
            rows += self._corrections(self.layout)
        if self.rotary_dim:
            rows += self._frequencies(self.layout)
        return tuple(rows)

    def _corrections(self, layout: Layout) -> Iterator[Buffer]:
        """Return the buffers of routers that correct each expert's score."""
        for stack in layout.stacks:
            if "router" not in stack.parts:
                continue
            for i in range(stack.first, stack.first + stack.count):
                name = f"{stack.prefix}.{i}.mlp.gate.e_score_correction_bias"
                yield name, (self.num_experts,), "float32"

    def _frequencies(self, layout: Layout) -> Iterator[Buffer]:
        """Return the tables of rotary frequencies: one for each pair of channels."""
        module = layout.stacks[0].prefix.rpartition(".")[0] + ".rotary_emb"
        pairs = (self.rotary_dim + 1) // 2
        prefixes = [""]
        if layout.kinds_tables:
            prefixes = [f"{kind}_" for kind in sorted(set(layout.kinds))]
        for prefix in prefixes:
            # transformers keeps a second copy to undo dynamic scaling
            for name in ("inv_freq", "original_inv_freq"):
                yield f"{module}.{prefix}{name}", (pairs,), "float32"

    @cached_property
    def num_parameters(self) -> int:
        """How many parameters the model has, shared ones once."""
        return sum(weight.size for weight in self.weights())

    @property
    def stores_tied_head(self) -> bool:
        """Whether the published checkpoint has the head's matrix too, though it is tied."""
        entry = catalogue().get(self.name, {})
        is_published = (entry.get("hub_id"), entry.get("task")) == (self.hub_id, self.task)
        return is_published and "stored_parameters" in entry


def _modules_in(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """Read "module kind size …; …": yield name, kind and the words of the sizes."""
    for row in text.split(";"):
        words = row.split()
        if words:
            name, kind, *sizes = words
            yield name, kind, sizes


def _sizes_by_word(shape: Shape) -> dict[str, Any]:
    """Return the sizes that a layout's words mean.

    "queries", "keys" and "values" are of all heads; a "rank" is the width of compressed ones, and
    "expanded" what these become. A "shared_experts" is as wide as all shared ones together.
    """
    config = shape.config
    queries = shape.num_heads * shape.head_dim
    keys = shape.num_kv_heads * shape.head_dim
    feed_forward = shape.intermediate_size
    expert = config.get("moe_intermediate_size") or feed_forward
    # of models with compressed queries, keys and values (DeepSeek V2, section 2.1)
    rotary = config.get("qk_rope_head_dim") or 0
    others = config.get("qk_nope_head_dim") or 0
    value = config.get("v_head_dim") or 0
    key_rank = config.get("kv_lora_rank") or 0
    return {
        "1": 1,
        "hidden": shape.hidden_size,
        "feed_forward": feed_forward,
        "twice_feed_forward": 2 * feed_forward,
        "head": shape.head_dim,
        "heads": shape.num_heads,
        "queries": queries,
        "keys": keys,
        "queries_keys_values": queries + 2 * keys,
        "vocabulary": max(shape.vocab_size, 1),
        "positions": shape.max_positions,
        "positions_and_two": (shape.max_positions or 0) + 2,
        "token_types": config.get("type_vocab_size", 2),
        "labels": shape.num_labels,
        "image_tokens": shape.image_tokens,
        "channels": config.get("num_channels", 3),
        "patch": config.get("patch_size", 16),
        "experts": shape.num_experts,
        "expert": expert,
        "twice_expert": 2 * expert,
        "shared_experts": expert * (config.get("n_shared_experts") or 0),
        "query_rank": config.get("q_lora_rank"),
        "expanded_queries": shape.num_heads * (others + rotary),
        "key_rank": key_rank,
        "key_rank_and_rotary": key_rank + rotary,
        "expanded_keys_and_values": shape.num_heads * (others + value),
        "values": shape.num_heads * value,
    }


def _tensors(
    shape: Shape, sizes: Mapping[str, Any], name: str, kind: str, words: Sequence[str]
) -> Iterator[Tensor]:
    """Return (name, shape, kind) of a module's tensors.

    Kinds that are no module are the tensor itself; one that ends with "+" has a bias.
    """
    dimensions = tuple(sizes[word] for word in words)
    has_bias = kind.endswith("+")
    kind = kind.removesuffix("+")
    if kind not in MODULES:
        yield name, dimensions, kind
        return
    # Conv1D is stored transposed
    yield f"{name}.weight", dimensions[::-1] if kind == "conv1d" else dimensions, kind
    is_norm = kind == "norm"
    if has_bias or (is_norm and shape.norm == "layernorm"):
        yield f"{name}.bias", dimensions[:1], "norm" if is_norm else "bias"


@cache
def catalogue() -> dict[str, dict[str, Any]]:
    """Return the published models by name, families together, small ones first.

    Their configurations are JSON text. `parameters` counts shared ones once, `stored_parameters` a
    tied head that the published file has too; `aliases` are hub ids of the same shape, such as the
    instruction-tuned variant; `source` says where the facts are from.
    """
    paths = data_path("models").glob("*.json")
    entries = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    entries.sort(key=lambda entry: (entry["config"]["model_type"], entry["parameters"]))
    by_name = {}
    for entry in entries:
        by_name[entry["name"]] = entry | {"config": json.dumps(entry["config"])}
    return by_name


def model_names() -> list[str]:
    """Return the names of the catalogue, families together, small models first."""
    return list(catalogue())


@cache
def _spellings() -> dict[str, dict[str, Any]]:
    """Return every spelling that finds an entry, in lower case.

    That is the name, the hub id and aliases, with and without organisation.
    """
    entries = {}
    for entry in catalogue().values():
        for spelling in (*entry.get("aliases", ()), entry["hub_id"], entry["name"]):
            lower = spelling.lower()
            entries[lower] = entry
            entries[lower.rpartition("/")[2]] = entry
    return entries


def read_shape(
    model: str | Mapping,
    num_layers: int | None = None,
    task: str | None = None,
    num_labels: int | None = None,
) -> Shape:
    """Return the shape of `model`.

    That is a name, a hub id, a path to a `config.json` or its folder, or its content.

    Args:
        num_layers: a depth other than the model's own; an encoder–decoder gets that depth on both
            sides.
        task: which head; None takes the one that the configuration names, else the usual one.
        num_labels: of a classifier, other than the configuration's.
    Raises:
        RecipeError: no such model or file, a size is missing or impossible, or the model has no
            such head.
    """
    if isinstance(model, Mapping):
        config = plain(model)
        name = str(config.get("_name_or_path") or config.get("model_type") or "config")
        return _shape(name, None, json.dumps(config), num_layers, task, num_labels)
    if not isinstance(model, str):
        rest = "it must be a name, a path to a config.json or a configuration, such as a model's "
        rest += "own `config`; a module goes to simulate(model=...)"
        raise RecipeError("model", model, rest)
    entry = _spellings().get(model.lower())
    if entry:
        config_text = entry["config"]
        return _shape(entry["name"], entry["hub_id"], config_text, num_layers, task, num_labels)
    path, text = _read_file(model)
    is_usual = path.name == "config.json"
    name = path.resolve().parent.name if is_usual else path.name.removesuffix(".json")
    return _shape(name, None, text, num_layers, task, num_labels)


def _read_file(model: str) -> tuple[Path, str]:
    """Return the path of a configuration and its text. Raises RecipeError."""
    path = Path(model)
    try:
        path = path / "config.json" if path.is_dir() else path
        return path, read_text(path)
    except FileError as error:
        reason = str(error).rstrip(".")
        rest = f"{reason}: it must be a name, or the path of a config.json"
        raise RecipeError("model", model, rest) from None
    except (OSError, ValueError):  # no such file, or a zero byte in a name
        last_part = model.lower().rpartition("/")[2]
        near = difflib.get_close_matches(last_part, _spellings(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        rest = f"no model and no readable file is called so; {hint}vramlab.model_names() lists the "
        rest += "names, and the path of any config.json works too"
        raise RecipeError("model", model, rest) from None


def _shown(name: str) -> str:
    """Return `name`, which anybody may have written, without what a terminal cannot print.

    Or what it takes for an order.
    """
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in name)


@lru_cache(maxsize=512)
def _shape(name: str, *said: Any) -> Shape:
    try:
        return _described(_shown(name), *said)
    except RecipeError:
        raise
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        # a value of another kind than its key's
        rest = f"its configuration cannot be read: {configuration.reason(error)}"
        raise RecipeError("model", name, rest) from error


def _described(
    name: str,
    hub_id: str | None,
    text: str,
    num_layers: int | None,
    task: str | None,
    num_labels: int | None,
) -> Shape:
    config = configuration.parse(name, text)
    if num_labels:
        config.pop("id2label", None)
        config.pop("label2id", None)
        config["num_labels"] = num_labels
    if num_layers is not None:
        configuration.keep_layers(config, num_layers)
    family = configuration.family_of(name, config)
    if task is None:
        task = _named_task(family.classes, config)
    elif task not in family.classes:
        known = " or ".join(map(repr, family.classes))
        raise RecipeError("task", task, f"{name} can be trained for {known}")
    config["architectures"] = [family.classes[task]]
    fields = configuration.read(name, config, family, task)
    head = family.heads.get(task, TASKS[task].head)
    shape = Shape(name, config["model_type"], task, hub_id, json.dumps(config), head, **fields)
    if family.layout_options is None:
        with needing(name):
            return dataclasses.replace(shape, **describe(shape))
    empty = [weight.name for weight in shape.weights() if not weight.size]
    if empty:
        rest = f"a size that its configuration sets to 0 or null would empty {empty[0]}"
        raise RecipeError("model", name, rest)
    return shape


def _named_task(classes: Mapping[str, str], config: Mapping[str, Any]) -> str:
    """Return the task whose class a configuration names, else the usual one, which is first."""
    named, *_ = config.get("architectures") or [None]
    for task, class_name in classes.items():
        if class_name == named:
            return task
    return next(iter(classes))
