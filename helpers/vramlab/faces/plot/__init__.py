"""Every figure of the course, in one look; matplotlib loads when the first one is drawn.

Each function returns the figure, drawn and not shown: end a cell with `plt.show()`. The data under a figure prints as
text with `print(plot.table(figure))`; `plot.alt_text(figure)` says it in words, which Jupyter stores with the picture.
`unit` is "GiB", "MiB", "KiB" or "B" everywhere, and `limit` bytes, a `Gpu` or the name of one.
"""

from .bars import bars, compare, compare_many
from .canvas import canvas
from .error import scatter_error
from .ranks import pipeline, who_holds_what
from .style import alt_text, table
from .sweep import sweep
from .timeline import timeline

__all__ = [
    "alt_text",
    "bars",
    "canvas",
    "compare",
    "compare_many",
    "pipeline",
    "scatter_error",
    "sweep",
    "table",
    "timeline",
    "who_holds_what",
]
