"""The numeric settings of a step: its formats, its kernels, and the rows it computes on."""

from dataclasses import dataclass
from typing import NamedTuple

from ..hardware.gpu import Chip
from ..recipe.liger import kernels
from ..recipe.options import REPEATED
from ..recipe.recipe import Recipe
from .graph import Parameter
from .model_states import joined_samples
from .tensor_sizes import HALF, weight_width

BOOL = 1
INT64 = 8


class Rows(NamedTuple):
    """The rows of a micro-batch.

    Attributes:
        batch, tokens: how many there are, and positions in each.
        joined: sequences that one row is joined of, 0 if rows are samples.
        padded: tokens of each sample, where rows are padded.
    """

    batch: int
    tokens: int
    joined: int
    padded: tuple[int, ...]

    @classmethod
    def of(cls, recipe: Recipe) -> "Rows":
        """Return the rows of `recipe`'s micro-batch."""
        batch, tokens = recipe.rows
        # Rows of one length need no mask, and nothing is left out of them.
        padded: tuple[int, ...] = ()
        if not recipe.joins and min(recipe.samples) < tokens:
            padded = recipe.samples
        return cls(batch, tokens, joined_samples(recipe), padded)


@dataclass(frozen=True)
class Numerics:
    """What operators ask before they compute; a width is bytes of one number.

    Attributes:
        autocast: width in which autocast computes matrix products, None without autocast.
        hidden: width of embedded tokens.
        unpacked: width in which quantized weights had been loaded, and are unpacked.
        compute: width in which their layers multiply. `nested`: their scales are quantized too.
        bf16: half precision is bf16.
        attention: `attn_implementation`, "sdpa" where keys are repeated for it.
        repeats_keys: they are, before the kernel (`training/repeated_keys.py`).
        liger: names of Liger's kernels that replace modules.
        views: linear layers that multiply by a view of their weight, which autocast casts anew.
    """

    chip: Chip
    autocast: int | None
    hidden: int
    unpacked: int
    compute: int
    nested: bool
    bf16: bool
    attention: str
    repeats_keys: bool
    lora_dropout: float
    liger: frozenset[str]
    views: frozenset[str]

    @classmethod
    def of(cls, recipe: Recipe, parameters: dict[str, Parameter], chip: Chip) -> "Numerics":
        """Return the settings of `recipe`'s step."""
        shape = recipe.shape
        # A "-true" precision computes in half precision without autocast.
        precision = recipe.precision
        quantization = recipe.quantization
        attention = recipe.attn_implementation
        repeats_keys = attention == REPEATED
        views: frozenset[str] = frozenset()
        if (
            not shape.known_layout.quantizable
        ):  # a class of its own (`FalconLinear`), all but the head
            modules = {name.removesuffix(".weight") for name in parameters}
            views = frozenset(modules - {shape.head})
        return cls(
            chip=chip,
            autocast=HALF if precision.endswith("-mixed") else None,
            hidden=weight_width(recipe.weights_dtype, quantization),
            unpacked=weight_width(recipe.weights_dtype),
            compute=weight_width(recipe.implied_dtype),
            nested=bool(quantization and quantization.double),
            bf16=not precision.startswith("fp16"),
            attention="sdpa" if repeats_keys else attention,
            repeats_keys=repeats_keys,
            lora_dropout=recipe.lora.lora_dropout if recipe.lora else 0.0,
            liger=kernels(recipe),
            views=views,
        )
