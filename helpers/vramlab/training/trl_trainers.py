"""TRL's SFTTrainer, DPOTrainer, KTOTrainer and RewardTrainer as far as memory sees them, in their own code.

What their `__init__` does to the model is said here again (trl 1.16, `trl/trainer/*_trainer.py`); the fused head and
`compute_loss` are called. Of a sequence of DPO and KTO all tokens but the first are the answer.
"""

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from ..recipe.options import TRL
from ..recipe.recipe import Recipe
from ..report.errors import RecipeError, needing
from .engine import AUTOCAST, Training, autocast_inside

REFERENCE = {"dpo": ("ref_chosen_logps", "ref_rejected_logps"), "kto": ("ref_logps", "ref_KL_logps")}
OUTPUTS = {  # of the fused head that each asks for
    "sft": ("log_probs", "entropy", "is_top1"),
    "dpo": ("log_probs", "entropy", "mean_logits", "is_top1"),
    "kto": ("log_probs", "entropy", "mean_logits"),
}


@needing("A trainer of TRL")
def trl_class(name: str) -> type:
    """TRL's class `name`."""
    import trl

    return getattr(trl, name)


@needing("A trainer of TRL")
def prepare(model: torch.nn.Module, trainer: str) -> None:
    """Give `model` what the `__init__` of TRL's `trainer` gives it: the fused head, a balancing loss, a padding token."""
    from trl.trainer.utils import add_fused_lm_head

    config = model.config.get_text_config()
    if trainer in OUTPUTS:
        add_fused_lm_head(model, outputs=OUTPUTS[trainer])
    elif config.pad_token_id is None:
        config.pad_token_id = 0
    if trainer == "sft" and hasattr(config, "router_aux_loss_coef"):
        config.output_router_logits = _balances(config)


def offloading(model: torch.nn.Module, device: torch.device) -> contextlib.AbstractContextManager:
    """TRL's context in which activations of `model` are offloaded from `device`."""
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    if device.type == "cpu" and device.index is None:  # with an index it stands for a GPU
        raise RecipeError("activation_offloading", True, "TRL offloads from a GPU only: simulate it for target='cuda'")
    return get_act_offloading_ctx_manager(model, use_pin_memory=device.type != "cpu", warn_if_no_head=False)


def start(training: Training, recipe: Recipe, model: torch.nn.Module, build_model: Callable) -> None:
    """Make the frozen reference model, if there is one, and let TRL's trainer of `model` compute the loss of `training`."""
    trainer = object.__new__(trl_class(TRL[recipe.trainer]))
    from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model

    if recipe.trainer == "sft":
        training.compute_loss = lambda forward, batch: trainer.compute_loss(forward, dict(batch))
    else:
        training.compute_loss = lambda forward, batch: trainer.compute_loss(training.model, dict(batch))
        if recipe.has_reference:
            plain = recipe.replace(trainer="transformers", gradient_checkpointing=False, activation_offloading=False)
            training.reference = build_model(plain, training.device).eval()
            add_fused_lm_head(training.reference)
        for each in filter(None, (training.reference, model)):
            disable_dropout_in_model(each)
            if training.precision in AUTOCAST and training.engine.autocasts:
                autocast_inside(each, training.device.type, training.precision)
    vars(trainer).update(_fields(training, recipe, model))


def _fields(training: Training, recipe: Recipe, model: torch.nn.Module) -> dict[str, Any]:
    """What `compute_loss` reads of the recipe's trainer: defaults of its arguments, and what `__init__` makes."""
    fields = dataclasses.fields(trl_class(TRL[recipe.trainer].replace("Trainer", "Config")))
    usual = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    config = model.config.get_text_config()
    accelerator = {"device": training.device, "parallelism_config": None}
    accelerator |= dict.fromkeys(("gather", "gather_for_metrics"), lambda value: value)
    accelerator["unwrap_model"] = lambda wrapped: model
    return usual | {
        "model": model,
        "ref_model": training.reference,
        "args": SimpleNamespace(**usual | {"gradient_checkpointing_kwargs": {"use_reentrant": False}}),
        "accelerator": SimpleNamespace(**accelerator),
        "compute_loss_func": None,
        "label_smoother": None,
        "precompute_ref_logps": recipe.precompute_ref_log_probs,
        "loss_types": ["sigmoid"],
        "loss_weights": [1.0],
        "calculate_KL": True,
        "aux_loss_enabled": _balances(config),
        "router_aux_loss_coef": getattr(config, "router_aux_loss_coef", 0.0),
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }


def _balances(config: Any) -> bool:
    """Whether TRL adds the balancing loss of a mixture of experts with `config`."""
    return hasattr(config, "output_router_logits") and getattr(config, "router_aux_loss_coef", 0.0) != 0.0


def make_pairs(recipe: Recipe, device: str) -> dict[str, torch.Tensor]:
    """What TRL's collator makes of preferences without padding: of a pair the chosen answers come first."""
    size = recipe.sequences, recipe.seq_len

    def sequences() -> dict[str, torch.Tensor]:
        answer = torch.ones(size, dtype=torch.int64, device=device)
        answer[:, 0] = 0
        ids = torch.randint(1, recipe.shape.vocab_size, size, device=device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": answer}

    batch = sequences()
    if recipe.trainer == "reward":
        del batch["completion_mask"]
    names = REFERENCE.get(recipe.trainer, ()) if recipe.precompute_ref_log_probs else ()
    if recipe.trainer == "kto":
        batch |= {f"KL_{name}": tensor for name, tensor in sequences().items()}
        batch["label"] = torch.arange(recipe.batch_size, device=device) < -(-recipe.batch_size // 2)
    return batch | {name: torch.zeros(recipe.batch_size, device=device) for name in names}
