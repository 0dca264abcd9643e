"""What CUDA kernels allocate besides their results while they run.

Each function here gives bytes by block, of an operator's arguments and the GPU's chip.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..hardware.fused_4bit import is_fused
from ..hardware.gpu import DEFAULT_CHIP, Chip
from ..hardware.kernels import efficient_scratch, norms_scratch, reduction_scratch
from ..hardware.overhead import (
    CUBLASLT_WORKSPACE,
    cublas_workspace,
    frees_workspaces,
    has_lt_workspaces,
    rounded,
)

CONVOLUTIONS = (
    "convolutions: the workspace that cuDNN's heuristics choose at run time is not counted"
)
FP32 = 4  # bytes
FP16 = 2
FLASH_ROWS = 128  # rows of queries that flash attention's backward takes at once
FLASH_CHANNELS = 32
MOST_UNSORTED = 3072  # indices of an embedding's backward that one kernel takes as they are
ROWS_A_BLOCK = 10  # NROWS_PER_THREAD in EmbeddingBackwardKernel.cu

Blocks = Callable[[Sequence, Chip], list[int]]  # of an operator's arguments and the chip


def _ignore(note: str) -> None:
    """Stand for who does not want notes."""


def kernel_scratch(
    chip: Chip = DEFAULT_CHIP,
    note: Callable[[str], None] = _ignore,
) -> Callable[[str, Sequence], int]:
    """Return a function of an operator's name and arguments to its kernel's scratch bytes.

    All blocks but the last are rounded up as the caching allocator does (the tracker rounds the
    sum). `note` is called with what it leaves out.
    """
    # In older releases a thread keeps its workspace from the first product on
    # (`lasting_workspaces`), so a product allocates nothing while it runs.
    kernels = BLOCKS | PRODUCTS if frees_workspaces() else BLOCKS

    def scratch(name: str, args: Sequence) -> int:
        if name == "convolution" and not _is_depthwise(args):
            note(CONVOLUTIONS)
        if name not in kernels:
            return 0
        blocks = kernels[name](args, chip)
        if not blocks:
            return 0
        *others, last = blocks
        return sum(map(rounded, others)) + last

    return scratch


def _is_depthwise(args: Sequence) -> bool:
    """Tell whether torch runs a convolution itself (`Conv_v8.cpp`): one with a group a channel."""
    is_transposed = args[6]
    groups = args[8]
    return not is_transposed and groups != 1 and groups == args[0].shape[1]


def lasting_workspaces(chip: Chip) -> dict[str, int]:
    """Return the workspaces that a thread keeps from its first product on.

    An operator that takes one, to bytes.
    """
    if frees_workspaces():
        return {}
    sizes = {"mm": cublas_workspace(chip.capability)}
    if has_lt_workspaces():
        sizes["addmm"] = CUBLASLT_WORKSPACE
    return sizes


def _argument(args: Sequence, place: int, default: Any = None) -> Any:
    return args[place] if len(args) > place else default


def _reduction(args: Sequence, chip: Chip, place: int = 1) -> list[int]:
    """Return the blocks of a sum over the dimensions that the argument at `place` names.

    Thread blocks add up in global memory what they found (`hardware/kernels.py`).
    """
    tensor = args[0]
    if not tensor.is_floating_point() or not tensor.numel():
        return []
    dims = _argument(args, place)
    if isinstance(dims, int):
        dims = [dims]
    itemsize = tensor.element_size()
    return reduction_scratch(tensor.shape, tensor.stride(), dims or [], itemsize, chip)


def _vector_norm(args: Sequence, chip: Chip) -> list[int]:
    """Return the same for a norm, whose dimensions come after its order."""
    return _reduction(args, chip, place=2)


def _norms(args: Sequence, chip: Chip) -> list[int]:
    tensors = args[0]
    return [norms_scratch(len(tensors), max(tensor.numel() for tensor in tensors))]


def _loss(args: Sequence, chip: Chip) -> list[int]:
    """Return the blocks of a loss, which is computed element by element before it is reduced.

    The elements' losses are a tensor of their own (`Loss.cpp`, `Loss.cu`).
    """
    reduction = _argument(args, 2, 1)
    if reduction == 0:  # none
        return []
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    itemsize = args[0].element_size()
    strides = torch.empty(shape, device="meta").stride()
    # The elements' losses and the scratch of their sum are there at the same time.
    adding_up = reduction_scratch(shape, strides, (), itemsize, chip)
    return [math.prod(shape) * itemsize, *adding_up]


def _flash_backward(args: Sequence, chip: Chip) -> list[int]:
    """Return the blocks of flash attention's backward (`flash_api.cpp`, mha_bwd).

    dQ is accumulated in fp32 over padded sizes; with fewer key heads than query heads dK and dV are
    made for every query head before summing.
    """
    _, query, key, *_ = args
    length = query.shape[2]
    return _flash_blocks(query, key, -(-length // FLASH_ROWS) * FLASH_ROWS)


def _flash_backward_of_package(args: Sequence, chip: Chip) -> list[int]:
    """Return the same for tensors as the package flash-attn takes them: heads come third.

    In mha_varlen_bwd sequences are joined to one row, which the argument at 6 divides.
    """
    query, key = (_heads_first(tensor) for tensor in args[1:3])
    ends = args[6]
    length = query.shape[2]
    if ends is None:
        rows = -(-length // FLASH_ROWS) * FLASH_ROWS
    else:
        rows = length + FLASH_ROWS * (ends.numel() - 1)
    return _flash_blocks(query, key, rows)


def _heads_first(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, *tensor.shape[-3:]).transpose(1, 2)


def _flash_blocks(query: torch.Tensor, key: torch.Tensor, rows: int) -> list[int]:
    batch, heads, _, channels = query.shape
    _, key_heads, key_length, _ = key.shape
    numbers = FP32 * batch * heads * rows  # one a row
    blocks = [numbers, numbers * -(-channels // FLASH_CHANNELS) * FLASH_CHANNELS]
    if key_heads != heads:
        copy = batch * heads * key_length * channels * key.element_size()
        blocks += [copy, copy]
    return blocks


def _efficient_backward(args: Sequence, chip: Chip) -> list[int]:
    _, query, key, value, *_ = args
    batch, heads, length, channels = query.shape
    dropout = _argument(args, 8, 0)
    return efficient_scratch(
        batch * heads,
        (length, key.shape[-2]),
        (channels, value.shape[-1]),
        query.element_size(),
        dropout > 0,
        chip,
    )


def _softmax_backward(args: Sequence, chip: Chip) -> list[int]:
    """Return the product of gradient and result (`SoftMax.cu`).

    It is as large as the scores where attention is written out.
    """
    gradient = args[0]
    return [gradient.numel() * gradient.element_size()]


def _embedding_backward(args: Sequence, chip: Chip) -> list[int]:
    """Return the block in which many indices are sorted and rows summed up.

    The sums are in fp32, so many rows a thread block (`Embedding.cu`, embedding_dense_backward;
    `EmbeddingBackwardKernel.cu`, grad_weight_per_segment).
    """
    gradient, indices, vocabulary, *_ = args
    count = indices.numel()
    if count <= MOST_UNSORTED:
        return []
    different = min(count, vocabulary)  # indices, at most
    partial = count // ROWS_A_BLOCK + different
    # int64 each: the sorted indices, where each of them was, and where segments begin; for each
    # segment how many partial sums it has, and where they begin; where each partial sum begins.
    sorting = 8 * (3 * count + 2 * different + partial)
    return [sorting + FP32 * partial * gradient.shape[-1]]


def _dequantized(args: Sequence, chip: Chip) -> list[int]:
    """Return the blocks of a 4-bit weight that is dequantized whole, for cuBLAS to multiply.

    It is, except where a kernel reads the codes (bitsandbytes 0.50, backends/cuda/ops.py).
    """
    activation = args[0]
    shape = tuple(args[2])
    size = math.prod(shape)
    block_size = args[4]
    has_nested = _argument(args, 7) is not None
    rows = activation.numel() // activation.shape[-1]
    is_fp16 = activation.dtype == torch.float16
    if is_fused(rows, shape, activation.itemsize, is_fp16, chip, block_size):
        return []
    scales = FP32 * math.ceil(size / block_size) if has_nested else 0
    return [size * activation.element_size(), scales, scales]


def _int8_quant(args: Sequence, chip: Chip) -> list[int]:
    """Return the blocks in which outliers are looked for (bitsandbytes 0.50, backends/cuda/ops.py).

    They are the absolute values and whether each is one.
    """
    tensor = args[0]
    has_threshold = _argument(args, 1, 0.0) > 0
    return [tensor.nbytes, tensor.numel()] if has_threshold else []


def _int8_product(args: Sequence, chip: Chip) -> list[int]:
    """Return the blocks of sums in int32, and in fp16 where the result has another format.

    bitsandbytes 0.50, backends/cuda/ops.py, int8_mm_dequant; cublasLt is given no workspace
    (csrc/ops.cu, igemmlt).
    """
    activation, codes, weight, *_ = args
    count = codes.numel() // codes.shape[-1] * weight.shape[0]
    rounded_sums = 0 if activation.dtype == torch.float16 else FP16 * count
    return [FP32 * count, rounded_sums]


BLOCKS: dict[str, Blocks] = {
    "sum": _reduction,
    "mean": _reduction,
    "linalg_vector_norm": _vector_norm,
    "_foreach_norm": _norms,
    "mse_loss": _loss,
    "smooth_l1_loss": _loss,
    "huber_loss": _loss,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_flash_attention_backward": _flash_backward_of_package,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_softmax_backward_data": _softmax_backward,
    "embedding_dense_backward": _embedding_backward,
    "gemm_4bit": _dequantized,
    "bitsandbytes::gemm_4bit": _dequantized,
    "int8_vectorwise_quant": _int8_quant,
    "int8_mixed_scaled_mm": _int8_product,
}


def _product(args: Sequence, chip: Chip) -> list[int]:
    """Return the workspace of one call of cuBLAS.

    It is not called for a product without numbers in it (`Blas.cpp`).
    """
    for tensor in args:
        if isinstance(tensor, torch.Tensor) and not tensor.numel():
            return []
    return [cublas_workspace(chip.capability)]


def _product_with_bias(args: Sequence, chip: Chip) -> list[int]:
    """Return the workspace of a product that something is added to.

    cuBLASLt adds a bias, and a whole matrix to a half-precision product
    (`isInputCompliesAddmmCudaLt`). Where the sum is weighted (`beta`), which no layer's is, cuBLAS
    does it.
    """
    added, _, second, *_ = args
    workspace = _product(args, chip)
    is_vector = added.dim() == 1 and added.is_contiguous()
    is_half_matrix = added.dim() == 2 and added.itemsize == 2 and added.is_contiguous()
    # A matrix of one row or column is left to cuBLAS.
    if (is_vector or is_half_matrix) and min(second.shape) > 1:
        return [CUBLASLT_WORKSPACE] if workspace else []
    return workspace


def _scaled_product(args: Sequence, chip: Chip) -> list[int]:
    return [CUBLASLT_WORKSPACE]


def _dequantized_product(args: Sequence, chip: Chip) -> list[int]:
    """Return the same for what `_dequantized` unpacks: the product comes after them."""
    unpacked = _dequantized(args, chip)
    if not unpacked:
        return []
    weight, *scales = unpacked
    bias = _argument(args, 6)
    workspace = cublas_workspace(chip.capability) if bias is None else CUBLASLT_WORKSPACE
    return [weight, max(sum(map(rounded, scales)), workspace)]


PRODUCTS: dict[str, Blocks] = {
    "mm": _product,
    "bmm": _product,
    "baddbmm": _product,
    "mv": _product,
    "addmv": _product,
    "dot": _product,
    "addmm": _product_with_bias,
    "_scaled_mm": _scaled_product,
    "gemm_4bit": _dequantized_product,
    "bitsandbytes::gemm_4bit": _dequantized_product,
}
