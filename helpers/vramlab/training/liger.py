"""Liger's kernels in a model, put there by transformers and Liger themselves, and taken out of their modules again."""

import sys
from typing import Any

import torch

from ..recipe.recipe import Recipe
from ..report.errors import needing

_replaced: dict[tuple[Any, str], Any] = {}  # (module, name) to what was there before Liger


@needing("use_liger_kernel")
def apply(model: torch.nn.Module, recipe: Recipe) -> None:
    """Do what `Trainer.train` does to `model`; under SFTTrainer Liger leaves the head alone."""
    from transformers.integrations.liger import apply_liger_kernel
    from transformers.trainer_utils import unwrap_peft_model

    home = sys.modules[type(unwrap_peft_model(model)).__module__]
    before = [(home, dict(vars(home))), (torch.nn.functional, {"cross_entropy": torch.nn.functional.cross_entropy})]
    config = dict(recipe.liger_kernel_config or {})
    if recipe.trainer == "sft":
        config["fused_linear_cross_entropy"] = False
    import liger_kernel.transformers  # noqa: F401 — transformers says in other words that it is missing

    apply_liger_kernel(model, config)
    for module, names in before:
        for name, value in names.items():
            if getattr(module, name) is not value:
                _replaced.setdefault((module, name), value)


def restore() -> None:
    """Undo what Liger replaced in modules for every model of the process: classes, rotary positions, the loss."""
    while _replaced:
        (module, name), value = _replaced.popitem()
        setattr(module, name, value)
