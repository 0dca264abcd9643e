"""What a step works on (`Training`), and who runs it (`Engine`): one process here, many ranks in `engines`."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..recipe.options import Loop
from ..recipe.recipe import Recipe
from .process_group import is_fake_group

AUTOCAST = {"fp16-mixed": "float16", "bf16-mixed": "bfloat16"}


class Engine:
    """A single process that holds everything; engines of many ranks override the rest."""

    autocasts = True  # runs a "-mixed" precision under `torch.autocast`; False where the engine casts by itself
    fake_gpu = "cpu"  # device of fake tensors that stand for a GPU's; "cpu:0" keeps them apart from the host's "cpu"

    def __init__(self, recipe: Recipe | None = None):
        self.recipe = recipe

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """`model` as this rank holds it. The optimizer is made from its parameters."""
        return model

    def optimizer(self, parameters: list, make: Callable[[list], Any]) -> Any:
        """The optimizer of `parameters` (groups or a list); `make(parameters)` is the recipe's."""
        return make(parameters)

    def start(self, training: "Training") -> None:
        """Called once model and optimizer are built; an engine may replace them."""

    def without_peers(self, target: str) -> contextlib.AbstractContextManager:
        """While entered, the engine's library runs under a fake process group, whose other ranks never answer."""
        return contextlib.nullcontext()

    def follow(self, training: "Training", tracker: Any) -> contextlib.AbstractContextManager:
        """Tell a `tracking.tracker.Tracker` what the engine holds besides model and optimizer and, while entered, makes."""
        return contextlib.nullcontext()

    def micro_batch(self, training: "Training", last: bool) -> contextlib.AbstractContextManager:
        """Around one micro-batch; gradients need to be averaged after the `last` only."""
        return contextlib.nullcontext()

    def run_micro_batches(self, training: "Training", on_phase: Callable[[str], None]) -> bool:
        """Run all micro-batches by the engine's own schedule and return True; False leaves it to the plain loop."""
        return False

    def backward(self, training: "Training", loss: torch.Tensor) -> None:
        loss.backward()

    def clip(self, training: "Training", norm: float) -> None:
        """Clip the gradients of the whole model, over all ranks, to `norm`."""
        # torch takes the multi-tensor path by itself on CUDA, but not on fake CPU tensors
        torch.nn.utils.clip_grad_norm_(training.model.parameters(), norm, foreach=training.multi_tensor)

    def update(self, training: "Training") -> None:
        """Step the optimizer, through the loss scaler where there is one."""
        if scaler := training.scaler:
            if makes_fakes() or is_fake_group():  # values are missing: it may look like an overflow
                scaler._maybe_opt_step = lambda optimizer, state, *args, **kwargs: optimizer.step(*args, **kwargs)
            scaler.step(training.optimizer)
            scaler.update()
        else:
            training.optimizer.step()

    def zero_grad(self, training: "Training") -> None:
        training.optimizer.zero_grad(set_to_none=training.loop.set_to_none)


def makes_fakes() -> bool:
    """Whether a FakeTensorMode is active."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


@dataclass
class Training:
    """Everything one step needs."""

    model: torch.nn.Module
    optimizer: Any
    batch: Any
    device: torch.device
    multi_tensor: bool  # use the optimizer's and clipping's multi-tensor kernels
    loop: Loop = field(default_factory=Loop)
    precision: str = "fp32"
    accumulation: int = 1  # micro-batches in a step
    abridged: bool = False  # run two of them in the first step, then one
    loss_of: Callable[[Any, Any], torch.Tensor] = lambda outputs, batch: outputs["loss"]
    reference: torch.nn.Module | None = None  # frozen, which the loss needs too
    compute_loss: Callable[[Callable, Any], torch.Tensor] | None = None  # a trainer's own, instead of `loss_of`
    scaler: Any = None
    engine: Engine = field(default_factory=Engine)
    per_parameter: dict = field(default_factory=dict)  # parameter to its own optimizer, with optimizer_in_backward
    further: list = field(default_factory=list)  # other micro-batches, where the loop has all on the device at once
    around: contextlib.AbstractContextManager = field(default_factory=contextlib.nullcontext)  # each micro-batch
    outputs: Any = None  # what the loop keeps alive between steps, as `loss`
    loss: Any = None
    steps: int = 0

    @property
    def optimizers(self) -> list:
        """All optimizers that hold state: one, or one per parameter with optimizer_in_backward."""
        # ZeroRedundancyOptimizer keeps its state in the optimizer of this rank's shard, `optim`
        several = list(self.per_parameter.values()) or getattr(self.optimizer, "members", None)
        return several or [getattr(self.optimizer, "optim", self.optimizer)]


def autocast(device_type: str, precision: str) -> contextlib.AbstractContextManager:
    """`torch.autocast` in the dtype of a "-mixed" precision, a null context for the others."""
    if precision not in AUTOCAST:
        return contextlib.nullcontext()
    return torch.autocast(device_type, getattr(torch, AUTOCAST[precision]))


def autocast_inside(model: torch.nn.Module, device_type: str, precision: str) -> None:
    """Autocast `model.forward` itself as `Accelerator.prepare_model` does, which copies outputs to fp32."""
    from accelerate.utils import convert_outputs_to_fp32

    model.forward = convert_outputs_to_fp32(autocast(device_type, precision)(model.forward))
