"""What a tracker knows of operators: their buffers, which are collectives and which products."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from ..private.of_torch import OpOverload, qualified_name, users_of

aten = torch.ops.aten
DEVICE_QUERY = torch.ops.prim.device.default
READ_SCALAR = aten._local_scalar_dense.default
# Buffers of FSDP and of collectives: operator to the places of its arguments that are one.
BUFFERS: dict[str, tuple[int | str, ...]] = {
    "fsdp::all_gather_copy_in": (0, 1),
    "fsdp::chunk_cat": ("out",),
    "c10d::_allgather_base_": (0,),
    "c10d::_reduce_scatter_base_": (0, 1),
    "c10d::allreduce_": (0,),
}
# Views that any step takes by the thousand.
VIEWS = {
    aten.detach.default,
    aten.slice.Tensor,
    aten.view.default,
    aten.t.default,
    aten.transpose.int,
}
# Operators that all ranks of a group enter.
COLLECTIVES = {
    "c10d::_allgather_base_",
    "c10d::_reduce_scatter_base_",
    "c10d::allreduce_",
    "c10d::broadcast_",
    "c10d::allgather_",
    "c10d::alltoall_",
    "c10d::scatter_",
    "deepspeed::dim_zero_all_to_all",
    "_c10d_functional::all_reduce",
    "_c10d_functional::all_gather_into_tensor",
    "_c10d_functional::wait_tensor",
}
# bitsandbytes unpacks a 4-bit weight for a product, except for few rows, and multiplies as any
# linear layer does (0.50, backends/cuda/ops.py, `_dequant_linear_fallback`).
UNPACKED = "gemm_4bit"
BIAS = 6  # place of its bias
# Operators whose kernels are cuBLAS's, which has a workspace.
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "_scaled_mm"}


@cache
def is_wrapper(kind: type) -> bool:
    """Tell whether tensors of this class wrap others, as DTensor does."""
    return hasattr(kind, "__tensor_flatten__")


def operands_of(results: list | tuple, args: tuple) -> list | tuple | None:
    """Return the first arguments of a multi-tensor kernel, one for each result.

    Each result belongs where its own operand does.
    """
    if args and isinstance(args[0], list | tuple) and len(args[0]) == len(results):
        return args[0]
    return None


class About(NamedTuple):
    """What the tracker wants to know of an operator."""

    name: str
    is_collective: bool  # all ranks enter it
    buffers: tuple[int | str, ...]  # the places of its arguments that are buffers
    multiplies: bool  # by cuBLAS, which has a workspace


@cache
def about(func: OpOverload) -> About:
    """Return what the tracker wants to know of an operator."""
    qualified = qualified_name(func)
    name = qualified.rpartition("::")[2]
    multiplies = name == UNPACKED or name in PRODUCTS
    return About(name, qualified in COLLECTIVES, BUFFERS.get(qualified, ()), multiplies)


def workspaces_taken(
    sizes: dict[str, int],
    operator: str,
    args: Sequence[Any] = (),
) -> Iterator[int]:
    """Yield the bytes of cuBLAS's workspaces that a phase takes with this operator, once.

    Forward's is made as the phase begins, backward's with its first product, after the gradients of
    the logits.
    """
    if operator == UNPACKED:
        has_bias = len(args) > BIAS and args[BIAS] is not None
        operator = "addmm" if has_bias else "mm"
    if operator not in PRODUCTS:
        return
    # "mm" stands for the workspace of any product; some operators have one of their own beside it.
    for name in ("mm", operator):
        size = sizes.pop(name, None)
        if size is not None:
            yield size


def accumulates(held: Any, new: Any, **options: Any) -> bool:
    """Tell whether autograd would add `new` in place to a gradient that only its buffer holds.

    It does so where no dispatch mode is active (`can_accumulate_inplace` in input_buffer.cpp).
    """
    if torch.is_grad_enabled() or options or not isinstance(new, torch.Tensor):
        return False
    storage = held.untyped_storage()
    # A view of a larger storage could not take the sum in place.
    is_dense = held.nbytes == storage.nbytes()
    is_alike = held.shape == new.shape and held.dtype == new.dtype
    # two hold the storage here: the tensor, and the handle that is asked
    return is_dense and is_alike and users_of(storage) == 2
