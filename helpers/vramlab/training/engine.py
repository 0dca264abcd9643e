"""What a step works on (`Training`), and who runs it (`Engine`).

That is one process here, and many ranks in `engines`.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..private import of_torch
from ..recipe.options import Loop
from ..recipe.recipe import Recipe
from .process_group import is_fake_group

AUTOCAST = {"fp16-mixed": "float16", "bf16-mixed": "bfloat16"}
# A transformers model, perhaps in a wrapper of PEFT, torch or DeepSpeed that has its attributes.
Model = Any


class Engine:
    """A single process that holds everything; engines of many ranks override the rest."""

    # runs a "-mixed" precision under `torch.autocast`; False where the engine casts by itself
    autocasts = True
    # device of fake tensors that stand for a GPU's; "cpu:0" keeps them apart from the host's "cpu"
    fake_gpu = "cpu"

    def wrap(self, model: Model) -> Model:
        """Return `model` as this rank holds it. The optimizer is made from its parameters."""
        return model

    def optimizer(self, parameters: list, make: Callable[[list], Any]) -> Any:
        """Return the optimizer of `parameters` (groups or a list); `make` gives the recipe's."""
        return make(parameters)

    def start(self, training: "Training") -> None:
        """Finish what is built: an engine may replace model and optimizer."""

    def without_peers(self, target: str) -> contextlib.AbstractContextManager:
        """While entered, the engine's library runs in a fake process group.

        Its other ranks never answer.
        """
        return contextlib.nullcontext()

    def follow(self, training: "Training", tracker: Any) -> contextlib.AbstractContextManager:
        """Tell a `tracking.tracker.Tracker` what the engine holds besides model and optimizer.

        While entered, also tell it what the engine makes.
        """
        return contextlib.nullcontext()

    def micro_batch(self, training: "Training", last: bool) -> contextlib.AbstractContextManager:
        """Run one micro-batch inside; gradients need to be averaged after the `last` only."""
        return contextlib.nullcontext()

    def part_of(
        self,
        training: "Training",
        batch: Any,
    ) -> contextlib.AbstractContextManager[Any]:
        """Return a context that yields what this rank computes of a micro-batch."""
        return contextlib.nullcontext(batch)

    def run_micro_batches(self, training: "Training", on_phase: Callable[[str], None]) -> bool:
        """Run all micro-batches by the engine's own schedule and return True.

        False leaves it to the plain loop.
        """
        return False

    def backward(self, training: "Training", loss: torch.Tensor) -> None:
        """Run the backward pass of a micro-batch's loss."""
        loss.backward()

    def clip(self, training: "Training", norm: float) -> None:
        """Clip the gradients of the whole model, over all ranks, to `norm`."""
        # torch takes the multi-tensor path by itself on CUDA, but not on fake CPU tensors
        parameters = training.model.parameters()
        torch.nn.utils.clip_grad_norm_(parameters, norm, foreach=training.multi_tensor)

    def update(self, training: "Training") -> None:
        """Step the optimizer, through the loss scaler where there is one."""
        scaler = training.scaler
        if not scaler:
            training.optimizer.step()
            return
        if makes_fakes() or is_fake_group():
            # values are missing: it may look like an overflow
            of_torch.never_skip(scaler, _always_step)
        scaler.step(training.optimizer)
        scaler.update()

    def zero_grad(self, training: "Training") -> None:
        """Clear the gradients as the loop does."""
        training.optimizer.zero_grad(set_to_none=training.loop.set_to_none)


class ShardedEngine(Engine):
    """One rank of many."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.sharding = recipe.group


def _always_step(optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand for the scaler's `_maybe_opt_step`: no gradient overflowed."""
    return optimizer.step(*args, **kwargs)


def makes_fakes() -> bool:
    """Tell whether a FakeTensorMode is active."""
    return of_torch.is_faking()


def _loss_in(outputs: Any, batch: Any) -> torch.Tensor:
    return outputs["loss"]


def _leave_nothing_out() -> None:
    """Stand for a trainer that counts no batches."""


def _ignore_token(made: int, cache: Any) -> None:
    """Stand for who does not ask what is sampled."""


@dataclass
class Training:
    """Everything one step needs."""

    model: Model
    optimizer: Any
    batch: Any
    device: torch.device
    multi_tensor: bool  # use the optimizer's and clipping's multi-tensor kernels
    loop: Loop = field(default_factory=Loop)
    precision: str = "fp32"
    accumulation: int = 1  # micro-batches in a step
    abridged: bool = False  # run two of them in the first step, then one
    is_compiled: bool = False  # hooks of modules would be compiled too
    loss_of: Callable[[Any, Any], torch.Tensor] = _loss_in
    reference: Model | None = None  # frozen, which the loss needs too
    # a trainer's own, instead of `loss_of`
    compute_loss: Callable[[Callable, Any], torch.Tensor] | None = None
    # a trainer's own, which samples what is trained on: told as the phases of that begin
    next_batch: Callable[[Callable[[str], None]], Any] | None = None
    sampled: Any = None  # batches that it keeps
    # lets that trainer go on without training on its next batch
    leave_out: Callable[[], None] = _leave_nothing_out
    left_out: range = range(0)  # micro-batches of a step that are not run
    # called as it samples: `fixed_generation.fixed_length`
    on_token: Callable[[int, Any], None] = _ignore_token
    most_tokens: int | None = None  # of a completion that are sampled; None: all
    cycle: int = 1  # steps after which the trainer's work begins anew
    scaler: Any = None
    engine: Engine = field(default_factory=Engine)
    # parameter to its own optimizer, with optimizer_in_backward
    per_parameter: dict = field(default_factory=dict)
    # other micro-batches, where the loop has all on the device at once
    further: list = field(default_factory=list)
    # entered for each micro-batch
    around: contextlib.AbstractContextManager = field(default_factory=contextlib.nullcontext)
    outputs: Any = None  # what the loop keeps alive between steps, as `loss`
    loss: Any = None
    steps: int = 0

    @property
    def optimizers(self) -> list:
        """All optimizers that hold state: one, or one per parameter with optimizer_in_backward."""
        if self.per_parameter:
            return list(self.per_parameter.values())
        # `Together` has several, as Muon with AdamW for the rest.
        members = getattr(self.optimizer, "members", None)
        if members:
            return members
        # ZeroRedundancyOptimizer keeps its state in the optimizer of this rank's shard, `optim`
        return [getattr(self.optimizer, "optim", self.optimizer)]


def autocast(device_type: str, precision: str) -> contextlib.AbstractContextManager:
    """Return `torch.autocast` in the dtype of a "-mixed" precision, else a null context."""
    if precision not in AUTOCAST:
        return contextlib.nullcontext()
    return torch.autocast(device_type, getattr(torch, AUTOCAST[precision]))


def autocast_inside(model: Model, device_type: str, precision: str) -> None:
    """Autocast `model.forward` itself as `Accelerator.prepare_model` does.

    Its outputs are copied to fp32.
    """
    from accelerate.utils import convert_outputs_to_fp32

    dtype = getattr(torch, AUTOCAST[precision])
    # Arithmetic in half precision, and what comes out copied to fp32 so that a loss is computed
    # there.
    in_half = torch.autocast(device_type, dtype)(model.forward)
    model.forward = convert_outputs_to_fp32(in_half)


class Together:
    """Several optimizers as one."""

    def __init__(self, members: list[torch.optim.Optimizer]) -> None:
        self.members = members
        self.param_groups: list[dict] = []
        for member in members:
            # The members' own dictionaries, so that a scheduler which sets a rate reaches them all.
            self.param_groups += member.param_groups

    def step(self) -> None:
        """Step all of them."""
        for member in self.members:
            member.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all."""
        for member in self.members:
            member.zero_grad(set_to_none)
