"""TRL's own activation offloading on fake tensors, with streams that never wait.

The code that runs is `trl/models/activation_offloading.py`.
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import torch

from ..private.of_torch import address_of
from ..private.patched import replaced

DEVICE = "cpu:0"  # fake tensors of this device are the GPU's, those of "cpu" the host's


class Accelerator(str):
    """The device itself, where TRL takes it for its type."""

    def __ne__(self, other: object) -> bool:
        return other != "cpu"


class Stream(torch.cpu.Stream):
    """A stream whose work is done when it is asked for."""

    synchronize = torch.cpu.Stream.record_event


STREAMS = SimpleNamespace(
    Stream=Stream,
    current_stream=Stream,
    stream=contextlib.nullcontext,
    empty_cache=lambda: None,
    __name__="streams",
)


@contextlib.contextmanager
def fake_accelerator() -> Iterator[None]:
    """While entered, TRL's context offloads from `DEVICE`.

    Storages of fake tensors can be told apart by address.
    """
    from trl.models import activation_offloading as trl_code

    device = SimpleNamespace(type=Accelerator(DEVICE))
    accelerator = SimpleNamespace(current_accelerator=lambda: device)
    stand_ins = {"accelerator": accelerator, "get_device_module": lambda name: STREAMS}
    # TRL's module alone sees them: other code that runs meanwhile has torch itself
    torch_with_accelerator = SimpleNamespace(**{**vars(torch), **stand_ins})
    with (
        replaced(trl_code, "torch", torch_with_accelerator),
        replaced(torch.UntypedStorage, "data_ptr", lambda storage: address_of(storage) << 32),
        replaced(torch.Tensor, "record_stream", lambda tensor, stream: None),
    ):
        yield
