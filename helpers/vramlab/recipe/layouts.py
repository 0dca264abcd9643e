"""What a model is made of: modules outside the layers, and a layer's parts by the role they play in it.

`weights` lists tensors from it, and `formulas.layer` walks through a layer by it. `families` has one for each family.
"""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Stack:
    """Equal layers: `count` of them under `prefix`, with `parts`, role to module, in the order of definition."""

    prefix: str
    count: int
    parts: dict[str, str]


@dataclass(frozen=True)
class Layout:
    """What a model is made of, in order: "module kind size …; …" outside the layers, and stacks of layers.

    Sizes are the letters of `weights._sizes`. The other attributes say how a layer differs from Llama's.

    Attributes:
        biased: roles of linear layers with a bias.
        linear: their kind in the layers: "linear" or "conv1d" (stored transposed).
        buffers: those of one int64 a position; rotary frequencies go without saying.
        causal: a token sees earlier ones only, and keys and values are cached.
        parallel: attention and feed-forward part read the same input.
        post_norm: norms come after the residual sums; there is none after the last layer.
        rms_norm: whose RMSNorm: "llama", "gemma" (times 1 + weight, in fp32) or "t5" (cast to its weight's dtype).
        fp32_softmax: written-out attention asks for an fp32 softmax.
        grouped_keys: shared keys go to the kernel as they are (`enable_gqa`); `repeated_keys`: copied before positions.
        scores_in_place: written-out scores are scaled in place, and one head of keys broadcasts over one sequence.
        scaled_queries: queries are scaled before the kernel.
        joined_rotary: turned and other channels are joined even where all are turned.
        scaled_embedding: the embedding is multiplied by a number.
        shared_positions: one row of positions serves the whole batch.
        held_feed_forward: the wide feed-forward tensor lives to the end of the layer.
        quantizable: linear layers are `nn.Linear` or `Conv1D`, which bitsandbytes replaces.
        fp32_modules: linear layers that stay in fp32 in an fp16 model and are never quantized.
    """

    items: tuple[str | Stack, ...]
    biased: frozenset[str] = frozenset()
    linear: str = "linear"
    buffers: tuple[str, ...] = ()
    causal: bool = True
    parallel: bool = False
    post_norm: bool = False
    rms_norm: str = "llama"
    fp32_softmax: bool = True
    grouped_keys: bool = True
    repeated_keys: bool = False
    scores_in_place: bool = False
    scaled_queries: bool = False
    joined_rotary: bool = False
    scaled_embedding: bool = False
    shared_positions: bool = False
    held_feed_forward: bool = False
    quantizable: bool = True
    fp32_modules: tuple[str, ...] = ()

    @property
    def stacks(self) -> list[Stack]:
        """The stacks alone: one, or an encoder's and a decoder's."""
        return [item for item in self.items if isinstance(item, Stack)]

    @cached_property
    def modules(self) -> list[tuple[str, str]]:
        """(name, kind) of the modules outside the layers."""
        rows = [row.split() for item in self.items if isinstance(item, str) for row in item.split(";")]
        return [(row[0], row[1]) for row in rows if row]
