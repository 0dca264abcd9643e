"""Any nn.Module made ready for a simulated step: fake copies of it, its batch and its optimizer."""

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator, Mapping
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
from .twins import Twins
from .values import UNFAKED, ValueNeeded, Values, user_line


def check(model: Any, batch: Any, optimizer: Any, loss: Any, loop: Any, precision: str) -> None:
    """Raise RecipeError for what cannot be trained, before anything is copied."""
    if not isinstance(model, torch.nn.Module):
        raise RecipeError("model", _name(model), "it must be a torch.nn.Module, if there is no recipe")
    if (lazy := lazy_parameter(model)) is not None:
        allowed = f"its parameter {lazy!r} is lazy and has no shape yet: call the module once on a batch before"
        raise RecipeError("model", _name(model), allowed)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RecipeError("model", _name(model), "it has no parameter that requires a gradient, so nothing is trained")
    if batch is None:
        raise RecipeError("batch", None, "a module needs what its forward takes: a mapping, a tuple or a tensor")
    several = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    if not several or not all(isinstance(o, torch.optim.Optimizer) or callable(o) for o in several):
        allowed = "it must be a torch.optim.Optimizer on the module's parameters, a list of them, or a function that "
        raise RecipeError("optimizer", _name(optimizer), allowed + "makes one from parameters")
    if loss is not None and not callable(loss):
        raise RecipeError("loss", _name(loss), "it must be a function of (outputs, batch) to a scalar tensor, or None")
    if not isinstance(loop, Loop):
        raise RecipeError("loop", loop, "it must be a Loop, or the name of one such as 'plain'")
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
) -> tuple[tr.Training, Values]:
    """Fake copies of `model` and `batch`, and `optimizer` again, without its state, on the copy's parameters.

    With a "-true" precision the copy's floating parameters, buffers and inputs have that dtype, as after
    `model.to(dtype)`. Returns what is known of values too.
    """
    twins, values = Twins(mode), Values(mode)
    dtype = {"fp16-true": torch.float16, "bf16-true": torch.bfloat16}.get(precision)
    fake = twins.module(model, functools.partial(_on_cpu, dtype=dtype))
    fake_batch = tree_map(lambda leaf: _input(leaf, twins, dtype), batch, is_leaf=_is_packed)
    values.know(tensors_in(fake_batch), tensors_in(batch))
    for original, copied in zip(model.modules(), fake.modules(), strict=True):
        for name, value in vars(original).items():
            if name != "_modules" and len(found := tensors_in(vars(copied).get(name))) == len(tensors_in(value)):
                values.know(found, tensors_in(value))
    if loop.use_cache is not None and hasattr(getattr(fake, "config", None), "use_cache"):
        fake.config.use_cache = loop.use_cache
    training = tr.Training(
        model=fake,
        optimizer=None,
        batch=fake_batch,
        device=torch.device("cpu"),
        multi_tensor=target == "cuda" if loop.foreach is None else loop.foreach,
        loop=loop,
        precision=precision,
        loss_of=_scalar(loss, twins),
        scaler=torch.amp.GradScaler("cpu", init_scale=1.0) if precision == "fp16-mixed" else None,
    )
    _give_optimizer(training, optimizer, model, twins)
    return training, values


def failed(model: torch.nn.Module, batch: Any, optimizer: Any, phase: str, error: Exception) -> RecipeError:
    """The error of a module whose step does not run on fake tensors, with what was at fault and the line."""
    if isinstance(error, ValueNeeded):
        return RecipeError("model", _name(model), f"{error}: `watch` measures a step that really runs")
    reason = reason_at(error)
    if isinstance(error, UNFAKED):
        return RecipeError("model", _name(model), f"it uses an operator that does not run on fake tensors: {reason}")
    if phase in ("step", "between_steps"):
        return RecipeError("optimizer", _called(optimizer), f"its step fails: {reason}")
    if phase == "backward":
        return RecipeError("loss", "its value", f"the backward pass from it fails: {reason}")
    if phase == "load":
        return RecipeError("model", _name(model), f"it cannot be copied: {reason}")
    if isinstance(error, RuntimeError | TypeError | IndexError):  # torch's own, of shapes, dtypes and arguments
        return RecipeError("batch", _describe(batch), f"a forward pass of {_name(model)} fails on it: {reason}")
    return RecipeError("model", _name(model), f"its forward pass fails: {type(error).__name__}: {reason}")


@contextlib.contextmanager
def untouched(model: torch.nn.Module) -> Iterator[None]:
    """Whatever is done while entered, `model` has the attributes and gradients afterwards that it had before."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
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


def notes(model: torch.nn.Module, loop: Loop | str) -> list[str]:
    """What the simulation of `model` leaves out."""
    return ["torch.compile: the eager step is simulated"] * is_compiled(model) + loop_notes(loop)


def loop_notes(loop: Loop | str) -> list[str]:
    """What the simulation leaves out of `loop`."""
    if not getattr(loop, "empty_cache_steps", None):
        return []
    return ["loop.empty_cache_steps: what is reserved is that of a run that never empties the cache"]


def lazy_parameter(model: torch.nn.Module) -> str | None:
    """The name of a parameter or buffer of `model` that has no shape yet."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return next((name for name, tensor in named if isinstance(tensor, UninitializedTensorMixin)), None)


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether `model` or a part of it is run by torch.compile."""
    return any(hasattr(module, "_orig_mod") or module._compiled_call_impl for module in model.modules())


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)


def _input(leaf: Any, twins: Twins, dtype: torch.dtype | None) -> Any:
    """A leaf of the batch as a fake CPU tensor; a packed sequence keeps its batch sizes, which kernels read."""
    if _is_packed(leaf):
        parts = [None if part is None else _input(part, twins, dtype) for part in leaf]
        with tr.real_tensors():
            sizes = leaf.batch_sizes.clone()
        return PackedSequence(parts[0], sizes, *parts[2:])
    fake = twins(leaf)
    if not isinstance(fake, torch.Tensor):
        return fake
    return fake.to("cpu", dtype if fake.is_floating_point() else None)


def _on_cpu(model: torch.nn.Module, dtype: torch.dtype | None) -> None:
    """Fake tensors of other devices (meta, CUDA) become the CPU's, which stand for all; shared ones stay shared."""
    done: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, old in [*module._parameters.items(), *module._buffers.items()]:
            wanted = dtype if dtype and old is not None and old.is_floating_point() else getattr(old, "dtype", None)
            if old is None or (old.device.type == "cpu" and old.dtype == wanted):
                continue
            if id(old) not in done:
                new = torch.empty_like(old, device="cpu", dtype=wanted)
                trained = isinstance(old, torch.nn.Parameter)
                done[id(old)] = torch.nn.Parameter(new, requires_grad=old.requires_grad) if trained else new
            (module._parameters if name in module._parameters else module._buffers)[name] = done[id(old)]


def _scalar(given: Any, twins: Twins) -> Callable[[Any, Any], torch.Tensor]:
    loss = twins(given) if given is not None else engine.loss_of

    def checked(outputs: Any, batch: Any) -> torch.Tensor:
        if given is None and not (isinstance(outputs, Mapping) and "loss" in outputs):
            raise RecipeError("loss", None, f"the module returns a {_name(outputs)} without a 'loss': give a function")
        try:
            value = loss(outputs, batch)
        except (ValueNeeded, *UNFAKED):
            raise
        except Exception as error:
            line = user_line(list(traceback.walk_tb(error.__traceback__))[::-1])
            at = f" ({line})" if line else ""
            name = getattr(given, "__name__", _name(given))
            raise RecipeError(
                "loss", name, f"it fails on the module's outputs: {error}{at}".replace("\n", " ")
            ) from error
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
            raise RecipeError("loss", _name(value) + shape, "it must give one number to go backward from")
        return value

    return checked


# --- optimizers -------------------------------------------------------------------------------------------------------


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


def _give_optimizer(training: tr.Training, given: Any, model: torch.nn.Module, twins: Twins) -> None:
    """The optimizer of `training`, or one for each parameter where the loop steps in the backward pass."""
    trained = [p for p in training.model.parameters() if p.requires_grad]
    if not training.loop.optimizer_in_backward:
        made = [o for each in _listed(given) for o in _made(each, trained, model, training, twins)]
        closures = [o for o in made if tr.needs_closure(o)]
        if closures and (len(made) > 1 or training.scaler):
            raise RecipeError("optimizer", _name(closures[0]), "it needs a closure: alone, and without loss scaling")
        training.optimizer = made[0] if len(made) == 1 else Together(made)
        return

    def one(parameter: torch.Tensor) -> torch.optim.Optimizer | None:
        made = [o for each in _listed(given) for o in _made(each, [parameter], model, training, twins)]
        if any(tr.needs_closure(o) for o in made):
            raise RecipeError(
                "loop.optimizer_in_backward", True, f"{_name(made[0])} needs a closure: take another loop"
            )
        return next((o for o in made if o.param_groups), None)

    tr.step_in_backward(training, one, trained)


def _listed(value: Any) -> list:
    return list(value) if isinstance(value, list | tuple) else [value]


def _made(given: Any, trained: list, model: torch.nn.Module, training: tr.Training, twins: Twins) -> list:
    """The optimizers on those of the fake parameters `trained` that `given` is for."""
    if isinstance(given, torch.optim.Optimizer):
        made = [_refit(given, trained, model, twins)]
    else:
        try:
            with tr.real_tensors():
                made = _listed(twins(given)(trained))
        except Exception as error:
            raise RecipeError("optimizer", _called(given), f"making it fails: {reason_at(error)}") from error
        if not made or not all(isinstance(each, torch.optim.Optimizer) for each in made):
            raise RecipeError("optimizer", _name(made[0] if made else made), "the function must return an Optimizer")
    for each in made:
        _choose_kernels(each, training)
    return made


def _refit(optimizer: torch.optim.Optimizer, trained: list, model: torch.nn.Module, twins: Twins) -> Any:
    """`optimizer` again, without its states, on those of its parameters' twins that are in `trained`."""
    own = set(map(id, model.parameters()))
    if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
        raise RecipeError("optimizer", _name(optimizer), "it holds parameters that are not the module's")
    new = twins.optimizer(optimizer)
    chosen = set(map(id, trained))
    for group in new.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in chosen or not p.requires_grad]
    new.param_groups = [group for group in new.param_groups if group["params"]]
    if type(optimizer) is torch.optim.Adagrad and new.param_groups:  # torch 2.11's has its states from the start
        with tr.real_tensors():
            return torch.optim.Adagrad(new.param_groups, **optimizer.defaults)
    return new


def _choose_kernels(optimizer: torch.optim.Optimizer, training: tr.Training) -> None:
    """The multi-tensor kernels where the loop, or else the target's default, takes them."""
    wanted = training.loop.foreach
    for group in optimizer.param_groups:
        chosen = group.get("foreach", False if "foreach" not in group else None)
        if wanted is not None and (group.get("fused") or chosen not in (None, wanted)):
            what = "is fused" if group.get("fused") else f"has foreach={chosen}"
            raise RecipeError(
                "loop.foreach", wanted, f"the optimizer {_name(optimizer)} {what}: leave the loop's at None"
            )
        if "foreach" in group and chosen is None and not group.get("fused"):
            group["foreach"] = training.multi_tensor


def _name(value: Any) -> str:
    return value if isinstance(value, str) else type(value).__name__


def _called(value: Any) -> str:
    return getattr(value, "__name__", _name(value))


def reason_at(error: Exception) -> str:
    """The first line of what `error` says, and the user's line that it came from."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    line = user_line(list(traceback.walk_tb(error.__traceback__))[::-1])
    return f"{text} ({line})" if line else text


def _describe(batch: Any) -> Any:
    def leaf(value: Any) -> Any:
        if _is_packed(value):
            return f"packed sequence {tuple(value.data.shape)}"
        return f"tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else value

    return tree_map(leaf, batch, is_leaf=_is_packed)
