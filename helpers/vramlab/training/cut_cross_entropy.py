"""Cut cross-entropy (Wijmans et al. 2024) in a model, as axolotl's plugin puts it there.

A GPU runs the package itself. Its kernels are Triton's and make no tensor, so among fake tensors
what its host code allocates is all that there is: the module follows `cut_cross_entropy` of
axolotl's fork at 5f0c7a7 line by line, which a test holds to the byte where the package is. Left
out are the blocks of CUDA's sort of one number a word.
"""

from math import ceil
from types import MethodType
from typing import Any

import torch

from ..base.errors import RecipeError
from ..recipe.cut_head import PACKAGE
from .engine import Model, makes_fakes

ROWS = 128  # and columns of the vocabulary that share a lock (cce_lse_forward.py, cce_backward.py)
CHANNELS = 64


def cut_cross_entropy(model: Model) -> None:
    """Let `model` compute its loss so. Raises RecipeError where the package is missing."""
    from transformers.trainer_utils import unwrap_peft_model

    owner = unwrap_peft_model(model)
    if makes_fakes():
        owner.forward = MethodType(_forward, owner)
        return
    try:
        from cut_cross_entropy.transformers import cce_patch
    except ImportError as error:
        rest = f"axolotl's fork of the package is not here: pip install '{PACKAGE}'"
        raise RecipeError("cut_cross_entropy", True, rest) from error
    cce_patch(owner)


def _forward(self: Any, labels: torch.Tensor, **inputs: Any) -> Any:
    """Compute the loss without logits (transformers/llama.py, `cce_forward`)."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    outputs = self.model(**inputs)
    hidden = outputs.last_hidden_state
    weight = self.lm_head.weight
    if weight.dtype == torch.bfloat16 and hidden.dtype == torch.float32:
        hidden = hidden.to(weight.dtype)
    rows = hidden.contiguous().flatten(0, -2)
    # The row and the place of each token with a label, all but the first of a row, which `nonzero`
    # finds (utils.py).
    places = (labels.numel() - labels.shape[0], 2)
    found = (labels[..., 1:] != -100).new_empty(places, dtype=torch.int64).to(torch.int32)
    valid = found.sum(1)
    del found
    loss = LinearCrossEntropyFunction.apply(rows, weight, labels.flatten(), valid)
    # The cache, where one is kept, under the name that this transformers has for it.
    kept = dict(outputs)
    del kept["last_hidden_state"]
    return CausalLMOutputWithPast(loss=loss, **kept)


class LinearCrossEntropyFunction(torch.autograd.Function):
    """What the function of that name allocates and keeps (cce.py)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        valid: torch.Tensor,
    ) -> torch.Tensor:
        count = valid.numel()
        sums = hidden.new_full((count,), 0.0, dtype=torch.float32)
        locks = hidden.new_full((ceil(count / ROWS),), 0, dtype=torch.uint32)
        averages = hidden.new_full((weight.shape[0],), 0.0, dtype=torch.float32)
        del locks
        losses = hidden.new_zeros((count,), dtype=torch.float32)
        ctx.save_for_backward(hidden, weight, sums, labels, valid, averages)
        ctx.params = valid  # freed with the graph, not with what is saved
        return losses.add_(sums).mean()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        hidden, weight, _, _, valid, averages = ctx.saved_tensors
        order = torch.argsort(averages).to(torch.int32)  # held until the kernel is done
        wanted = ctx.needs_input_grad
        made = [torch.zeros_like(hidden) if wanted[0] else None]
        made.append(torch.zeros_like(weight) if wanted[1] else None)
        locks = []
        for place, rows in enumerate((valid.numel(), weight.shape[0])):
            if wanted[place]:
                shape = (ceil(rows / ROWS), ceil(weight.shape[1] / CHANNELS))
                locks.append(hidden.new_zeros(shape, dtype=torch.int32))
        del order, locks
        return *made, None, None
