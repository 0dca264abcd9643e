"""A card of any size for chapter 08, made of this machine's memory."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vramlab.report.report import format_bytes


class Card(TorchDispatchMode):
    """Hold at most `limit` bytes of tensors, those of `model` included.

    Raise torch.OutOfMemoryError over it.

    Counts each storage that an operator returns until it is freed, not what an operator uses up
    within itself.
    """

    def __init__(self, limit: int, model: torch.nn.Module):
        super().__init__()
        self.limit = limit
        self.sizes = {}
        self._hold([*model.parameters(), *model.buffers()])

    def _hold(self, values: Any) -> Any:
        for tensor in filter(torch.is_tensor, tree_leaves(values)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                # torch keeps one Python object for a storage as long as that lives
                weakref.finalize(storage, self.sizes.pop, storage._cdata)
        # Checked once the operator has made it: its size is not known before.
        if sum(self.sizes.values()) > self.limit:
            raise torch.OutOfMemoryError(f"more than {format_bytes(self.limit, 'MiB')}")
        return values

    def __torch_dispatch__(
        self,
        function,
        types,
        args=(),
        kwargs=None,
    ):
        return self._hold(function(*args, **(kwargs or {})))
