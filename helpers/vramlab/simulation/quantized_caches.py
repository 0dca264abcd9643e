"""Caches that quanto quantizes, on fake tensors (`transformers.cache_utils.QuantoQuantizedLayer`).

HQQ's does not run on them: it reads after each round whether that was better.
"""

import contextlib
import functools
import importlib
from typing import Any

from ..private.of_fake_tensors import FakeTensor
from ..private.patched import plain, replaced
from ..recipe.generation import Generation


def packed(generation: Generation) -> contextlib.AbstractContextManager:
    """While entered, let quanto pack fake tensors, which it does to plain ones only."""
    if not generation.quantizes or generation.cache_backend != "quanto":
        return contextlib.nullcontext()
    of_quanto = "optimum.quanto.tensor"
    packing = importlib.import_module(f"{of_quanto}.packed")
    quantized: Any = importlib.import_module(f"{of_quanto}.weights.qbits").WeightQBitsTensor
    make = plain(quantized, "__init__")

    @functools.wraps(make)
    def init(self: Any, qtype: Any, *sizes: Any) -> None:
        *before, data, scale, shift, requires_grad = sizes
        if type(data) is FakeTensor:
            data = packing.PackedTensor.pack(data, qtype.bits)
        make(self, qtype, *before, data, scale, shift, requires_grad)

    return replaced(quantized, "__init__", init)
