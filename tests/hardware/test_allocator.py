"""The allocator's model: invariants under any sequence, sequences worked out by hand from the C++,
and speed.
"""

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vramlab.hardware.allocator import Allocator, AllocatorError, replay, without_sharing
from vramlab.report.report import KiB, MiB

SIZES = st.one_of(st.integers(1, 4 * KiB), st.integers(1, 3 * MiB), st.integers(1 * MiB, 40 * MiB))
MALLOC = st.tuples(st.just("malloc"), SIZES, st.integers(0, 1))  # bytes, stream
FREE = st.tuples(st.just("free"), st.integers(0, 99), st.just(0))  # of the n-th living block
ACTIONS = st.lists(st.one_of(MALLOC, FREE, st.just(("empty_cache", 0, 0))), max_size=120)


def check_pool(pool, stretches: dict[int, int], alive: list, more: dict[int, int]) -> None:
    """The pool's blocks, free blocks and `more` tile its stretches of addresses; what is free is
    merged and found.
    """
    free, blocks = pool.free, [(b.address, b.address + b.size) for b in alive if b.pool is pool]
    spans = sorted([*blocks, *free.items(), *more.items()])
    for begin, behind in sorted(stretches.items()):
        inside = [spans.pop(0) for start, _ in list(spans) if start < behind]
        assert [begin, *(end for _, end in inside)] == [*(start for start, _ in inside), behind], (
            "no gap, no overlap"
        )
        assert not any(a in free and b in free for (a, _), (b, _) in pairwise(inside)), (
            "free neighbours merge"
        )
    assert not spans and all(pool.starts[end] == start for start, end in free.items())
    assert pool.sizes == sorted(pool.buckets) and all(
        starts == sorted(starts) for starts in pool.buckets.values()
    )
    assert sorted((a, a + size) for size, starts in pool.buckets.items() for a in starts) == sorted(
        free.items()
    )


def living(allocator: Allocator, actions: list):
    """The living blocks after each of `actions`; what holds of any allocator is checked there."""
    alive, limit = [], allocator.limit
    for what, number, stream in actions:
        if what == "malloc":
            try:
                alive.append(allocator.malloc(number, stream))
                block, size = alive[-1], -(-number // 512) * 512
                assert block.size % 512 == block.address % 512 == 0 and block.pool.small == (
                    size <= MiB
                )
                assert block.pool is allocator.pools[2 * stream + block.pool.small]
                assert 0 <= block.size - size <= (0 if block.pool.small else MiB)
            except AllocatorError as error:
                assert limit and (error.allocated, error.reserved) == (
                    allocator.allocated,
                    allocator.reserved,
                )
        elif what == "empty_cache":
            allocator.empty_cache()
        elif alive:
            allocator.free(alive.pop(number % len(alive)))
        assert allocator.allocated == sum(block.size for block in alive) <= allocator.reserved
        assert (
            allocator.peak_allocated >= allocator.allocated
            and allocator.peak_reserved >= allocator.reserved
        )
        assert limit is None or allocator.peak_reserved <= limit
        yield alive


@given(ACTIONS, st.sampled_from([None, 100 * MiB]))
def test_invariants(actions, limit):
    allocator, alive = Allocator(limit=limit), []
    for alive in living(allocator, actions):
        for pool in allocator.pools.values():
            check_pool(pool, pool.segments, alive, {})
        segments = [
            end - start for pool in allocator.pools.values() for start, end in pool.segments.items()
        ]
        assert (sum(segments), len(segments)) == (
            allocator.reserved,
            allocator.mallocs - allocator.given_back,
        )
        assert not any(size % (2 * MiB) for size in segments)
    for block in alive:
        allocator.free(block)
    assert all(pool.free == pool.segments for pool in allocator.pools.values()), (
        "all merged back to whole segments"
    )
    allocator.empty_cache()
    assert (
        allocator.allocated == allocator.reserved == 0 and allocator.mallocs == allocator.given_back
    )


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MiB),
        (512, 512, 2 * MiB),
        (513, 1024, 2 * MiB),
        (MiB, MiB, 2 * MiB),  # kSmallSize: the last request that the small pool takes
        (MiB + 1, MiB + 512, 20 * MiB),  # kLargeBuffer
        (10 * MiB - 512, 10 * MiB - 512, 20 * MiB),
        (
            10 * MiB,
            10 * MiB,
            10 * MiB,
        ),  # kMinLargeAlloc: from here on segments fit, rounded up to 2 MiB
        (10 * MiB + 1, 10 * MiB + 512, 12 * MiB),
        (11 * MiB - 512, 11 * MiB - 512, 12 * MiB),  # left: 1 MiB + 512, over kSmallSize: split off
        (
            11 * MiB,
            12 * MiB,
            12 * MiB,
        ),  # left: 1 MiB exactly, not over it: not split off, counts as allocated
    ],
)
def test_one_request(size, allocated, reserved):
    allocator = Allocator()
    allocator.malloc(size)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_the_smallest_free_block_that_fits_is_taken():
    allocator = Allocator()
    a, b, c = (allocator.malloc(n * MiB) for n in (30, 14, 22))
    for block in (a, b, c):
        allocator.free(block)
    assert allocator.malloc(16 * MiB).address == c.address
    assert allocator.malloc(13 * MiB).address == b.address
    assert allocator.malloc(26 * MiB).address == a.address
    assert allocator.reserved == (30 + 14 + 22) * MiB


def test_of_equal_ones_the_lowest_address():
    allocator = Allocator()
    blocks = [allocator.malloc(16 * MiB) for _ in range(3)]
    for block in reversed(blocks):
        allocator.free(block)
    assert allocator.malloc(16 * MiB).address == blocks[0].address


def test_pools_do_not_mix():
    allocator = Allocator()
    allocator.free(allocator.malloc(20 * MiB))
    small = allocator.malloc(512)
    assert allocator.reserved == 22 * MiB and small.pool.small
    for _ in range(2 * MiB // 512 - 1):
        allocator.malloc(512)
    assert allocator.reserved == 22 * MiB
    allocator.malloc(512)
    assert allocator.reserved == 24 * MiB


def test_fragmentation_reserves_more_than_was_ever_alive():
    """Every second of twenty 2 MiB blocks freed: 20 MiB free, and not one hole of 3."""
    allocator = Allocator()
    blocks = [allocator.malloc(2 * MiB) for _ in range(20)]
    assert allocator.reserved == 40 * MiB == allocator.allocated
    for block in blocks[::2]:
        allocator.free(block)
    allocator.malloc(3 * MiB)
    assert allocator.reserved == 60 * MiB and allocator.peak_allocated == 40 * MiB


def test_neighbours_merge_from_both_sides():
    allocator = Allocator()
    a, b, c = (allocator.malloc(4 * MiB) for _ in range(3))
    allocator.free(a)
    allocator.free(c)
    allocator.free(b)
    whole = allocator.malloc(20 * MiB - 512)
    assert whole.address == a.address and allocator.reserved == 20 * MiB


def log_of(*sizes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A log that makes a storage of each positive size, of one number after the other, and frees
    the n-th one for -n.
    """
    made, log = [], []
    for size in sizes:
        if size > 0:
            made.append(-(-size // 512) * 512)
        log.append((made[-1], len(made), 0) if size > 0 else (-made[-size - 1], -size, 0))
    return tuple(np.array(log).T)


def test_replay_says_what_blocks_hold_beyond_the_request():
    replayed = replay(*log_of(11 * MiB, 512, -1, 3 * MiB))
    assert (replayed.reserved, replayed.failed) == (14 * MiB, None)
    assert replayed.internal_fragmentation.tolist() == [0, MiB, MiB, 0, 0]


@given(ACTIONS, st.sampled_from([None, 60 * MiB, 100 * MiB]))
def test_replay_is_the_allocator(actions, limit):
    """The same events one by one, through an allocator with the limit, and without one where that
    fails.
    """
    log, alive = [], []
    for what, size, stream in actions:
        if what == "malloc":  # a number that was freed is born again
            key = min(set(range(121)) - {key for _, key, _ in alive})
            alive.append((-(-size // 512) * 512, key, stream))
            log.append(alive[-1])
        elif what == "free" and alive:
            size, *where = alive.pop(size % len(alive))
            log.append((-size, *where))
    replayed = replay(*np.array(log, dtype=np.int64).reshape(-1, 3).T, limit)
    for allocator in (Allocator(limit=limit), Allocator()):
        blocks, beyond, live = {}, [0], 0
        try:
            for size, key, stream in log:
                blocks[key] = (
                    allocator.malloc(size, stream) if size > 0 else allocator.free(blocks[key])
                )
                live += size
                beyond.append(allocator.allocated - live)
            break
        except AllocatorError as error:
            failed = replayed.failed
            assert (failed.event, failed.allocated, str(failed)) == (
                len(beyond) - 1,
                error.allocated,
                str(error),
            )
    assert (replayed.failed is None) == (allocator.limit == limit)
    assert (replayed.reserved, replayed.internal_fragmentation.tolist()) == (
        allocator.peak_reserved,
        beyond,
    )


def test_replay_takes_a_hundred_thousand_events_in_seconds():
    sizes, alive = [], []
    for i in range(50_000):
        sizes.append(1 + (i * 7919) % (8 * MiB))
        alive.append(i)
        if i % 3:
            sizes.append(-(alive.pop((i * 31) % len(alive)) + 1))
    log = log_of(*sizes)
    started = time.process_time()
    replayed = replay(*log)
    seconds = time.process_time() - started
    assert len(sizes) > 80_000 and replayed.reserved >= log[0].cumsum().max()
    assert seconds < 10


def test_replay_on_a_card_gives_back_unused_segments_before_it_fails():
    """30 MiB come and go, then 40: cached, the 30 would be reserved beside them."""
    log = log_of(30 * MiB, -1, 40 * MiB, -2)
    assert replay(*log).reserved == 70 * MiB
    assert (replay(*log, 64 * MiB).reserved, replay(*log, 64 * MiB).failed) == (40 * MiB, None)
    assert replay(*log, 70 * MiB).reserved == 70 * MiB
    too_small = replay(*log, 39 * MiB)
    assert (too_small.failed.event, too_small.failed.limit, too_small.reserved) == (
        2,
        39 * MiB,
        70 * MiB,
    )
    assert (too_small.internal_fragmentation == replay(*log).internal_fragmentation).all()


def test_no_segment_serves_two_sizes():
    # 12 and 30 MiB one after the other, the first again: 1 MiB pieces share small segments
    big, large, small = 12 * MiB, 30 * MiB, 512 * 1024
    events = [
        (big, 0),
        (big, 1),
        (-big, 0),
        (-big, 1),
        (large, 2),
        (-large, 2),
        (big, 3),
        (small, 4),
        (-small, 4),
        (-big, 3),
    ]
    sizes, keys = map(np.array, zip(*events, strict=True))
    streams = np.zeros_like(sizes)
    assert without_sharing(sizes, streams) == 2 * big + large + 2 * MiB
    middle = np.array([3 * MiB] * 7)  # six fit 20 MiB
    assert without_sharing(middle, np.zeros_like(middle)) == 2 * 20 * MiB
    assert replay(sizes, keys, streams).reserved <= without_sharing(sizes, streams)
