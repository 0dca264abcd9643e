"""Weights of linear layers in int8, one scale a row: bitsandbytes' LLM.int8()."""

from typing import Any

import torch

from ..private.of_bitsandbytes import quantized
from .engine import Model, makes_fakes

INT8_CLASS = "Int8Params"  # bitsandbytes' class of such a weight


def mark_int8(model: Model) -> None:
    """Give weights that are stored in int8 that dtype, which PEFT's preparation leaves alone."""
    for parameter in model.parameters():
        if type(parameter).__name__ == INT8_CLASS:
            parameter.data = parameter.data.to(torch.int8)


def int8_parameter(data: torch.Tensor) -> torch.nn.Parameter:
    """Return fp16 `data` in int8 as bitsandbytes stores it; a fake one is a plain parameter."""
    import bitsandbytes as bnb

    if not makes_fakes():
        return quantized(bnb.nn.Int8Params(data, requires_grad=False), data.device)
    codes, scales, _ = bnb.functional.int8_vectorwise_quant(data)
    parameter: Any = torch.nn.Parameter(codes, requires_grad=False)
    # `Linear8bitLt` takes both over in its first pass, and gives the weight the same codes back
    parameter.CB = codes
    parameter.SCB = scales
    return parameter
