"""TRL's DPOTrainer, KTOTrainer and RewardTrainer as far as memory sees them, in their own code.

What their `__init__` does to the model is said here again (trl 1.16, trl/trainer/dpo_trainer.py, kto_trainer.py,
reward_trainer.py); the head and `compute_loss` are called. Of a sequence all tokens but the first are the answer.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..recipe.options import TRL
from ..recipe.recipe import Recipe
from ..report.errors import needing
from .engine import AUTOCAST, Training, autocast
from .sft import balances, trl_class

if TYPE_CHECKING:
    import torch

REFERENCE = {"dpo": ("ref_chosen_logps", "ref_rejected_logps"), "kto": ("ref_logps", "ref_KL_logps")}
OUTPUTS = {"dpo": ("log_probs", "entropy", "mean_logits", "is_top1"), "kto": ("log_probs", "entropy", "mean_logits")}


@needing("A trainer of TRL")
def prepare(model: "torch.nn.Module", trainer: str) -> None:
    """Give `model` the fused head of TRL's `trainer`; a reward model knows which token is padding instead."""
    from trl.trainer.utils import add_fused_lm_head

    config = model.config.get_text_config()
    if trainer in OUTPUTS:
        add_fused_lm_head(model, outputs=OUTPUTS[trainer])
    elif config.pad_token_id is None:
        config.pad_token_id = 0


def start(training: Training, recipe: Recipe, build_model: Callable) -> None:
    """Make the frozen reference model, if there is one, and let TRL's trainer compute the loss of `training`."""
    from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model

    name, model = TRL[recipe.trainer], training.model
    trainer = object.__new__(trl_class(name))
    disable_dropout_in_model(model)
    if recipe.has_reference:
        plain = recipe.replace(trainer="transformers", gradient_checkpointing=False, activation_offloading=False)
        training.reference = build_model(plain, training.device).eval()
        add_fused_lm_head(training.reference)
        disable_dropout_in_model(training.reference)
        _prepare_model(training.reference, training)
    _prepare_model(model, training)
    fields = dataclasses.fields(trl_class(name.replace("Trainer", "Config")))
    usual = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    coefficient = getattr(model.config.get_text_config(), "router_aux_loss_coef", 0.0)
    vars(trainer).update(
        usual,
        model=model,
        ref_model=training.reference,
        args=SimpleNamespace(**usual | {"gradient_checkpointing_kwargs": {"use_reentrant": False}}),
        accelerator=SimpleNamespace(device=training.device, gather=_same, gather_for_metrics=_same, unwrap_model=_same),
        precompute_ref_logps=recipe.precompute_ref_log_probs,
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        calculate_KL=True,
        aux_loss_enabled=balances(model.config.get_text_config()),
        router_aux_loss_coef=coefficient,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    training.compute_loss = lambda forward, batch: trainer.compute_loss(model, dict(batch))


def make_batch(recipe: Recipe, device: str) -> dict[str, "torch.Tensor"]:
    """What TRL's collator makes of samples without padding: of a pair the chosen answers come first."""
    import torch

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


def _prepare_model(model: "torch.nn.Module", training: Training) -> None:
    """Autocast the model's forward pass as `accelerate.Accelerator.prepare_model` does, and copy its outputs to fp32."""
    from accelerate.utils import convert_outputs_to_fp32

    if training.precision in AUTOCAST:
        model.forward = convert_outputs_to_fp32(autocast(training.device.type, training.precision)(model.forward))


def _same(value: Any) -> Any:
    return value
