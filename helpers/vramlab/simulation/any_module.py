"""The training step of any nn.Module made ready for simulation: fake tensors in place of its own, and its optimizer again."""

import contextlib
import copy
import inspect
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.nn.parameter import UninitializedTensorMixin
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from ..recipe.recipe import PRECISIONS, Loop
from ..report.errors import RecipeError
from ..tracking.tracked import tensors_in
from ..training import training as tr
from .values import UNFAKED, Values, reason_at

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
        for is_met, field, value, allowed in self._demands():
            if not is_met:
                raise RecipeError(field, value, allowed)

    def _demands(self) -> Iterator[tuple[Any, str, Any, str]]:
        """(whether it is met, field, its value, what is allowed); what comes later may need what came before."""
        model, name, makers = self.model, _name(self.model), _listed(self.optimizer)
        yield isinstance(model, nn.Module), "model", name, "it must be a torch.nn.Module, if there is no recipe"
        lazy = lazy_parameter(model)
        allowed = f"its parameter {lazy!r} is lazy and has no shape yet: call the module once on a batch before"
        yield lazy is None, "model", name, allowed
        allowed = "it has no parameter that requires a gradient, so nothing is trained"
        yield any(parameter.requires_grad for parameter in model.parameters()), "model", name, allowed
        recurrent = any(isinstance(module, nn.RNNBase | nn.RNNCellBase) for module in model.modules())
        yield not recurrent, "model", name, f"the kernels of recurrent layers are not simulated: {WATCH}"
        allowed = "a module needs what its forward takes: a mapping, a tuple or a tensor"
        yield self.batch is not None, "batch", None, allowed
        made = makers and all(isinstance(o, torch.optim.Optimizer) or callable(o) for o in makers)
        allowed = "it must be a torch.optim.Optimizer on the module's parameters, a list of them, or a function that "
        yield made, "optimizer", _name(self.optimizer), allowed + "makes one from parameters"
        yield isinstance(self.loop, Loop), "loop", self.loop, "it must be a Loop, or the name of one such as 'plain'"
        allowed = "allowed are " + ", ".join(map(repr, PRECISIONS))
        yield self.precision in PRECISIONS, "precision", self.precision, allowed

    @contextlib.contextmanager
    def prepared(self, target: str, mode: FakeTensorMode) -> Iterator[tuple[tr.Training, Values]]:
        """The training and what is known of values. While entered the model holds fake tensors, of the dtype of a "-true"
        precision; afterwards each of its modules has the attributes that it had before."""
        model = getattr(self.model, "_orig_mod", self.model)  # of torch.compile
        fakes = _Fakes(mode, {"fp16-true": torch.float16, "bf16-true": torch.bfloat16}.get(self.precision))
        loop, before = self.loop, [(module, dict(vars(module))) for module in _modules(model, self.loss)]
        caches = loop.use_cache is not None and hasattr(getattr(model, "config", None), "use_cache")
        try:
            own = [t for m, _ in before for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))]
            for tensor in (*own, *tensors_in(self.batch)):
                fakes.of(tensor, fakes.dtype)
            for module, held in before:
                vars(module).update(tree_map_only(torch.Tensor, fakes.of, held))
            training = tr.Training(
                model=model,
                optimizer=None,
                batch=fakes.copied(self.batch),
                device=torch.device("cpu"),
                multi_tensor=target == "cuda" if loop.foreach is None else loop.foreach,
                loop=loop,
                precision=self.precision,
                loss_of=self._scalar,
                scaler=torch.amp.GradScaler("cpu", init_scale=1.0) if self.precision == "fp16-mixed" else None,
            )
            self._attach_optimizers(training, fakes)
            with patch.object(model.config, "use_cache", loop.use_cache) if caches else contextlib.nullcontext():
                yield training, fakes.values
        finally:
            for module, held in before:
                vars(module).clear()
                vars(module).update(held)

    def _scalar(self, outputs: Any, batch: Any) -> torch.Tensor:
        """The loss, held to be one number."""
        if self.loss is None and not (isinstance(outputs, Mapping) and "loss" in outputs):
            raise RecipeError("loss", None, f"the module returns a {_name(outputs)} without a 'loss': give a function")
        try:
            value = outputs["loss"] if self.loss is None else self.loss(outputs, batch)
        except UNFAKED:
            raise
        except Exception as error:
            raise RecipeError("loss", _name(self.loss), f"it fails on the outputs: {reason_at(error)}") from error
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise RecipeError("loss", _shape(value), "it must give one number to go backward from")
        return value

    def _attach_optimizers(self, training: tr.Training, fakes: "_Fakes") -> None:
        """Give `training` its optimizer, or one for each parameter where the loop steps in the backward pass."""

        def made(parameters: list) -> torch.optim.Optimizer | Together | None:
            members = []
            for given in _listed(self.optimizer):
                is_built = isinstance(given, torch.optim.Optimizer)
                members += [fakes.refit(given, parameters)] if is_built else _call(given, parameters)
            for member in members:
                _check(member, training)
            members = [member for member in members if member.param_groups]
            return Together(members) if len(members) > 1 else next(iter(members), None)

        trained = [p for p in training.model.parameters() if p.requires_grad]
        if training.loop.optimizer_in_backward:
            tr.step_in_backward(training, lambda parameter: made([parameter]), trained)
        else:
            training.optimizer = made(trained)

    def failed(self, phase: str, error: Exception) -> RecipeError:
        """The error of a step that does not run on fake tensors, with what was at fault and the line."""
        name, reason = _name(getattr(self.model, "_orig_mod", self.model)), reason_at(error)
        if isinstance(error, UNFAKED):
            return RecipeError("model", name, f"its step does not run on fake tensors: {reason}; {WATCH}")
        if phase in ("step", "between_steps"):
            return RecipeError("optimizer", _name(self.optimizer), f"its step fails: {reason}")
        if phase == "backward":
            return RecipeError("loss", "its value", f"the backward pass from it fails: {reason}")
        if isinstance(error, RuntimeError | TypeError | IndexError):  # torch's own, of shapes, dtypes and arguments
            return RecipeError("batch", tree_map(_shape, self.batch), f"a forward pass of {name} fails on it: {reason}")
        return RecipeError("model", name, f"its forward pass fails: {type(error).__name__}: {reason}")

    def notes(self) -> list[str]:
        """What the simulation leaves out."""
        return ["torch.compile: the eager step is simulated"] * is_compiled(self.model) + loop_notes(self.loop)


def _modules(*values: Any) -> list[nn.Module]:
    """The modules in `values`, in their attributes, and those that functions there refer to (a teacher in the loss)."""
    found, rest = {}, list(values)
    while rest:
        value = rest.pop()
        if isinstance(value, types.FunctionType):
            names = inspect.getclosurevars(value)
            named = (*names.nonlocals.values(), *names.globals.values())
            rest += [module for module in named if isinstance(module, nn.Module)]
        elif isinstance(value, nn.Module) and id(value) not in found:
            found[id(value)] = value
            rest += tree_leaves(vars(value))
    return list(found.values())


class _Fakes:
    """Fake CPU tensors of `mode` for real ones, each made once; `values` is what is known of them."""

    def __init__(self, mode: FakeTensorMode, dtype: torch.dtype | None):
        self.mode, self.dtype, self.values = mode, dtype, Values(mode)
        self.made: dict[int, torch.Tensor] = {}  # by the real one's id: a memo for copy.deepcopy

    def of(self, real: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The fake one of `real`, with its hooks; of `dtype` if it is floating and was not made before."""
        if id(real) in self.made:
            return self.made[id(real)]
        with FakeCopyMode(self.mode):
            fake = copy.deepcopy(real)
        dtype = dtype if dtype and real.is_floating_point() else real.dtype
        if (fake.device.type, fake.dtype) != ("cpu", dtype):
            moved = torch.empty_like(fake, device="cpu", dtype=dtype)
            fake = nn.Parameter(moved, fake.requires_grad) if isinstance(fake, nn.Parameter) else moved
        for hook in (real._backward_hooks or {}).values():
            fake.register_hook(hook)
        for hook in (real._post_accumulate_grad_hooks or {}).values():
            fake.register_post_accumulate_grad_hook(hook)
        self.values.know(fake, real)
        self.made[id(real)] = fake
        return fake

    def copied(self, value: Any) -> Any:
        """A copy of `value` with fake tensors."""
        with FakeCopyMode(self.mode):
            return copy.deepcopy(value, dict(self.made))

    def refit(self, optimizer: torch.optim.Optimizer, chosen: list) -> torch.optim.Optimizer:
        """`optimizer` again, without its states, on those of its parameters whose fake ones are in `chosen`."""
        if any(id(p) not in self.made for group in optimizer.param_groups for p in group["params"]):
            raise RecipeError("optimizer", _name(optimizer), "it holds parameters that are not the module's")
        new = object.__new__(type(optimizer))
        held = {name: value for name, value in vars(optimizer).items() if name not in ("state", "step")}
        vars(new).update(self.copied(held), state=type(optimizer.state)(dict))
        ids = set(map(id, chosen))
        for group in new.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in ids or not p.requires_grad]
        new.param_groups = [group for group in new.param_groups if group["params"]]
        if type(optimizer) is torch.optim.Adagrad and new.param_groups:  # which has its states from the start
            with tr.real_tensors():
                return torch.optim.Adagrad(new.param_groups, **optimizer.defaults)
        return new


@dataclass
class Together:
    """Several optimizers as one."""

    members: list[torch.optim.Optimizer]

    @property
    def param_groups(self) -> list[dict]:
        return [group for member in self.members for group in member.param_groups]

    def step(self) -> None:
        for member in self.members:
            member.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for member in self.members:
            member.zero_grad(set_to_none)


def _call(make: Any, parameters: list) -> list[torch.optim.Optimizer]:
    """The optimizers that the user's function makes from fake `parameters`."""
    try:
        with tr.real_tensors():
            made = _listed(make(parameters))
    except Exception as error:
        raise RecipeError("optimizer", _name(make), f"making it fails: {reason_at(error)}") from error
    if not made or not all(isinstance(each, torch.optim.Optimizer) for each in made):
        raise RecipeError("optimizer", _name(made[0] if made else made), "the function must return an Optimizer")
    if not all(isinstance(p, FakeTensor) for each in made for group in each.param_groups for p in group["params"]):
        raise RecipeError("optimizer", _name(make), "the function must take the parameters that it is given")
    return made


def _check(optimizer: torch.optim.Optimizer, training: tr.Training) -> None:
    """Refuse an optimizer that needs a closure, and take the multi-tensor kernels where the loop, or else the target's
    default, does."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise RecipeError("optimizer", _name(optimizer), f"a step that needs a closure is not simulated: {WATCH}")
    wanted = training.loop.foreach
    for group in optimizer.param_groups:
        chosen = "fused" if group.get("fused") else group.get("foreach", False)
        if wanted is not None and chosen not in (None, wanted):
            allowed = f"the optimizer {_name(optimizer)} says {chosen!r} for its own kernels: leave the loop's at None"
            raise RecipeError("loop.foreach", wanted, allowed)
        if chosen is None:
            group["foreach"] = training.multi_tensor


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


def _shape(value: Any) -> str:
    return f"tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else _name(value)


def _name(value: Any) -> str:
    return value if isinstance(value, str) else getattr(value, "__name__", type(value).__name__)


def _listed(value: Any) -> list:
    return list(value) if isinstance(value, list | tuple) else [value]
