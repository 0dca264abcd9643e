"""Sparse gradients on fake tensors: how many of their rows differ, and so their sizes, follow from their indices.

The content of a fake sparse tensor is a real one of the same indices, with one number for each row. Operators run on
these, and a fake result gets as many rows as the real one has, and room for as many.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .operators import is_cuda

aten = torch.ops.aten
MAKER, BAGS = aten._sparse_coo_tensor_with_dims_and_tensors.default, aten._embedding_bag_backward.default
BY_ROWS = {"_coalesce", "add", "add_", "clone", "mul", "mul_", "neg", "sparse_mask"}  # and give a sparse tensor
UNKNOWN = "a sparse gradient is coalesced whose indices the simulation does not know: as if all its rows differed"


def is_sparse(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.sparse_coo


def concerns(func: Any, tensors: Iterable[torch.Tensor]) -> bool:
    """Whether `func` makes or takes sparse tensors."""
    return func in (MAKER, BAGS) or any(map(is_sparse, tensors))


def run(func: Any, args: tuple, kwargs: dict, values: Any) -> Any:
    """The fake result of an operator that `concerns` sparse tensors; `values` knows the content of others."""
    name = func.overloadpacket.__name__
    if func is MAKER:
        return _made(*args[2:5], values.of(args[3]))
    if func is BAGS and args[9]:
        gradient, indices, rows = args[0], args[1], args[6]
        each, places = gradient.new_empty(indices.numel(), gradient.shape[1]), values.of(indices)
        with _disable_current_modes():
            places = None if places is None else places.view(1, -1)
        return _made((rows, gradient.shape[1]), indices.view(1, -1), each, places)
    if name == "add_" and not is_sparse(args[0]):
        return args[0]
    contents = [getattr(tensor, "_content", None) for tensor in args if is_sparse(tensor)]
    whole = name in ("t", "transpose") and not args[0].dense_dim()
    if (name in BY_ROWS or whole) and None not in contents:
        return _by_rows(func, name, args, kwargs, values)
    result = func(*args, **kwargs)
    if name in ("detach", "_indices", "indices") and contents[0] is not None:
        result._content = contents[0] if name == "detach" else contents[0]._indices()
    elif is_sparse(result):
        values.note(f"the size of the sparse tensor that aten.{name} makes is not known: it is not counted")
    return result


def know(fake: torch.Tensor, real: torch.Tensor) -> None:
    """Give the fake copy of a sparse tensor, which is empty, as many rows and the content of its indices."""
    options = {"check_invariants": False, "is_coalesced": real.is_coalesced()}
    with _disable_current_modes():
        indices, rows = real._indices().detach().clone(), real._values()
        row = torch.zeros(len(rows), dtype=rows.dtype)
        content = torch.sparse_coo_tensor(indices, row, real.shape[: len(indices)], **options)
    indices, rows = torch.empty(indices.shape, dtype=torch.int64), torch.empty(rows.shape, dtype=fake.dtype)
    fake.data = torch.sparse_coo_tensor(indices, rows, fake.shape, **options)
    fake._content, content.is_known = content, True


def _made(shape: tuple, indices: torch.Tensor, rows: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
    fake, known = torch.sparse_coo_tensor(indices, rows, shape, check_invariants=False), places is not None
    with _disable_current_modes():
        places = places if known else torch.arange(len(rows)).expand(len(indices), -1) % shape[0]
        row = torch.zeros(len(rows), dtype=rows.dtype)
        fake._content = torch.sparse_coo_tensor(places, row, shape[: len(indices)], check_invariants=False)
        fake._content.is_known = known
    return fake


def _by_rows(func: Any, name: str, args: tuple, kwargs: dict, values: Any) -> torch.Tensor:
    """CUDA's kernels keep no room for rows that were merged, and merge none when adding (`SparseCUDATensor*.cu`)."""
    mine = [arg for arg in args if is_sparse(arg)]
    contents, like, on_cuda = [tensor._content for tensor in mine], mine[0]._values(), is_cuda()
    is_known = all(content.is_known for content in contents)
    if not is_known and (name == "_coalesce" or (name.startswith("add") and not on_cuda)):
        values.note(UNKNOWN)

    def real(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value._content if is_sparse(value) else torch.zeros(value.shape[: mine[0].sparse_dim()])

    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        if on_cuda and name.startswith("add"):
            indices, rows = (torch.cat([getattr(c, part)() for c in contents], -1) for part in ("_indices", "_values"))
            made = torch.sparse_coo_tensor(indices, rows, contents[0].shape, check_invariants=False)
        else:
            made = func(*map(real, args), **kwargs)
        made.is_known = is_known
        indices, rows = made._indices(), made._values()
        places, room = (part.untyped_storage().nbytes() // part.element_size() for part in (indices, rows))
        room = len(rows) if on_cuda and name == "_coalesce" else room
    dims, count = len(indices), len(rows)
    indices = torch.empty(dims, places // dims, dtype=torch.int64)[:, :count]
    rows = torch.empty(room, *like.shape[1:], dtype=rows.dtype)[:count]
    coalesced = {"check_invariants": False, "is_coalesced": made.is_coalesced()}
    fake = torch.sparse_coo_tensor(indices, rows, (*made.shape, *like.shape[1:]), **coalesced)
    if name.endswith("_"):
        args[0].data = fake
        fake = args[0]
    fake._content = made
    return fake
