"""What gloo allocates through torch while it transfers, besides what it is handed. NCCL has its own memory instead."""

from typing import Any

import torch


def gloo_scratch(name: str, args: tuple[Any, ...]) -> int:
    """Bytes that the collective `name` takes from torch's CPU allocator while it runs, 0 for all others.

    Gathering receives into one flat tensor and copies it to the outputs (`AsyncAllgatherWork::allgather`); a
    reduce-scatter is an all-reduce of a copy of the input, of which the rank's part is kept
    (`ProcessGroupGloo::reduce_scatter_tensor_coalesced`). Reducing and broadcasting work in place.
    """
    if name == "_allgather_base_":
        return _bytes(args[0])
    if name == "_reduce_scatter_base_":
        return _bytes(args[1])
    return 0


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
