"""The figures of the course in one look, drawn and not shown: end a cell with `plt.show()`.

`print(plot.table(figure))` prints a figure's data, `figure.alt` describes it; Jupyter stores that
with the picture. `unit` is "GiB", "MiB", "KiB" or "B" everywhere, and `limit` a `Gpu` or its name.
"""

from .figures import bars, compare, fits, timeline
from .style import canvas, table

__all__ = ["bars", "canvas", "compare", "fits", "table", "timeline"]
