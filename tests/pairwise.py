"""Few combinations that hold every pair: what goes wrong goes wrong, as a rule, where two settings
meet.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

Row = dict[str, Hashable]
Pair = tuple[str, Hashable, str, Hashable]


def pairs_of(row: Mapping[str, Hashable]) -> set[Pair]:
    """The pairs of settings that meet in `row`, in the order of its factors."""
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(row, 2)}


def pairwise(
    factors: Mapping[str, Iterable[Hashable]],
    valid: Callable[[Row], Any],
    optional: Iterable[tuple[str, str]] = (),
    tries: int = 40,
) -> tuple[list[Row], set[Pair]]:
    """Rows in which every pair of values of two factors occurs that any valid row holds; always the
    same rows.

    Args:
        factors: name to values.
        valid: whether a row can be; a pair that no valid row was found for is left out.
        optional: pairs of factors whose values need not all meet.
    Returns:
        The rows, and the pairs that were left out as impossible.
    """
    factors = {name: tuple(values) for name, values in factors.items()}
    dice = random.Random(0)
    open_pairs = {
        (a, x, b, y)
        for a, b in itertools.combinations(factors, 2)
        if (a, b) not in optional
        for x in factors[a]
        for y in factors[b]
    }
    rows, impossible = [], set()
    while open_pairs:
        first = min(open_pairs, key=str)
        best, gain = None, 0
        for _ in range(tries):
            row = {name: dice.choice(values) for name, values in factors.items()}
            row[first[0]], row[first[2]] = first[1], first[3]
            new = len(pairs_of(row) & open_pairs)
            if new > gain and valid(row):
                best, gain = row, new
        if best is None:
            impossible.add(first)
            open_pairs.discard(first)
        else:
            rows.append(best)
            open_pairs -= pairs_of(best)
    return rows, impossible


def every_value(rows: list[Row], times: int = 2) -> list[Row]:
    """The first rows in which each value of each factor occurs `times`, or as often as it does in
    all rows.
    """
    left = Counter(item for row in rows for item in row.items())
    left = {item: min(count, times) for item, count in left.items()}
    chosen = []
    while any(left.values()):
        row = max(
            (r for r in rows if r not in chosen),
            key=lambda r: sum(left[item] > 0 for item in r.items()),
        )
        chosen.append(row)
        left.update({item: max(0, left[item] - 1) for item in row.items()})
    return chosen
