"""The figures: that no words touch, that a category looks the same everywhere, that notebooks show
them once.
"""

import itertools
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import nbclient
import nbformat
import pytest
from matplotlib.colors import to_hex
from sample_reports import TITLE, measured, of_batch, report, split
from vramlab import plot
from vramlab.interfaces.plot.splits import shared_title
from vramlab.interfaces.plot.style import LOOK, RC
from vramlab.report.report import CATEGORIES, Bytes, GiB, Moment

LONG = (
    TITLE
    + " · 24 layers · accumulate ×4 · checkpointing · eager · LoRA r=8 · nf4 double · fsdp stage "
    "3 × 8 · plain loop"
)
TINY = Bytes(parameters=123_456, activations=23_456)
OVER_EXPLAINED = measured(unexplained=-900_000_000)


pytestmark = pytest.mark.usefixtures("no_figure_stays")


def moments(*runs: tuple[str, int]) -> list[Moment]:
    """A timeline of so many moments of each phase."""
    phases = [phase for phase, count in runs for _ in range(count)]
    return [Moment(i, phase, split()) for i, phase in enumerate(phases)]


SHORT_PHASES = [("forward", 300), *[("backward", 1), ("step", 1), ("between_steps", 1)] * 4]
NAMES = [f"optimizer number {i}" for i in range(11)]
FIGURES = {
    "two bars": lambda: plot.compare(report("predicted", peak=TINY), report(peak=TINY)),
    "nine categories": lambda: plot.compare(report("predicted"), report(), measured(), limit="T4"),
    "long title": lambda: plot.compare(report(title=LONG), measured(title=LONG), limit="T4"),
    "huge": lambda: plot.compare(report(scale=300), measured(300), limit="H200"),
    "over-explained": lambda: plot.compare(report(), OVER_EXPLAINED),
    "one bar": lambda: plot.compare(report()),
    "many labels": lambda: plot.bars([f"LoRA r={i}" for i in range(9)], [report()] * 9),
    "eleven bars": lambda: plot.bars(NAMES, [{"parameters": i + 1} for i in range(11)], unit="B"),
    "timeline": lambda: plot.timeline(report()),
    "short phases": lambda: plot.timeline(report(timeline=moments(*SHORT_PHASES))),
    "one phase": lambda: plot.timeline(report(timeline=moments(("forward", 1)))),
}


def boxes(figure) -> dict[str, object]:
    """Each piece of visible text to where it stands, in pixels."""
    figure.draw_without_rendering()
    axes = [*figure.axes, *(child for ax in figure.axes for child in ax.child_axes)]
    found = {"heading": figure._suptitle}
    for i, ax in enumerate(axes):
        found |= {
            f"{i} left title": ax._left_title,
            f"{i} x": ax.xaxis.label,
            f"{i} y": ax.yaxis.label,
        }
        found |= {f"{i} text {k} {text.get_text()}": text for k, text in enumerate(ax.texts)}
        for name, axis in (("x", ax.xaxis), ("y", ax.yaxis)):
            low, high = sorted(axis.get_view_interval())
            span = 1e-9 * (high - low)
            ticks = [
                t
                for t in axis.get_major_ticks()
                if low - span <= t.get_loc() <= high + span and axis.get_visible()
            ]
            found |= {
                f"{i} tick {name} {t.label1.get_text()}": t.label1
                for t in ticks
                if t.label1.get_visible()
            }
    found |= {f"legend {t.get_text()}": t for legend in figure.legends for t in legend.get_texts()}
    return {name: text.get_window_extent() for name, text in found.items() if text.get_text()}


@pytest.mark.parametrize("name", FIGURES)
def test_no_words_touch_none_leave_the_page_and_the_figure_says_itself(name):
    figure = FIGURES[name]()
    assert len(figure.alt) > 60 and "\n" not in figure.alt
    assert len(plot.table(figure).splitlines()) > 2 and figure._suptitle.get_text() in repr(figure)
    found = boxes(figure)
    assert len(found) > 6
    for (a, box_a), (b, box_b) in itertools.combinations(found.items(), 2):
        shared = type(box_a).intersection(box_a, box_b)
        assert shared is None or min(shared.width, shared.height) < 1, f"{a!r} touches {b!r}"
    for label, box in found.items():
        inside = (
            box.x0 >= -1
            and box.y0 >= -1
            and box.x1 <= figure.bbox.x1 + 1
            and box.y1 <= figure.bbox.y1 + 1
        )
        assert inside, f"{label!r} leaves the page"
    for legend, ax in itertools.product(figure.legends, figure.axes):
        box = type(figure.bbox).intersection(legend.get_window_extent(), ax.get_window_extent())
        assert box is None or box.height < 1, "the legend hides something"


def test_every_category_has_one_colour_and_one_hatch_of_its_own():
    assert tuple(LOOK) == CATEGORIES
    assert (
        len({colour for colour, _ in LOOK.values()})
        == len({hatch for _, hatch in LOOK.values()})
        == len(CATEGORIES)
    )
    peak = split(unexplained=GiB, kv_cache=GiB)
    patches = {}
    for figure in (
        plot.compare(measured(peak=peak)),
        plot.bars(["x"], [peak]),
    ):
        for c in figure.axes[0].containers:
            patches.setdefault(c.get_label().lstrip("_"), set()).add(
                (to_hex(c[0].get_facecolor()), c[0].get_hatch() or "")
            )
    for c in (
        plot.timeline(measured(timeline=[Moment(i, "step", peak) for i in (0, 1)]))
        .axes[0]
        .collections
    ):
        patches.setdefault(c.get_label().lstrip("_"), set()).add(
            (to_hex(c.get_facecolor()[0]), c.get_hatch() or "")
        )
    assert patches == {
        name.replace("_", " "): {(colour.lower(), hatch)} for name, (colour, hatch) in LOOK.items()
    }


def test_the_recipe_stands_in_the_figure():
    ax = plot.compare(report(title=LONG)).axes[0]
    assert ax.get_title(loc="left").replace("\n", " ") == LONG
    assert shared_title([of_batch(1), of_batch(2)]) == TITLE.replace(" · batch 4", "")


def test_the_readers_own_settings_are_left_alone():
    plt.rcParams["font.size"], plt.rcParams["axes.spines.top"] = 7.5, True
    before = dict(plt.rcParams)
    plot.compare(report())
    with pytest.raises(ValueError):
        plot.compare(report(), unit="GB")
    assert dict(plt.rcParams) == before
    plt.rcParams["font.family"] = ["serif"]
    figure = plot.timeline(report())
    fonts = {
        t.get_fontname()
        for t in [*figure.axes[0].get_xticklabels(), figure._suptitle, *figure.axes[0].texts]
    }
    assert fonts == set(RC["font.family"])
    plt.rcdefaults()


def test_matplotlib_loads_with_the_first_figure_only():
    code = (
        "import sys; from vramlab import plot; assert 'matplotlib' not in sys.modules and "
        "'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_figures_do_not_hide_the_function_behind_the_module_of_its_name():
    code = (
        "from vramlab import plot; plot.compare; from vramlab import compare; assert not "
        "hasattr(compare, '__path__')"
    )
    subprocess.run([sys.executable, "-c", f"{code}; assert callable(compare), compare"], check=True)


def test_a_notebook_shows_each_figure_once_with_its_alt_text(tmp_path, monkeypatch):
    monkeypatch.delenv(
        "MPLBACKEND", raising=False
    )  # the kernel would inherit it in place of its own
    path = f"import sys; sys.path.insert(0, {str(Path(__file__).parent.parent)!r})"
    start = (
        f"{path}\nimport matplotlib.pyplot as plt\nfrom vramlab import plot\nfrom "
        f"sample_reports import *"
    )
    figure = "plot.compare(report(), measured())"
    cells = [
        start,
        f"{figure}\nplt.show()",
        figure,
        f"{figure};",
        f"{figure}\nplot.bars(['a'], [split()])\nplt.show()",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(
        notebook, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    pictures = [
        [o for o in cell.outputs if "image/png" in o.get("data", {})] for cell in notebook.cells
    ]
    assert [len(found) for found in pictures] == [0, 1, 1, 1, 2]
    assert all(
        len(cell.outputs) == len(found)
        for cell, found in zip(notebook.cells, pictures, strict=True)
    )
    assert pictures[1][0].metadata["image/png"]["alt"] == plot.compare(report(), measured()).alt
    for output in itertools.chain(*pictures):
        assert output.metadata["image/png"]["alt"]
        assert (
            output.data["text/plain"].startswith("<Figure: Memory ")
            and "13" not in output.data["text/plain"]
        )
