"""What CUDA kernels allocate besides their results while they run."""

import math
from collections.abc import Sequence

import torch

HALF = (torch.float16, torch.bfloat16)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def kernel_scratch(name: str, args: Sequence) -> int:
    """Bytes that the CUDA kernel of operator `name` allocates besides its results, while it runs.

    - flash attention's backward accumulates dQ in fp32 over padded sizes, and with fewer key heads than query heads it
      makes dK and dV for every query head before summing (`flash_api.cpp`, mha_bwd);
    - memory-efficient attention's backward does the first too in half precision (`kernel_backward.h`, workspace);
    - softmax's backward multiplies gradient and result into a tensor of its own (`SoftMax.cu`,
      softmax_backward_cuda_out), as large as the scores where attention is written out;
    - the embedding's backward sorts the indices when there are more than 3,072 and sums up rows in fp32
      (`Embedding.cu`, embedding_dense_backward; `EmbeddingBackwardKernel.cu`, grad_weight_per_segment);
    - int8 products are int32 before they are scaled (bitsandbytes, int8_linear_matmul);
    - a 4-bit weight is dequantized whole and multiplied by cuBLAS, except for a handful of rows (bitsandbytes 0.50,
      backends/cuda/ops.py; for up to 1,536 rows some cards have a fused kernel for some shapes: then this is too much).
    """
    if name == "_scaled_dot_product_flash_attention_backward":
        _, query, key = args[:3]
        batch, heads, length, dim = query.shape
        rows, width = _up(length, 128), _up(dim, 32)
        scratch = 4 * batch * heads * rows * (width + 1)
        if key.shape[1] != heads:
            scratch += 2 * batch * heads * key.shape[2] * dim * key.element_size()
        return scratch
    if name == "_scaled_dot_product_efficient_attention_backward":
        query = args[1]
        batch, heads, length, dim = query.shape
        delta = 4 * batch * heads * length
        return delta + (4 * batch * heads * length * _up(dim, 32) if query.dtype in HALF else 0)
    if name == "_softmax_backward_data":
        return args[0].numel() * args[0].element_size()
    if name == "embedding_dense_backward":
        gradient, indices = args[:2]
        count = indices.numel()
        if count <= 3072:
            return 0
        rows = min(count, args[2])  # different indices, at most
        partial = count // 10 + rows  # each kernel block sums up ten rows (NROWS_PER_THREAD)
        return 8 * (3 * count + 2 * rows + partial) + 4 * partial * gradient.shape[-1]
    if name == "int8_scaled_mm":
        return 4 * args[0].numel() // args[0].shape[-1] * args[1].shape[0]
    if name in ("gemm_4bit", "bitsandbytes::gemm_4bit"):
        activation, shape = args[0], args[2]
        rows = activation.numel() // activation.shape[-1]
        nested = 4 * math.ceil(math.prod(shape) / args[4]) if len(args) > 7 and args[7] is not None else 0
        return math.prod(shape) * activation.element_size() + 2 * nested if rows > 8 else 0
    return 0
