"""Every figure of the course, in one look; matplotlib loads when the first one is drawn.

Each function returns the figure, drawn and not shown: end a cell with `plt.show()`. The data under a figure prints as
text with `print(plot.table(figure))`; `plot.alt_text(figure)` says it in words, which Jupyter stores with the picture.
"""

from .plot_bars import bars, compare, compare_many, phases
from .plot_error import scatter_error
from .plot_style import alt_text, table
from .plot_sweep import sweep
from .plot_timeline import timeline

__all__ = ["alt_text", "bars", "compare", "compare_many", "phases", "scatter_error", "sweep", "table", "timeline"]
