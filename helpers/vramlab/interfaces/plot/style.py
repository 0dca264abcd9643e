"""The look of every figure: colours and hatches, one size, the data as a table, alt text."""

import json
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import cycle
from typing import Any

from ...base.data import data_path
from ...base.errors import needing
from ...report.report import text_table

# "categories": Okabe and Ito's palette (Color Universal Design, 2008) suits every kind of colour
# vision; hatches serve grey print. Neighbours in a stack differ in lightness. "rc": matplotlib's
# settings.
DATA = json.loads(data_path("figures.json").read_text(encoding="utf-8"))
LOOK = DATA["categories"]
RC = DATA["rc"]
LINES = (
    ("#0072B2", "o", "-"),
    ("#D55E00", "s", "--"),
    ("#009E73", "^", "-."),
    ("#CC79A7", "D", ":"),
)
INK = "#222222"
FAINT = "#EEEEEE"
ALARM = "#B00020"
PROCESS = "#A9B8C6"
# A tier's colour, which is the site's (site/static/course.css), and its hatch.
TIER_LOOK = {"safe": ("#009E73", ""), "likely": ("#56B4E9", "//"), "tight": ("#E69F00", "..")}
NO_TIER_LOOK = ("#E8A0A8", "xx")  # does not fit: pale, so that the dot can be seen
PATCH = {
    "facecolor": "white",
    "edgecolor": "none",
    "pad": 0.8,
}  # keeps words legible where a line runs through them
# 6.4 inches at 11 points stay readable where a phone shows the figure 360 pixels wide.
SIZE = (6.4, 4.8)
DPI = 200
FONT = RC["font.family"][0]


@cache
def figure_class() -> type:
    """Return a subclass of matplotlib's Figure that holds its data as a table, and alt text."""
    # Late and cached: only a figure needs matplotlib, and all figures need the same class.
    import matplotlib.pyplot as plt
    from matplotlib.figure import Figure

    # pyplot makes figures of any class that it is given as FigureClass.
    class LabFigure(Figure):
        rows: Sequence[tuple[str, ...]] = ()
        alt = heading = ""

        def __repr__(self) -> str:
            return f"<Figure: {self.heading}>"

        def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict, dict]:
            # Jupyter adds this metadata to the inline backend's picture. Close the figure, or it is
            # shown again at the end of the cell.
            if "inline" in plt.get_backend():
                plt.close(self)
            width = round(
                100 * self.get_figwidth()
            )  # on the page; the picture has 2 × as many pixels
            return {"text/plain": repr(self)}, {"image/png": {"alt": self.alt, "width": width}}

    return LabFigure


@contextmanager
def styled() -> Iterator[None]:
    """Draw in this style and restore the reader's settings. Decorates too."""
    with needing("plot"):
        import matplotlib.pyplot as plt

    # Not `rc_context`: it would undo what a notebook's backend sets when the first figure loads it.
    own = {key: plt.rcParams[key] for key in RC}
    plt.rcParams.update(RC)
    try:
        yield
    finally:
        plt.rcParams.update(own)


def start(heading: str, subtitle: str = "", rows: int = 1, **options: Any) -> tuple[Any, Any]:
    """Return a new figure and its axes, a list of them when `rows` > 1.

    `options` go to `Figure.subplots`.
    """
    import matplotlib.pyplot as plt

    figure: Any = plt.figure(
        FigureClass=figure_class(),
        figsize=SIZE,
        dpi=DPI,
        layout="constrained",
    )
    figure.heading = heading
    figure.suptitle(heading, x=0.01, ha="left", fontweight="bold", fontsize=11.5, parse_math=False)
    # squeeze=False always gives a matrix of axes, of which this is the only column.
    axes = figure.subplots(rows, 1, squeeze=False, **options)[:, 0]
    title = textwrap.fill(subtitle, 78)
    axes[0].set_title(title, loc="left", color="#444444", linespacing=1.25, parse_math=False)
    for ax in axes:
        ax.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        # Tick labels are made after the block, under the reader's settings: set their font now.
        ax.tick_params(labelsize=9.5, labelfontfamily=FONT, color=INK)
    return figure, axes[0] if rows == 1 else list(axes)


def finish(
    figure: Any,
    rows: Sequence[tuple[str, ...]],
    alt: str,
    say_rows: bool = False,
) -> Any:
    """Return the figure with a legend below the axes, a table of `rows` and its alt text.

    That may say the rows too.
    """
    handles: dict[str, Any] = {}
    for ax in figure.axes:
        # One entry for a label that several axes have, such as the card's line.
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        figure.legend(
            handles.values(),
            handles,
            loc="outside lower left",
            ncols=3,
            handlelength=1.8,
            columnspacing=1.4,
        )
    figure.rows = list(rows)
    # Alt text is read aloud, so lines and double blanks become single ones.
    figure.alt = " ".join((alt + (_in_words(rows) if say_rows else "")).split())
    for text in _names(figure):
        text.set_parse_math(False)
    figure.draw_without_rendering()  # makes tick labels in this style
    return figure


def _names(figure: Any) -> list[Any]:
    """Texts that may name a model, in which a $ begins no formula.

    Numbers of a logarithmic axis are formulas.
    """
    from matplotlib.category import StrCategoryFormatter
    from matplotlib.ticker import FixedFormatter

    texts = [text for legend in figure.legends for text in legend.get_texts()]
    for ax in figure.axes:
        texts += ax.texts
        for axis in (ax.xaxis, ax.yaxis):
            if isinstance(axis.get_major_formatter(), FixedFormatter | StrCategoryFormatter):
                texts += axis.get_ticklabels()
    return texts


def _in_words(rows: Sequence[tuple[str, ...]]) -> str:
    """A table as a sentence; only totals and what follows where it has many lines."""
    head, *lines = rows
    # A screen reader reads all of it: forty cells would bury the totals.
    first = head.index("total") if len(lines) > 5 and "total" in head else 1
    said = (
        f"{line[0]}: {', '.join(map(' '.join, zip(head[first:], line[first:], strict=True)))}"
        for line in lines
    )
    return f" {head[0]}: {'; '.join(said)}."


@contextmanager
def canvas(
    heading: str,
    alt: str,
    subtitle: str = "",
    rows: Sequence[tuple[str, ...]] = (),
) -> Iterator[Any]:
    """Give axes to draw on with matplotlib in this style.

    `with plot.canvas("A title", alt="A falling line.") as ax: …`.

    `plot.table(ax.figure)` prints `rows`; `alt` says it in words to readers who do not see the
    figure.
    """
    with styled():
        figure, ax = start(heading, subtitle)
        ax.set_prop_cycle(color=[colour for colour, *_ in LINES] + [INK])
        yield ax
        finish(figure, rows, alt)


def table(figure: Any) -> str:
    """Return the data of a figure of this package as a text table."""
    return text_table(figure.rows)


def look(keys: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return face, hatch and edge of each key.

    A category's own, the palette in order for other keys.
    """
    spare = cycle(LOOK.values())
    chosen = {key: LOOK.get(key) or next(spare) for key in keys}
    return {
        key: {"facecolor": c, "hatch": h, "edgecolor": INK, "linewidth": 0.5}
        for key, (c, h) in chosen.items()
    }
