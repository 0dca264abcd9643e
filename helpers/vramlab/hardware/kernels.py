"""CUDA kernels: which one attention takes, and what kernels allocate besides their results.

A reduction over long columns cuts each column into pieces, one per thread block, which meet in global memory. The
buffer has room for `block width x vector width` numbers where one would do (`Reduce.cuh`, global_memory_size multiplies
by both, while num_outputs already counts every column): 8 x 512 tokens and 3,072 columns take 96 MiB for the 12 KiB
gradient of a bias.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

from .gpu import Chip
from .overhead import rounded

MAX_THREADS, WARP = 512, 32  # mnt_wrapper::MAX_NUM_THREADS; threads of a warp
MIN_VALUES, MAX_VALUES = 16, 256  # per thread: min_values_per_thread, max_values_per_thread
INT32 = 2**31 - 1
LARGE_SHARED_MEMORY = ((8, 0), (9, 0), (10, 0))  # a tile of 128 x 128 fits
VECTOR = 4  # vt0 and input_vec_size: values loaded at once

Dims = list[tuple[int, int]]  # (size, stride) of dimensions in elements, the fastest first


def reduction_scratch(
    shape: Sequence[int], strides: Sequence[int], reduced: Sequence[int], itemsize: int, chip: Chip
) -> list[int]:
    """List the bytes of each block that a sum's kernel allocates besides its result (`Reduce.cuh`, setReduceConfig).

    Args:
        shape, strides: of what is summed, in elements. `reduced`: dimensions that are summed over; empty means all.
        itemsize: bytes of one value; they are added up in fp32.
    """
    inner, outer = _reduced_and_kept(shape, strides, reduced)
    if math.prod(shape) == 0 or not inner:
        return []
    accumulator = []
    if _extent(inner + outer, itemsize) > INT32 and itemsize < 4:  # partial sums of halves (AccumulationBuffer)
        accumulator = [4 * _count(outer)]
    while _extent(inner + outer, itemsize) > INT32:  # TensorIterator::with_32bit_indexing halves the longest stretch
        dims = max(inner, outer, key=lambda dims: max(map(_stretch, dims), default=0))
        longest = max(range(len(dims)), key=lambda i: _stretch(dims[i]))
        dims[longest] = (-(-dims[longest][0] // 2), dims[longest][1])
    inputs, outputs = _count(inner), _count(outer)
    along = not outer or inner[0][1] < outer[0][1]  # neighbours in memory are summed
    vector, block_width, block_height = _block(inner, outer, along)

    per_block, outputs_per_block = (block_width, 1) if along else (1, block_width)
    across_warps = -(-inputs // per_block) >= min(block_height * MIN_VALUES, MAX_VALUES)
    if across_warps:
        per_block *= block_height
    else:
        outputs_per_block *= block_height
    values = -(-inputs // per_block)  # that each thread adds up
    resident = chip.multiprocessors * (chip.threads // (block_width * block_height))
    columns = -(-(outputs // vector) // outputs_per_block)
    if not across_warps or values < MAX_VALUES or columns > resident:
        return accumulator
    blocks = max(min(-(-resident // columns), -(-values // MIN_VALUES)), -(-values // MAX_VALUES))
    if blocks == 1:
        return accumulator
    partial_sums = 4 * outputs * blocks * (1 if along else block_width * vector)
    semaphores = 4 * columns
    return [*accumulator, partial_sums, semaphores]


def _reduced_and_kept(shape: Sequence[int], strides: Sequence[int], reduced: Sequence[int]) -> tuple[Dims, Dims]:
    """Return the dimensions that are summed over and the others, each coalesced."""
    reduced = [d % max(len(shape), 1) for d in reduced] or list(range(len(shape)))
    kept = [d for d in range(len(shape)) if d not in reduced]
    result_strides = {d: math.prod(shape[e] for e in kept if e > d) for d in kept}
    inner = _coalesced([(shape[d], strides[d], 0) for d in reduced])
    return inner, _coalesced([(shape[d], strides[d], result_strides[d]) for d in kept])


def _coalesced(dims: list[tuple[int, int, int]]) -> Dims:
    """Merge neighbours among (size, stride, stride in the result) that are contiguous in both (coalesce_dimensions)."""
    merged: list[tuple[int, int, int]] = []
    for size, stride, out in sorted((d for d in dims if d[0] != 1), key=lambda d: (d[2], d[1])):
        if merged and (stride, out) == tuple(merged[-1][0] * n for n in merged[-1][1:]):
            merged[-1] = (merged[-1][0] * size, *merged[-1][1:])
        else:
            merged.append((size, stride, out))
    return [(size, stride) for size, stride, _ in merged]


def _count(dims: Dims) -> int:
    return math.prod(size for size, _ in dims)


def _stretch(dim: tuple[int, int]) -> int:
    return (dim[0] - 1) * dim[1]


def _extent(dims: Dims, itemsize: int) -> int:
    """Return the offset of the last value in bytes, plus one (can_use_32bit_indexing)."""
    return 1 + itemsize * sum(map(_stretch, dims))


def _block(inner: Dims, outer: Dims, along: bool) -> tuple[int, int, int]:
    """Return vector width, and a block's threads along contiguous values and the others (set_block_dimension)."""
    (width, height), vector = (_count(inner), _count(outer)) if along else (_count(outer), _count(inner)), 1
    if (inner if along else outer)[0][1] == 1:
        if not along:
            others = [outer[0][0], *(stride for _, stride in (*inner, *outer[1:]))]
            vector = next(v for v in (4, 2, 1) if all(n % v == 0 for n in others))
            width //= vector
        elif width >= 128 and len(inner) == 1:
            width //= VECTOR
    most = MAX_THREADS // vector
    width, height = (1 << n.bit_length() - 1 if 0 < n < most else min(max(n, 1), most) for n in (width, height))
    block_height = min(height, most // min(width, WARP))
    return vector, min(width, most // block_height), block_height


@lru_cache(maxsize=4096)
def column_sums(rows: int, columns: int, itemsize: int, chip: Chip) -> int:
    """Return the scratch bytes of summing the rows of a matrix, as for the gradient of a bias."""
    return sum(map(rounded, reduction_scratch((rows, columns), (columns, 1), (0,), itemsize, chip)))


def norms_scratch(tensors: int, largest: int) -> int:
    """Return the scratch bytes of `_foreach_norm`: an fp32 number per 65,536 elements, for each tensor as many as for the
    largest (`ForeachReduceOp.cu`, output_per_tensor; `MultiTensorApply.cuh`, kChunkSize)."""
    return 4 * tensors * -(-largest // 65536)


def sdp_backend(
    width: int,
    head_dim: int,
    masked: bool,
    grouped: bool,
    bf16: bool,
    capability: tuple[int, int],
    dropout: float = 0.0,
    value_dim: int | None = None,
    broadcast: bool = False,
) -> str:
    """Return the backend of `scaled_dot_product_attention`: "flash", "efficient" or "math" (`sdp_utils.cpp`).

    Flash: half precision, no mask, heads up to 256 wide, compute capability 8.0 (consumer cards of 8.6 to 8.9 and 12.x
    have no backward for 193 to 224 channels, or more with dropout). Memory-efficient: no bf16 below 8.0, no shared heads
    of keys (torch up to 2.13), multiples of 16 bytes a head where tensor cores multiply. Else "math".

    Args:
        width: bytes per element.
        grouped, broadcast: fewer heads of keys, with and without `enable_gqa` (check_batch_size_and_num_heads_dense).
    """
    if broadcast:
        return "math"
    half, major, value_dim = width == 2, capability[0], value_dim or head_dim
    consumer = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    trainable = not consumer or head_dim <= 192 or (head_dim > 224 and not dropout)
    if half and head_dim == value_dim and head_dim <= 256 and major >= 8 and trainable and not masked:
        return "flash"
    if (half and bf16 and major < 8) or grouped:
        return "math"
    aligned = (8 if half else 4) if major >= 8 or (half and major == 7) else 1
    return "math" if head_dim % aligned or value_dim % aligned else "efficient"


def efficient_scratch(
    heads: int, lengths: tuple[int, int], dims: tuple[int, int], itemsize: int, dropout: bool, chip: Chip
) -> list[int]:
    """List the bytes of the blocks that memory-efficient attention's backward allocates besides its results.

    Tiles of `rows` queries by `columns` keys go through a block. The workspace has a lock and a tile of dQ for each, and
    where registers cannot hold dK and dV one stretch for each split (`kernel_backward.h`, workspace_elements_gq). In
    fp32, gradient and output are first multiplied into a tensor of their own (`attention_backward.cu`, delta).

    Args:
        heads: of all sequences of the batch. `lengths`: queries and keys of a sequence.
        dims: channels of a head of queries and keys, and of one of values.
    """
    (queries, keys), (dim, value_dim) = lengths, dims
    rows, columns, adds_up = _tiles(itemsize, max(dims), dropout, chip.capability)
    tiles = -(-queries // rows) * -(-dim // columns)
    numbers = tiles * (16 + 4 * rows * columns) // 4
    if adds_up:
        splits = max(1, min(-(-keys // columns), 200 // heads))
        numbers += splits * columns * sum(-(-d // rows) * rows for d in dims)
    delta, workspace = 4 * heads * queries, 4 * heads * -(-numbers // 4) * 4
    product = 4 * heads * queries * value_dim
    if itemsize == 4 and product + delta > workspace:
        return [product, delta, delta]
    return [delta, workspace]


def _tiles(itemsize: int, dim: int, dropout: bool, capability: tuple[int, int]) -> tuple[int, int, bool]:
    """Return rows and columns of a tile, and whether dK and dV are added up in memory: the first entry of the list in
    `kernels/cutlassB.h` that fits the card's shared memory."""
    large = capability in LARGE_SHARED_MEMORY
    if dim <= 64:
        return 64, 64, False
    if itemsize == 4:
        return (128 if large else 64), 64, False
    if dim > 128:
        return 128, 64, True
    if large:
        return 128, 128, False
    if capability < (8, 0) or (capability < (9, 0) and dim <= 96 and not dropout):
        return 128, 64, False
    return 64, 64, True
