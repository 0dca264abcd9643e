"""The optimizer that `TrainingArguments.optim` names, and Muon."""

from importlib import import_module
from typing import Any

import torch

from ..base.errors import needing
from ..private.of_bitsandbytes import make_states_by
from ..recipe.optimizers import MODELLED, Optimizer
from ..recipe.recipe import Recipe
from .engine import Together
from .models import real_tensors

LEARNING_RATE = 1e-5  # bytes do not depend on it
TORCHAO_BLOCK = 256  # numbers that share a scale


def make_optimizer(recipe: Recipe, parameters: list, multi_tensor: bool) -> torch.optim.Optimizer:
    """Return the optimizer that `TrainingArguments.optim` names."""
    name = recipe.optim
    options: dict[str, Any] = {"lr": LEARNING_RATE, **recipe.optimizer_arguments()}
    modelled = MODELLED[name]
    if name == "adamw_torch_fused":
        return torch.optim.AdamW(parameters, fused=True, **options)
    if name == "muon":
        return _muon(parameters, options, multi_tensor)
    if modelled.library == "torch":
        make = getattr(torch.optim, modelled.kind)
        return make(parameters, foreach=multi_tensor, **options)
    if name == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(parameters, scale_parameter=False, relative_step=False, **options)
    if modelled.compiles_updates:
        # The Trainer's block, also in 4 bits, where torchao's own is 128 (`trainer_optimizer.py`).
        make = getattr(torchao_optimizers(name), modelled.kind)
        return make(parameters, block_size=TORCHAO_BLOCK, **options)
    if modelled.library == "schedulefree":
        return _schedule_free(recipe, modelled.kind, parameters, options)
    return _of_bitsandbytes(name, modelled, parameters, options)


def torchao_optimizers(name: str) -> Any:
    """Return torchao's optimizers. Raises MissingExtra where it is not installed."""
    with needing(f"optim={name!r}"):
        return import_module("torchao.optim")


def _muon(parameters: list, options: dict[str, Any], multi_tensor: bool) -> Any:
    """Return Muon for hidden matrices together with AdamW for the rest."""
    # Muon takes matrices alone; the trainer's groups say which of them are hidden layers'.
    rest = [group for group in parameters if group["params"] and "orthogonalize" not in group]
    hidden = [group["params"] for group in parameters if "orthogonalize" in group]
    # AdamW has no use for Muon's own arguments, such as its momentum.
    common = {key: options[key] for key in ("lr", "weight_decay") if key in options}
    members: list[torch.optim.Optimizer] = []
    for matrices in hidden:
        members.append(torch.optim.Muon(matrices, **options))
    if rest:
        members.append(torch.optim.AdamW(rest, foreach=multi_tensor, **common))
    return Together(members)


def _of_bitsandbytes(
    name: str,
    modelled: Optimizer,
    parameters: list,
    options: dict[str, Any],
) -> torch.optim.Optimizer:
    """Return a bitsandbytes optimizer with a manager of its own."""
    import bitsandbytes.optim as bnb

    assert modelled.width is not None  # all of this library have one
    options["optim_bits"] = 8 * modelled.width
    if name.startswith("paged"):
        options["is_paged"] = True
    with real_tensors():  # it computes code tables
        optimizer = getattr(bnb, modelled.kind)(parameters, **options)
    first = optimizer.param_groups[0]["params"][0]
    if modelled.kind == "AdEMAMix" and first.device.type == "cpu":
        # the only buffer of a paged optimizer without a fallback where there is no unified memory
        make_states_by(optimizer, _two_states)
    # bitsandbytes has one manager a process, which knows parameters by id(): a Trainer's, freed by
    # now, may have had it
    optimizer.mng = object.__new__(bnb.GlobalOptimManager)
    optimizer.mng.initialize()
    return optimizer


def _two_states(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return AdEMAMix's two averages of a parameter, in one block."""
    return parameter.new_zeros((2, *parameter.shape), dtype=dtype)


def _schedule_free(
    recipe: Recipe,
    kind: str,
    parameters: list,
    options: dict[str, Any],
) -> torch.optim.Optimizer:
    """Return a schedule-free optimizer in training mode.

    RAdam's is past the first steps, in which it makes no denominator.
    """
    with needing(f"optim={recipe.optim!r}"):
        import schedulefree
    make = getattr(schedulefree, kind)
    # foreach is schedulefree's default, also for tensors on a CPU.
    optimizer = make(parameters, foreach=recipe.loop.foreach is not False, **options)
    optimizer.train()
    for group in optimizer.param_groups:
        # its average is too short in the first five (Liu et al. 2020, section 4)
        group["k"] = 10
    return optimizer
