"""What chapter 03's figures are made of."""

from vramlab_course.chapters.chapter_03 import pairings


def test_each_way_to_deal_into_pairs_comes_once():
    ways = [tuple(map(tuple, pairs)) for pairs in pairings(list(range(8)))]
    assert len(set(ways)) == len(ways) == 105
    assert ways[0] == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert all(sorted(sum(way, ())) == list(range(8)) for way in ways)
