"""One look for every figure: a colour and a hatch per category, one size, fonts that come with matplotlib, alt text."""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from ...report.errors import needing
from ...report.report import text_table

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
LINES = (("#0072B2", "o", "-"), ("#D55E00", "s", "--"), ("#009E73", "^", "-."), ("#CC79A7", "D", ":"))
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
    "axes.axisbelow": True,
    "text.color": INK,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
}


@cache
def figure_class() -> type:
    """The figures of this package: matplotlib's, which also carry their data as a table and say it in words."""
    import matplotlib.pyplot as plt
    from matplotlib.figure import Figure

    class LabFigure(Figure):
        rows: Sequence[tuple[str, ...]] = ()
        alt = heading = ""

        def __repr__(self) -> str:
            return f"<Figure: {self.heading}>"

        def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict, dict]:
            # Jupyter merges this with the picture that the inline backend makes; nbconvert reads the alt text from it.
            # A shown figure is closed, or the inline backend would show it once more at the end of the cell.
            if "inline" in plt.get_backend():
                plt.close(self)
            return {"text/plain": repr(self)}, {"image/png": {"alt": self.alt}}

    return LabFigure


@contextmanager
def styled() -> Iterator[None]:
    """While entered, figures are drawn in this package's style; the reader's own settings are left alone."""
    with needing("plot"):
        import matplotlib.pyplot as plt

    # Not `rc_context`: it would also undo what a notebook's backend switches on when the first figure loads it.
    own, before = {key: plt.rcParams[key] for key in RC}, plt.get_fignums()
    plt.rcParams.update(RC)
    try:
        yield
    except BaseException:
        for number in set(plt.get_fignums()).difference(before):  # a notebook would show half a figure
            plt.close(number)
        raise
    finally:
        plt.rcParams.update(own)


def drawn(function: Callable) -> Callable:
    """`function`, drawing in this package's style."""
    return styled()(function)


def start(heading: str, subtitle: str = "", rows: int = 1, **options: Any):
    """A new figure with its heading and subtitle: (figure, its axes, or a list of them when `rows` > 1)."""
    import matplotlib.pyplot as plt

    figure = plt.figure(FigureClass=figure_class(), figsize=SIZE, dpi=DPI, layout="constrained")
    figure.heading = heading
    figure.suptitle(heading, x=0.01, ha="left", fontweight="bold", fontsize=11.5)
    axes = figure.subplots(rows, 1, squeeze=False, **options)[:, 0]
    axes[0].set_title(textwrap.fill(subtitle, 78), loc="left", color="#444444", linespacing=1.25)
    for ax in axes:
        ax.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        # Tick labels are made late, when the reader's own settings hold again: say their font now.
        ax.tick_params(labelsize=9.5, labelfontfamily=FONT, color=INK)
    return figure, axes[0] if rows == 1 else list(axes)


def finish(figure, rows: Sequence[tuple[str, ...]], alt: str, say_rows: bool = False):
    """The figure with a legend below the axes, where it hides nothing, its data as a table, and its alt text.

    `say_rows` adds the table in words: each line whole, or where lines are many from its total on.
    """
    if say_rows:
        head, *lines = rows
        first = head.index("total") if len(lines) > 5 and "total" in head else 1
        cells = [(line[0], zip(head[first:], line[first:], strict=True)) for line in lines]
        said = (
            f"{name}: {', '.join(f'{column} {cell}' for column, cell in pairs if cell != '–')}" for name, pairs in cells
        )
        alt = f"{alt} {head[0]}: {'; '.join(said)}."
    found: dict[str, Any] = {}
    for ax in figure.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if found:
        figure.legend(found.values(), found, loc="outside lower left", ncols=3, handlelength=1.8, columnspacing=1.4)
    figure.rows, figure.alt = list(rows), " ".join(alt.split())
    figure.draw_without_rendering()  # once, so that what is made late takes this style too
    return figure


def table(figure) -> str:
    """The data of a figure of this package as a text table, to be printed under it."""
    return text_table(_own(figure).rows)


def alt_text(figure) -> str:
    """The figure in words, for readers who do not see it."""
    return _own(figure).alt


def _own(figure):
    if type(figure).__name__ != "LabFigure":
        raise ValueError(f"this is no figure of vramlab.plot but a {type(figure).__name__}.")
    return figure


def look(keys: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Face, hatch and edge of each key: a category's own, and for other keys the palette in order."""
    spare = iter([*LOOK.values()] * (1 + len(keys) // len(LOOK)))
    chosen = {key: LOOK.get(key) or next(spare) for key in keys}
    return {key: {"facecolor": c, "hatch": h, "edgecolor": INK, "linewidth": 0.5} for key, (c, h) in chosen.items()}
