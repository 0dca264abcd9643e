"""What figures show: bytes split over categories, as layers to draw, as rows of a table, and the card's limit."""

import math
from collections.abc import Iterator, Mapping, Sequence

from ...report.compare import check_unit
from ...report.report import CATEGORIES, Bytes, Interval, Report, format_bytes
from . import style

Split = Bytes | Mapping[str, float]


def split_of(report: Report) -> Split | str:
    """What a report's bar shows: the split at the peak, or in words why there is none."""
    return report.peak if report.status == "ok" else "out of memory" if report.status == "oom" else report.status


def size_of(value: Report | Bytes | Interval | Split | float) -> float:
    """One number of bytes: a report's peak, a split's total, the likeliest of an interval."""
    if isinstance(value, Report):
        value = value.peak
    if isinstance(value, Bytes | Mapping):
        return sum(n for _, n in value.items())
    return value.value if isinstance(value, Interval) else value


def amount(n: float, unit: str = "GiB") -> str:
    """`n` bytes with three significant figures and no unit, for a label that stands in a figure."""
    if unit == "B":
        return exact(n, unit)
    value = abs(n) / check_unit(unit)
    digits = min(max(2 - math.floor(math.log10(value)), 0), 9) if value else 0
    return format_bytes(n, unit, digits).rsplit(" ", 1)[0]


def exact(n: float, unit: str = "GiB") -> str:
    """`n` bytes as in the text tables, without the unit."""
    if unit == "B":
        return f"{n:,.0f}" if n == int(n) else f"{n:,.2f}"
    return format_bytes(n, unit).rsplit(" ", 1)[0]


def name(category: str) -> str:
    """A category as the reader sees it."""
    return category.replace("_", " ")


def used(splits: Sequence[Split | str]) -> list[str]:
    """The keys with something in them, in the order of CATEGORIES, other keys after them as they first appear."""
    keys = dict.fromkeys(key for split in splits if not isinstance(split, str) for key, n in split.items() if n)
    return [c for c in CATEGORIES if c in keys] + [key for key in keys if key not in CATEGORIES]


def layers(splits: Sequence[Split | str], unit: str) -> Iterator[tuple[list[float], list[float], dict]]:
    """Where each key's layer starts, how high it is, and its looks; what is negative (over-explained) hangs below 0."""
    size, keys = check_unit(unit), used(splits)
    up, down = [0.0] * len(splits), [0.0] * len(splits)
    for key, look in style.look(keys).items():
        heights = [0 if isinstance(split, str) else dict(split.items()).get(key, 0) / size for split in splits]
        yield (
            [u if h >= 0 else d for u, d, h in zip(up, down, heights, strict=True)],
            heights,
            {"label": name(key), **look},
        )
        up = [u + max(h, 0) for u, h in zip(up, heights, strict=True)]
        down = [d + min(h, 0) for d, h in zip(down, heights, strict=True)]


def areas(ax, x: Sequence[float], splits: Sequence[Bytes], unit: str, step: str | None = None) -> None:
    """Draws stacked areas, one collection per category."""
    for base, heights, look in layers(splits, unit):
        ax.fill_between(x, base, [b + h for b, h in zip(base, heights, strict=True)], step=step, **look)
    ax.set_ylabel(unit)


def split_rows(names: Sequence[str], splits: Sequence[Split | str], unit: str, corner: str) -> list[tuple[str, ...]]:
    """A text table's rows: a line per split, a column per key, and the total."""
    keys = used(splits)
    rows = [(corner, *map(name, keys), "total")]
    for label, split in zip(names, splits, strict=True):
        if isinstance(split, str):
            rows.append((label, *["–"] * len(keys), split))
        else:
            found = dict(split.items())
            rows.append((label, *(exact(found.get(key, 0), unit) for key in keys), exact(size_of(split), unit)))
    return rows


def limit_of(limit) -> tuple[float, str]:
    """(bytes, name) of a limit given as bytes, as a `Gpu` or as its name; no limit is infinite. Raises ValueError."""
    if limit is None:
        return math.inf, ""
    if isinstance(limit, str):
        from ...hardware.gpu import find_gpu

        limit = find_gpu(limit)
    if hasattr(limit, "total") and hasattr(limit, "name"):
        return limit.total, limit.name
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0:
        raise ValueError(f"limit is {limit!r}, but it must be bytes over 0, a Gpu or its name.")
    return int(limit), "limit"


def draw_limit(ax, limit, unit: str) -> float:
    """A line at what the card has, named in the legend; returns its height, 0 without a limit."""
    if limit is None:
        return 0
    size, label = limit_of(limit)
    text, height = f"{label}: {amount(size, unit)} {unit}", size / check_unit(unit)
    ax.axhline(height, color=style.ALARM, linewidth=1.4, linestyle=(0, (6, 3)), label=text)
    return height


def subtitle(reports: Sequence[Report]) -> str:
    """The recipe: one line where all share it, else what they share."""
    first, *others = (title.split(" · ") for title in dict.fromkeys(r.title for r in reports))
    return " · ".join(part for part in first if all(part in other for other in others))
