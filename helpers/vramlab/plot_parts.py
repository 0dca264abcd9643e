"""What several figures are made of: stacks of bars and areas, the card's limit, and the table under a figure."""

from collections.abc import Mapping, Sequence

from . import plot_style as style
from .report import Bytes, Interval, Report

Split = Bytes | Mapping[str, float]


def split_of(report: Report) -> Split | str:
    """What a report's bar shows: the split at the peak, or in words why there is none."""
    if report.status == "ok":
        return report.peak
    return "out of memory" if report.status == "oom" else report.status


def stack(ax, positions: Sequence[float], splits: Sequence[Split | str], unit: str, width: float = 0.68) -> None:
    """Draws one bar per split, one container per key; what is negative (over-explained) hangs below zero."""
    size = style.check_unit(unit)
    keys = style.used(splits)
    looks = style.look(keys)
    up, down = [0.0] * len(splits), [0.0] * len(splits)
    for key in keys:
        heights = [0 if isinstance(split, str) else dict(split.items()).get(key, 0) / size for split in splits]
        bottoms = [up[i] if h >= 0 else down[i] for i, h in enumerate(heights)]
        ax.bar(positions, heights, width, bottom=bottoms, label=style.name(key), **looks[key])
        up = [u + max(h, 0) for u, h in zip(up, heights, strict=True)]
        down = [d + min(h, 0) for d, h in zip(down, heights, strict=True)]
    if any(down):
        ax.axhline(0, color=style.INK, linewidth=0.8)
    ax.set_ylabel(unit)


def areas(ax, x: Sequence[float], splits: Sequence[Bytes], unit: str, step: str | None = None) -> None:
    """Draws stacked areas, one collection per category; what is negative hangs below zero."""
    size = style.check_unit(unit)
    keys = style.used(splits)
    looks = style.look(keys)
    up, down = [0.0] * len(x), [0.0] * len(x)
    for key in keys:
        heights = [getattr(split, key) / size for split in splits]
        base = [u if h >= 0 else d for u, d, h in zip(up, down, heights, strict=True)]
        edge = [b + h for b, h in zip(base, heights, strict=True)]
        ax.fill_between(x, base, edge, step=step, label=style.name(key), **looks[key])
        up = [u + max(h, 0) for u, h in zip(up, heights, strict=True)]
        down = [d + min(h, 0) for d, h in zip(down, heights, strict=True)]
    ax.set_ylabel(unit)


def total(split: Split) -> float:
    """The bytes of a split, whichever kind it is."""
    return sum(n for _, n in split.items())


def size_of(value: Report | Bytes | Interval | float) -> float:
    """One number of bytes: a report's peak, a split's total, the likeliest of an interval."""
    if isinstance(value, Report | Bytes):
        return total(value.peak if isinstance(value, Report) else value)
    return value.value if isinstance(value, Interval) else value


def split_rows(names: Sequence[str], splits: Sequence[Split | str], unit: str, corner: str) -> list[tuple[str, ...]]:
    """A text table's rows: a line per split, a column per key, and the total."""
    keys = style.used(splits)
    rows = [(f"{corner}, {unit}" if corner != unit else unit, *map(style.name, keys), "total")]
    for label, split in zip(names, splits, strict=True):
        if isinstance(split, str):
            rows.append((str(label), *["–"] * len(keys), split))
        else:
            found = dict(split.items())
            cells = [style.exact(found.get(key, 0), unit) for key in keys]
            rows.append((str(label), *cells, style.exact(total(split), unit)))
    return rows


def limit_of(limit) -> tuple[int, str]:
    """(bytes, name) of a limit given as bytes, as a `Gpu` or as its name. Raises ValueError for anything else."""
    if isinstance(limit, str):
        from .gpu import find_gpu

        limit = find_gpu(limit)
    if hasattr(limit, "total") and hasattr(limit, "name"):
        return limit.total, limit.name
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0:
        raise ValueError(f"limit is {limit!r}, but it must be bytes over 0, a Gpu or its name.")
    return int(limit), "limit"


def draw_limit(ax, limit, unit: str) -> None:
    """A line at what the card has, named in the legend."""
    size, label = limit_of(limit)
    text = f"{label}: {style.amount(size, unit)} {unit}"
    ax.axhline(size / style.check_unit(unit), color=style.ALARM, linewidth=1.4, linestyle=(0, (6, 3)), label=text)


def subtitle(reports: Sequence[Report]) -> str:
    """The recipe: one line where all share it, else what they share."""
    titles = list(dict.fromkeys(r.title for r in reports))
    if len(titles) == 1:
        return titles[0]
    first, *others = (title.split(" · ") for title in titles)
    return " · ".join(part for part in first if all(part in other for other in others))
