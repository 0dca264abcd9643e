"""What an evaluation's predictions take of the host's memory, by the rules of transformers.

`trainer_pt_utils.EvalLoopContainer` takes what is kept to the host every `eval_accumulation_steps`
batches, or at the end: `nested_numpify` copies each tensor, one in bfloat16 once more to float32,
which numpy needs; `nested_concat` then makes a new array of what was there and what came, and both
are there beside it until it is done.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch


class Kept(NamedTuple):
    """One tensor that goes to the host: bytes on the device, and of the array made of it."""

    on_device: int
    on_host: int


def kept(tensors: Iterable[torch.Tensor]) -> list[Kept]:
    """Return what `nested_numpify` makes of the tensors of one container."""
    found = []
    for tensor in tensors:
        width = tensor.itemsize
        if tensor.dtype == torch.bfloat16:
            width = torch.float32.itemsize
        found.append(Kept(tensor.nbytes, tensor.numel() * width))
    return found


def host_peak(first: list[list[Kept]], moves: Iterable[int], concatenates: bool) -> int:
    """Return the most bytes that the host holds of them.

    Args:
        first: of each container what the first of `moves` takes to the host.
        moves: samples that go there at a time.
        concatenates: `eval_do_concat_batches`.
    """
    there = [0] * len(first)
    peak = 0
    samples = 0
    for count in moves:
        # The first move's count: `first` is what that took, and the others are in proportion.
        samples = samples or count
        for i, tensors in enumerate(first):
            before = sum(there)
            came = 0
            for tensor in tensors:
                came += tensor.on_host * count // samples
                # A tensor that is converted is on the host twice until that is done.
                copied = tensor.on_device != tensor.on_host
                copy = tensor.on_device * count // samples if copied else 0
                peak = max(peak, before + came + copy)
            there[i] += came
            # The new array of what was there and what came, before both are freed.
            joined = there[i] if concatenates and there[i] > came else 0
            peak = max(peak, before + came + joined)
    return peak
