"""Every parameter tensor and buffer of a model, by formula: names, shapes and order as `transformers` 5.23 has them.

One function per architecture lists them from its `Shape`; the source of each is the `__init__` of the architecture's
`modeling_*.py` in transformers, and the tests hold every list against the model built on the meta device. A variant
that no list covers raises `Unlisted`; `tensors.py` then reads it off a model.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

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


def _head(s: "Shape", bias: bool = False, width: int | None = None) -> list[Row]:
    """The decoder families' output head: a classifier's `score`, or `lm_head` unless the embedding serves as it."""
    width = width or s.hidden_size
    if s.task == "sequence-classification":
        return linear("score", width, s.num_labels, bias=False)
    if s.tied:
        return [("lm_head.bias", (s.vocab_size,), "bias")] if bias else []
    return linear("lm_head", width, s.vocab_size, bias)


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


def _opt(s: "Shape") -> Iterator[Weight]:
    c, h, m = s.config, s.hidden_size, s.intermediate_size
    if not (c.get("enable_bias", True) and c.get("layer_norm_elementwise_affine", True)):
        raise Unlisted
    width = c.get("word_embed_proj_dim") or h
    yield from _outside(embedding("model.decoder.embed_tokens", s.vocab_size, width))
    # two rows more than positions: OPT counts from 2, as the code it was converted from does
    yield from _outside(embedding("model.decoder.embed_positions", s.max_positions + 2, h))
    if width != h:
        project = linear("model.decoder.project_out", h, width, False) + linear(
            "model.decoder.project_in", width, h, False
        )
        yield from _outside(project)
    if c.get("do_layer_norm_before", True) and not c.get("_remove_final_layer_norm"):
        yield from _outside(norm("model.decoder.final_layer_norm", h))
    rows = [row for part in ("k_proj", "v_proj", "q_proj", "out_proj") for row in linear(f"self_attn.{part}", h, h)]
    rows += norm("self_attn_layer_norm", h) + linear("fc1", h, m) + linear("fc2", m, h) + norm("final_layer_norm", h)
    yield from _stack("model.decoder.layers", s.num_layers, rows)
    yield from _outside(_head(s, width=width))


def _phi(s: "Shape") -> Iterator[Weight]:
    h, m = s.hidden_size, s.intermediate_size
    if s.config.get("qk_layernorm"):
        raise Unlisted
    yield from _outside(embedding("model.embed_tokens", s.vocab_size, h))
    attention = _attention(s, "dense", bias=True, out_bias=True)
    mlp = linear("mlp.fc1", h, m) + linear("mlp.fc2", m, h)
    yield from _stack("model.layers", s.num_layers, attention + mlp + norm("input_layernorm", h))
    yield from _outside(norm("model.final_layernorm", h) + _head(s, bias=True))


def _falcon(s: "Shape") -> Iterator[Weight]:
    c, h, m = s.config, s.hidden_size, s.intermediate_size
    bias, new = bool(c.get("bias", False)), bool(c.get("new_decoder_architecture", False))
    yield from _outside(embedding("transformer.word_embeddings", s.vocab_size, h))
    rows = linear("self_attention.query_key_value", h, (s.num_heads + 2 * s.num_kv_heads) * s.head_dim, bias)
    rows += linear("self_attention.dense", h, h, bias)
    rows += linear("mlp.dense_h_to_4h", h, m, bias) + linear("mlp.dense_4h_to_h", m, h, bias)
    norms = ["input_layernorm"]
    if not c.get("parallel_attn", True):
        norms = ["post_attention_layernorm", "input_layernorm"]
    elif c.get("num_ln_in_parallel_attn", 2 if new else 1) == 2:
        norms = ["ln_attn", "ln_mlp"]
    yield from _stack("transformer.h", s.num_layers, rows + [row for name in norms for row in norm(name, h)])
    yield from _outside(norm("transformer.ln_f", h) + _head(s))


def _t5(s: "Shape") -> Iterator[Weight]:
    h, m, inner = s.hidden_size, s.intermediate_size, s.num_heads * s.head_dim
    buckets = s.config.get("relative_attention_num_buckets", 32)
    position = embedding("layer.0.SelfAttention.relative_attention_bias", buckets, s.num_heads)

    def attention(name: str, number: int, first: bool = False) -> list[Row]:
        sub = f"layer.{number}.{name}"
        rows = [row for part in "qkv" for row in linear(f"{sub}.{part}", h, inner, False)]
        rows += linear(f"{sub}.o", inner, h, False) + (position if first else [])  # one position table for all blocks
        return rows + norm(f"layer.{number}.layer_norm", h, bias=False)

    def mlp(number: int) -> list[Row]:
        sub = f"layer.{number}.DenseReluDense"
        names = ("wi_0", "wi_1") if s.gated_mlp else ("wi",)
        rows = [row for name in names for row in linear(f"{sub}.{name}", h, m, False)]
        return rows + linear(f"{sub}.wo", m, h, False) + norm(f"layer.{number}.layer_norm", h, bias=False)

    def stack(side: str, depth: int, after: Callable[[], list[Row]], first: int) -> Iterator[Weight]:
        for i in range(depth):
            rows = attention("SelfAttention", 0, first=i == 0) + after()
            yield from (Weight(f"{side}.block.{i}.{name}", shape, kind, first + i) for name, shape, kind in rows)
        yield from _outside(norm(f"{side}.final_layer_norm", h, bias=False))

    yield from _outside(embedding("shared", s.vocab_size, h))
    yield from stack("encoder", s.num_layers, lambda: mlp(1), 0)
    yield from stack("decoder", s.num_decoder_layers, lambda: attention("EncDecAttention", 1) + mlp(2), s.num_layers)


def _vit(s: "Shape") -> Iterator[Weight]:
    c, h, m, bias = s.config, s.hidden_size, s.intermediate_size, s.config.get("qkv_bias", True)
    patch = c.get("patch_size", 16)
    sides = tuple(patch) if isinstance(patch, list) else (patch, patch)
    yield Weight("vit.embeddings.cls_token", (1, 1, h), "other")
    yield Weight("vit.embeddings.position_embeddings", (1, s.image_tokens, h), "other")
    yield Weight("vit.embeddings.patch_embeddings.projection.weight", (h, c.get("num_channels", 3), *sides), "conv")
    yield Weight("vit.embeddings.patch_embeddings.projection.bias", (h,), "bias")
    rows = [row for part in ("q_proj", "k_proj", "v_proj") for row in linear(f"attention.{part}", h, h, bias)]
    rows += linear("attention.o_proj", h, h) + norm("layernorm_before", h) + norm("layernorm_after", h)
    rows += linear("mlp.fc1", h, m) + linear("mlp.fc2", m, h)
    yield from _stack("vit.layers", s.num_layers, rows)
    yield from _outside(norm("vit.layernorm", h) + linear("classifier", h, s.num_labels))


LISTS: dict[str, Callable[["Shape"], Iterator[Weight]]] = {
    "bert": _bert,
    "falcon": _falcon,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
    "phi": _phi,
    "t5": _t5,
    "vit": _vit,
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "mixtral"), _llama),
}
