"""The figures of the course in one look, drawn and not shown: end a cell with `plt.show()`.

`print(plot.table(figure))` prints a figure's data, `plot.alt_text(figure)` describes it; Jupyter stores that with the
picture. `unit` is "GiB", "MiB", "KiB" or "B" everywhere, and `limit` a `Gpu` or its name.
"""

from .bars import bars, compare, fits
from .curves import sweep, timeline
from .style import alt_text, canvas, table

__all__ = ["alt_text", "bars", "canvas", "compare", "fits", "sweep", "table", "timeline"]
