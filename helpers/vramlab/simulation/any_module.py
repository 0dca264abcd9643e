"""The training step of any nn.Module made ready for simulation: fake copies of it, its batch and its optimizer."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import UninitializedTensorMixin
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map

from ..recipe.recipe import PRECISIONS, Loop
from ..report.errors import RecipeError
from ..tracking.tracked import tensors_in
from ..training import engine
from ..training import training as tr
from .copies import Copier
from .values import UNFAKED, ValueNeeded, Values, reason_at


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
        """Raise RecipeError for what cannot be trained, before anything is copied."""
        for met, field, value, allowed in self._demands():
            if not met:
                raise RecipeError(field, value, allowed)

    def _demands(self) -> Iterator[tuple[Any, str, Any, str]]:
        """(whether it is met, field, its value, what is allowed); what comes later may need what came before."""
        model, name, makers = self.model, _name(self.model), _listed(self.optimizer)
        yield isinstance(model, torch.nn.Module), "model", name, "it must be a torch.nn.Module, if there is no recipe"
        lazy = lazy_parameter(model)
        allowed = f"its parameter {lazy!r} is lazy and has no shape yet: call the module once on a batch before"
        yield lazy is None, "model", name, allowed
        allowed = "it has no parameter that requires a gradient, so nothing is trained"
        yield any(parameter.requires_grad for parameter in model.parameters()), "model", name, allowed
        allowed = "a module needs what its forward takes: a mapping, a tuple or a tensor"
        yield self.batch is not None, "batch", None, allowed
        made = makers and all(isinstance(o, torch.optim.Optimizer) or callable(o) for o in makers)
        allowed = "it must be a torch.optim.Optimizer on the module's parameters, a list of them, or a function that "
        yield made, "optimizer", _name(self.optimizer), allowed + "makes one from parameters"
        allowed = "it must be a function of (outputs, batch) to a scalar tensor, or None"
        yield self.loss is None or callable(self.loss), "loss", _name(self.loss), allowed
        yield isinstance(self.loop, Loop), "loop", self.loop, "it must be a Loop, or the name of one such as 'plain'"
        allowed = "allowed are " + ", ".join(map(repr, PRECISIONS))
        yield self.precision in PRECISIONS, "precision", self.precision, allowed

    def prepare(self, target: str, mode: FakeTensorMode) -> tuple[tr.Training, Values]:
        """Fake copies of model and batch, of the dtype of a "-true" precision, with the optimizer again, without its state;
        and what is known of values."""
        model = getattr(self.model, "_orig_mod", self.model)  # of torch.compile
        values = Values(mode)
        dtype = {"fp16-true": torch.float16, "bf16-true": torch.bfloat16}.get(self.precision)
        copier = Copier(mode, dtype)
        fake = copier(model)
        batch = tree_map(lambda leaf: _input(leaf, copier, dtype), self.batch, is_leaf=_is_packed)
        values.know(tensors_in(batch), tensors_in(self.batch))
        for original, copied in zip(model.modules(), fake.modules(), strict=True):
            for name, value in vars(original).items():
                if name != "_modules" and len(found := tensors_in(vars(copied).get(name))) == len(tensors_in(value)):
                    values.know(found, tensors_in(value))
        if self.loop.use_cache is not None and hasattr(getattr(fake, "config", None), "use_cache"):
            fake.config.use_cache = self.loop.use_cache
        training = tr.Training(
            model=fake,
            optimizer=None,
            batch=batch,
            device=torch.device("cpu"),
            multi_tensor=target == "cuda" if self.loop.foreach is None else self.loop.foreach,
            loop=self.loop,
            precision=self.precision,
            loss_of=_scalar(self.loss, copier),
            scaler=torch.amp.GradScaler("cpu", init_scale=1.0) if self.precision == "fp16-mixed" else None,
        )
        _Optimizers(self.optimizer, set(map(id, model.parameters())), training, copier).attach()
        return training, values

    def failed(self, phase: str, error: Exception) -> RecipeError:
        """The error of a step that does not run on fake tensors, with what was at fault and the line."""
        name, reason = _name(getattr(self.model, "_orig_mod", self.model)), reason_at(error)
        if isinstance(error, ValueNeeded):
            return RecipeError("model", name, f"{error}: `watch` measures a step that really runs")
        if isinstance(error, UNFAKED):
            return RecipeError("model", name, f"it uses an operator that does not run on fake tensors: {reason}")
        if phase in ("step", "between_steps"):
            return RecipeError("optimizer", _called(self.optimizer), f"its step fails: {reason}")
        if phase == "backward":
            return RecipeError("loss", "its value", f"the backward pass from it fails: {reason}")
        if phase == "load":
            return RecipeError("model", name, f"it cannot be copied: {reason}")
        if isinstance(error, RuntimeError | TypeError | IndexError):  # torch's own, of shapes, dtypes and arguments
            shapes = tree_map(_shape, self.batch, is_leaf=_is_packed)
            return RecipeError("batch", shapes, f"a forward pass of {name} fails on it: {reason}")
        return RecipeError("model", name, f"its forward pass fails: {type(error).__name__}: {reason}")

    @contextlib.contextmanager
    def untouched(self) -> Iterator[None]:
        """Whatever is done while entered, the model has the attributes and gradients afterwards that it had before."""
        before = [(module, dict(vars(module))) for module in self.model.modules()]
        gradients = [(parameter, parameter.grad) for parameter in self.model.parameters()]
        try:
            yield
        finally:
            for module, held in before:
                if list(map(id, vars(module).values())) != list(map(id, held.values())):
                    vars(module).clear()
                    vars(module).update(held)
            for parameter, gradient in gradients:
                if parameter.grad is not gradient:
                    parameter.grad = gradient

    def notes(self) -> list[str]:
        """What the simulation leaves out."""
        return ["torch.compile: the eager step is simulated"] * is_compiled(self.model) + loop_notes(self.loop)


def loop_notes(loop: Loop) -> list[str]:
    """What the simulation leaves out of `loop`."""
    note = "loop.empty_cache_steps: what is reserved is that of a run that never empties the cache"
    return [note] if loop.empty_cache_steps else []


def lazy_parameter(model: torch.nn.Module) -> str | None:
    """The name of a parameter or buffer of `model` that has no shape yet."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return next((name for name, tensor in named if isinstance(tensor, UninitializedTensorMixin)), None)


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether `model` or a part of it is run by torch.compile."""
    return any(hasattr(module, "_orig_mod") or module._compiled_call_impl for module in model.modules())


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)


def _shape(value: Any) -> Any:
    if _is_packed(value):
        return f"packed sequence {tuple(value.data.shape)}"
    return f"tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else value


def _input(leaf: Any, copier: Copier, dtype: torch.dtype | None) -> Any:
    """A leaf of the batch as a fake CPU tensor; a packed sequence keeps its batch sizes, which kernels read."""
    if _is_packed(leaf):
        parts = [None if part is None else _input(part, copier, dtype) for part in leaf]
        with tr.real_tensors():
            sizes = leaf.batch_sizes.clone()
        return PackedSequence(parts[0], sizes, *parts[2:])
    fake = copier(leaf)
    return fake.to("cpu", dtype if fake.is_floating_point() else None) if isinstance(fake, torch.Tensor) else fake


def _scalar(given: Any, copier: Copier) -> Callable[[Any, Any], torch.Tensor]:
    """The loss function `given`, or the outputs' own loss, held to give one number."""
    loss = copier(given) if given is not None else engine.loss_of

    def checked(outputs: Any, batch: Any) -> torch.Tensor:
        if given is None and not (isinstance(outputs, Mapping) and "loss" in outputs):
            raise RecipeError("loss", None, f"the module returns a {_name(outputs)} without a 'loss': give a function")
        try:
            value = loss(outputs, batch)
        except (ValueNeeded, *UNFAKED):
            raise
        except Exception as error:
            why = f"it fails on the module's outputs: {reason_at(error, whole=True)}"
            raise RecipeError("loss", _called(given), why) from error
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
            raise RecipeError("loss", _name(value) + shape, "it must give one number to go backward from")
        return value

    return checked


class Together:
    """Several optimizers as one."""

    def __init__(self, members: list[torch.optim.Optimizer]):
        self.members = members

    @property
    def param_groups(self) -> list[dict]:
        return [group for member in self.members for group in member.param_groups]

    def step(self) -> None:
        for member in self.members:
            member.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for member in self.members:
            member.zero_grad(set_to_none)


@dataclass
class _Optimizers:
    """What the user gave as `optimizer`, for the fake parameters of `training`; `own`: ids of the model's parameters."""

    given: Any
    own: set[int]
    training: tr.Training
    copier: Copier

    def attach(self) -> None:
        """Give `training` its optimizer, or one for each parameter where the loop steps in the backward pass."""
        training = self.training
        trained = [p for p in training.model.parameters() if p.requires_grad]
        if training.loop.optimizer_in_backward:
            tr.step_in_backward(training, self._of_one, trained)
            return
        made = self._made(trained)
        closures = [o for o in made if tr.needs_closure(o)]
        if closures and (len(made) > 1 or training.scaler):
            raise RecipeError("optimizer", _name(closures[0]), "it needs a closure: alone, and without loss scaling")
        training.optimizer = made[0] if len(made) == 1 else Together(made)

    def _of_one(self, parameter: torch.Tensor) -> torch.optim.Optimizer | None:
        made = self._made([parameter])
        if any(tr.needs_closure(o) for o in made):
            allowed = f"{_name(made[0])} needs a closure: take another loop"
            raise RecipeError("loop.optimizer_in_backward", True, allowed)
        return next((o for o in made if o.param_groups), None)

    def _made(self, trained: list) -> list[torch.optim.Optimizer]:
        """The optimizers on those of the fake parameters `trained` that they are for."""
        made = []
        for given in _listed(self.given):
            is_built = isinstance(given, torch.optim.Optimizer)
            made += [self._refit(given, trained)] if is_built else self._call(given, trained)
        for optimizer in made:
            self._choose_kernels(optimizer)
        return made

    def _call(self, make: Any, trained: list) -> list[torch.optim.Optimizer]:
        try:
            with tr.real_tensors():
                made = _listed(self.copier(make)(trained))
        except Exception as error:
            raise RecipeError("optimizer", _called(make), f"making it fails: {reason_at(error)}") from error
        if not made or not all(isinstance(each, torch.optim.Optimizer) for each in made):
            raise RecipeError("optimizer", _name(made[0] if made else made), "the function must return an Optimizer")
        return made

    def _refit(self, optimizer: torch.optim.Optimizer, trained: list) -> torch.optim.Optimizer:
        """`optimizer` again, without its states, on the copies of those of its parameters that are in `trained`."""
        if any(id(p) not in self.own for group in optimizer.param_groups for p in group["params"]):
            raise RecipeError("optimizer", _name(optimizer), "it holds parameters that are not the module's")
        self.copier.memo.pop(id(optimizer), None)  # another parameter's has groups of its own
        new = self.copier(optimizer)
        chosen = set(map(id, trained))
        for group in new.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in chosen or not p.requires_grad]
        new.param_groups = [group for group in new.param_groups if group["params"]]
        if type(optimizer) is torch.optim.Adagrad and new.param_groups:  # torch 2.11's has its states from the start
            with tr.real_tensors():
                return torch.optim.Adagrad(new.param_groups, **optimizer.defaults)
        return new

    def _choose_kernels(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the multi-tensor kernels where the loop, or else the target's default, does."""
        wanted = self.training.loop.foreach
        for group in optimizer.param_groups:
            chosen = group.get("foreach", False if "foreach" not in group else None)
            if wanted is not None and (group.get("fused") or chosen not in (None, wanted)):
                what = "is fused" if group.get("fused") else f"has foreach={chosen}"
                allowed = f"the optimizer {_name(optimizer)} {what}: leave the loop's at None"
                raise RecipeError("loop.foreach", wanted, allowed)
            if "foreach" in group and chosen is None and not group.get("fused"):
                group["foreach"] = self.training.multi_tensor


def _name(value: Any) -> str:
    return value if isinstance(value, str) else type(value).__name__


def _called(value: Any) -> str:
    return getattr(value, "__name__", _name(value))


def _listed(value: Any) -> list:
    return list(value) if isinstance(value, list | tuple) else [value]
