"""The allocator's model: invariants under any sequence, sequences worked out by hand from the C++, and speed."""

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vramlab.hardware.allocator import Allocator, Block, replay
from vramlab.report.report import KiB, MiB
from vramlab.tracking.tracker import Storage

# A request of a given size, or a free of the n-th living block.
SIZES = st.one_of(st.integers(1, 4 * KiB), st.integers(1, 3 * MiB), st.integers(1 * MiB, 40 * MiB))
FREE = st.integers(0, 99).map(lambda n: ("free", n))
ACTIONS = st.lists(st.one_of(SIZES.map(lambda n: ("malloc", n)), FREE), max_size=120)


def segments(blocks: list[Block]) -> list[list[Block]]:
    """The chains that living blocks belong to, each from its segment's first block to its last."""
    chains = {}
    for block in blocks:
        while block.before:
            block = block.before
        chain = [block]
        while chain[-1].after:
            chain.append(chain[-1].after)
        chains[block.address] = chain
    return list(chains.values())


@given(ACTIONS)
def test_invariants(actions):
    allocator, alive = Allocator(), []
    for what, number in actions:
        if what == "malloc":
            block = allocator.malloc(number)
            assert block.size >= number and block.size % 512 == 0 and block.address % 512 == 0
            assert block.pool[0] == (-(-number // 512) * 512 <= MiB)
            alive.append(block)
        elif alive:
            allocator.free(alive.pop(number % len(alive)))
        spans = sorted((b.address, b.address + b.size) for b in alive)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert allocator.allocated == sum(b.size for b in alive) <= allocator.reserved
        assert allocator.peak_allocated >= allocator.allocated and allocator.peak_reserved == allocator.reserved
        for chain in segments(alive):
            assert all(a.address + a.size == b.address for a, b in pairwise(chain))
            assert not any(a.free and b.free for a, b in pairwise(chain)), "free neighbours merge"
            assert sum(b.size for b in chain) % (2 * MiB) == 0
    for block in alive:
        allocator.free(block)
    assert allocator.allocated == 0
    free = [block for pool in allocator._pools.values() for _, _, block in pool]
    assert sum(block.size for block in free) == allocator.reserved
    assert all(block.before is None and block.after is None for block in free), "all merged back to whole segments"


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MiB),
        (512, 512, 2 * MiB),
        (513, 1024, 2 * MiB),
        (MiB, MiB, 2 * MiB),  # kSmallSize: the last request that the small pool takes
        (MiB + 1, MiB + 512, 20 * MiB),  # kLargeBuffer
        (10 * MiB - 512, 10 * MiB - 512, 20 * MiB),
        (10 * MiB, 10 * MiB, 10 * MiB),  # kMinLargeAlloc: from here on segments fit, rounded up to 2 MiB
        (10 * MiB + 1, 10 * MiB + 512, 12 * MiB),
        (11 * MiB - 512, 11 * MiB - 512, 12 * MiB),  # left: 1 MiB + 512, over kSmallSize: split off
        (11 * MiB, 12 * MiB, 12 * MiB),  # left: 1 MiB exactly, not over it: not split off, counts as allocated
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
    assert allocator.reserved == 22 * MiB and small.pool[0]
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


def log_of(*sizes: int) -> list:
    """A log that makes a storage of each positive size and frees the n-th one for -n."""
    made, log = [], []
    for size in sizes:
        if size > 0:
            made.append(Storage(-(-size // 512) * 512, size, None, "empty"))
            log.append((made[-1].size, made[-1], "empty"))
        else:
            log.append((-made[-size - 1].size, made[-size - 1], "free"))
    return log


def test_replay_says_what_blocks_hold_beyond_the_request():
    replayed = replay(log_of(11 * MiB, 512, -1, 3 * MiB))
    assert (replayed.requested, replayed.reserved) == (11 * MiB + 512, 14 * MiB)
    assert replayed.allocated == 12 * MiB + 512
    assert replayed.internal_fragmentation == [0, MiB, MiB, 0, 0]


def test_replay_takes_a_hundred_thousand_events_in_seconds():
    sizes, alive = [], []
    for i in range(50_000):
        sizes.append(1 + (i * 7919) % (8 * MiB))
        alive.append(i)
        if i % 3:
            sizes.append(-(alive.pop((i * 31) % len(alive)) + 1))
    started = time.process_time()
    replayed = replay(log_of(*sizes))
    seconds = time.process_time() - started
    assert len(sizes) > 80_000 and replayed.reserved >= replayed.allocated >= replayed.requested
    assert seconds < 10


def test_replay_on_a_card_gives_back_unused_segments_before_it_fails():
    """30 MiB come and go, then 40: cached, the 30 would be reserved beside them."""
    log = log_of(30 * MiB, -1, 40 * MiB, -2)
    assert replay(log).reserved == 70 * MiB
    assert (replay(log, 64 * MiB).reserved, replay(log, 64 * MiB).failed) == (40 * MiB, None)
    assert replay(log, 70 * MiB).reserved == 70 * MiB
    too_small = replay(log, 39 * MiB)
    assert (
        (too_small.failed.event, too_small.failed.limit) == (2, 39 * MiB)
        and too_small.reserved == 70 * MiB
        and too_small.internal_fragmentation == replay(log).internal_fragmentation
    )
