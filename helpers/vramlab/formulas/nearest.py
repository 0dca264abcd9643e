"""Layouts for architectures that have none: guess the roles of a decoder's weights from their names and sizes.

What has something else (state spaces, convolutions, a second stack, unlike layers) is refused, for `simulate`.
"""

import dataclasses
import json
from collections import defaultdict
from functools import lru_cache
from math import prod

from ..recipe.families import Layout, Stack
from ..recipe.from_transformers import describe_layout
from ..recipe.recipe import Recipe
from ..recipe.shapes import Shape
from ..recipe.weights import Weight
from ..report.data import data_path
from ..report.errors import RecipeError
from .operators import ACTIVATIONS

# Role in the layer to the last parts of modules' names (modeling files of transformers 5.23).
_ROLES = json.loads(data_path("decoder_modules.json").read_text(encoding="utf-8"))
NAMES = {name: role for role, names in _ROLES.items() for name in names}
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
    unnumbered = {tuple((w.name.replace(f".{i}.", ".", 1), w.shape) for w in rows) for i, rows in layers.items()}
    stray = other or f"{len(norms)} norms with weights"
    has_causal_head = s.task in ("causal-lm", "sequence-classification") and s.head != "classifier"
    reasons = {
        "there is an encoder": s.num_decoder_layers,
        "attention is not causal": not has_causal_head,
        f"the activation is {s.activation}": s.activation not in ACTIVATIONS,
        f"the norm is {s.norm}": s.norm not in KNOWN_NORMS,
        "the layers are shared or differ": len(layers) != s.num_layers or len(unnumbered) != 1,
        f"{stray} stands outside the layers": other or len(norms) != 1 or not tables,
    }
    if reason := next((reason for reason, applies in reasons.items() if applies), ""):
        return reason
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
