"""Any nn.Module made ready for a simulated step: fake copies of it, its batch and its optimizer."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._pytree import tree_map

from . import training as tr
from .errors import RecipeError
from .recipe import PRECISIONS, Loop


def check(model: Any, batch: Any, optimizer: Any, loss: Any, precision: str) -> None:
    """Raise RecipeError for what cannot be trained, before anything is copied."""
    if not isinstance(model, torch.nn.Module):
        raise RecipeError("model", _name(model), "it must be a torch.nn.Module, if there is no recipe")
    if batch is None:
        raise RecipeError("batch", None, "a module needs what its forward takes: a mapping, a tuple or a tensor")
    if not isinstance(optimizer, torch.optim.Optimizer) and not callable(optimizer):
        allowed = "it must be a torch.optim.Optimizer on the module's parameters, or a function of parameters to one"
        raise RecipeError("optimizer", _name(optimizer), allowed)
    if loss is not None and not callable(loss):
        raise RecipeError("loss", _name(loss), "it must be a function of (outputs, batch) to a scalar tensor, or None")
    if precision not in PRECISIONS:
        raise RecipeError("precision", precision, "allowed are " + ", ".join(map(repr, PRECISIONS)))


def prepare(
    model: torch.nn.Module,
    batch: Any,
    optimizer: Any,
    loss: Any,
    loop: Loop,
    precision: str,
    target: str,
    mode: FakeTensorMode,
) -> tr.Training:
    """Fake copies of `model` and `batch`, and `optimizer` again, without its state, on the copy's parameters."""
    with FakeCopyMode(mode):
        fake, fake_batch = copy.deepcopy((model, batch))
    _to_cpu(fake)
    multi_tensor = target == "cuda" if loop.foreach is None else loop.foreach
    return tr.Training(
        model=fake,
        optimizer=_refit(optimizer, model, fake, multi_tensor),
        batch=tree_map(lambda value: value.to("cpu") if isinstance(value, torch.Tensor) else value, fake_batch),
        device=torch.device("cpu"),
        multi_tensor=multi_tensor,
        loop=loop,
        precision=precision,
        loss_of=_scalar(loss or tr.loss_of, given=loss is not None),
        scaler=torch.amp.GradScaler("cpu", init_scale=1.0) if precision == "fp16-mixed" else None,
    )


def failed(model: torch.nn.Module, batch: Any, error: Exception) -> RecipeError:
    """The error of a module whose step does not run on fake tensors."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return RecipeError("batch", _describe(batch), f"a training step of {type(model).__name__} fails on it: {reason}")


def _to_cpu(model: torch.nn.Module) -> None:
    """Fake tensors of other devices (meta, CUDA) become the CPU's, which stand for all; shared ones stay shared."""
    done: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, old in [*module._parameters.items(), *module._buffers.items()]:
            if old is None or old.device.type == "cpu":
                continue
            if id(old) not in done:
                new = torch.empty_like(old, device="cpu")
                trained = isinstance(old, torch.nn.Parameter)
                done[id(old)] = torch.nn.Parameter(new, requires_grad=old.requires_grad) if trained else new
            (module._parameters if name in module._parameters else module._buffers)[name] = done[id(old)]


def _scalar(loss: Callable[[Any, Any], Any], given: bool) -> Callable[[Any, Any], torch.Tensor]:
    def checked(outputs: Any, batch: Any) -> torch.Tensor:
        if not given and not (isinstance(outputs, Mapping) and "loss" in outputs):
            raise RecipeError("loss", None, f"the module returns a {_name(outputs)} without a 'loss': give a function")
        value = loss(outputs, batch)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
            raise RecipeError("loss", _name(value) + shape, "it must give one number to go backward from")
        return value

    return checked


def _refit(optimizer: Any, model: torch.nn.Module, fake: torch.nn.Module, multi_tensor: bool) -> torch.optim.Optimizer:
    if not isinstance(optimizer, torch.optim.Optimizer):
        with tr.real_tensors():
            made = optimizer([p for p in fake.parameters() if p.requires_grad])
        if not isinstance(made, torch.optim.Optimizer):
            raise RecipeError("optimizer", _name(made), "the function must return a torch.optim.Optimizer")
        new, groups = made, made.param_groups
    else:
        twin = dict(zip(map(id, model.parameters()), fake.parameters(), strict=True))
        if any(id(p) not in twin for group in optimizer.param_groups for p in group["params"]):
            raise RecipeError("optimizer", _name(optimizer), "it holds parameters that are not the module's")
        groups = [{**group, "params": [twin[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
        new = copy.copy(optimizer)
        new.__dict__ = {**optimizer.__dict__, "param_groups": groups, "state": type(optimizer.state)(dict)}
        if type(optimizer) is torch.optim.Adagrad:  # torch 2.11's has its states from the start
            with tr.real_tensors():
                new = torch.optim.Adagrad(groups, **optimizer.defaults)
    defaults = new.defaults
    if "foreach" in defaults and defaults["foreach"] is None and not defaults.get("fused"):
        for group in groups:
            group["foreach"] = multi_tensor
    return new


def _name(value: Any) -> str:
    return value if isinstance(value, str) else type(value).__name__


def _describe(batch: Any) -> Any:
    return tree_map(lambda v: f"tensor {tuple(v.shape)}" if isinstance(v, torch.Tensor) else v, batch)
