"""What CUDA kernels allocate besides their results while they run: bytes by block, of arguments and the GPU's chip."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..hardware.gpu import DEFAULT_CHIP, Chip
from ..hardware.kernels import efficient_scratch, norms_scratch, reduction_scratch
from ..hardware.overhead import (
    CUBLASLT_WORKSPACE,
    cublas_workspace,
    frees_workspaces,
    has_lt_workspaces,
    rounded,
)

CONVOLUTIONS = "convolutions: the workspace that cuDNN's heuristics choose at run time is not counted"


def kernel_scratch(chip: Chip = DEFAULT_CHIP, note: Callable[[str], None] = str) -> Callable[[str, Sequence], int]:
    """A function of an operator's name and arguments to the bytes of its kernel's scratch memory, all blocks but the last
    rounded up as the caching allocator does (the tracker rounds the sum). `note` is called with what it leaves out."""
    kernels = BLOCKS | PRODUCTS if frees_workspaces() else BLOCKS

    def scratch(name: str, args: Sequence) -> int:
        if name == "convolution" and (args[6] or args[8] == 1 or args[8] != args[0].shape[1]):
            note(CONVOLUTIONS)  # torch runs depthwise ones itself (`Conv_v8.cpp`)
        blocks = kernels[name](args, chip) if name in kernels else []
        return sum(map(rounded, blocks[:-1])) + sum(blocks[-1:])

    return scratch


def lasting_workspaces(chip: Chip) -> dict[str, int]:
    """The workspaces that a thread keeps from its first product on: an operator that takes one, to bytes."""
    if frees_workspaces():
        return {}
    sizes = {"mm": cublas_workspace(chip.capability)}
    if has_lt_workspaces():
        sizes["addmm"] = CUBLASLT_WORKSPACE
    return sizes


def _argument(args: Sequence, place: int, default: Any = None) -> Any:
    return args[place] if len(args) > place else default


def _reduction(args: Sequence, chip: Chip, place: int = 1) -> list[int]:
    """Thread blocks add up in global memory what they found (`hardware/scratch.py`); `place` is that of the dimensions."""
    tensor, dims = args[0], _argument(args, place)
    if not tensor.is_floating_point() or not tensor.numel():
        return []
    dims = [dims] if isinstance(dims, int) else dims or []
    return reduction_scratch(tensor.shape, tensor.stride(), dims, tensor.element_size(), chip)


def _loss(args: Sequence, chip: Chip) -> list[int]:
    """Every element's loss is computed into a tensor of its own before they are reduced (`Loss.cpp`, `Loss.cu`)."""
    if _argument(args, 2, 1) == 0:
        return []
    size, itemsize = torch.broadcast_shapes(args[0].shape, args[1].shape), args[0].element_size()
    adding_up = reduction_scratch(size, torch.empty(size, device="meta").stride(), (), itemsize, chip)
    return [math.prod(size) * itemsize, *adding_up]


def _flash_backward(args: Sequence, chip: Chip, heads_first: bool = True) -> list[int]:
    """dQ is accumulated in fp32 over padded sizes; with fewer key heads than query heads dK and dV are made for every
    query head before summing (`flash_api.cpp`, mha_bwd)."""
    query, key = (t if heads_first else t.reshape(-1, *t.shape[-3:]).transpose(1, 2) for t in args[1:3])
    batch, heads, length, dim = query.shape
    ends = None if heads_first else args[6]  # of sequences joined to one row (mha_varlen_bwd)
    row = 4 * batch * heads * (-(-length // 128) * 128 if ends is None else length + 128 * (ends.numel() - 1))
    copies = [batch * heads * key.shape[2] * dim * key.element_size()] * 2 if key.shape[1] != heads else []
    return [row, row * -(-dim // 32) * 32, *copies]


def _efficient_backward(args: Sequence, chip: Chip) -> list[int]:
    query, key, value = args[1:4]
    batch, heads, length, dim = query.shape
    sizes = batch * heads, (length, key.shape[-2]), (dim, value.shape[-1]), query.element_size()
    return efficient_scratch(*sizes, _argument(args, 8, 0) > 0, chip)


def _embedding_backward(args: Sequence, chip: Chip) -> list[int]:
    """More than 3,072 indices are sorted, and rows are summed up in fp32, ten a thread block (`Embedding.cu`,
    embedding_dense_backward; `EmbeddingBackwardKernel.cu`, grad_weight_per_segment, NROWS_PER_THREAD)."""
    gradient, count = args[0], args[1].numel()
    rows = min(count, args[2])  # different indices, at most
    partial = count // 10 + rows
    return [8 * (3 * count + 2 * rows + partial) + 4 * partial * gradient.shape[-1]] if count > 3072 else []


def _dequantized(args: Sequence, chip: Chip) -> list[int]:
    """A 4-bit weight is dequantized whole and multiplied by cuBLAS, except for a handful of rows (bitsandbytes 0.50,
    backends/cuda/ops.py). Some cards have a fused kernel for some shapes of up to 1,536 rows: this is too much then."""
    activation, size = args[0], math.prod(args[2])
    nested = 4 * math.ceil(size / args[4]) if _argument(args, 7) is not None else 0
    few = activation.numel() // activation.shape[-1] <= 8
    return [] if few else [size * activation.element_size(), nested, nested]


BLOCKS: dict[str, Callable[[Sequence, Chip], list[int]]] = {
    **dict.fromkeys(("sum", "mean"), _reduction),
    "linalg_vector_norm": lambda args, chip: _reduction(args, chip, 2),  # after the order of the norm
    "_foreach_norm": lambda args, chip: [norms_scratch(len(args[0]), max(tensor.numel() for tensor in args[0]))],
    **dict.fromkeys(("mse_loss", "smooth_l1_loss", "huber_loss"), _loss),
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_flash_attention_backward": lambda args, chip: _flash_backward(args, chip, heads_first=False),
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    # gradient times result, as large as the scores where attention is written out (`SoftMax.cu`)
    "_softmax_backward_data": lambda args, chip: [args[0].numel() * args[0].element_size()],
    "embedding_dense_backward": _embedding_backward,
    **dict.fromkeys(("gemm_4bit", "bitsandbytes::gemm_4bit"), _dequantized),
}


def _product(args: Sequence, chip: Chip) -> list[int]:
    """The workspace of one call of cuBLAS, which is not called for a product without numbers in it (`Blas.cpp`)."""
    is_empty = any(isinstance(tensor, torch.Tensor) and not tensor.numel() for tensor in args)
    return [] if is_empty else [cublas_workspace(chip.capability)]


def _product_with_bias(args: Sequence, chip: Chip) -> list[int]:
    """cuBLASLt adds a bias, and a whole matrix to a half-precision product (`isInputCompliesAddmmCudaLt`).

    Where the sum is weighted (`beta`), which no layer's is, cuBLAS does it.
    """
    added, _, second = args[:3]
    is_vector = added.dim() == 1 and added.is_contiguous()
    is_half_matrix = added.dim() == 2 and added.itemsize == 2 and added.is_contiguous()
    if (is_vector or is_half_matrix) and min(second.shape) > 1:
        return _product(args, chip) and [CUBLASLT_WORKSPACE]
    return _product(args, chip)


def _dequantized_product(args: Sequence, chip: Chip) -> list[int]:
    """The same for what `_dequantized` unpacks: the product comes when its scales are gone."""
    unpacked = _dequantized(args, chip)
    if not unpacked:
        return []
    weight, *scales = unpacked
    workspace = cublas_workspace(chip.capability) if _argument(args, 6) is None else CUBLASLT_WORKSPACE
    return [weight, max(sum(map(rounded, scales)), workspace)]


PRODUCTS: dict[str, Callable[[Sequence, Chip], list[int]]] = {
    **dict.fromkeys(("mm", "bmm", "baddbmm", "mv", "addmv", "dot"), _product),
    "addmm": _product_with_bias,
    "_scaled_mm": lambda args, chip: [CUBLASLT_WORKSPACE],
    **dict.fromkeys(("gemm_4bit", "bitsandbytes::gemm_4bit"), _dequantized_product),
}
