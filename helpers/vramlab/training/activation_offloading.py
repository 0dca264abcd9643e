"""TRL's own activation offloading (`trl/models/activation_offloading.py`) on fake tensors, with streams that never wait."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import torch

from .patched import replaced

DEVICE = "cpu:0"  # fake tensors of this device are the GPU's, those of "cpu" the host's


class Accelerator(str):
    """The device itself, where TRL takes it for its type."""

    def __ne__(self, other: object) -> bool:
        return other != "cpu"


class Stream(torch.cpu.Stream):
    """A stream whose work is done when it is asked for."""

    synchronize = torch.cpu.Stream.record_event


STREAMS = SimpleNamespace(
    Stream=Stream, current_stream=Stream, stream=contextlib.nullcontext, empty_cache=lambda: None, __name__="streams"
)


@contextlib.contextmanager
def fake_accelerator() -> Iterator[None]:
    """While entered, TRL's context offloads from `DEVICE`; storages of fake tensors can be told apart by address."""
    from trl.models import activation_offloading as trl_code

    found = SimpleNamespace(current_accelerator=lambda: SimpleNamespace(type=Accelerator(DEVICE)))
    seen = SimpleNamespace(**{**vars(torch), "accelerator": found, "get_device_module": lambda name: STREAMS})
    with (
        replaced(trl_code, "torch", seen),
        replaced(torch.UntypedStorage, "data_ptr", lambda storage: storage._cdata << 32),
        replaced(torch.Tensor, "record_stream", lambda tensor, stream: None),
    ):
        yield
