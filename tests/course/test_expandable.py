"""Expandable segments and a full card: invariants under any sequence, and sequences worked out by
hand from the C++.
"""

import pytest
from hardware.test_allocator import ACTIONS, check_pool, living
from hypothesis import given
from hypothesis import strategies as st
from vramlab.hardware.allocator import ADDRESSES, Allocator, AllocatorError
from vramlab.report.report import GiB, MiB
from vramlab_course.expandable import ExpandableAllocator


@given(ACTIONS, st.sampled_from([None, 100 * MiB]))
def test_invariants(actions, limit):
    allocator = ExpandableAllocator(limit=limit)
    for alive in living(allocator, actions):
        mapped = 0
        for index, pool in allocator.pools.items():
            page, start, holes = (
                (2 if pool.small else 20) * MiB,
                ADDRESSES * (index + 1),
                pool.holes,
            )
            check_pool(pool, {start: start + ADDRESSES}, alive, holes)
            assert not set(holes) & set(holes.values()), "holes that touch are one"
            assert all(start % page == end % page == 0 for start, end in holes.items())
            mapped += ADDRESSES - sum(end - start for start, end in holes.items())
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
    """Each a page more than the last, and gone before the next: the classic case, in one segment
    and in many.
    """
    grown, many = ExpandableAllocator(), Allocator()
    for pages in range(1, 11):
        for allocator in (grown, many):
            allocator.free(allocator.malloc(pages * 20 * MiB))
    assert grown.reserved == 200 * MiB
    assert many.reserved == sum(range(1, 11)) * 20 * MiB == 1100 * MiB


def test_the_end_that_can_grow_is_taken_last_and_of_equal_ones_the_first():
    allocator = ExpandableAllocator()
    first, _, second, _, last = (allocator.malloc(n * MiB) for n in (6, 2, 6, 2, 3))
    for block in (second, first, last):
        allocator.free(block)  # 6 MiB free twice, 4 behind them with all addresses
    assert [allocator.malloc(4 * MiB).address for _ in range(2)] == [first.address, second.address]


def test_pages_in_the_middle_are_given_back_and_used_again():
    allocator = ExpandableAllocator(limit=100 * MiB)
    blocks = [allocator.malloc(20 * MiB) for _ in range(5)]
    for index in (1, 3, 2):
        allocator.free(blocks[index])
        allocator.empty_cache()
    assert (allocator.reserved, allocator.given_back, len(blocks[0].pool.holes)) == (40 * MiB, 3, 2)
    again = allocator.malloc(60 * MiB)
    assert again.address == blocks[1].address and allocator.reserved == 100 * MiB


def test_a_full_card_gives_back_what_is_unused_and_then_refuses():
    allocator = Allocator(limit=64 * MiB)
    allocator.free(allocator.malloc(30 * MiB))
    kept = allocator.malloc(32 * MiB)  # the free 30 are too small: a segment more
    assert allocator.reserved == 62 * MiB and allocator.given_back == 0
    allocator.free(allocator.malloc(31 * MiB))  # only by giving back the 30
    assert allocator.reserved == 64 * MiB and (allocator.mallocs, allocator.given_back) == (3, 1)
    with pytest.raises(
        AllocatorError,
        match=r"out of memory: 0\.039 GiB more beside 0\.031 GiB allocated, of 0\.062",
    ):
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
