"""What PEFT leaves otherwise where a model is on the card before its adapters are."""

import torch

from .engine import Model


def train_what_moves(model: Model) -> None:
    """Let gradients reach what PEFT makes on the host and moves to the card of its layer.

    A `ParameterDict` makes of it a parameter that is trained, whatever it was: so is AdaLoRA's
    `ranknum` (PEFT 0.21).
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in model.modules():
        names = module.other_param_names if isinstance(module, BaseTunerLayer) else ()
        for name in names:
            held = getattr(module, name, None)
            if isinstance(held, torch.nn.ParameterDict):
                held.requires_grad_(True)
