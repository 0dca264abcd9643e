"""What a step works on (`Training`), and who runs it (`Engine`): one process alone, and what engines may do otherwise."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..recipe.options import Loop

if TYPE_CHECKING:
    import torch


AUTOCAST = {"fp16-mixed": "float16", "bf16-mixed": "bfloat16"}


class Follower(Protocol):
    """What an engine may say to whoever follows its storages (`vramlab.tracking.tracker.Tracker`)."""

    live: dict[int, Any]
    device: str
    round_to: int
    host_computes: bool

    def claim(self, tensors: Iterable, category: str, where: str = "") -> None:
        """The storages of `tensors` belong to `category`."""

    def forget(self, tensors: Iterable) -> None:
        """The storages of `tensors` are the host's."""


class Engine:
    """One process that holds everything. Engines of many ranks override what they do otherwise.

    `autocasts`: a "-mixed" precision is `torch.autocast` around the forward pass; False where the engine has its own way.
    `ranks_differ`: each rank has parameters of its own, as the stages of a pipeline do.
    `fake_gpu`: on which device fake tensors stand for a GPU's. "cpu:0" is told from the host, "cpu", which takes part.
    """

    autocasts = True
    ranks_differ = False
    fake_gpu = "cpu"

    def wrap(self, model: "torch.nn.Module") -> "torch.nn.Module":
        """`model` as this rank holds it: sharded, wrapped or cut. The optimizer is made from its parameters."""
        return model

    def optimizer(self, parameters: list, make: Callable[[list], Any]) -> Any:
        """The optimizer of `parameters` (groups or a list); `make` gives the recipe's for those it is handed."""
        return make(parameters)

    def start(self, training: "Training") -> None:
        """Everything is built: the place for engines that take model and optimizer over."""

    def without_peers(self, target: str) -> contextlib.AbstractContextManager:
        """Around building and running on fake tensors: what the engine's library asks of other ranks has an answer."""
        return contextlib.nullcontext()

    def follow(self, training: "Training", tracker: Follower) -> contextlib.AbstractContextManager:
        """Tell `tracker` what the engine holds besides model and optimizer and, while entered, what it makes."""
        return contextlib.nullcontext()

    def micro_batch(self, training: "Training", last: bool) -> contextlib.AbstractContextManager:
        """Around forward and backward of one micro-batch; gradients need to be averaged after the `last` only."""
        return contextlib.nullcontext()

    def run_micro_batches(self, training: "Training", on_phase: Callable[[str], None]) -> bool:
        """Run all micro-batches of the step under a schedule of its own, and return True; False: the plain loop does."""
        return False

    def buffers(self) -> list["torch.UntypedStorage"]:
        """What the engine itself has allocated by now, beside parameters: its buckets."""
        return []

    def backward(self, training: "Training", loss: "torch.Tensor") -> None:
        loss.backward()

    def clip(self, training: "Training", norm: float) -> None:
        """Clip the gradients of the whole model, over all ranks, to `norm`."""
        import torch

        # On CUDA tensors torch takes the multi-tensor path by itself; fake CPU tensors have to be told.
        torch.nn.utils.clip_grad_norm_(training.model.parameters(), norm, foreach=training.multi_tensor)

    def update(self, training: "Training") -> None:
        """The optimizer's step, with the loss scaler's where there is one."""
        if training.scaler:
            training.scaler.step(training.optimizer)
            training.scaler.update()
        else:
            training.optimizer.step()

    def zero_grad(self, training: "Training") -> None:
        training.optimizer.zero_grad(set_to_none=training.loop.set_to_none)

    def gradients(self, training: "Training") -> "Iterator[tuple[str, torch.Tensor]]":
        """(name as in the whole model, whole gradient) before the update, gathered where ranks hold shards of it."""
        for name, parameter in training.model.named_parameters():
            if parameter.grad is not None:
                gradient = parameter.grad
                name = name.removeprefix("module.")  # DDP's
                yield name, gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def loss_of(outputs: Any, batch: Any) -> "torch.Tensor":
    """The loss that a transformers model returns with its outputs."""
    return outputs["loss"]


@dataclass
class Training:
    """Everything one step needs. `outputs` and `loss` are what the loop keeps alive between steps.

    `further` are the other micro-batches of the step, where the loop has all of them on the device at once.
    """

    model: "torch.nn.Module"
    optimizer: Any
    batch: Any
    device: "torch.device"
    multi_tensor: bool
    loop: Loop = field(default_factory=Loop)
    precision: str = "fp32"
    accumulation: int = 1
    loss_of: Callable[[Any, Any], "torch.Tensor"] = loss_of
    scaler: Any = None
    engine: Engine = field(default_factory=Engine)
    per_parameter: dict = field(default_factory=dict)
    further: list = field(default_factory=list)
    outputs: Any = None
    loss: Any = None
    steps: int = 0

    @property
    def optimizers(self) -> list:
        """All optimizers that hold state: one, or one per parameter with optimizer_in_backward."""
        # ZeroRedundancyOptimizer has one for this rank's share, and no state of its own
        several = list(self.per_parameter.values()) or getattr(self.optimizer, "members", None)
        return several or [getattr(self.optimizer, "optim", self.optimizer)]


def autocast(device_type: str, precision: str) -> contextlib.AbstractContextManager:
    """`torch.autocast` in the dtype of a "-mixed" precision, a null context for the others."""
    import torch

    if precision not in AUTOCAST:
        return contextlib.nullcontext()
    return torch.autocast(device_type, getattr(torch, AUTOCAST[precision]))
