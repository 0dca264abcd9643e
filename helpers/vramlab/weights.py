"""Every parameter tensor and buffer of a model, by formula: names, shapes and order as `transformers` 5.23 has them.

One function per architecture lists them from its `Shape`; the source of each is the `__init__` of the architecture's
`modeling_*.py` in transformers, and the tests hold every list against the model built on the meta device. A variant that
no list covers (and any other architecture) is built there too, once, when asked for.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

from .errors import RecipeError

if TYPE_CHECKING:
    from .shapes import Shape

Row = tuple[str, tuple[int, ...], str]


@dataclass(frozen=True)
class Weight:
    """One parameter tensor.

    Attributes:
        kind: "linear" (out × in), "conv1d" (GPT-2's in × out), "embedding", "norm", "bias", "conv", "expert" (experts
            × out × in) or "other"; a matrix shared by embedding and head is an "embedding".
        layer: which block it belongs to, None outside the blocks; a decoder's blocks count on after its encoder's.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    layer: int | None = None

    @property
    def size(self) -> int:
        """How many numbers it holds."""
        return prod(self.shape)


class Unlisted(Exception):
    """The configuration uses a variant for which this module has no list."""


def linear(name: str, inside: int, out: int, bias: bool = True) -> list[Row]:
    """The weight of an `nn.Linear`, and its bias."""
    rows = [(f"{name}.weight", (out, inside), "linear")]
    return [*rows, (f"{name}.bias", (out,), "bias")] if bias else rows


def conv1d(name: str, inside: int, out: int) -> list[Row]:
    """transformers' `Conv1D`: a linear layer whose weight is stored transposed."""
    return [(f"{name}.weight", (inside, out), "conv1d"), (f"{name}.bias", (out,), "bias")]


def norm(name: str, size: int, bias: bool = True) -> list[Row]:
    """A LayerNorm, or without bias an RMSNorm; its bias is of kind "norm" too."""
    return [(f"{name}.{part}", (size,), "norm") for part in (("weight", "bias") if bias else ("weight",))]


def embedding(name: str, rows: int, size: int) -> list[Row]:
    """A lookup table."""
    return [(f"{name}.weight", (rows, size), "embedding")]


def _outside(rows: list[Row]) -> Iterator[Weight]:
    return (Weight(*row) for row in rows)


def _stack(prefix: str, count: int, rows: list[Row], first: int = 0) -> Iterator[Weight]:
    """`rows` once per layer, under `prefix` and the layer's number."""
    for i in range(count):
        for name, shape, kind in rows:
            yield Weight(f"{prefix}.{i}.{name}", shape, kind, first + i)


def _head(s: "Shape", bias: bool = False) -> list[Row]:
    """The decoder families' output head: a classifier's `score`, or `lm_head` unless the embedding serves as it."""
    if s.task == "sequence-classification":
        return linear("score", s.hidden_size, s.num_labels, bias=False)
    return [] if s.tied else linear("lm_head", s.hidden_size, s.vocab_size, bias)


def _gpt2(s: "Shape") -> Iterator[Weight]:
    if s.config.get("add_cross_attention"):
        raise Unlisted
    h, m = s.hidden_size, s.intermediate_size
    yield from _outside(
        embedding("transformer.wte", s.vocab_size, h) + embedding("transformer.wpe", s.max_positions, h)
    )
    attention = conv1d("attn.c_attn", h, 3 * h) + conv1d("attn.c_proj", h, h)
    mlp = conv1d("mlp.c_fc", h, m) + conv1d("mlp.c_proj", m, h)
    yield from _stack("transformer.h", s.num_layers, norm("ln_1", h) + attention + norm("ln_2", h) + mlp)
    yield from _outside(norm("transformer.ln_f", h) + _head(s))


def _gpt_neox(s: "Shape") -> Iterator[Weight]:
    h, m, bias = s.hidden_size, s.intermediate_size, s.config.get("attention_bias", True)
    yield from _outside(embedding("gpt_neox.embed_in", s.vocab_size, h))
    norms = norm("input_layernorm", h) + norm("post_attention_layernorm", h)
    attention = linear("attention.query_key_value", h, 3 * h, bias) + linear("attention.dense", h, h, bias)
    mlp = linear("mlp.dense_h_to_4h", h, m) + linear("mlp.dense_4h_to_h", m, h)
    yield from _stack("gpt_neox.layers", s.num_layers, norms + attention + mlp)
    yield from _outside(norm("gpt_neox.final_layer_norm", h) + _head(s))


def _attention(s: "Shape", out: str = "o_proj", bias: bool = False, out_bias: bool = False) -> list[Row]:
    """Llama's separate projections; keys and values are narrower when heads share them."""
    h, q, kv = s.hidden_size, s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    rows = linear("self_attn.q_proj", h, q, bias) + linear("self_attn.k_proj", h, kv, bias)
    return rows + linear("self_attn.v_proj", h, kv, bias) + linear(f"self_attn.{out}", q, h, out_bias)


def _gated_mlp(s: "Shape", bias: bool = False) -> list[Row]:
    h, m = s.hidden_size, s.intermediate_size
    return linear("mlp.gate_proj", h, m, bias) + linear("mlp.up_proj", h, m, bias) + linear("mlp.down_proj", m, h, bias)


def _llama(s: "Shape") -> Iterator[Weight]:
    """Llama and its descendants, which differ in biases, extra norms and the feed-forward part."""
    h, bias = s.hidden_size, bool(s.config.get("attention_bias", False))
    attention = _attention(s, bias=True) if s.family == "qwen2" else _attention(s, bias=bias, out_bias=bias)
    if s.family == "qwen3":
        attention += norm("self_attn.q_norm", s.head_dim, bias=False) + norm("self_attn.k_norm", s.head_dim, bias=False)
    mlp = _gated_mlp(s, bool(s.config.get("mlp_bias", False)) and s.family == "llama")
    if s.family == "mixtral":
        n, m = s.num_experts, s.intermediate_size
        mlp = [("mlp.gate.weight", (n, h), "other"), ("mlp.experts.gate_up_proj", (n, 2 * m, h), "expert")]
        mlp += [("mlp.experts.down_proj", (n, h, m), "expert")]
    names = ["input_layernorm", "post_attention_layernorm"]
    if s.family == "gemma2":
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    norms = [row for name in names for row in norm(name, h, bias=False)]
    yield from _outside(embedding("model.embed_tokens", s.vocab_size, h))
    yield from _stack("model.layers", s.num_layers, attention + mlp + norms)
    yield from _outside(norm("model.norm", h, bias=False) + _head(s))


def _bert(s: "Shape") -> Iterator[Weight]:
    c, h, m = s.config, s.hidden_size, s.intermediate_size
    if c.get("add_cross_attention") or c.get("is_decoder"):
        raise Unlisted
    tables = (("word", s.vocab_size), ("position", s.max_positions), ("token_type", c.get("type_vocab_size", 2)))
    for table, rows in tables:
        yield from _outside(embedding(f"bert.embeddings.{table}_embeddings", rows, h))
    yield from _outside(norm("bert.embeddings.LayerNorm", h))
    rows = [row for part in ("query", "key", "value") for row in linear(f"attention.self.{part}", h, h)]
    rows += linear("attention.output.dense", h, h) + norm("attention.output.LayerNorm", h)
    rows += linear("intermediate.dense", h, m) + linear("output.dense", m, h) + norm("output.LayerNorm", h)
    yield from _stack("bert.encoder.layer", s.num_layers, rows)
    if s.task == "sequence-classification":
        yield from _outside(linear("bert.pooler.dense", h, h) + linear("classifier", h, s.num_labels))
    elif s.tied:
        yield Weight("cls.predictions.bias", (s.vocab_size,), "bias")
        head = linear("cls.predictions.transform.dense", h, h) + norm("cls.predictions.transform.LayerNorm", h)
        yield from _outside(head)
    else:
        raise Unlisted


FAMILIES: dict[str, Callable[["Shape"], Iterator[Weight]]] = {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "gemma": _llama,
    "gemma2": _llama,
    "mixtral": _llama,
    "bert": _bert,
}


def list_weights(s: "Shape") -> tuple[Weight, ...]:
    """Every parameter of `s` in the order of `named_parameters()`, shared ones once."""
    try:
        if s.family in FAMILIES:
            return tuple(FAMILIES[s.family](s))
    except Unlisted:
        pass
    return _on_meta(s)[0]


def list_buffers(s: "Shape") -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """Every buffer of `s`: name, shape and dtype, whether or not it is saved with the weights."""
    if s.family not in FAMILIES or _other_rotation(s):
        return _on_meta(s)[1]
    if s.family == "bert":
        return tuple(
            (f"bert.embeddings.{n}", (1, s.max_positions), "int64") for n in ("position_ids", "token_type_ids")
        )
    rows = []
    if s.family in ("gemma", "gemma2"):
        rows.append(("model.embed_tokens.embed_scale", (), "float32"))
    if s.rotary_dim:
        prefix = {"gpt_neox": "gpt_neox", "falcon": "transformer"}.get(s.family, "model")
        # one frequency per pair of channels, and a second copy that transformers keeps to undo dynamic scaling
        shape = ((s.rotary_dim + 1) // 2,)
        rows += [(f"{prefix}.rotary_emb.{n}", shape, "float32") for n in ("inv_freq", "original_inv_freq")]
    return tuple(rows)


def _other_rotation(s: "Shape") -> bool:
    """Whether the rotary embedding is of a type whose buffers are not the two usual ones."""
    rope = s.config.get("rope_parameters") or s.config.get("rope_scaling") or {}
    return rope.get("rope_type", rope.get("type", "default")) not in ("default", "linear", "dynamic", "llama3", "yarn")


@lru_cache(maxsize=32)
def _on_meta(s: "Shape") -> tuple[tuple[Weight, ...], tuple]:
    """Weights and buffers of the transformers model of `s`, built without storage."""
    import re

    import torch
    import transformers

    from .models import AUTO_CLASS

    try:
        config = transformers.AutoConfig.for_model(**s.config)
        with torch.device("meta"):
            model = getattr(transformers, AUTO_CLASS[s.task]).from_config(config, dtype=torch.float32)
    except (KeyError, ValueError, TypeError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise RecipeError("model", s.name, f"transformers cannot build it for {s.task}: {reason}") from error
    owner = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owner.setdefault(id(parameter), module)
    weights = []
    for name, parameter in model.named_parameters():
        layer = re.search(r"\.(\d+)\.", name)
        kind = _kind(torch.nn, name, parameter, owner[id(parameter)])
        weights.append(Weight(name, tuple(parameter.shape), kind, int(layer.group(1)) if layer else None))
    dtype = lambda tensor: str(tensor.dtype).removeprefix("torch.")  # noqa: E731
    return tuple(weights), tuple((name, tuple(b.shape), dtype(b)) for name, b in model.named_buffers())


def _kind(nn, name: str, parameter, module) -> str:
    if "Norm" in type(module).__name__:
        return "norm"
    if name.endswith("bias"):
        return "bias"
    for kind, classes in (
        ("embedding", nn.Embedding),
        ("linear", nn.Linear),
        ("conv", (nn.Conv1d, nn.Conv2d, nn.Conv3d)),
    ):
        if isinstance(module, classes):
            return kind
    if type(module).__name__ == "Conv1D":
        return "conv1d"
    return "expert" if parameter.dim() == 3 and "expert" in name else "other"
