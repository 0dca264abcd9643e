"""Encoder layers, and T5's pair of stacks, as transformers 5.23 writes them; see `decoders.py` for how to read them."""

from typing import TYPE_CHECKING

from .blocks import Tensor

if TYPE_CHECKING:
    from .forward import Model

Bias = tuple[Tensor, Tensor | None]


def bert(m: "Model", name: str, x: Tensor, mask: Tensor | None) -> Tensor:
    """`BertLayer`: norms after the sums."""
    s = m.shape
    y = _self_attention(m, f"{name}.attention.self", x, mask, ("query", "key", "value"), softmax_fp32=False)
    y = m.linear(y, f"{name}.attention.output.dense")
    y = m.dropout(y, s.hidden_dropout)
    y = m.layer_norm(m.add(y, x), f"{name}.attention.output.LayerNorm")
    inner = m.activation(m.linear(y, f"{name}.intermediate.dense"), s.activation)
    z = m.dropout(m.linear(inner, f"{name}.output.dense"), s.hidden_dropout)
    return m.layer_norm(m.add(z, y), f"{name}.output.LayerNorm")


def _self_attention(m: "Model", name: str, x: Tensor, mask, parts: tuple[str, str, str], softmax_fp32: bool) -> Tensor:
    s = m.shape
    q, k, v = (m.heads(m.linear(x, f"{name}.{part}"), s.num_heads)[0] for part in parts)
    return m.attend(q, k, v, mask, s.attention_dropout, softmax_fp32=softmax_fp32)


def vit(m: "Model", name: str, x: Tensor, mask: Tensor | None) -> Tensor:
    """`ViTLayer`: norms before, as in GPT-2, without a causal mask."""
    s = m.shape
    y = m.layer_norm(x, f"{name}.layernorm_before")
    y = _self_attention(m, f"{name}.attention", y, mask, ("q_proj", "k_proj", "v_proj"), softmax_fp32=True)
    y = m.linear(y, f"{name}.attention.o_proj")
    y = m.dropout(y, s.hidden_dropout)
    x = m.add(y, x)
    y = m.layer_norm(x, f"{name}.layernorm_after")
    y = m.linear(m.activation(m.linear(y, f"{name}.mlp.fc1"), s.activation), f"{name}.mlp.fc2")
    y = m.dropout(y, s.hidden_dropout)
    return m.add(y, x)


def t5(m: "Model", name: str, x: Tensor, positions: Bias, source: Tensor | None, zeros: Bias) -> Tensor:
    """`T5Block`: relative positions are a bias on the scores; a decoder block also attends to `source`.

    `positions` and `zeros` are what is added to the scores of either attention, and the causal mask beside it.
    """
    p, parts = m.shape.hidden_dropout, 2 if source is None else 3
    x = _t5_attention(m, f"{name}.layer.0", "SelfAttention", x, None, positions)
    if source is not None:
        x = _t5_attention(m, f"{name}.layer.1", "EncDecAttention", x, source, zeros)
    inner = f"{name}.layer.{parts - 1}"
    z = m.rms_norm(x, f"{inner}.layer_norm", "t5")
    z = _t5_feed_forward(m, f"{inner}.DenseReluDense", z, p)
    return m.clamped(m.add(x, m.dropout(z, p)))


def _t5_feed_forward(m: "Model", name: str, z: Tensor, p: float) -> Tensor:
    if m.shape.gated_mlp:
        gate = m.activation(m.linear(z, f"{name}.wi_0"), m.shape.activation)
        z = m.mul(gate, m.linear(z, f"{name}.wi_1"))
        del gate
    else:
        z = m.linear(z, f"{name}.wi")
        z = m.activation(z, m.shape.activation)
    z = m.dropout(z, p)
    z = m.to(z, m.parameters[f"{name}.wo.weight"].width)
    return m.linear(z, f"{name}.wo")


def _t5_attention(m: "Model", name: str, kind: str, x: Tensor, source: Tensor | None, bias: Bias) -> Tensor:
    s = m.shape
    normed = m.rms_norm(x, f"{name}.layer_norm", "t5")
    y = _t5_heads(m, f"{name}.{kind}", normed, normed if source is None else source, bias)
    del normed
    return m.clamped(m.add(x, m.dropout(y, s.hidden_dropout)))


def _t5_heads(m: "Model", name: str, x: Tensor, source: Tensor, bias: Bias) -> Tensor:
    s = m.shape
    (q,) = m.heads(m.linear(x, f"{name}.q"), s.num_heads)
    (k,) = m.heads(m.linear(source, f"{name}.k"), s.num_heads)
    (v,) = m.heads(m.linear(source, f"{name}.v"), s.num_heads)
    if m.decoding:
        k, v = m.cached(k, v)
    if m.implementation == "eager":
        y = m.written_out(q, k, v, bias[0], s.attention_dropout, softmax_fp32=False, second_mask=bias[1])
    else:
        y = m.fused(q, k, v, m.bias_mask(bias[0]), s.attention_dropout)
    return m.linear(y, f"{name}.o")
