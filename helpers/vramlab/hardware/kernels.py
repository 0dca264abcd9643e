"""CUDA kernels: which one attention takes, and what kernels allocate besides their results.

A reduction over long columns cuts each column into pieces, one per thread block, which meet in
global memory. The buffer has room for `block width x vector width` numbers where one would do
(`Reduce.cuh`, global_memory_size multiplies by both, while num_outputs already counts every
column): 8 x 512 tokens and 3,072 columns take 96 MiB for the 12 KiB gradient of a bias.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

from .gpu import Chip
from .overhead import rounded

MAX_THREADS = 512  # mnt_wrapper::MAX_NUM_THREADS
WARP = 32  # threads
MIN_VALUES = 16  # per thread: min_values_per_thread
MAX_VALUES = 256  # per thread: max_values_per_thread
INT32 = 2**31 - 1
LARGE_SHARED_MEMORY = ((8, 0), (9, 0), (10, 0))  # a tile of 128 x 128 fits
VECTOR = 4  # vt0 and input_vec_size: values loaded at once
NORM_CHUNK = 65536  # elements: MultiTensorApply.cuh, kChunkSize

Dims = list[tuple[int, int]]  # (size, stride) of dimensions in elements, the fastest first


def _divided_up(number: int, by: int) -> int:
    """Return the quotient rounded up."""
    return -(-number // by)


def reduction_scratch(
    shape: Sequence[int],
    strides: Sequence[int],
    reduced: Sequence[int],
    itemsize: int,
    chip: Chip,
) -> list[int]:
    """List the bytes of each block that a sum's kernel allocates besides its result.

    The sizes follow setReduceConfig of `Reduce.cuh`.

    Args:
        shape, strides: of what is summed, in elements.
        reduced: dimensions that are summed over; empty means all.
        itemsize: bytes of one value; they are added up in fp32.
    """
    inner, outer = _reduced_and_kept(shape, strides, reduced)
    if math.prod(shape) == 0 or not inner:
        return []
    accumulator = []
    if _extent(inner + outer, itemsize) > INT32 and itemsize < 4:
        # Partial sums of halves (AccumulationBuffer).
        accumulator = [4 * _count(outer)]
    # The kernel runs once for each part, and the scratch of the larger half counts.
    _halve_to_32bit(inner, outer, itemsize)
    along = not outer or inner[0][1] < outer[0][1]  # neighbours in memory are summed
    return accumulator + _partial_sums(inner, outer, along, chip)


def _halve_to_32bit(inner: Dims, outer: Dims, itemsize: int) -> None:
    """Halve the longest stretch until 32 bits index all (TensorIterator::with_32bit_indexing)."""

    def longest(dims: Dims) -> int:
        return max(map(_stretch, dims), default=0)

    while _extent(inner + outer, itemsize) > INT32:
        dims = max(inner, outer, key=longest)
        number = max(range(len(dims)), key=lambda number: _stretch(dims[number]))
        size, stride = dims[number]
        dims[number] = (_divided_up(size, 2), stride)


def _partial_sums(
    inner: Dims,
    outer: Dims,
    along: bool,
    chip: Chip,
) -> list[int]:
    """List the bytes of the sums of each column's pieces, and of a semaphore for each column.

    There are none where one block of threads sums a whole column.
    """
    inputs = _count(inner)
    outputs = _count(outer)
    vector, block_width, block_height = _block(
        inner,
        outer,
        along,
    )
    # Threads side by side share one column where neighbours in memory are summed, and have a
    # column each where they are not (split_input, split_output).
    inputs_per_block = block_width if along else 1
    outputs_per_block = 1 if along else block_width
    least = min(block_height * MIN_VALUES, MAX_VALUES)
    across_warps = _divided_up(inputs, inputs_per_block) >= least
    if across_warps:
        inputs_per_block *= block_height
    else:
        outputs_per_block *= block_height
    values = _divided_up(inputs, inputs_per_block)  # that each thread adds up
    resident = chip.multiprocessors * (chip.threads // (block_width * block_height))
    columns = _divided_up(outputs // vector, outputs_per_block)
    # Thread blocks share a column only if warps do already, if each thread has many values to add,
    # and if the columns alone do not fill the card.
    if not across_warps or values < MAX_VALUES or columns > resident:
        return []
    # Enough to fill the card, but each with work to do, and none with too much.
    blocks = min(_divided_up(resident, columns), _divided_up(values, MIN_VALUES))
    blocks = max(blocks, _divided_up(values, MAX_VALUES))
    if blocks == 1:
        return []
    partial_sums = 4 * outputs * blocks
    if not along:
        partial_sums *= block_width * vector
    semaphores = 4 * columns
    return [partial_sums, semaphores]


def _reduced_and_kept(
    shape: Sequence[int],
    strides: Sequence[int],
    reduced: Sequence[int],
) -> tuple[Dims, Dims]:
    """Return the dimensions that are summed over and the others, each coalesced."""
    every = range(len(shape))
    reduced = [dim % max(len(shape), 1) for dim in reduced] or list(every)
    inner = [(shape[dim], strides[dim], 0) for dim in reduced]
    outer = []
    result_stride = 1
    # The result is contiguous, its last dimension the fastest.
    for dim in reversed(every):
        if dim not in reduced:
            outer.append((shape[dim], strides[dim], result_stride))
            result_stride *= shape[dim]
    outer.reverse()
    return _coalesced(inner), _coalesced(outer)


def _coalesced(dims: list[tuple[int, int, int]]) -> Dims:
    """Merge neighbours that are contiguous in what is summed and in the result.

    `dims`: (size, stride, stride in the result) each (coalesce_dimensions).
    """
    merged: list[tuple[int, int, int]] = []
    long = [dim for dim in dims if dim[0] != 1]
    for size, stride, out in sorted(long, key=lambda dim: (dim[2], dim[1])):
        if merged:
            last_size, last_stride, last_out = merged[-1]
            if stride == last_size * last_stride and out == last_size * last_out:
                merged[-1] = (last_size * size, last_stride, last_out)
                continue
        merged.append((size, stride, out))
    return [(size, stride) for size, stride, _ in merged]


def _count(dims: Dims) -> int:
    return math.prod(size for size, _ in dims)


def _stretch(dim: tuple[int, int]) -> int:
    size, stride = dim
    return (size - 1) * stride


def _extent(dims: Dims, itemsize: int) -> int:
    """Return the offset of the last value in bytes, plus one (can_use_32bit_indexing)."""
    return 1 + itemsize * sum(map(_stretch, dims))


def _block(
    inner: Dims,
    outer: Dims,
    along: bool,
) -> tuple[int, int, int]:
    """Return vector width, and a block's threads along contiguous values and the others.

    set_block_dimension, after what is loaded at once.
    """
    width = _count(inner if along else outer)
    height = _count(outer if along else inner)
    vector = 1
    _, fastest_stride = inner[0] if along else outer[0]
    if fastest_stride == 1:
        if not along:
            vector = _output_vector(inner, outer)
            width //= vector
        # A thread loads four neighbours at once where a row is contiguous and long enough.
        elif width >= 128 and len(inner) == 1:
            width //= VECTOR
    most = MAX_THREADS // vector
    width = _power_of_two(width, most)
    height = _power_of_two(height, most)
    block_height = min(height, most // min(width, WARP))
    return vector, min(width, most // block_height), block_height


def _output_vector(inner: Dims, outer: Dims) -> int:
    """Return how many neighbouring columns a thread sums: what divides all that they step over."""
    numbers = [outer[0][0]]
    numbers += [stride for _, stride in inner]
    numbers += [stride for _, stride in outer[1:]]
    for vector in (4, 2):
        if all(number % vector == 0 for number in numbers):
            return vector
    return 1


def _power_of_two(number: int, most: int) -> int:
    """Return the largest power of two up to `number`, within 1 and `most`."""
    if 0 < number < most:
        return 1 << number.bit_length() - 1
    return min(max(number, 1), most)


@lru_cache(maxsize=4096)
def column_sums(
    rows: int,
    columns: int,
    itemsize: int,
    chip: Chip,
) -> int:
    """Return the scratch bytes of summing the rows of a matrix, as for the gradient of a bias."""
    blocks = reduction_scratch(
        (rows, columns),
        (columns, 1),
        (0,),
        itemsize,
        chip,
    )
    return sum(map(rounded, blocks))


def norms_scratch(tensors: int, largest: int) -> int:
    """Return the scratch bytes of `_foreach_norm`.

    An fp32 number per chunk of elements, for each tensor as many as for the largest
    (`ForeachReduceOp.cu`, output_per_tensor).
    """
    return 4 * tensors * _divided_up(largest, NORM_CHUNK)


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
    """Return the backend of `scaled_dot_product_attention` (`sdp_utils.cpp`).

    Args:
        width: bytes per element.
        grouped, broadcast: fewer heads of keys, with and without `enable_gqa`
            (check_batch_size_and_num_heads_dense).
    Returns:
        "flash": half precision, no mask, heads up to 256 wide, compute capability 8.0 (consumer
            cards of 8.6 to 8.9 and 12.x have no backward for 193 to 224 channels, or more with
            dropout).
        "efficient": no bf16 below 8.0, no shared heads of keys (torch up to 2.13), multiples of 16
            bytes a head where tensor cores multiply.
        "math": else.
    """
    if broadcast:
        return "math"
    is_half = width == 2
    major, _ = capability
    value_dim = value_dim or head_dim
    # Flash's backward pass on wide heads is refused there
    # (check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120).
    is_consumer = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    has_backward = not is_consumer or head_dim <= 192 or (head_dim > 224 and not dropout)
    fits_flash = is_half and head_dim == value_dim and head_dim <= 256 and major >= 8
    if fits_flash and has_backward and not masked:
        return "flash"
    if grouped or (is_half and bf16 and major < 8):
        return "math"
    aligned = 1
    if major >= 8 or (is_half and major == 7):
        aligned = 8 if is_half else 4
    return "math" if head_dim % aligned or value_dim % aligned else "efficient"


def efficient_scratch(
    heads: int,
    lengths: tuple[int, int],
    dims: tuple[int, int],
    itemsize: int,
    dropout: bool,
    chip: Chip,
) -> list[int]:
    """List the bytes of the blocks of memory-efficient attention's backward besides its results.

    Tiles of `rows` queries by `columns` keys go through a block. The workspace has a lock and a
    tile of dQ for each, and where registers cannot hold dK and dV one stretch for each split
    (`kernel_backward.h`, workspace_elements_gq). In fp32, gradient and output are first multiplied
    into a tensor of their own (`attention_backward.cu`, delta).

    Args:
        heads: of all sequences of the batch.
        lengths: queries and keys of a sequence.
        dims: channels of a head of queries and keys, and of one of values.
    """
    queries, keys = lengths
    dim, value_dim = dims
    rows, columns, adds_up = _tiles(
        itemsize,
        max(dims),
        dropout,
        chip.capability,
    )
    tiles = _divided_up(queries, rows) * _divided_up(dim, columns)
    numbers = tiles * (16 + 4 * rows * columns) // 4
    if adds_up:
        splits = max(1, min(_divided_up(keys, columns), 200 // heads))
        padded = sum(_divided_up(each, rows) * rows for each in dims)
        numbers += splits * columns * padded
    delta = 4 * heads * queries
    workspace = 4 * heads * _divided_up(numbers, 4) * 4
    product = delta * value_dim
    if itemsize == 4 and product + delta > workspace:
        return [product, delta, delta]
    return [delta, workspace]


def _tiles(
    itemsize: int,
    dim: int,
    dropout: bool,
    capability: tuple[int, int],
) -> tuple[int, int, bool]:
    """Return rows and columns of a tile, and whether dK and dV are added up in memory.

    That is the first entry of the list in `kernels/cutlassB.h` that fits the card's shared memory.
    """
    is_large = capability in LARGE_SHARED_MEMORY
    if dim <= 64:
        return 64, 64, False
    if itemsize == 4:
        return (128 if is_large else 64), 64, False
    if dim > 128:
        return 128, 64, True
    if is_large:
        return 128, 128, False
    if capability < (8, 0) or (capability < (9, 0) and dim <= 96 and not dropout):
        return 128, 64, False
    return 64, 64, True
