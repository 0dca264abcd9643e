"""Context parallel: ring attention over FSDP's ranks, as accelerate and the Trainer take it.

Neighbouring ranks have the same samples, and each a part of their tokens: the first and the last
piece of as many that it is even, so that all have as much causal attention to do. A rank's queries
meet the keys of all, which go around the ring (Liu et al. 2023; torch's `context_parallel`). What
shards the batch is the Trainer's own code.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional
from transformers import Trainer  # before a step: what it imports makes tensors

from ...private import of_distributed, of_transformers
from ...private.patched import plain, replaced
from ..engine import Model
from ..process_group import is_fake_group

# The ring's, the first by its name before torch 2.13.
EXCHANGES = ("all_gather_tensor", "all_gather_single", "permute_tensor")


def attach(model: Model) -> None:
    """Let attention drop its mask, as `Accelerator._prepare_cp` does: the ring is causal."""
    of_transformers.drop_masks(model)


@contextlib.contextmanager
def divided(mesh: Any, model: Model, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield this rank's part of `batch` in the ring of `mesh`, with attention that goes around it.

    The batch's own tensors hold the part as long as it is entered, and have their shapes again
    afterwards.
    """

    def around(**buffers: Any) -> Any:
        return context_parallel(mesh, **buffers)

    # All that the Trainer's function asks of its accelerator.
    config = SimpleNamespace(cp_enabled=True, cp_backend="torch")
    accelerator = SimpleNamespace(parallelism_config=config, maybe_context_parallel=around)
    trainer: Any = SimpleNamespace(accelerator=accelerator)
    # torch shortens the buffers in place, and the Trainer asks it not to restore those of a batch.
    shapes = {name: tensor.shape for name, tensor in batch.items()}
    context, part = of_transformers.divide_batch(Trainer, trainer, model, dict(batch))
    sent = _sent_held() if is_fake_group() else contextlib.nullcontext()
    with _in_this_thread(), sent, context():
        yield part
    for name, shape in shapes.items():
        batch[name].resize_(shape)


@contextlib.contextmanager
def _in_this_thread() -> Iterator[None]:
    """While entered, what torch puts in the place of attention is so for this thread alone."""
    own = _Functional()
    with (
        replaced(of_distributed.ring_attention(), "F", own),
        replaced(
            functional,
            "scaled_dot_product_attention",
            lambda *args, **options: own.scaled_dot_product_attention(*args, **options),
        ),
    ):
        yield


@contextlib.contextmanager
def _sent_held() -> Iterator[None]:
    """While entered, hold what the ring sends until that is waited for.

    So do the works of gloo and of NCCL (`ProcessGroupNCCL::collective` stashes it); a fake group's
    hold nothing.
    """
    attention = of_distributed.ring_attention()
    wait = getattr(attention, of_distributed.WAIT)

    def holding(exchange: Callable) -> Callable:
        def exchanged(buffer: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            received = exchange(buffer, *args, **options)
            # Alive as long as what is received, on which the wait is called.
            received.sent = buffer
            return received

        return exchanged

    def waited(tensor: Any) -> torch.Tensor:
        received = wait(tensor)
        # Results that no exchange made have nothing to let go of.
        vars(tensor).pop("sent", None)
        return received

    # A copy of the module's names, so that other threads keep their own.
    collectives = SimpleNamespace(**vars(attention.ft_c))
    for name in EXCHANGES:
        if hasattr(collectives, name):
            setattr(collectives, name, holding(getattr(collectives, name)))
    with (
        replaced(attention, "ft_c", collectives),
        replaced(attention, of_distributed.WAIT, waited),
    ):
        yield


class _Functional:
    """`torch.nn.functional`, one of whose functions torch replaces."""

    def __init__(self) -> None:
        self.scaled_dot_product_attention = plain(functional, "scaled_dot_product_attention")

    def __getattr__(self, name: str) -> Any:
        return getattr(functional, name)
