"""The sizes of a model, as data. `shapes.Shape` adds what follows from them: weights, buffers, layout, LoRA's targets."""

import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class ShapeData:
    """The sizes of one model with one head, as its configuration gives them; all are counts.

    Attributes:
        name: short, for people.
        family: the configuration's `model_type`.
        task: which head is trained, and `head`, the module name of that head.
        hub_id: where the published weights are, None if the shape is not from the catalogue.
        config_json: the configuration, at this depth and for this head, as JSON text.
        num_layers: blocks, of the encoder where there is a decoder too.
        num_decoder_layers: 0 unless the model is an encoder–decoder.
        num_kv_heads: heads of keys and values, which groups of query heads share.
        max_positions: the longest sequence, None if the architecture sets no limit.
        num_labels: classes of a classification head.
        tied: one matrix serves as embedding and output head.
        gated_mlp: the feed-forward part has a gate beside its up-projection.
        norm: "layernorm" or "rmsnorm"; either "in fp32" casts back after its weight (`meta.py` knows those).
        rotary_dim: channels of a head that are rotated; 0 without rotary positions.
        sliding_window: how far back a token sees, None without such a limit (Gemma 2: in every second layer).
        hidden_dropout, attention_dropout, embedding_dropout: probabilities while training.
        attention: the kernel that transformers takes by itself, "eager" for an architecture without sdpa.
        image_tokens: patches of an image and the class token; 0 for text.
        dtype: the format in which the weights were published, None if unknown.
    """

    name: str
    family: str
    task: str
    hub_id: str | None
    config_json: str = field(repr=False)
    head: str
    num_layers: int
    num_decoder_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int | None
    num_labels: int
    tied: bool
    gated_mlp: bool
    activation: str
    norm: str
    rotary_dim: int
    sliding_window: int | None
    hidden_dropout: float
    attention_dropout: float
    embedding_dropout: float
    num_experts: int
    experts_per_token: int
    image_tokens: int
    dtype: str | None
    attention: str

    @property
    def config(self) -> dict[str, Any]:
        """What `transformers.AutoConfig.for_model(**config)` takes: a fresh copy, for transformers writes into it."""
        return json.loads(self.config_json)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """`config`, parsed once; not to be written to."""
        return self.config

    @property
    def layout(self) -> Any:
        """The modules by the roles they play (`layouts.Layout`), or None."""
        raise NotImplementedError

    def weights(self) -> tuple:
        """Every parameter tensor (`weights.Weight`)."""
        raise NotImplementedError
