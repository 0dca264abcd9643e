"""Expandable segments and a full card: invariants under any sequence, and sequences worked out by hand from the C++."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vramlab.hardware.allocator import Allocator, AllocatorError
from vramlab.report.report import GiB, KiB, MiB
from vramlab_course.expandable import ExpandableAllocator, Hole

SIZES = st.one_of(st.integers(1, 4 * KiB), st.integers(1, 3 * MiB), st.integers(1 * MiB, 40 * MiB))
ACTIONS = st.lists(
    st.one_of(
        SIZES.map(lambda n: ("malloc", n)),
        st.integers(0, 99).map(lambda n: ("free", n)),
        st.just(("empty_cache", 0)),
    ),
    max_size=120,
)


def chains(allocator):
    """Every block and hole of each stretch, from its first address on."""
    for pool, holes in allocator._holes.items():
        block = holes[0]
        while block.before:
            block = block.before
        chain = [block]
        while chain[-1].after:
            chain.append(chain[-1].after)
        yield pool, chain


@given(ACTIONS, st.sampled_from([None, 100 * MiB]))
def test_invariants(actions, limit):
    allocator, alive = ExpandableAllocator(limit=limit), []
    for what, number in actions:
        if what == "malloc":
            try:
                alive.append(allocator.malloc(number))
            except AllocatorError:
                assert limit
        elif what == "empty_cache":
            allocator.empty_cache()
        elif alive:
            allocator.free(alive.pop(number % len(alive)))
        assert allocator.allocated == sum(block.size for block in alive) <= allocator.reserved
        assert limit is None or allocator.peak_reserved <= limit
        mapped = 0
        for pool, chain in chains(allocator):
            page = (2 if pool[0] else 20) * MiB
            assert all(a.address + a.size == b.address and b.before is a for a, b in pairwise(chain))
            assert not any(a.free and b.free for a, b in pairwise(chain)), "free neighbours merge"
            assert not any(isinstance(a, Hole) and isinstance(b, Hole) for a, b in pairwise(chain)), "and so do holes"
            holes = [block for block in chain if isinstance(block, Hole)]
            assert holes == sorted(allocator._holes[pool], key=lambda hole: hole.address)
            assert all(hole.address % page == hole.size % page == 0 for hole in holes)
            free = [block for block in chain if block.free]
            assert {id(block) for block in free} == {id(block) for _, _, block in allocator._pools[pool]}
            mapped += sum(block.size for block in chain if not isinstance(block, Hole))
        assert mapped == allocator.reserved


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MiB),
        (MiB, MiB, 2 * MiB),
        (MiB + 1, MiB + 512, 20 * MiB),
        (11 * MiB, 11 * MiB, 20 * MiB),  # nothing is too little to be split off
        (21 * MiB, 21 * MiB, 40 * MiB),  # two pages
        (100 * MiB, 100 * MiB, 100 * MiB),
    ],
)
def test_one_request(size, allocated, reserved):
    allocator = ExpandableAllocator()
    allocator.malloc(size)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_growing_requests_share_one_stretch():
    """Each a page more than the last, and gone before the next: the classic case, in one segment and in many."""
    grown, many = ExpandableAllocator(), Allocator()
    for pages in range(1, 11):
        for allocator in (grown, many):
            allocator.free(allocator.malloc(pages * 20 * MiB))
    assert grown.reserved == 200 * MiB
    assert many.reserved == sum(range(1, 11)) * 20 * MiB == 1100 * MiB


def test_the_end_that_can_grow_is_taken_last():
    allocator = ExpandableAllocator()
    first, wall, last = allocator.malloc(8 * MiB), allocator.malloc(4 * MiB), allocator.malloc(6 * MiB)
    allocator.free(first)
    allocator.free(last)  # 8 MiB free before the wall, 8 after it with all addresses behind
    assert allocator.malloc(5 * MiB).address == first.address < wall.address


def test_pages_in_the_middle_are_given_back_and_used_again():
    allocator = ExpandableAllocator(limit=100 * MiB)
    blocks = [allocator.malloc(20 * MiB) for _ in range(5)]
    for block in blocks[1:4]:
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.reserved == 40 * MiB and allocator.given_back == 1
    again = allocator.malloc(60 * MiB)
    assert again.address == blocks[1].address and allocator.reserved == 100 * MiB


def test_a_full_card_gives_back_what_is_unused_and_then_refuses():
    allocator = Allocator(limit=64 * MiB)
    allocator.free(allocator.malloc(30 * MiB))
    kept = allocator.malloc(32 * MiB)  # the free 30 are too small: a segment more
    assert allocator.reserved == 62 * MiB and allocator.given_back == 0
    allocator.free(allocator.malloc(31 * MiB))  # only by giving back the 30
    assert allocator.reserved == 64 * MiB and (allocator.mallocs, allocator.given_back) == (3, 1)
    with pytest.raises(AllocatorError, match=r"out of memory: 0\.039 GiB more beside 0\.031 GiB allocated, of 0\.062"):
        allocator.malloc(40 * MiB)
    assert allocator.allocated == kept.size == 32 * MiB


def test_a_segment_in_which_something_lives_is_kept():
    allocator = Allocator()
    big, small = allocator.malloc(12 * MiB), allocator.malloc(4 * MiB)
    allocator.malloc(4 * MiB)
    allocator.free(small)
    allocator.free(big)
    allocator.empty_cache()
    assert allocator.reserved == 20 * MiB and allocator.given_back == 1


def test_an_end_to_addresses_is_far():
    assert ExpandableAllocator().malloc(200 * GiB).size == 200 * GiB
