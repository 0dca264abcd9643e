"""What CUDA kernels allocate besides their results, where it depends on the card: buffers in which they add up.

Where a column is long and there are few of them, as when a bias's gradient is summed over all tokens, the kernel cuts
each column into pieces, one a block, and the pieces meet in global memory. The buffer has room for `block width x
vector width` numbers where one would do (`Reduce.cuh`, global_memory_size, multiplies by both, while num_outputs already
counts every column), so that 8 x 512 tokens and 3,072 columns take 96 MiB for a gradient of 12 KiB.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

from .gpu import Chip
from .overhead import rounded

MAX_THREADS, WARP = 512, 32  # mnt_wrapper::MAX_NUM_THREADS; a warp's lanes
FEWEST, MOST = 16, 256  # values a thread: min_values_per_thread, max_values_per_thread
INT32 = 2**31 - 1
MUCH_SHARED_MEMORY = ((8, 0), (9, 0), (10, 0))  # of which a tile of 128 x 128 fits
FACTOR = 4  # vt0 and input_vec_size: values loaded at once


def reduction_scratch(
    shape: Sequence[int], strides: Sequence[int], reduced: Sequence[int], itemsize: int, chip: Chip, wide: int = 4
) -> list[int]:
    """Bytes of each block that the kernel allocates besides its result; empty where one block does whole columns.

    Args:
        shape, strides: of what is summed, in elements.
        reduced: the dimensions that are summed over; empty means all.
        itemsize: bytes of one value; `wide` those of the accumulator.
        chip: whose multiprocessors and resident threads decide.
    """
    reduced = [d % max(len(shape), 1) for d in reduced] or list(range(len(shape)))
    kept = [d for d in range(len(shape)) if d not in reduced]
    down = _coalesced([(shape[d], strides[d], 0) for d in reduced])
    across = _coalesced([(shape[d], strides[d], math.prod(shape[e] for e in kept if e > d)) for d in kept])
    if math.prod(shape) == 0 or not down:
        return []
    sums = []
    if _offset(down + across, itemsize) > INT32 and itemsize < wide:  # halves are added up in fp32 (AccumulationBuffer)
        sums = [wide * _count(across)]
    while _offset(down + across, itemsize) > INT32:  # TensorIterator::with_32bit_indexing halves the longest stretch
        dims = max(down, across, key=lambda dims: max(((n - 1) * stride for n, stride in dims), default=0))
        longest = max(range(len(dims)), key=lambda i: (dims[i][0] - 1) * dims[i][1])
        dims[longest] = (-(-dims[longest][0] // 2), dims[longest][1])
    inputs, outputs = _count(down), _count(across)

    fastest = not across or down[0][1] < across[0][1]  # the neighbours in memory are summed
    width, height, vector = (inputs, outputs, 1) if fastest else (outputs, inputs, 1)
    if (down if fastest else across)[0][1] == 1:
        if not fastest:
            others = [s for _, s in (*down, *across[1:])]
            vector = next(v for v in (4, 2, 1) if all(n % v == 0 for n in (across[0][0], *others)))
            width //= vector
        elif width >= 128 and len(down) == 1:
            width //= FACTOR
    block_width, block_height = _block(width, height, MAX_THREADS // vector)

    step_in, step_out = (block_width, 1) if fastest else (1, block_width)
    across_warps = -(-inputs // step_in) >= min(block_height * FEWEST, MOST)
    if across_warps:
        step_in *= block_height
    else:
        step_out *= block_height
    values = -(-inputs // step_in)
    target = chip.multiprocessors * (chip.threads // (block_width * block_height))
    grid = -(-(outputs // vector) // step_out)
    if not across_warps or values < MOST or grid > target:
        return sums
    blocks = max(min(-(-target // grid), -(-values // FEWEST)), -(-values // MOST))
    if blocks == 1:
        return sums
    return [*sums, wide * outputs * blocks * (1 if fastest else block_width * vector), 4 * grid]


def _coalesced(dims: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """(size, stride) of dimensions given with their stride in the result too, by which they go: made one where they run
    on from each other in both (`coalesce_dimensions`)."""
    merged: list[tuple[int, int, int]] = []
    for size, stride, out in sorted((d for d in dims if d[0] != 1), key=lambda d: (d[2], d[1])):
        if merged and (stride, out) == tuple(merged[-1][0] * n for n in merged[-1][1:]):
            merged[-1] = (merged[-1][0] * size, *merged[-1][1:])
        else:
            merged.append((size, stride, out))
    return [(size, stride) for size, stride, _ in merged]


def _count(dims: list[tuple[int, int]]) -> int:
    return math.prod(size for size, _ in dims)


def _offset(dims: list[tuple[int, int]], itemsize: int) -> int:
    """Of the last value, in bytes, plus one (`can_use_32bit_indexing`)."""
    return 1 + itemsize * sum((size - 1) * stride for size, stride in dims)


def _block(width: int, height: int, most: int) -> tuple[int, int]:
    """Threads along what lies side by side and along the other dimension (`set_block_dimension`)."""
    width, height = (1 << n.bit_length() - 1 if 0 < n < most else min(max(n, 1), most) for n in (width, height))
    block_width = min(width, WARP)
    block_height = min(height, most // block_width)
    return min(width, most // block_height), block_height


@lru_cache(maxsize=4096)
def column_sums(rows: int, columns: int, itemsize: int, chip: Chip) -> int:
    """Bytes that adding up the rows of a matrix takes, as for the gradient of a bias."""
    return sum(map(rounded, reduction_scratch((rows, columns), (columns, 1), (0,), itemsize, chip)))


def norms_scratch(tensors: int, largest: int) -> int:
    """Bytes in which `_foreach_norm` keeps an fp32 number for every 65,536 elements of each tensor, for all as many as
    the largest has (`ForeachReduceOp.cu`, output_per_tensor; `MultiTensorApply.cuh`, kChunkSize)."""
    return 4 * tensors * -(-largest // 65536)


def efficient_scratch(
    heads: int, queries: int, keys: int, dim: int, value_dim: int, itemsize: int, dropout: bool, chip: Chip
) -> list[int]:
    """Bytes of the blocks that memory-efficient attention's backward holds at once besides its results.

    It adds up in a workspace: tiles of `rows` queries by `columns` keys go through a block; dQ has a lock and a tile
    for each of them, dK and dV, where registers cannot hold them, one stretch for each of the splits
    (`kernel_backward.h`, workspace_elements_gq and its neighbours). Which tiles a card gets is from the list in
    `kernels/cutlassB.h`: the first that fits its shared memory. In fp32, gradient and output are first multiplied into a
    tensor of their own (`attention_backward.cu`, delta).

    Args:
        heads: of all sequences of the batch.
    """
    rows, columns, adds_up = _tiles(itemsize, max(dim, value_dim), dropout, chip.capability)
    tiles = -(-queries // rows) * -(-dim // columns)
    numbers = tiles * (16 + 4 * rows * columns) // 4
    if adds_up:
        splits = max(1, min(-(-keys // columns), 200 // heads))
        numbers += splits * columns * sum(-(-d // rows) * rows for d in (dim, value_dim))
    delta, workspace = 4 * heads * queries, 4 * heads * -(-numbers // 4) * 4
    product = 4 * heads * queries * value_dim
    if itemsize == 4 and product + delta > workspace:
        return [product, delta, delta]
    return [delta, workspace]


def _tiles(itemsize: int, dim: int, dropout: bool, capability: tuple[int, int]) -> tuple[int, int, bool]:
    """Rows and columns of a tile, and whether dK and dV are added up in memory."""
    much = capability in MUCH_SHARED_MEMORY
    if dim <= 64:
        return 64, 64, False
    if itemsize == 4:
        return (128 if much else 64), 64, False
    if dim > 128:
        return 128, 64, True
    if much:
        return 128, 128, False
    if capability < (8, 0) or (capability < (9, 0) and dim <= 96 and not dropout):
        return 128, 64, False
    return 64, 64, True
