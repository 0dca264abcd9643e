"""TRL's SFTTrainer, DPOTrainer, KTOTrainer and RewardTrainer as far as memory sees them.

It is their own code that runs. What their `__init__` does to the model is said here again (trl
1.16, `trl/trainer/*_trainer.py`); the fused head and `compute_loss` are called. Of a sequence of
DPO and KTO all tokens but the first are the answer.
"""

import contextlib
import dataclasses
import importlib.metadata
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from ..base.errors import RecipeError, needing
from ..private import of_trl
from ..private.patched import replaced
from ..recipe.options import TRL
from ..recipe.recipe import Recipe
from .engine import AUTOCAST, Model, Training, autocast_inside

# What the reference model said of a batch, where that was computed before.
REFERENCE = {
    "dpo": ("ref_chosen_logps", "ref_rejected_logps"),
    "kto": ("ref_logps", "ref_KL_logps"),
}
# Outputs of the fused head that each trainer asks for.
OUTPUTS = {
    "sft": ("log_probs", "entropy", "is_top1"),
    "dpo": ("log_probs", "entropy", "mean_logits", "is_top1"),
    "kto": ("log_probs", "entropy", "mean_logits"),
    "grpo": ("log_probs", "entropy"),
    "rloo": ("log_probs", "entropy"),
}


class Distributions(dict):
    """By package the distribution of its name; where there is none, TRL asks the package itself."""

    def __missing__(self, package: str) -> list[str]:
        return [package]


@needing("A trainer of TRL")
def trl_class(name: str) -> type:
    """Return TRL's class `name`."""
    # TRL would list the packages of all files, which takes 0.1 s, for the versions of two.
    with replaced(importlib.metadata, "packages_distributions", Distributions):
        import trl

        return getattr(trl, name)


@needing("A trainer of TRL")
def prepare(model: Model, trainer: str) -> None:
    """Give `model` what the `__init__` of TRL's `trainer` gives it.

    That is the fused head, a balancing loss or a padding token.
    """
    from trl.trainer.utils import add_fused_lm_head

    config = model.config.get_text_config()
    if trainer in OUTPUTS:
        add_fused_lm_head(model, outputs=OUTPUTS[trainer])
    # RewardTrainer reads a row's last token before the padding, so there has to be a padding token.
    elif config.pad_token_id is None:
        config.pad_token_id = 0
    if trainer == "sft" and hasattr(config, "router_aux_loss_coef"):
        config.output_router_logits = balances(config)


def offloading(model: Model, device: torch.device) -> contextlib.AbstractContextManager:
    """Return TRL's context in which activations of `model` are offloaded from `device`."""
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    # with an index the CPU stands for a GPU
    if device.type == "cpu" and device.index is None:
        rest = "TRL offloads from a GPU only: simulate it for target='cuda'"
        raise RecipeError("activation_offloading", True, rest)
    # Pinned memory needs a real accelerator.
    is_real = device.type != "cpu"
    if is_real:
        # As in every Trainer: TRL warns by accelerate's logger once 60 % of the RAM are in use
        # (`verify_sufficient_virtual_memory`), and without the state that is an error.
        from accelerate import PartialState

        PartialState()
    return get_act_offloading_ctx_manager(model, use_pin_memory=is_real, warn_if_no_head=False)


def start(
    training: Training,
    recipe: Recipe,
    model: Model,
    build_model: Callable[[Recipe, torch.device], Model],
) -> None:
    """Let TRL's trainer of `model` compute the loss of `training`.

    Makes the frozen reference model, if there is one.
    """
    trainer: Any = object.__new__(trl_class(TRL[recipe.trainer]))
    if recipe.trainer == "sft":
        # A copy of the batch, since TRL puts entries of its own into it.
        training.compute_loss = lambda forward, batch: trainer.compute_loss(forward, dict(batch))
    else:

        def compute_loss(forward: Callable, batch: Any) -> torch.Tensor:
            return trainer.compute_loss(training.model, dict(batch))

        training.compute_loss = compute_loss
        if recipe.has_reference:
            training.reference = reference_model(training, recipe, build_model)
        _prepare_pair(training, model)
    vars(trainer).update(_fields(training, recipe, model))


def reference_model(training: Training, recipe: Recipe, build_model: Callable) -> Model:
    """Return the model that the trained one is held against, with the same fused head."""
    from trl.trainer.utils import add_fused_lm_head

    # TRL loads it by the same arguments, and trains nothing of it
    plain = recipe.replace(
        trainer="transformers",
        rollouts=None,
        gradient_checkpointing=False,
        activation_offloading=False,
    )
    reference = build_model(plain, training.device).eval()
    add_fused_lm_head(reference)
    return reference


def _prepare_pair(training: Training, model: Model) -> None:
    """Prepare the reference and the trained model alike: no dropout, and autocast within."""
    from trl.trainer.utils import disable_dropout_in_model

    for each in (training.reference, model):
        if each is None:
            continue
        # DPO and KTO compare two models' log-probabilities, which dropout would make noisy.
        disable_dropout_in_model(each)
        if training.precision in AUTOCAST and training.engine.autocasts:
            autocast_inside(each, training.device.type, training.precision)


def _fields(training: Training, recipe: Recipe, model: Model) -> dict[str, Any]:
    """Return what `compute_loss` reads of the recipe's trainer.

    These are defaults of its arguments, and what its `__init__` makes.
    """
    defaults = argument_defaults(recipe)
    config = model.config.get_text_config()
    accelerator = SimpleNamespace(
        device=training.device,
        parallelism_config=parallelism_of(recipe),
        # this rank's values stand for all ranks'
        gather=lambda value: value,
        gather_for_metrics=lambda value: value,
        unwrap_model=lambda wrapped: model,
    )
    arguments = defaults | {
        "gradient_checkpointing_kwargs": {"use_reentrant": recipe.use_reentrant}
    }
    return defaults | {
        "model": model,
        "ref_model": training.reference,
        "args": SimpleNamespace(**arguments),
        "accelerator": accelerator,
        "compute_loss_func": None,
        "label_smoother": None,
        "precompute_ref_logps": recipe.precompute_ref_log_probs,
        "loss_types": ["sigmoid"],
        "loss_weights": [1.0],
        "calculate_KL": True,
        "aux_loss_enabled": balances(config),
        "router_aux_loss_coef": getattr(config, "router_aux_loss_coef", 0.0),
        **of_trl.trained_state(),
    }


def parallelism_of(recipe: Recipe) -> Any:
    """Return what the Trainers read of accelerate's `ParallelismConfig`; None without Ulysses."""
    ranks = recipe.group.sp_size
    if ranks == 1:
        return None
    return SimpleNamespace(sp_backend="deepspeed", sp_enabled=True, sp_size=ranks)


def argument_defaults(recipe: Recipe) -> dict[str, Any]:
    """Return the defaults of the arguments of the recipe's trainer, by name."""
    arguments = trl_class(TRL[recipe.trainer].replace("Trainer", "Config"))
    defaults = {}
    for field in dataclasses.fields(arguments):
        # Fields without a plain default have a factory or must be said.
        if field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
    return defaults


def balances(config: Any) -> bool:
    """Tell whether TRL adds the balancing loss of a mixture of experts with `config`."""
    has_router = hasattr(config, "output_router_logits")
    return has_router and getattr(config, "router_aux_loss_coef", 0.0) != 0.0


def make_pairs(recipe: Recipe, device: str) -> dict[str, torch.Tensor]:
    """Return what TRL's collator makes of preferences without padding.

    Of a pair the chosen answers come first.
    """
    batch = _sequences(recipe, device)
    if recipe.trainer == "reward":
        del batch["completion_mask"]
    if recipe.trainer == "kto":
        # the same prompts with others' answers, for the KL term
        for name, tensor in _sequences(recipe, device).items():
            batch[f"KL_{name}"] = tensor
        # Half of the answers, rounded up, are the desirable ones.
        desirable = -(-recipe.batch_size // 2)
        batch["label"] = torch.arange(recipe.batch_size, device=device) < desirable
    if recipe.precompute_ref_log_probs:
        for name in REFERENCE.get(recipe.trainer, ()):
            batch[name] = torch.zeros(recipe.batch_size, device=device)
    return batch


def _sequences(recipe: Recipe, device: str) -> dict[str, torch.Tensor]:
    """Return random token ids and their masks, for all sequences of a micro-batch."""
    size = (recipe.sequences, recipe.seq_len)
    answer = torch.ones(size, dtype=torch.int64, device=device)
    # The first token stands for the prompt.
    answer[:, 0] = 0
    ids = torch.randint(1, recipe.shape.vocab_size, size, device=device)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "completion_mask": answer,
    }
