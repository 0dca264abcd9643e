"""A process alone, and what every engine may do otherwise."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ..tracker import Tracker
    from ..training import Training


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

    def without_peers(self) -> contextlib.AbstractContextManager:
        """Around building and running on fake tensors: what the engine's library asks of other ranks has an answer."""
        return contextlib.nullcontext()

    def follow(self, training: "Training", tracker: "Tracker") -> contextlib.AbstractContextManager:
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
