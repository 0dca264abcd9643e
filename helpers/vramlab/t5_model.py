"""T5 on paper: an encoder, a decoder that looks at it, and relative positions as a bias on every score."""

from . import encoders
from .forward import Model
from .ledger import Tensor
from .operators import INT64


def hidden_states(m: Model) -> Tensor:
    """Encoder and decoder of `T5ForConditionalGeneration`, up to the output head."""
    encoded = run(m, "encoder", m.shape.num_layers, None)
    hidden = run(m, "decoder", m.shape.num_decoder_layers, encoded)
    m.held.append(encoded)
    return hidden


def run(m: Model, name: str, count: int, source: Tensor | None) -> Tensor:
    """One `T5Stack`. The first layer computes the bias for all; a cross-attention's bias is zeros."""
    s, p = m.shape, m.shape.hidden_dropout
    m.where = name
    ids = Tensor(None, (m.batch, m.tokens), INT64)
    embedded = m.embedding(ids, "shared")
    if m.recipe.lora and m.recipe.gradient_checkpointing:
        embedded.needs = True
    x = m.dropout(embedded, p)
    biases: list[Tensor] = []

    def layer(inner: str, x: Tensor) -> Tensor:
        if not biases:
            biases.append(bias(m, f"{inner}.layer.0.SelfAttention", source is not None))
        zeros = None
        if source is not None:
            if len(biases) == 1:
                biases.append(m.tensor("zeros", (1, s.num_heads, m.tokens, m.tokens), m.hidden_width))
            zeros = biases[1]
        return encoders.t5(m, inner, x, biases[0], source, zeros)

    m.causal_bias = source is not None
    x = m.stack(f"{name}.block", count, layer, x)
    m.where = name
    x = m.rms_norm(x, f"{name}.final_layer_norm", "t5")
    return m.dropout(x, p)


def bias(m: Model, name: str, causal: bool) -> Tensor:
    """A learned number for each head and each distance between tokens, looked up for every pair."""
    n, heads = m.tokens, m.shape.num_heads
    distance = m.tensor("sub", (n, n), INT64)
    bucket = m.tensor("add", (n, n), INT64)
    del distance
    values = m.embedding(bucket, f"{name}.relative_attention_bias")
    return values.view(1, heads, n, n)
