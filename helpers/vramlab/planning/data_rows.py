"""How wide the rows of a data set are: padded, joined or packed."""

import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from functools import cached_property

PACKED_AT_ONCE = 1000  # samples: `trl.pack_dataset` maps the data set in batches of that size


class DataRows:
    """Samples of sorted `lengths`, in rows of at most `longest` tokens."""

    def __init__(self, lengths: Sequence[int], longest: int) -> None:
        self.lengths = lengths
        self.longest = longest
        # By samples drawn, since a search asks for the same few over and over.
        self._widths: dict[int, float] = {}

    @cached_property
    def packed_rows(self) -> int:
        """How many rows of seq_len tokens SFTTrainer packs the data set into.

        It packs PACKED_AT_ONCE samples at a time; every n-th of the sorted ones stand for those.
        """
        cut = [min(length, self.longest) for length in self.lengths]
        # So many batches of samples, of which the last one's rest counts too.
        times = math.ceil(len(cut) / PACKED_AT_ONCE)
        return sum(_rows_of(cut[first::times], self.longest) for first in range(times))

    def packed_in_step(self, samples: int) -> int:
        """Return the packed rows that have about so many samples."""
        return max(1, round(samples * self.packed_rows / len(self.lengths)))

    def packed_lengths(self, rows: int, is_usual: bool) -> tuple[int, ...]:
        """Return the samples of `rows` full rows, of the data set's most samples to a row.

        If `is_usual` they have the mean row's pairs of tokens, which take attention its time.
        """
        longest = self.longest
        lengths = self.lengths
        # The shortest samples first: as many as can stand in one row.
        sums = itertools.accumulate(lengths[:PACKED_AT_ONCE])
        count = sum(total <= longest for total in sums)
        if is_usual:
            pairs = sum(min(length, longest) ** 2 for length in lengths) / self.packed_rows
            # So many equal samples have the mean row's pairs, since n samples of L/n have L²/n.
            count = int(longest**2 / pairs)
        shortest = longest // max(1, count)
        # The first takes what division leaves, so that rows are full.
        first = longest - max(0, count - 1) * shortest
        return ((first,) + (shortest,) * (count - 1)) * rows

    def mean_width(self, drawn: int) -> float:
        """Return the mean tokens of the longest of `drawn` samples, drawn at random."""
        if drawn not in self._widths:
            lengths = self.lengths
            count = len(lengths)
            parts = []
            # Sorted, the sample `rank` is the longest where all are among the first rank + 1, but
            # not all among the first `rank`.
            for rank, length in enumerate(lengths):
                probability = ((rank + 1) / count) ** drawn - (rank / count) ** drawn
                parts.append(min(length, self.longest) * probability)
            self._widths[drawn] = sum(parts)
        return self._widths[drawn]


def _rows_of(lengths: Sequence[int], longest: int) -> int:
    """Return the rows of `longest` tokens that sorted samples are packed into.

    Best fit decreasing, as `trl.data_utils._pack_bfd`.
    """
    rows = 0
    free: list[int] = []  # tokens in each row that is not full, sorted
    for length in reversed(lengths):
        # The fullest row that still has room: the list of what is free is sorted.
        place = bisect_left(free, length)
        if place < len(free):
            left = free.pop(place) - length
        else:
            rows += 1
            left = longest - length
        if left:
            insort(free, left)
    return rows
