"""One look for every figure: a colour and a hatch per category, one size, fonts that come with matplotlib, alt text."""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from typing import Any

from .report import CATEGORIES, Bytes, GiB, KiB, MiB, format_bytes, text_table

# Okabe and Ito's palette (Color Universal Design, 2008), which readers of every kind of colour vision tell apart; the
# hatches do the same in print and in grey. The order keeps neighbours in a stack apart in lightness.
LOOK = {
    "parameters": ("#0072B2", ""),
    "gradients": ("#E69F00", "//"),
    "optimizer_states": ("#009E73", "\\\\"),
    "activations": ("#56B4E9", ".."),
    "temporaries": ("#D55E00", "xx"),
    "buffers": ("#CC79A7", "||"),
    "inputs": ("#F0E442", "--"),
    "workspace": ("#999999", "++"),
    "unexplained": ("#FFFFFF", "////"),
}
LINES = (
    ("#0072B2", "o", "-"),
    ("#D55E00", "s", "--"),
    ("#009E73", "^", "-."),
    ("#CC79A7", "D", ":"),
    ("#000000", "v", "-"),
)
INK, FAINT, ALARM = "#222222", "#EEEEEE", "#B00020"
PATCH = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}  # keeps words legible where a line runs through them
# 6.4 inches at 11 points stay readable where a phone shows the figure 360 pixels wide.
SIZE, DPI, FONT = (6.4, 4.8), 100, "DejaVu Sans"
RC = {
    "font.family": [FONT],
    "font.size": 10.5,
    "axes.titlesize": 9.5,
    "axes.labelsize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.axisbelow": True,
    "axes.facecolor": "white",
    "figure.facecolor": "white",
    "text.color": INK,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "mathtext.default": "regular",
}
UNIT_SIZES = {"GiB": GiB, "MiB": MiB, "KiB": KiB, "B": 1}


@cache
def figure_class() -> type:
    """The figures of this package: matplotlib's, which also carry their data as a table and say it in words."""
    import matplotlib.pyplot as plt
    from matplotlib.figure import Figure

    class LabFigure(Figure):
        rows: Sequence[tuple[str, ...]] = ()
        alt = ""
        heading = ""

        def __repr__(self) -> str:
            return f"<Figure: {self.heading}>"

        def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict, dict]:
            # Jupyter merges this with the picture that the inline backend makes; nbconvert reads the alt text from it.
            # A shown figure is closed, or the inline backend would show it once more at the end of the cell.
            if "inline" in plt.get_backend():
                plt.close(self)
            return {"text/plain": repr(self)}, {"image/png": {"alt": self.alt}}

    return LabFigure


def drawn(function: Callable) -> Callable:
    """Draws in this package's style whatever the reader's own settings are, and leaves those alone."""

    @wraps(function)
    def inside(*args: Any, **options: Any):
        import matplotlib.pyplot as plt

        # Not `rc_context`: it would also undo what a notebook's backend switches on when the first figure loads it.
        own = {key: plt.rcParams[key] for key in RC}
        before = plt.get_fignums()
        plt.rcParams.update(RC)
        try:
            return function(*args, **options)
        except BaseException:
            for number in set(plt.get_fignums()).difference(before):  # a notebook would show half a figure
                plt.close(number)
            raise
        finally:
            plt.rcParams.update(own)

    return inside


def start(heading: str, subtitle: str = "", rows: int = 1, **options: Any):
    """A new figure with its heading and (upper) axes' subtitle: (figure, axes, or a list of them when `rows` > 1)."""
    import matplotlib.pyplot as plt

    figure = plt.figure(FigureClass=figure_class(), figsize=SIZE, dpi=DPI, layout="constrained")
    figure.heading = heading
    figure.suptitle(heading, x=0.01, ha="left", fontweight="bold", fontsize=11.5)
    axes = figure.subplots(rows, 1, squeeze=False, **options)[:, 0]
    axes[0].set_title(wrap(subtitle, 78), loc="left", color="#444444", linespacing=1.25)
    for ax in axes:
        ax.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        # Tick labels are made late, when the reader's own settings hold again: say their font now.
        ax.tick_params(labelsize=9.5, labelfontfamily=FONT, color=INK)
    return figure, axes[0] if rows == 1 else list(axes)


def wrap(text: str, width: int) -> str:
    """`text` in lines of at most `width` letters, broken at the recipe's " · " where that can be."""
    lines = [""]
    for part in text.split(" · "):
        joined = f"{lines[-1]} · {part}" if lines[-1] else part
        if lines[-1] and len(joined) > width:
            lines.append(part)
        else:
            lines[-1] = joined
    return "\n".join(piece for line in lines for piece in textwrap.wrap(line, width) or [""])


def legend(figure) -> None:
    """The legend below the axes, where it hides nothing: what is stacked in its order, then lines, no entry twice."""
    from matplotlib.collections import LineCollection
    from matplotlib.lines import Line2D

    found: dict[str, Any] = {}
    for ax in figure.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    entries = sorted(found.items(), key=lambda entry: isinstance(entry[1], Line2D | LineCollection))
    if entries:
        labels, handles = zip(*entries, strict=True)
        figure.legend(handles, labels, loc="outside lower left", ncols=3, handlelength=1.8, columnspacing=1.4)


def finish(figure, rows: Sequence[tuple[str, ...]], alt: str):
    """The figure with its data as a table and its alt text, laid out once so that late parts take this style too."""
    figure.rows, figure.alt = list(rows), " ".join(alt.split())
    figure.draw_without_rendering()
    return figure


def table(figure) -> str:
    """The data of a figure of this package as a text table, to be printed under it."""
    return text_table(_own(figure).rows)


def alt_text(figure) -> str:
    """The figure in words, for readers who do not see it."""
    return _own(figure).alt


def _own(figure):
    figure = getattr(figure, "figure", figure)  # axes know their figure
    if not hasattr(figure, "rows") or not hasattr(figure, "alt"):
        raise ValueError(f"this is no figure of vramlab.plot but a {type(figure).__name__}.")
    return figure


def check_unit(unit: str) -> int:
    """How many bytes a unit is. Raises ValueError for unknown ones."""
    if unit not in UNIT_SIZES:
        raise ValueError(f"unit is {unit!r}, but allowed are {', '.join(UNIT_SIZES)}.")
    return UNIT_SIZES[unit]


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


def used(splits: Sequence[Bytes | Mapping[str, float] | str]) -> list[str]:
    """The keys with something in them, in the order of CATEGORIES, other keys after them as they first appear."""
    keys = dict.fromkeys(key for split in splits if not isinstance(split, str) for key, n in split.items() if n)
    return [c for c in CATEGORIES if c in keys] + [key for key in keys if key not in CATEGORIES]


def look(keys: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Face, hatch and edge of each key: a category's own, and for other keys the palette in order."""
    spare = iter([*LOOK.values()] * (1 + len(keys) // len(LOOK)))
    chosen = {key: LOOK.get(key) or next(spare) for key in keys}
    return {key: {"facecolor": c, "hatch": h, "edgecolor": INK, "linewidth": 0.5} for key, (c, h) in chosen.items()}
