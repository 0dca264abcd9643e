"""Decoder layers, operator by operator, as transformers 5.23 writes them (`modeling_*.py`, the class in each docstring).

Every function takes the model `m` (see `forward.Model`), the layer's name and its input, and returns its output. What a
layer keeps for the backward pass is the sum over its operators; for GPT-2 in fp32 with a fused kernel, per token and
layer, in bytes: 4 · (2 norms · h + 3h queries, keys, values + h attention + 2h inputs of norms + 4 · 4h gelu_new + 4h its
result) + 2h dropout masks: about 109 h. `activations.activation_bytes_per_layer` lists them.
"""

from math import prod
from typing import TYPE_CHECKING

from .blocks import Tensor
from .ledger import SAME

if TYPE_CHECKING:
    from .forward import Model


def gpt2(m: "Model", name: str, x: Tensor, mask: Tensor | None) -> Tensor:
    """`GPT2Block`: one fused projection, dropout on both branches, tanh-GELU written out."""
    s = m.shape
    normed = m.layer_norm(x, f"{name}.ln_1")
    q, k, v = m.heads(m.linear(normed, f"{name}.attn.c_attn"), s.num_heads, s.num_heads, s.num_heads)
    k, v = m.cached(k, v)
    y = m.attend(q, k, v, mask, s.attention_dropout, softmax_fp32=False)
    del q, k, v
    y = m.dropout(m.linear(y, f"{name}.attn.c_proj"), s.hidden_dropout)
    x = m.add(y, x)
    normed = m.layer_norm(x, f"{name}.ln_2")
    z = m.linear(m.activation(m.linear(normed, f"{name}.mlp.c_fc"), s.activation), f"{name}.mlp.c_proj")
    z = m.dropout(z, s.hidden_dropout)
    return m.add(x, z)


def gpt_neox(m: "Model", name: str, x: Tensor, mask: Tensor | None) -> Tensor:
    """`GPTNeoXLayer`: attention and feed-forward part side by side, a quarter of each head rotated."""
    s = m.shape
    y = m.dropout(_neox_attention(m, name, m.layer_norm(x, f"{name}.input_layernorm"), mask), s.hidden_dropout)
    parallel = m.setting("use_parallel_residual", True)
    if not parallel:
        y = m.add(y, x)
    normed = m.layer_norm(x if parallel else y, f"{name}.post_attention_layernorm")
    z = _two_layers(m, normed, f"{name}.mlp.dense_h_to_4h", f"{name}.mlp.dense_4h_to_h")
    del normed
    z = m.dropout(z, s.hidden_dropout)
    return m.add(m.add(z, y), x) if parallel else m.add(z, y)


def _neox_attention(m: "Model", name: str, normed: Tensor, mask: Tensor | None) -> Tensor:
    s = m.shape
    qkv = m.linear(normed, f"{name}.attention.query_key_value")
    q, k, v = m.heads(qkv, s.num_heads, s.num_heads, s.num_heads)
    del qkv
    q, k = m.turn(q, k)
    k, v = m.cached(k, v)
    return m.linear(m.attend(q, k, v, mask, s.attention_dropout), f"{name}.attention.dense")


def _two_layers(m: "Model", x: Tensor, up: str, down: str) -> Tensor:
    return m.linear(m.activation(m.linear(x, up), m.shape.activation), down)


def opt(m: "Model", name: str, x: Tensor, mask: Tensor | None) -> Tensor:
    """`OPTDecoderLayer`: learned positions, queries scaled by hand, ReLU."""
    s, first = m.shape, m.setting("do_layer_norm_before", True)
    normed = m.layer_norm(x, f"{name}.self_attn_layer_norm") if first else x
    y = m.dropout(_opt_attention(m, f"{name}.self_attn", normed, mask), s.hidden_dropout)
    del normed
    x = m.add(x, y)
    del y
    if not first:
        x = m.layer_norm(x, f"{name}.self_attn_layer_norm")
    z = m.layer_norm(x, f"{name}.final_layer_norm") if first else x
    z = m.linear(z, f"{name}.fc1")
    z = m.activation(z, s.activation)
    z = m.linear(z, f"{name}.fc2")
    z = m.dropout(z, s.hidden_dropout)
    z = m.add(x, z)
    return z if first else m.layer_norm(z, f"{name}.final_layer_norm")


def _opt_attention(m: "Model", name: str, x: Tensor, mask: Tensor | None) -> Tensor:
    s = m.shape
    (q,) = m.heads(m.scale(m.linear(x, f"{name}.q_proj")), s.num_heads)
    k, v = (m.heads(m.linear(x, f"{name}.{part}"), s.num_heads)[0] for part in ("k_proj", "v_proj"))
    k, v = m.cached(k, v)
    return m.linear(m.attend(q, k, v, mask, s.attention_dropout), f"{name}.out_proj")


def llama(m: "Model", name: str, x: Tensor, mask: Tensor | None) -> Tensor:
    """`LlamaDecoderLayer` and its kin (Mistral, Qwen, Gemma, Mixtral): RMSNorm, rotated heads, a gated feed-forward part.

    Gemma 2 also norms what each branch returns; Mixtral's feed-forward part is a choice of experts.
    """
    s = m.shape
    four_norms = s.family == "gemma2"
    y = _llama_attention(m, f"{name}.self_attn", m.norm(x, f"{name}.input_layernorm"), mask)
    if four_norms:
        y = m.norm(y, f"{name}.post_attention_layernorm")
    x = m.add(x, y)
    z = m.norm(x, f"{name}.{'pre_feedforward' if four_norms else 'post_attention'}_layernorm")
    z = experts(m, f"{name}.mlp", z) if s.num_experts else gated(m, f"{name}.mlp", z)
    if four_norms:
        z = m.norm(z, f"{name}.post_feedforward_layernorm")
    return m.add(x, z)


def _llama_attention(m: "Model", name: str, x: Tensor, mask: Tensor | None) -> Tensor:
    s = m.shape
    q = m.linear(x, f"{name}.q_proj")
    if s.family == "qwen3":
        q = m.norm(q.view(*q.shape[:2], s.num_heads, s.head_dim), f"{name}.q_norm")
    (q,) = m.heads(q, s.num_heads)
    k = m.linear(x, f"{name}.k_proj")
    if s.family == "qwen3":
        k = m.norm(k.view(*k.shape[:2], s.num_kv_heads, s.head_dim), f"{name}.k_norm")
    (k,) = m.heads(k, s.num_kv_heads)
    (v,) = m.heads(m.linear(x, f"{name}.v_proj"), s.num_kv_heads)
    q, k = m.turn(q, k)
    k, v = m.cached(k, v)
    y = m.attend(q, k, v, mask, s.attention_dropout, cap=bool(m.setting("attn_logit_softcapping", None)))
    return m.linear(y, f"{name}.o_proj")


def gated(m: "Model", name: str, x: Tensor) -> Tensor:
    """down(act(gate(x)) · up(x)): four tensors as wide as the feed-forward part are kept."""
    gate = m.activation(m.linear(x, f"{name}.gate_proj"), m.shape.activation)
    product = m.mul(gate, m.linear(x, f"{name}.up_proj"))
    del gate
    return m.linear(product, f"{name}.down_proj")


def falcon(m: "Model", name: str, x: Tensor, mask: Tensor | None) -> Tensor:
    """`FalconDecoderLayer`: one norm (or two side by side), heads that share one key and value, parallel branches."""
    s = m.shape
    new, parallel = m.setting("new_decoder_architecture", False), m.setting("parallel_attn", True)
    two = new and m.setting("num_ln_in_parallel_attn", 2) in (2, None)
    normed = m.layer_norm(x, f"{name}.{'ln_attn' if two else 'input_layernorm'}")
    other = m.layer_norm(x, f"{name}.ln_mlp") if two else normed
    y = _falcon_attention(m, f"{name}.self_attention", normed, mask, new)
    if not new and not parallel:
        x = m.add(x, m.dropout(y, s.attention_dropout))
        other = m.layer_norm(x, f"{name}.post_attention_layernorm")
    z = _two_layers(m, other, f"{name}.mlp.dense_h_to_4h", f"{name}.mlp.dense_4h_to_h")
    if new or parallel:
        z = m.op("add_", [z, y], z.shape, z.width, grads=(SAME, SAME), block=z.block)
    return m.add(x, m.dropout(z, s.hidden_dropout))


def _falcon_attention(m: "Model", name: str, x: Tensor, mask: Tensor | None, new: bool) -> Tensor:
    s = m.shape
    kv = s.num_kv_heads if new else 1 if m.setting("multi_query", True) else s.num_heads
    q, k, v = m.heads(m.linear(x, f"{name}.query_key_value"), s.num_heads, kv, kv)
    if new:
        k, v = m.repeat(k, s.num_heads), m.repeat(v, s.num_heads)
    q, k = m.turn(q, k)
    k, v = m.cached(k, v)
    y = _falcon_scores(m, q, k, v, mask) if m.implementation == "eager" else m.fused(q, k, v, mask, 0.0)
    return m.linear(y, f"{name}.dense")


def _falcon_scores(m: "Model", q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Scores scaled in place; one head of keys serves all without a copy if there is one sequence."""
    b, heads, n, d = q.shape
    if b > 1:
        k, v = m.repeat(k, heads), m.repeat(v, heads)
    scores = m.matmul(m.copied(q), m.copied(k), b, heads, n, n)
    weights = m.softmax(m.add(scores, mask), False, q.width)
    del scores
    return m.copy(m.matmul(weights, m.copied(v), b, heads, n, d), shape=(b, n, heads * d))


def phi(m: "Model", name: str, x: Tensor, mask: Tensor | None) -> Tensor:
    """`PhiDecoderLayer`: one norm for both branches, which run side by side."""
    s = m.shape
    normed = m.layer_norm(x, f"{name}.input_layernorm")
    parts = []
    for part, heads in (("q_proj", s.num_heads), ("k_proj", s.num_kv_heads), ("v_proj", s.num_kv_heads)):
        parts += m.heads(m.linear(normed, f"{name}.self_attn.{part}"), heads)
    q, k, v = parts
    parts.clear()
    q, k = m.turn(q, k)
    k, v = m.cached(k, v)
    y = m.attend(q, k, v, mask, s.attention_dropout)
    y = m.dropout(m.linear(y, f"{name}.self_attn.dense"), s.hidden_dropout)
    del q, k, v
    z = m.dropout(_two_layers(m, normed, f"{name}.mlp.fc1", f"{name}.mlp.fc2"), s.hidden_dropout)
    return m.add(m.add(y, z), x)


def experts(m: "Model", name: str, x: Tensor) -> Tensor:
    """`MixtralSparseMoeBlock` with grouped products: every token's row is copied to each expert it goes to."""
    s = m.shape
    b, n, h = x.shape
    rows, k = b * n, s.experts_per_token
    flat = x.view(rows, h)
    scores = m.product(flat, m.parameters[f"{name}.gate.weight"])
    probabilities = m.softmax(scores, True, 4)
    top = m.op("topk", [probabilities], (rows, k), 4, saves=[m.tensor("topk", (rows, k), 8)])
    weights = m.op("div", [top], (rows, k), 4, saves=[top])
    order = m.tensor("sort", (rows * k,), 8)
    chosen = index(m, flat, order, rows * k, h)
    both = grouped(m, chosen, f"{name}.experts.gate_up_proj", 2 * s.intermediate_size)
    gate, up = m.split(both, (rows * k, s.intermediate_size), (rows * k, s.intermediate_size))
    product = m.mul(m.activation(gate, s.activation), up)
    out = grouped(m, product, f"{name}.experts.down_proj", h)
    weighted = m.mul(out, index(m, weights, order, rows * k, 1))
    back = index(m, weighted, order, rows * k, h)
    total = m.reduce(back, (rows, h), "sum")
    return m.to(total, x.width).view(b, n, h)


def index(m: "Model", x: Tensor, order: Tensor, *shape: int) -> Tensor:
    """x[order]: backward puts the gradient into zeros and that into another tensor (`index_put`)."""
    return m.op("index", [x], shape, x.width, saves=[order], extra=prod(x.shape) * x.width)


def grouped(m: "Model", x: Tensor, name: str, out: int) -> Tensor:
    """One product for all experts (`torch.nn.functional.grouped_mm`): autocast leaves it alone, x takes W's dtype."""
    weight = m.parameters[name]
    x = m.to(x, weight.width)
    saves = ([x] if weight.needs else []) + ([weight] if x.needs else [])
    return m.op("grouped_mm", [x, weight], (x.shape[0], out), weight.width, saves=saves)
