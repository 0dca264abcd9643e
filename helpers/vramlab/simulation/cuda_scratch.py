"""What CUDA kernels allocate besides their results while they run."""

import math
from collections.abc import Callable, Sequence

import torch

from ..hardware.gpu import DEFAULT_CHIP, Chip
from ..hardware.overhead import rounded
from ..hardware.scratch import efficient_scratch, norms_scratch, reduction_scratch

HALF = (torch.float16, torch.bfloat16)
REDUCTIONS = ("sum", "mean", "linalg_vector_norm")
LOSSES = {  # to the index of the argument `reduction`, and whether the elements' losses are apart from the result
    "mse_loss": (2, True),
    "smooth_l1_loss": (2, True),
    "huber_loss": (2, True),
    "soft_margin_loss": (2, False),
    "binary_cross_entropy": (3, False),
}


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def kernel_scratch(chip: Chip = DEFAULT_CHIP) -> Callable[[str, Sequence], int]:
    """A function of an operator's name and arguments to the bytes that its CUDA kernel allocates besides its results,
    while it runs, all blocks but the last rounded up as the caching allocator does.

    - a reduction adds up in global memory what its blocks found (`formulas/scratch.py`);
    - a loss is computed for every element before it is reduced (`Loss.cpp`, `Loss.cu`);
    - flash attention's backward accumulates dQ in fp32 over padded sizes, and with fewer key heads than query heads it
      makes dK and dV for every query head before summing (`flash_api.cpp`, mha_bwd);
    - memory-efficient attention's backward keeps what it adds up in a workspace (there too);
    - softmax's backward multiplies gradient and result into a tensor of its own (`SoftMax.cu`,
      softmax_backward_cuda_out), as large as the scores where attention is written out;
    - the embedding's backward sorts the indices when there are more than 3,072 and sums up rows in fp32
      (`Embedding.cu`, embedding_dense_backward; `EmbeddingBackwardKernel.cu`, grad_weight_per_segment);
    - int8 products are int32 before they are scaled (bitsandbytes, int8_linear_matmul);
    - a 4-bit weight is dequantized whole and multiplied by cuBLAS, except for a handful of rows (bitsandbytes 0.50,
      backends/cuda/ops.py; for up to 1,536 rows some cards have a fused kernel for some shapes: then this is too much).
    """

    def scratch(name: str, args: Sequence) -> int:
        *others, last = _blocks(name, args, chip) or [0]
        return sum(map(rounded, others)) + last  # the tracker rounds the sum

    return scratch


def _blocks(name: str, args: Sequence, chip: Chip) -> list[int]:
    if name in REDUCTIONS:
        return _reduction(name, args, chip)
    if name in LOSSES:
        return _loss(name, args, chip)
    if name == "_foreach_norm":
        return [norms_scratch(len(args[0]), max(tensor.numel() for tensor in args[0]))]
    if name in ("_scaled_dot_product_flash_attention_backward", "_flash_attention_backward"):
        _, query, key = args[:3]
        if name == "_flash_attention_backward":  # heads after tokens
            query, key = query.transpose(1, 2), key.transpose(1, 2)
        batch, heads, length, dim = query.shape
        rows, width = _up(length, 128), _up(dim, 32)
        blocks = [4 * batch * heads * rows, 4 * batch * heads * rows * width]
        if key.shape[1] != heads:
            blocks += 2 * [batch * heads * key.shape[2] * dim * key.element_size()]
        return blocks
    if name == "_scaled_dot_product_efficient_attention_backward":
        query, key, value = args[1:4]
        batch, heads, length, dim = query.shape
        sizes = batch * heads, length, key.shape[-2], dim, value.shape[-1], query.element_size()
        return efficient_scratch(*sizes, len(args) > 8 and args[8] > 0, chip)
    if name == "_softmax_backward_data":
        return [args[0].numel() * args[0].element_size()]
    if name == "embedding_dense_backward":
        gradient, indices = args[:2]
        count = indices.numel()
        if count <= 3072:
            return []
        rows = min(count, args[2])  # different indices, at most
        partial = count // 10 + rows  # each kernel block sums up ten rows (NROWS_PER_THREAD)
        return [8 * (3 * count + 2 * rows + partial) + 4 * partial * gradient.shape[-1]]
    if name == "int8_scaled_mm":
        return [4 * args[0].numel() // args[0].shape[-1] * args[1].shape[0]]
    if name in ("gemm_4bit", "bitsandbytes::gemm_4bit"):
        activation, shape = args[0], args[2]
        rows = activation.numel() // activation.shape[-1]
        nested = 4 * math.ceil(math.prod(shape) / args[4]) if len(args) > 7 and args[7] is not None else 0
        return [math.prod(shape) * activation.element_size(), nested, nested] if rows > 8 else []
    return []


def _loss(name: str, args: Sequence, chip: Chip) -> list[int]:
    place, apart = LOSSES[name]
    if (args[place] if len(args) > place else 1) == 0:  # by default the mean
        return []
    size, itemsize = torch.broadcast_shapes(args[0].shape, args[1].shape), args[0].element_size()
    adding_up = reduction_scratch(size, torch.empty(size, device="meta").stride(), (), itemsize, chip)
    return [math.prod(size) * itemsize if apart else itemsize, *adding_up]


def _reduction(name: str, args: Sequence, chip: Chip) -> list[int]:
    tensor = args[0]
    if not tensor.is_floating_point() or not tensor.numel():
        return []
    place = 2 if name == "linalg_vector_norm" else 1  # after the order of the norm
    dims = args[place] if len(args) > place else []
    dims = [dims] if isinstance(dims, int) else dims or []
    return reduction_scratch(tensor.shape, tensor.stride(), dims, tensor.element_size(), chip)
