"""Every tensor of a model, from its sizes, without torch.

Names, shapes and order of parameters follow from the architecture's layout (`families.py`); the
tests hold every list against the model of `transformers` 5.23 on the meta device. What no layout
covers is read off that model.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any

from ..base.data import data_path
from .families import Layout, Stack, layout_of
from .from_transformers import read_off
from .model_sizes import Sizes

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
        """The number of numbers that it holds."""
        return prod(self.shape)


# Kind and sizes of what plays a role in a layer. A cross-attention's roles begin with "cross_";
# "position" is in a stack's first layer only.
ROLES = json.loads(data_path("layer_roles.json").read_text(encoding="utf-8"))


@dataclass(frozen=True, eq=False)
class ModelWeights(Sizes):
    """The sizes of one model with one head, and its parameters and buffers."""

    @cached_property
    def layout(self) -> Layout | None:
        """The modules by the roles they play.

        It is None for a family, or a variant of one, that is not written down.
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
        # Layers of a stack are equal, so their tensors are worked out once and named for each.
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


def _modules_in(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """Read "module kind size …; …": yield name, kind and the words of the sizes."""
    for row in text.split(";"):
        words = row.split()
        if words:
            name, kind, *sizes = words
            yield name, kind, sizes


def _sizes_by_word(shape: ModelWeights) -> dict[str, Any]:
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
    shape: ModelWeights,
    sizes: Mapping[str, Any],
    name: str,
    kind: str,
    words: Sequence[str],
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
