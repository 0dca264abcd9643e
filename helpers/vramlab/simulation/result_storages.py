"""Operators whose result keeps a larger storage than its elements fill, which fake kernels do not reproduce.

A loss is written element by element into the result, which is then resized to one number; `resize_` never gives memory
back, so the scalar holds as many bytes as the prediction until it is freed. CPU and CUDA share this code: the meta
functions of `Loss.cpp` (mse_loss, smooth_l1_loss), `soft_margin_loss_out` there, `binary_cross_entropy_out_cpu` and
`Loss.cu`'s `binary_cross_entropy_out_cuda`. `Im2Col.cpp`, `Col2Im.cpp` and their `.cu` files begin with
`empty_like(input)`. In `EmbeddingBag.cpp`, two results are resized to one element less.
`tests/simulation/test_operators.py` sweeps ATen's operators for others.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .fakes import described

aten = torch.ops.aten
Storages = list[tuple[torch.Tensor, int]]  # tensors and how many elements the storage of each has room for


def keep_storage(func: torch._ops.OpOverload, args: Sequence, kwargs: Mapping, result: Any) -> None:
    """Give the fake `result` of `func` the storage that a real one keeps."""
    if rule := RULES.get(func):
        named = {a.name: a.default_value for a in func._schema.arguments}
        named |= dict(zip(named, args, strict=False)) | dict(kwargs)
        for tensor, elements in rule(result, named):
            storage, size = tensor.untyped_storage(), elements * tensor.element_size()
            if size > storage.nbytes():
                storage.resize_(size)


def _loss(result: torch.Tensor, named: dict) -> Storages:
    """All elements of the prediction (and target, where they broadcast) if they are reduced to one number."""
    whole = torch.broadcast_shapes(named["self"].shape, named["target"].shape).numel()
    return [(result, whole)] if named["reduction"] else []


def _begins_like_input(result: torch.Tensor, named: dict) -> Storages:
    return [(result, named["self"].numel())]


def _bags(result: tuple[torch.Tensor, ...], named: dict) -> Storages:
    """On CPU the bag of each index is found with one element more, and offsets may end with the number of indices."""
    _, bag_of_index, bag_sizes, _ = result
    if described() == "cuda":
        return []
    return [
        (t, n)
        for t, n in ((bag_of_index, bag_of_index.numel() + 1), (bag_sizes, named["offsets"].numel()))
        if t.numel()
    ]


RULES: dict[Any, Callable[[Any, dict], Storages]] = {
    **{loss.default: _loss for loss in (aten.mse_loss, aten.smooth_l1_loss, aten.soft_margin_loss)},
    aten.binary_cross_entropy.default: _loss,
    **{operator.default: _begins_like_input for operator in (aten.im2col, aten.col2im)},
    **{bag.default: _bags for bag in (aten._embedding_bag, aten._embedding_bag_forward_only)},
}
