"""The numbers of figures: bytes by category, labels and table rows, and a card's line."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...hardware.gpu import Gpu, find_gpu, usable_memory
from ...report.compare import check_unit, failure
from ...report.report import CATEGORIES, Bytes, Report, in_unit
from . import style

Split = Mapping[str, float]  # bytes by category


def split_of(value: Report | Bytes | Split) -> Split:
    """Return the bytes by category of a report's peak or of a split.

    Raises ValueError for a run that failed.
    """
    if isinstance(value, Report):
        if value.status != "ok":
            raise ValueError(f"a run that failed has no bytes to draw: {failure(value)}.")
        value = value.peak
    return dict(value.items())


def amount(n: float, unit: str = "GiB") -> str:
    """Return `n` bytes in `unit` with three significant figures, without the unit.

    All figures of "B".
    """
    value = abs(n) / check_unit(unit)
    # The number of digits before the point comes off the three; nine are enough for a byte in GiB.
    return in_unit(n, unit, min(max(2 - math.floor(math.log10(value)), 0), 9) if value else 0)


def label_of(category: str) -> str:
    """Return a category as the reader sees it."""
    return category.replace("_", " ")


def used(splits: Sequence[Split]) -> list[str]:
    """Return the keys that are not 0 everywhere.

    CATEGORIES in their order, then others as they appear.
    """
    # A dictionary keeps the order in which keys appear, which a set would not.
    keys = dict.fromkeys(key for split in splits for key, n in split.items() if n)
    return [c for c in CATEGORIES if c in keys] + [key for key in keys if key not in CATEGORIES]


def layers(splits: Sequence[Split], unit: str) -> list[tuple[list[float], dict[str, Any]]]:
    """Return each key's heights in `unit`, one per split, and how it is drawn.

    "_" keeps the inkless from the legend.
    """
    size = check_unit(unit)
    drawn = []
    # Under half a percent of the tallest bar a layer is thinner than a printed line, so nobody
    # could find its legend entry.
    ink = 0.005 * max((sum(map(abs, split.values())) for split in splits), default=0)
    for key, look in style.look(used(splits)).items():
        heights = [split.get(key, 0) / size for split in splits]
        seen = max(map(abs, heights)) * size > ink
        # matplotlib leaves labels that begin with an underscore out of a legend.
        drawn.append((heights, {"label": "_" * (not seen) + label_of(key), **look}))
    return drawn


def split_rows(
    names: Sequence[str],
    splits: Sequence[Split],
    unit: str,
    corner: str,
) -> list[tuple[str, ...]]:
    """Return a table: a line per split, a column per key, and the total."""
    keys = used(splits)
    rows = []
    for name, split in zip(names, splits, strict=True):
        # The total is summed here, since a split's own may leave a category out.
        sizes = [*(split.get(key, 0) for key in keys), sum(split.values())]
        rows.append((name, *(in_unit(n, unit) for n in sizes)))
    return [(corner, *map(label_of, keys), "total"), *rows]


def draw_limit(
    line: Callable[..., Any],
    card: Gpu | str | None,
    unit: str,
    dash: Any = (0, (6, 3)),
) -> None:
    """Draw a line where a card is full with `ax.axhline` or another, named in the legend.

    None without a card.
    """
    if card is not None:
        card, look = find_gpu(card), {"color": style.ALARM, "linewidth": 1.4, "linestyle": dash}
        room = usable_memory(card)
        line(room / check_unit(unit), label=f"{card.name}: {amount(room, unit)} {unit}", **look)


def shared_title(reports: Sequence[Report]) -> str:
    """Return what the reports' titles share, in one line."""
    # Titles are parts between dots; what only one report says would mislead as a subtitle for all.
    first, *others = (title.split(" · ") for title in dict.fromkeys(r.title for r in reports))
    return " · ".join(part for part in first if all(part in other for other in others))
