"""Every parameter tensor and buffer of a model, by formula: names, shapes and order as `transformers` 5.23 has them.

They follow from the architecture's layout (`families.py`); the tests hold every list against the model built on the
meta device. What no layout covers is read off that model.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from ..report.data import data_path
from .from_transformers import read_off
from .shape import ShapeData


@dataclass(frozen=True)
class Weight:
    """One parameter tensor.

    Kinds: "linear" (out × in), "conv1d" (GPT-2's in × out), "embedding" (a shared output head is one too), "norm", "bias",
    "conv", "expert" (experts × out × in) and "other".
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    layer: int | None = None  # its block; a decoder's count on after its encoder's

    @property
    def size(self) -> int:
        """How many numbers it holds."""
        return prod(self.shape)


# Kind and sizes of what plays a role in a layer. A cross-attention's roles begin with "cross_"; "position" is in a
# stack's first layer only.
ROLES = json.loads(data_path("layer_roles.json").read_text(encoding="utf-8"))


def letter_sizes(s: ShapeData) -> dict[str, int]:
    """Return the sizes that a layout's letters mean.

    h hidden, m feed-forward, q and k all heads, d one head, a heads, V vocabulary, P positions,
    T token types, L labels, E experts, e and s the width of one and of the shared ones, B position buckets, I image tokens,
    C channels, p a side of a patch; ql, qb, kl, kva, kvb and vo compressed queries, keys and values, and what these become.
    """
    c, h, q, k = s.config, s.hidden_size, s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    expert = c.get("moe_intermediate_size") or s.intermediate_size
    rope, nope, values = (c.get(key) or 0 for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    compressed = c.get("kv_lora_rank") or 0
    found = {"1": 1, "2e": 2 * expert, "2m": 2 * s.intermediate_size, "P+2": (s.max_positions or 0) + 2}
    found |= dict(e=expert, s=expert * (c.get("n_shared_experts") or 0), ql=c.get("q_lora_rank"), kl=compressed)
    found |= dict(qb=s.num_heads * (nope + rope), kva=compressed + rope, kvb=s.num_heads * (nope + values))
    found |= dict(h=h, m=s.intermediate_size, q=q, k=k, qkv=q + 2 * k, d=s.head_dim)
    found |= dict(
        a=s.num_heads, V=max(s.vocab_size, 1), P=s.max_positions, T=c.get("type_vocab_size", 2), L=s.num_labels
    )
    found |= dict(
        E=s.num_experts, B=c.get("relative_attention_num_buckets", 32), I=s.image_tokens, p=c.get("patch_size", 16)
    )
    return found | dict(vo=s.num_heads * values, C=c.get("num_channels", 3))


@lru_cache(maxsize=512)
def list_weights(s: ShapeData) -> tuple[Weight, ...]:
    """Return every parameter of `s` in the order of `named_parameters()`, shared ones once."""
    if s.layout is None:
        return tuple(Weight(*row) for row in read_off(s)[0])
    found, sizes, first = [], letter_sizes(s), 0
    for item in s.layout.items:
        if isinstance(item, str):
            for name, kind, *letters in filter(None, map(str.split, item.split(";"))):
                found += (Weight(*row) for row in _tensors(s, sizes, name, kind, letters))
            continue
        rows = []
        for role, name in item.parts.items():
            kind, letters = ROLES[role]
            letters = item.sizes.get(role, letters).replace(".", " ")
            if kind == "linear":
                kind = s.layout.linear + ("+" if role in s.layout.biased else "")
            rows += ((role, *row) for row in _tensors(s, sizes, name, kind, letters.split()))
        for i in range(item.count):
            found += (
                Weight(f"{item.prefix}.{item.first + i}.{name}", shape, kind, first + i)
                for role, name, shape, kind in rows
                if role != "position" or i == 0
            )
        first += item.count
    return tuple(found)


def _tensors(s: ShapeData, sizes: dict[str, int], name: str, kind: str, letters: list[str]) -> Iterator[tuple]:
    """Return (name, shape, kind) of a module's tensors; kinds that are no module are the tensor itself."""
    shape, bias = tuple(sizes[letter] for letter in letters), kind.endswith("+")
    kind = kind.removesuffix("+")
    if kind not in ("linear", "conv1d", "embedding", "norm"):
        yield name, shape, kind
        return
    yield f"{name}.weight", shape[::-1] if kind == "conv1d" else shape, kind  # Conv1D is stored transposed
    if bias or (kind == "norm" and s.norm == "layernorm"):
        yield f"{name}.bias", shape[:1], "norm" if kind == "norm" else "bias"


@lru_cache(maxsize=512)
def list_buffers(s: ShapeData) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """Return every buffer of `s`: name, shape and dtype, whether or not it is saved with the weights."""
    if s.layout is None:
        return read_off(s)[1]
    rows = [(name, (1, s.max_positions), "int64") for name in s.layout.buffers]
    if s.layout.scaled_embedding is True:
        rows.append((f"{s.layout.modules[0][0]}.embed_scale", (), "float32"))
    for stack in s.layout.stacks if s.layout.sigmoid_router else ():
        numbers = range(stack.first, stack.first + stack.count if "router" in stack.parts else 0)
        rows += [(f"{stack.prefix}.{i}.mlp.gate.e_score_correction_bias", (s.num_experts,), "float32") for i in numbers]
    if s.rotary_dim:
        module = s.layout.stacks[0].prefix.rpartition(".")[0] + ".rotary_emb"
        # one frequency per pair of channels, and a second copy that transformers keeps to undo dynamic scaling
        kinds = [f"{kind}_" for kind in sorted(set(s.layout.kinds))] if s.layout.kinds_tables else [""]
        names = (f"{module}.{kind}{name}" for kind in kinds for name in ("inv_freq", "original_inv_freq"))
        rows += [(name, ((s.rotary_dim + 1) // 2,), "float32") for name in names]
    return tuple(rows)


def unquantized(recipe: Any) -> list[str]:
    """Return notes on matrices that a 4-bit base keeps in 16 or 32 bits, and on sharding it; [] where none are due.

    `transformers.integrations.bitsandbytes.replace_with_bnb_linear` takes modules whose type is `nn.Linear` or `Conv1D`.
    """
    if not recipe.quantization:
        return []
    shape, own = recipe.shape, bool(recipe.shape.layout) and not recipe.shape.layout.quantizable
    left = [w for w in shape.weights() if w.kind == "expert" or (own and w.kind == "linear" and w.layer is not None)]
    notes = []
    if recipe.sharding and recipe.sharding.engine == "fsdp":
        # accelerate 1.15, utils/fsdp_utils.py: fsdp2_prepare_model
        stored = "if bnb_4bit_quant_storage is a floating dtype, as here, not uint8"
        notes = [f"accelerate's FSDP shards 4-bit weights {stored}"]
    if not left:
        return notes
    what = "Falcon's own linear class is none" if own else "transformers 5 fuses experts in 3-D parameters"
    cast = ", and prepare_model_for_kbit_training casts them to fp32" if recipe.quantization.prepare else ""
    kept, total = sum(w.size for w in left), shape.num_parameters
    sizes = f"{kept / 1e9:,.1f} of {total / 1e9:,.1f} billion" if total >= 1e9 else f"{kept:,} of {total:,}"
    return [*notes, f"{sizes} weights are not quantized: bitsandbytes takes nn.Linear layers, {what}{cast}"]
