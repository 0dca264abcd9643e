"""An architecture nobody wrote out: the nearest decoder, from the normalised sizes of its shape.

Its weights are counted exactly all the same (from transformers' own model on the meta device); what is approximate is what
a layer keeps and needs. The report says so.
"""

from typing import TYPE_CHECKING

from .blocks import Tensor
from .ledger import Parameter
from .operators import INT64

if TYPE_CHECKING:
    from .forward import Model

PREFIX = "model.layers"


def parameters(shape, width: int, trained: bool, quantized: str | None, rank: int) -> dict[str, Parameter]:
    """Two layers, embedding, last norm and head with the shape's sizes, and LoRA's usual two adapters a layer."""
    h, d, m = shape.hidden_size, shape.head_dim, shape.intermediate_size
    q, kv = shape.num_heads * d, shape.num_kv_heads * d
    found = {}

    def add(name: str, size: tuple[int, ...], packed: str | None = None, needs: bool = trained) -> None:
        found[name] = Parameter(name, size, width, needs, packed)

    for i in range(2):
        layer = f"{PREFIX}.{i}"
        sizes = {"q_proj": (q, h), "k_proj": (kv, h), "v_proj": (kv, h), "o_proj": (h, q), "up_proj": (m, h)}
        sizes |= {"down_proj": (h, m), **({"gate_proj": (m, h)} if shape.gated_mlp else {})}
        for name, size in sizes.items():
            add(f"{layer}.{name}.weight", size, quantized)
        for name in ("first_norm", "second_norm"):
            add(f"{layer}.{name}.weight", (h,))
        for name in ("q_proj", "v_proj") if rank else ():
            out, inside = sizes[name]
            add(f"{layer}.{name}.lora_A", (rank, inside), needs=True)
            add(f"{layer}.{name}.lora_B", (out, rank), needs=True)
    add("model.embed.weight", (max(shape.vocab_size, 1), h))
    add("model.last_norm.weight", (h,))
    labels = "classification" in shape.task
    if labels or not shape.tied:
        add("head.weight", (shape.num_labels if labels else shape.vocab_size, h), needs=trained or labels)
    return found


def adapted(rank: int) -> frozenset[str]:
    """The modules that get an adapter."""
    return frozenset(f"{PREFIX}.{i}.{name}" for i in range(2) for name in ("q_proj", "v_proj")) if rank else frozenset()


def hidden_states(m: "Model") -> Tensor:
    """Embedding, all layers (an encoder's and a decoder's in one stack) and the last norm."""
    s = m.shape
    m.where = "model"
    ids = Tensor(None, (m.batch, m.tokens), INT64)
    first = [m.dropout(m.first(m.embedding(ids, "model.embed")), s.embedding_dropout)]
    m.causal = s.task in ("causal-lm", "seq2seq-lm")
    mask = m.mask(causal=m.causal)
    if s.rotary_dim:
        m.rotary_table()
    count = s.num_layers + s.num_decoder_layers
    x = m.stack(PREFIX, count, lambda name, y: layer(m, name, y, mask), first)
    return m.norm(x, "model.last_norm")


def layer(m: "Model", name: str, x: Tensor, mask: Tensor | None) -> Tensor:
    """Norm, attention, norm, feed-forward part, as in Llama; dropout where the configuration has some."""
    s = m.shape
    normed = m.norm(x, f"{name}.first_norm")
    (q,) = m.heads(m.linear(normed, f"{name}.q_proj"), s.num_heads)
    (k,) = m.heads(m.linear(normed, f"{name}.k_proj"), s.num_kv_heads)
    (v,) = m.heads(m.linear(normed, f"{name}.v_proj"), s.num_kv_heads)
    if s.rotary_dim:
        q, k = m.turn(q, k)
    k, v = m.cached(k, v)
    y = m.dropout(m.linear(m.attend(q, k, v, mask, s.attention_dropout), f"{name}.o_proj"), s.hidden_dropout)
    del q, k, v, normed
    x = m.add(x, y)
    z = m.norm(x, f"{name}.second_norm")
    up = m.linear(z, f"{name}.up_proj")
    if s.gated_mlp:
        z = m.mul(m.activation(m.linear(z, f"{name}.gate_proj"), s.activation), up)
    else:
        z = m.activation(up, s.activation)
    del up
    return m.add(x, m.dropout(m.linear(z, f"{name}.down_proj"), s.hidden_dropout))
