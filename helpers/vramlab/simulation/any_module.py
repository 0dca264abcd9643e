"""The training step of any nn.Module made ready for simulation.

Fake tensors take the place of the module's own, and its optimizer is made again.
"""

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from ..base.errors import RecipeError
from ..private import of_torch
from ..recipe.knobs import Refusals, refuse
from ..recipe.recipe import PRECISIONS, Loop
from ..tracking.tensors import tensors_in
from ..training import training as tr
from ..training.engine import Together
from .fake_mode import RuledFakeMode
from .users_objects import Remembered
from .values import StandIns, Values, reason_at

SCRIPTED = (
    "cannot follow a TorchScript module, whose interpreter runs its forward out of Python's sight"
)
WATCH = "`watch` measures a step that really runs"
UNSIMULATED = (
    "no recurrent layers, embedding bags or sparse tensors are simulated: "
    f"{WATCH}, if none is sparse"
)
IN_HALF = {"fp16-true": torch.float16, "bf16-true": torch.bfloat16}


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
        """Return what is refused; what comes later may need what came before."""
        model = self.model
        allowed = "it must be a torch.nn.Module, if there is no recipe"
        yield "model", not isinstance(model, nn.Module), allowed
        yield from _module_refusals(model)
        is_sparse = any(tensor.layout != torch.strided for tensor in tensors_in(self.batch))
        yield "batch", is_sparse, UNSIMULATED
        allowed = "a module needs what its forward takes: a mapping, a tuple or a tensor"
        yield "batch", self.batch is None, allowed
        allowed = (
            "it must be a torch.optim.Optimizer, a list of them, or a function that makes "
            "one from parameters"
        )
        yield "optimizer", not self._has_optimizer(), allowed
        allowed = "it is called as loss(output, batch): take two arguments"
        yield "loss", self.loss is not None and not _takes_two(self.loss), allowed
        allowed = "it must be a Loop, or the name of one such as 'plain'"
        yield "loop", not isinstance(self.loop, Loop), allowed
        yield "loop.foreach", self.loop.foreach is not None, "say it to the module's optimizer"
        allowed = "allowed are " + ", ".join(map(repr, PRECISIONS))
        yield "precision", self.precision not in PRECISIONS, allowed

    def _has_optimizer(self) -> bool:
        given = _listed(self.optimizer)
        fitting = [isinstance(one, torch.optim.Optimizer) or callable(one) for one in given]
        return bool(given) and all(fitting)

    @contextlib.contextmanager
    def prepared(self, target: str, mode: RuledFakeMode) -> Iterator[tuple[tr.Training, Values]]:
        """Yield the training and what is known of values.

        While entered the model holds fake tensors, of the dtype of a "-true" precision; afterwards
        each of its modules and what the loss holds are as they were.
        """
        # The module inside a wrapper of torch.compile runs eagerly.
        model = of_torch.original_of(self.model)
        values = Values(mode)
        # Before anything is fake: later nobody could tell what had been there.
        remembered = Remembered(self.loss, self.model)
        try:
            training = self._training(model, values, target)
            self._attach_optimizers(training, values)
            with self._caching(model), StandIns(values):
                yield training, values
        finally:
            values.restore()
            fakes = ", ".join(remembered.restore())
            if fakes:
                note = f"the loss keeps tensors of the simulation ({fakes}): make it anew to train"
                values.notes.append(note)

    def _training(self, model: nn.Module, values: Values, target: str) -> tr.Training:
        """Put fake tensors into `model`, and return its training without an optimizer."""
        dtype = IN_HALF.get(self.precision)
        for tensor in (*model.parameters(), *model.buffers(), *tensors_in(self.batch)):
            values.stand_in(tensor, dtype)
        batch = values.copied(self.batch)
        values.take_place(model)
        scaler = None
        if self.precision == "fp16-mixed":
            # No size depends on the scale.
            scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        return tr.Training(
            model=model,
            optimizer=None,
            batch=batch,
            device=torch.device("cpu"),
            multi_tensor=target == "cuda",
            loop=self.loop,
            precision=self.precision,
            loss_of=self._scalar,
            scaler=scaler,
        )

    def _caching(self, model: Any) -> contextlib.AbstractContextManager:
        """While entered, the model's cache of keys and values is on or off as the loop says."""
        use_cache = self.loop.use_cache
        if use_cache is None or not hasattr(getattr(model, "config", None), "use_cache"):
            return contextlib.nullcontext()
        return patch.object(model.config, "use_cache", use_cache)

    def _scalar(self, outputs: Any, batch: Any) -> torch.Tensor:
        """Return the loss. Raises RecipeError unless it is one number to go backward from."""
        has_loss = isinstance(outputs, Mapping) and "loss" in outputs
        if self.loss is None and not has_loss:
            rest = (
                "the module returns no mapping with a 'loss': give loss=, a function of "
                "(outputs, batch) to one number"
            )
            raise RecipeError("loss", None, rest)
        value = outputs["loss"] if self.loss is None else self.loss(outputs, batch)
        is_number = isinstance(value, torch.Tensor) and value.numel() == 1
        if not is_number or not value.requires_grad:
            raise RecipeError("loss", self.loss, "it must give one number to go backward from")
        return value

    def _attach_optimizers(self, training: tr.Training, values: Values) -> None:
        """Give `training` its optimizer.

        There is one for each parameter where the loop steps in the backward pass.
        """
        parameters = list(training.model.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        make = partial(self._made, training, {id(parameter) for parameter in parameters}, values)
        if training.loop.optimizer_in_backward:
            tr.step_in_backward(training, lambda parameter: make([parameter]), trained)
        else:
            training.optimizer = make(trained)

    def _made(
        self,
        training: tr.Training,
        own: set[int],
        values: Values,
        parameters: list,
    ) -> Any:
        """Return the optimizer of `parameters`, several as one, None where it would have none.

        `own` are the ids of the module's parameters.
        """
        optimizers = []
        for given in _listed(self.optimizer):
            optimizer = self._fitted(given, parameters, values)
            if optimizer.param_groups:
                optimizers.append(optimizer)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if not own.issuperset(map(id, group["params"])):
                    rest = "it must hold the module's parameters and no others"
                    raise RecipeError("optimizer", self.optimizer, rest)
                # None leaves the choice to torch, which looks at the device of real tensors
                if group.get("foreach", False) is None and not group.get("fused"):
                    group["foreach"] = training.multi_tensor
        if len(optimizers) > 1:
            return Together(optimizers)
        return optimizers[0] if optimizers else None

    def _fitted(self, given: Any, parameters: list, values: Values) -> torch.optim.Optimizer:
        """Return what the function `given` makes of fake `parameters`.

        An optimizer is made again, without its states, on those of its parameters whose fake ones
        they are.
        """
        if not isinstance(given, torch.optim.Optimizer):
            with tr.real_tensors():
                return given(parameters)
        new = object.__new__(type(given))
        attributes = dict(vars(given))
        # the states are of real tensors, and `step` is bound to `given`
        attributes.pop("state", None)
        attributes.pop("step", None)
        # The copy finds the fake tensor for each real one, so its groups hold the fake parameters.
        vars(new).update(values.copied(attributes), state=type(given.state)(dict))
        trained = {id(each) for each in self.model.parameters() if each.requires_grad}
        # with a step in the backward pass, those that have optimizers of their own
        left_out = trained.difference(map(id, parameters))
        for group in new.param_groups:
            group["params"] = [each for each in group["params"] if id(each) not in left_out]
        new.param_groups = [group for group in new.param_groups if group["params"]]
        # Adagrad has its states from the start
        if type(given) is torch.optim.Adagrad and new.param_groups:
            with tr.real_tensors():
                return torch.optim.Adagrad(new.param_groups, **given.defaults)
        return new

    def failed(self, phase: str, error: Exception) -> RecipeError:
        """Return the error of a step that does not run on fake tensors.

        It names the phase and the user's line.
        """
        field = "model" if phase in ("forward", "backward") else "optimizer"
        reason = f"{type(error).__name__}: {reason_at(error)}"
        said = f"its {phase} fails on fake tensors: {reason}; {WATCH}"
        return RecipeError(field, getattr(self, field), said)

    def notes(self) -> list[str]:
        """Return what the simulation leaves out."""
        notes = loop_notes(self.loop)
        if is_compiled(self.model):
            rest = "of a module the eager step is simulated; a Recipe with it is compiled"
            return [f"torch.compile: {rest}", *notes]
        return notes


def _module_refusals(model: nn.Module) -> Refusals:
    modules = list(model.modules())
    is_scripted = any(isinstance(module, torch.jit.ScriptModule) for module in modules)
    allowed = f"simulate {SCRIPTED}: give the module that was scripted or traced"
    yield "model", is_scripted, allowed
    lazy = lazy_parameter(model)
    allowed = (
        f"its parameter {lazy!r} is lazy and has no shape: call the module once on a batch before"
    )
    yield "model", lazy, allowed
    is_trained = any(parameter.requires_grad for parameter in model.parameters())
    yield "model", not is_trained, "no parameter of it requires a gradient"
    yield "model", any(map(_is_unsimulated, modules)), UNSIMULATED


def _takes_two(function: Any) -> bool:
    """Tell whether a function can be called with two arguments; built in ones may not say."""
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def _is_unsimulated(module: nn.Module) -> bool:
    kinds = nn.RNNBase | nn.RNNCellBase | nn.EmbeddingBag
    return isinstance(module, kinds) or bool(getattr(module, "sparse", False))


def loop_notes(loop: Loop) -> list[str]:
    """Return what the simulation leaves out of `loop`."""
    if not loop.empty_cache_steps:
        return []
    return [
        "loop.empty_cache_steps: what is reserved is that of a run that never empties the cache",
    ]


def lazy_parameter(model: nn.Module) -> str | None:
    """Return the name of a parameter or buffer of `model` that has no shape yet."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, UninitializedTensorMixin):
            return name
    return None


def is_compiled(model: nn.Module) -> bool:
    """Tell whether `model` or a part of it is run by torch.compile."""
    return any(map(of_torch.is_compiled, model.modules()))


def _listed(value: Any) -> list:
    return list(value) if isinstance(value, list | tuple) else [value]
