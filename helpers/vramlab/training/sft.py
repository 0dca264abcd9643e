"""TRL's SFTTrainer as far as memory sees it, in its own code: a fused head without logits, and the loss made of that.

What `trl.SFTTrainer.__init__` does to the model is said here again (trl 1.16, trl/trainer/sft_trainer.py); the head and
`compute_loss` are called.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..report.errors import RecipeError, needing

if TYPE_CHECKING:
    import torch

OUTPUTS = ("log_probs", "entropy", "is_top1")  # those of the fused head that SFTTrainer asks for


@needing("A trainer of TRL")
def trl_class(name: str) -> type:
    """TRL's class `name`."""
    import trl

    return getattr(trl, name)


@needing("trainer='sft'")
def prepare(model: "torch.nn.Module") -> None:
    """Give `model` the fused head, and let a mixture of experts return what its balancing loss needs."""
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model, outputs=OUTPUTS)
    config = model.config.get_text_config()
    if hasattr(config, "router_aux_loss_coef"):
        config.output_router_logits = balances(config)


def offloading(model: "torch.nn.Module", device: "torch.device") -> contextlib.AbstractContextManager:
    """TRL's context in which activations of `model` are offloaded from `device`."""
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    if device.type == "cpu" and device.index is None:  # with an index it stands for a GPU
        raise RecipeError("activation_offloading", True, "TRL offloads from a GPU only: simulate it for target='cuda'")
    return get_act_offloading_ctx_manager(model, use_pin_memory=device.type != "cpu", warn_if_no_head=False)


def half_adapters(model: "torch.nn.Module") -> None:
    """Convert what is trained beside a quantized base to bf16."""
    import torch

    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_magnitude_vector" not in name:
            parameter.data = parameter.data.to(torch.bfloat16)


def compute_loss(model: "torch.nn.Module") -> "Callable[[Callable, Any], torch.Tensor]":
    """`SFTTrainer.compute_loss` for `model`, as a function of (what runs the model's forward pass, batch)."""
    from trl import SFTTrainer

    config = model.config.get_text_config()
    trainer = SimpleNamespace(
        model=model,
        args=SimpleNamespace(loss_type="nll", average_tokens_across_devices=True),
        accelerator=SimpleNamespace(parallelism_config=None, gather_for_metrics=lambda tensor: tensor),
        compute_loss_func=None,
        label_smoother=None,
        aux_loss_enabled=balances(config),
        router_aux_loss_coef=getattr(config, "router_aux_loss_coef", 0.0),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    return lambda forward, batch: SFTTrainer.compute_loss(trainer, forward, dict(batch))


def balances(config: Any) -> bool:
    """Whether TRL adds the balancing loss of a mixture of experts with `config`."""
    return hasattr(config, "output_router_logits") and getattr(config, "router_aux_loss_coef", 0.0) != 0.0
