"""T5 on paper: an encoder, a decoder that looks at it, and relative positions as a bias on every score."""

from . import encoders
from .blocks import Tensor
from .forward import Model
from .ledger import Leaf
from .operators import INT64


def hidden_states(m: Model) -> Tensor:
    """Encoder and decoder of `T5ForConditionalGeneration`, up to the output head, whose input is scaled."""
    encoded = run(m, "encoder", m.shape.num_layers, None)
    hidden = run(m, "decoder", m.shape.num_decoder_layers, encoded)
    m.held.append(encoded)
    return m.scale(hidden) if m.setting("scale_decoder_outputs", m.setting("tie_word_embeddings", True)) else hidden


def run(m: Model, name: str, count: int, source: Tensor | None) -> Tensor:
    """One `T5Stack`. The first layer computes the positions' bias for all; a cross-attention's bias is zeros."""
    p = m.shape.hidden_dropout
    m.where, m.decoding = name, source is not None
    embedded = m.first(m.embedding(Tensor(None, (m.batch, m.tokens), INT64), "shared"))
    first = [m.dropout(embedded, p)]
    mask = m.mask() if m.decoding else None
    shared: list[Tensor] = [] if m.checkpoints else biases(m, name)

    def layer(inner: str, x: Tensor) -> Tensor:
        m.decoding, own = source is not None, shared
        if inner.endswith(".0") and m.checkpoints:
            own = biases(m, name)
            shared[:] = shared or own
        return encoders.t5(m, inner, x, (own[0], mask), source, (own[-1], None))

    x = m.stack(f"{name}.block", count, layer, first)
    if count == 1:  # nobody else asks for them again
        shared.clear()
    m.where = name
    x = m.rms_norm(x, f"{name}.final_layer_norm", "t5")
    return m.dropout(x, p)


def biases(m: Model, stack: str) -> list[Tensor]:
    """What all layers add to their scores: relative positions, and a decoder's zeros; the first layer makes them."""
    return [bias(m, f"{stack}.block.0.layer.0.SelfAttention"), *zeros(m)]


def bias(m: Model, name: str) -> Tensor:
    """A learned number for each head and each distance between tokens, looked up for every pair."""
    n, heads = m.tokens, m.shape.num_heads
    distance = m.tensor("sub", (n, n), INT64)
    bucket = m.tensor("add", (n, n), INT64)
    m.spend(3 * INT64 * n * n, "where")
    del distance
    values = m.embedding(bucket, f"{name}.relative_attention_bias")
    return values.view(1, heads, n, n)


def zeros(m: Model) -> list[Tensor]:
    """A cross-attention has no positions: zeros, which under checkpointing are told to need a gradient."""
    if not m.decoding:
        return []
    empty = m.tensor("zeros", (1, m.shape.num_heads, m.tokens, m.tokens), m.autocast or m.hidden_width)
    empty.packed = True
    if m.checkpoints:
        empty.needs, empty.node = True, Leaf(empty.block)
    return [empty]
