"""Layouts for architectures that have none: guess the roles of a decoder's weights from their names and sizes.

What has something else (state spaces, convolutions, a second stack, unlike layers) is refused, for `simulate`.
"""

import dataclasses
from collections import defaultdict
from functools import lru_cache
from math import prod

from ..recipe.families import Layout, Stack
from ..recipe.from_transformers import describe_layout
from ..recipe.recipe import Recipe
from ..recipe.shapes import Shape
from ..recipe.weights import Weight
from ..report.errors import RecipeError
from .operators import ACTIVATIONS

# The last part of a module's name to its role in the layer (modeling files of transformers 5.23).
NAMES = {
    **{"q_proj": "q", "k_proj": "k", "v_proj": "v", "qkv_proj": "qkv", "query_key_value": "qkv", "c_attn": "qkv"},
    **{"o_proj": "out", "out_proj": "out", "dense": "out", "gate_proj": "gate", "gate_up_proj": "gate_up"},
    **{"up_proj": "up", "c_fc": "up", "fc1": "up", "fc_in": "up", "dense_h_to_4h": "up"},
    **{"down_proj": "down", "fc2": "down", "fc_out": "down", "dense_4h_to_h": "down"},
    **{"gate": "router", "router": "router", "experts.gate_up_proj": "experts_up", "experts.down_proj": "experts_down"},
    **{"sinks": "sinks", "q_norm": "q_norm", "q_layernorm": "q_norm", "k_norm": "k_norm", "k_layernorm": "k_norm"},
    **{"input_layernorm": "norm1", "ln_1": "norm1", "self_attn_layer_norm": "norm1"},
    **{"post_attention_layernorm": "norm2", "pre_feedforward_layernorm": "norm2", "ln_2": "norm2"},
    **{"final_layer_norm": "norm2", "post_self_attn_layernorm": "after1"},
    **{"post_feedforward_layernorm": "after2", "post_mlp_layernorm": "after2"},
}
SPARSE = {"router", "experts_up", "experts_down"}
ATTENTIONS = ({"q", "k", "v", "out"}, {"qkv", "out"})
FEED_FORWARDS = ({"up", "down"}, {"gate", "up", "down"}, {"gate_up", "down"}, SPARSE)
EXPERTS_BIASES = ("gate_up_proj_bias", "down_proj_bias")  # GPT-OSS's, of a few numbers
NORMS = {"norm1", "norm2", "after1", "after2"}
KNOWN_NORMS = ("layernorm", "rmsnorm", "rmsnorm in fp32", "layernorm in fp32")


def nearest(recipe: Recipe) -> Shape:
    """Return the shape of `recipe` with a decoder's layout. Raises RecipeError where something plays no role in one."""
    shape, window = recipe.shape, recipe.shape.sliding_window
    found = _decoder(shape)
    kinds = set(shape.settings.get("layer_types") or ())  # with a mask some layers take another kernel than the rest
    if recipe.attn_implementation == "sdpa" and window and recipe.rows[1] >= window and len(kinds) > 1:
        found = f"some layers look back {window} tokens only"
    if isinstance(found, Shape):
        return found
    known = f"predict knows causal decoders of equal attention and feed-forward layers, and in {shape.family} {found}"
    raise RecipeError("model", shape.name, f"{known}: ask simulate")


@lru_cache(maxsize=512)
def _decoder(s: Shape) -> Shape | str:
    """Return `s` with a decoder's layout, or a clause that says why it is none."""
    layers, outside = defaultdict(list), []
    for weight in s.weights():
        (outside if weight.layer is None else layers[weight.layer]).append(weight)
    outside = [w for w in outside if w.name.rpartition(".")[0] != s.head]
    tables, norms = (
        [w.name.removesuffix(".weight") for w in outside if w.kind == kind and w.name.endswith(".weight")]
        for kind in ("embedding", "norm")
    )
    other = next((w.name for w in outside if w.kind not in ("embedding", "norm")), "")
    if s.num_decoder_layers:
        return "there is an encoder"
    if s.task not in ("causal-lm", "sequence-classification") or s.head == "classifier":
        return "attention is not causal"
    if s.activation not in ACTIVATIONS:
        return f"the activation is {s.activation}"
    if s.norm not in KNOWN_NORMS:
        return f"the norm is {s.norm}"
    unnumbered = {tuple((w.name.replace(f".{i}.", ".", 1), w.shape) for w in rows) for i, rows in layers.items()}
    if len(layers) != s.num_layers or len(unnumbered) != 1:
        return "the layers are shared or differ"
    if other or len(norms) != 1 or not tables:
        return f"{other or f'{len(norms)} norms with weights'} stands outside the layers"
    first = min(layers)
    roles = _roles(s, layers[first], f".{first}.")
    if isinstance(roles, str):
        return f"the layers have {roles}"
    found = dataclasses.replace(s, **_experts(s, roles, layers[first]))
    stack = Stack(layers[first][0].name.partition(f".{first}.")[0], s.num_layers, roles)
    before = "; ".join(f"{name} embedding" for name in tables)
    layout = Layout((before, stack, f"{norms[0]} norm"), **describe_layout(s))
    found.__dict__.update(layout=layout, _weights=s.weights())
    return found


def _experts(s: Shape, roles: dict[str, str], rows: list[Weight]) -> dict[str, int]:
    """Read fields of `Shape` off a mixture's weights: how many experts, of what width, how many a token goes to."""
    if "experts_down" not in roles:
        return {}
    count, *sides = next(row.shape for row in rows if row.name.endswith(roles["experts_down"]))
    names = ("num_experts_per_tok", "experts_per_token", "num_experts_per_token")
    top = next((s.settings[name] for name in names if s.settings.get(name)), 1)
    return dict(num_experts=count, intermediate_size=prod(sides) // s.hidden_size, experts_per_token=top)


def _roles(s: Shape, rows: list[Weight], number: str) -> dict[str, str] | str:
    """Map role to module for one layer's weights, or name what plays none. Routers and experts are parameters."""
    names, found = NAMES, {}
    modules = [row.name.partition(number)[2].removesuffix(".weight").removesuffix(".bias") for row in rows]
    ends = {module.rpartition(".")[2] for module in modules}
    if "pre_feedforward_layernorm" in ends or "input_layernorm" not in ends:  # it norms what attention returns
        names = NAMES | {"post_attention_layernorm": "after1"}
    for row, module in zip(rows, modules, strict=True):
        parent, _, last = module.rpartition(".")
        role = names.get(f"{parent.rpartition('.')[2]}.{last}") or names.get(last)
        if last == "c_proj":
            role = "out" if parent.endswith("attn") else "down"
        if last in EXPERTS_BIASES or (role == "router" and row.kind == "bias"):
            continue
        part = row.name.partition(number)[2] if role in SPARSE else module
        if role is None or found.setdefault(role, part) != part or not _fits(s, role, row):
            return row.name
    matrices = found.keys() - NORMS - {"q_norm", "k_norm", "sinks"}
    if not any(matrices == attention | mlp for attention in ATTENTIONS for mlp in FEED_FORWARDS):
        return "other matrices than " + ", ".join(sorted(matrices))
    return found if found.keys() & {"norm1", "after1"} else "norms without weights"


def _fits(s: Shape, role: str, row: Weight) -> bool:
    """Tell whether a weight's size is that of its role."""
    q, k = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    if row.kind in ("bias", "norm"):
        return (row.kind == "bias") != (role in NORMS or role.endswith("norm"))
    outputs = {"q": q, "k": k, "v": k, "qkv": q + 2 * k, "out": s.hidden_size, "down": s.hidden_size}.get(role)
    return role in SPARSE or outputs in (None, row.shape[1] if row.kind == "conv1d" else row.shape[0])
