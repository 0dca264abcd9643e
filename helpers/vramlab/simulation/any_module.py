"""The training step of any nn.Module made ready for simulation: fake tensors in place of its own, and its optimizer again."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import UninitializedTensorMixin

from ..recipe.knobs import Refusals, refuse
from ..recipe.recipe import PRECISIONS, Loop
from ..report.errors import RecipeError
from ..tracking.tensors import tensors_in
from ..training import training as tr
from .users_objects import Remembered
from .values import StandIns, Values, reason_at

SCRIPTED = "cannot follow a TorchScript module, whose interpreter runs its forward out of Python's sight"
WATCH = "`watch` measures a step that really runs"


@dataclass
class ModuleStep:
    """A module's training step as the user gives it (`simulate.simulate`)."""

    model: Any
    batch: Any
    optimizer: Any
    loss: Any
    loop: Any
    precision: str

    def check(self) -> None:
        """Raise RecipeError for what cannot be simulated, before anything is made."""
        refuse(self, self._refusals())

    def _refusals(self) -> Refusals:
        """What comes later may need what came before."""
        model, optimizers = self.model, _listed(self.optimizer)
        yield "model", not isinstance(model, nn.Module), "it must be a torch.nn.Module, if there is no recipe"
        scripted = any(isinstance(module, torch.jit.ScriptModule) for module in model.modules())
        yield "model", scripted, f"simulate {SCRIPTED}: give the module that was scripted or traced"
        lazy = lazy_parameter(model)
        yield "model", lazy, f"its parameter {lazy!r} is lazy and has no shape: call the module once on a batch before"
        yield "model", not any(p.requires_grad for p in model.parameters()), "no parameter of it requires a gradient"
        kinds = nn.RNNBase | nn.RNNCellBase | nn.EmbeddingBag
        others = any(isinstance(module, kinds) or getattr(module, "sparse", False) for module in model.modules())
        allowed = f"no recurrent layers, embedding bags or sparse tensors are simulated: {WATCH}, if none is sparse"
        yield "model", others, allowed
        yield "batch", any(tensor.layout != torch.strided for tensor in tensors_in(self.batch)), allowed
        yield "batch", self.batch is None, "a module needs what its forward takes: a mapping, a tuple or a tensor"
        allowed = "it must be a torch.optim.Optimizer, a list of them, or a function that makes one from parameters"
        made = optimizers and all(isinstance(o, torch.optim.Optimizer) or callable(o) for o in optimizers)
        yield "optimizer", not made, allowed
        yield "loop", not isinstance(self.loop, Loop), "it must be a Loop, or the name of one such as 'plain'"
        yield "loop.foreach", self.loop.foreach is not None, "say it to the module's optimizer"
        yield "precision", self.precision not in PRECISIONS, "allowed are " + ", ".join(map(repr, PRECISIONS))

    @contextlib.contextmanager
    def prepared(self, target: str, mode: FakeTensorMode) -> Iterator[tuple[tr.Training, Values]]:
        """The training and what is known of values. While entered the model holds fake tensors, of the dtype of a "-true"
        precision; afterwards each of its modules and what the loss holds are as they were."""
        model = getattr(self.model, "_orig_mod", self.model)  # of torch.compile
        dtype = {"fp16-true": torch.float16, "bf16-true": torch.bfloat16}.get(self.precision)
        values, loop = Values(mode), self.loop
        remembered = Remembered(self.loss, self.model)
        caches = loop.use_cache is not None and hasattr(getattr(model, "config", None), "use_cache")
        try:
            for tensor in (*model.parameters(), *model.buffers(), *tensors_in(self.batch)):
                values.stand_in(tensor, dtype)
            batch = values.copied(self.batch)
            values.take_place(model)
            training = tr.Training(
                model=model,
                optimizer=None,
                batch=batch,
                device=torch.device("cpu"),
                multi_tensor=target == "cuda",
                loop=loop,
                precision=self.precision,
                loss_of=self._scalar,
                scaler=torch.amp.GradScaler("cpu", init_scale=1.0) if self.precision == "fp16-mixed" else None,
            )
            self._attach_optimizers(training, values)
            caching = patch.object(model.config, "use_cache", loop.use_cache) if caches else contextlib.nullcontext()
            with caching, StandIns(values):
                yield training, values
        finally:
            values.restore()
            if fakes := remembered.restore():
                values.notes.append(
                    f"the loss keeps tensors of the simulation ({', '.join(fakes)}): make it anew to train"
                )

    def _scalar(self, outputs: Any, batch: Any) -> torch.Tensor:
        """The loss, held to be one number."""
        if self.loss is None and not (isinstance(outputs, Mapping) and "loss" in outputs):
            raise RecipeError("loss", None, "the module returns no mapping with a 'loss': give a function")
        value = outputs["loss"] if self.loss is None else self.loss(outputs, batch)
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
            raise RecipeError("loss", self.loss, "it must give one number to go backward from")
        return value

    def _attach_optimizers(self, training: tr.Training, values: Values) -> None:
        """Give `training` its optimizer, or one for each parameter where the loop steps in the backward pass."""

        def made(parameters: list) -> Any:
            found = [self._fitted(given, parameters, values) for given in _listed(self.optimizer)]
            found = [optimizer for optimizer in found if optimizer.param_groups]
            for group in (group for optimizer in found for group in optimizer.param_groups):
                if any(id(parameter) not in own for parameter in group["params"]):
                    raise RecipeError("optimizer", self.optimizer, "it must hold the module's parameters and no others")
                if group.get("foreach", False) is None and not group.get("fused"):
                    group["foreach"] = training.multi_tensor
            return Together(found) if len(found) > 1 else next(iter(found), None)

        own = set(map(id, training.model.parameters()))
        trained = [parameter for parameter in training.model.parameters() if parameter.requires_grad]
        if training.loop.optimizer_in_backward:
            tr.step_in_backward(training, lambda parameter: made([parameter]), trained)
        else:
            training.optimizer = made(trained)

    def _fitted(self, given: Any, parameters: list, values: Values) -> torch.optim.Optimizer:
        """What the function `given` makes of fake `parameters`; or the optimizer `given` again, without its states, on
        those of its parameters whose fake ones they are."""
        if not isinstance(given, torch.optim.Optimizer):
            with tr.real_tensors():
                return given(parameters)
        new = object.__new__(type(given))
        held = {name: value for name, value in vars(given).items() if name not in ("state", "step")}
        vars(new).update(values.copied(held), state=type(given.state)(dict))
        left_out = {id(p) for p in self.model.parameters() if p.requires_grad} - set(map(id, parameters))
        for group in new.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in left_out]
        new.param_groups = [group for group in new.param_groups if group["params"]]
        if type(given) is torch.optim.Adagrad and new.param_groups:  # which has its states from the start
            with tr.real_tensors():
                return torch.optim.Adagrad(new.param_groups, **given.defaults)
        return new

    def failed(self, phase: str, error: Exception) -> RecipeError:
        """The error of a step that does not run on fake tensors, with its phase and the user's line."""
        field = "model" if phase in ("forward", "backward") else "optimizer"
        said = f"its {phase} fails on fake tensors: {type(error).__name__}: {reason_at(error)}; {WATCH}"
        return RecipeError(field, getattr(self, field), said)

    def notes(self) -> list[str]:
        """What the simulation leaves out."""
        return ["torch.compile: the eager step is simulated"] * is_compiled(self.model) + loop_notes(self.loop)


class Together:
    """Several optimizers as one."""

    def __init__(self, members: list[torch.optim.Optimizer]):
        self.members = members
        self.param_groups = [group for member in members for group in member.param_groups]

    def step(self) -> None:
        for member in self.members:
            member.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for member in self.members:
            member.zero_grad(set_to_none)


def loop_notes(loop: Loop) -> list[str]:
    """What the simulation leaves out of `loop`."""
    note = "loop.empty_cache_steps: what is reserved is that of a run that never empties the cache"
    return [note] if loop.empty_cache_steps else []


def lazy_parameter(model: nn.Module) -> str | None:
    """The name of a parameter or buffer of `model` that has no shape yet."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return next((name for name, tensor in named if isinstance(tensor, UninitializedTensorMixin)), None)


def is_compiled(model: nn.Module) -> bool:
    """Whether `model` or a part of it is run by torch.compile."""
    return any(hasattr(module, "_orig_mod") or module._compiled_call_impl for module in model.modules())


def _listed(value: Any) -> list:
    return list(value) if isinstance(value, list | tuple) else [value]
