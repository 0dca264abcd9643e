"""Figures of a notebook's own, in the look of all others."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from . import style


@contextmanager
def canvas(
    heading: str, alt: str, subtitle: str = "", rows: Sequence[tuple[str, ...]] = (), panels: int = 1, **options: Any
) -> Iterator[Any]:
    """Axes to draw on with matplotlib, in the course's style; a list of them, one below the other, for more `panels`.

        with plot.canvas("Half of it", alt="A line that falls from 4 to 2.", rows=[("x", "y"), ("0", "4")]) as ax:
            ax.plot([0, 1], [4, 2], label="a line")
        plt.show()

    At the end the legend is put below the axes. `rows` are the data as a text table, which `plot.table(ax.figure)` prints;
    `options` go to `Figure.subplots` (sharex, height_ratios). Raises ValueError without an alternative text.
    """
    if not alt.strip():
        raise ValueError("canvas needs alt, a sentence or two for readers who do not see the figure.")
    with style.styled():
        figure, axes = style.start(heading, subtitle, panels, **options)
        for ax in figure.axes:
            ax.set_prop_cycle(color=[colour for colour, *_ in style.LINES] + [style.INK])
        yield axes
        style.finish(figure, rows, alt)
