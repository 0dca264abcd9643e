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

    Sizes are the letters of `weights.letter_sizes`. The other fields say how a layer differs from Llama's.
    """

    items: tuple[str | Stack, ...]
    biased: frozenset[str] = frozenset()  # roles of linear layers with a bias
    linear: str = "linear"  # their kind in the layers; "conv1d" is stored transposed
    buffers: tuple[str, ...] = ()  # those of one int64 a position; rotary frequencies go without saying
    causal: bool = True  # a token sees earlier ones only, and keys and values are cached
    parallel: bool = False  # attention and feed-forward part read the same input
    post_norm: bool = False  # norms come after the residual sums; there is none after the last layer
    rms_norm: str = "llama"  # whose: "gemma" is times 1 + weight, in fp32; "t5" casts to its weight's dtype
    fp32_softmax: bool = True  # written-out attention asks for an fp32 softmax
    grouped_keys: bool = True  # shared keys go to the kernel as they are (`enable_gqa`)
    repeated_keys: bool = False  # they are copied before positions are applied
    scores_in_place: bool = (
        False  # written-out scores are scaled in place; one head of keys broadcasts over one sequence
    )
    scaled_queries: bool = False  # before the kernel
    joined_rotary: bool = False  # turned and other channels are joined even where all are turned
    scaled_embedding: bool = False  # the embedding is multiplied by a number
    shared_positions: bool = False  # one row of positions serves the whole batch
    held_feed_forward: bool = False  # the wide feed-forward tensor lives to the end of the layer
    quantizable: bool = True  # linear layers are `nn.Linear` or `Conv1D`, which bitsandbytes replaces
    fp32_modules: tuple[str, ...] = ()  # stay in fp32 in an fp16 model and are never quantized

    @property
    def stacks(self) -> list[Stack]:
        """The stacks alone: one, or an encoder's and a decoder's."""
        return [item for item in self.items if isinstance(item, Stack)]

    @cached_property
    def modules(self) -> list[tuple[str, str]]:
        """(name, kind) of the modules outside the layers."""
        rows = [row.split() for item in self.items if isinstance(item, str) for row in item.split(";")]
        return [(row[0], row[1]) for row in rows if row]
