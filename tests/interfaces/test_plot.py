"""The figures: the data they draw, and what they refuse."""

import dataclasses
import itertools

import pytest
from matplotlib.colors import to_hex, to_rgba
from sample_reports import TRAINED, measured, out_of_memory, report, split
from vramlab import Recipe, find_gpu, plot, predict
from vramlab.interfaces.plot import style
from vramlab.interfaces.plot.splits import amount
from vramlab.interfaces.plot.style import LOOK
from vramlab.report.report import CATEGORIES, Bytes, GiB, Interval, MiB

CARD = dataclasses.replace(find_gpu("T4"), name="a card", total=13 * GiB)
OVER_EXPLAINED = measured(unexplained=-900_000_000)


pytestmark = pytest.mark.usefixtures("no_figure_stays")


def heights(ax) -> dict[str, list[float]]:
    """Label of each container of bars to the heights of its bars; "_" would keep it from the
    legend.
    """
    return {
        container.get_label().lstrip("_"): [bar.get_height() for bar in container]
        for container in ax.containers
    }


def texts(figure, gid: str) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts if text.get_gid() == gid]


def test_bars_are_the_bytes_of_each_category_in_gib():
    shown = (report("predicted", 0.97), report(), measured())
    drawn = heights(plot.compare(*shown).axes[0])
    assert list(drawn) == [c.replace("_", " ") for c in TRAINED]
    for name in TRAINED:
        bytes_ = [height * GiB for height in drawn[name.replace("_", " ")]]
        assert bytes_ == pytest.approx([getattr(r.peak, name) for r in shown], abs=1)


def test_the_legend_names_what_leaves_ink():
    figure = plot.bars(["a"], [{"parameters": 3 * GiB, "activations": GiB, "inputs": 1000}])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "parameters",
        "activations",
    ]


def test_bars_stand_on_each_other_and_reach_the_total():
    ax = plot.compare(report(), measured()).axes[0]
    for bars in zip(*ax.containers, strict=True):
        tops = [0, *(bar.get_y() + bar.get_height() for bar in bars)]
        assert [bar.get_y() for bar in bars] == pytest.approx(tops[:-1])
    assert tops[-1] * GiB == pytest.approx(measured().peak.total)


def test_totals_stand_over_the_bars():
    figure = plot.compare(report(), measured(2))
    assert texts(figure, "total") == ["13.7", "27.4"]
    ends = [text.xy[1] * GiB for text in figure.axes[0].texts if text.get_gid() == "total"]
    assert ends == pytest.approx([split().total, measured(2).peak.total])


def test_what_is_over_explained_hangs_below_zero_and_the_total_stays_true():
    figure = plot.compare(report(), OVER_EXPLAINED)
    (container,) = [c for c in figure.axes[0].containers if c.get_label() == "unexplained"]
    assert container[1].get_y() == 0 and container[1].get_height() * GiB == pytest.approx(
        -900_000_000
    )
    assert texts(figure, "total")[1] == amount(OVER_EXPLAINED.peak.total)
    assert figure.axes[0].get_ylim()[0] < -900_000_000 / GiB


def test_the_unit_scales_the_bars():
    figure = plot.compare(report(peak=Bytes(parameters=123_456)), unit="MiB")
    assert heights(figure.axes[0])["parameters"] == [pytest.approx(123_456 / MiB)]
    assert figure.axes[0].get_ylabel() == "peak, MiB"


def test_bars_take_any_numbers_and_keep_the_colours_of_categories():
    values = [
        {"parameters": 4, "gradients": 4, "optimizer_states": 8},
        {"parameters": 2, "master copy": 4.5},
    ]
    figure = plot.bars(
        ["fp32", "mixed"], values, ylabel="bytes per parameter", unit="B", title="Costs"
    )
    assert heights(figure.axes[0]) == {
        "parameters": [4, 2],
        "gradients": [4, 0],
        "optimizer states": [8, 0],
        "master copy": [0, 4.5],
    }
    assert texts(figure, "total") == ["16", "6.50"]
    assert to_hex(figure.axes[0].containers[0][0].get_facecolor()) == LOOK["parameters"][0].lower()
    assert plot.table(figure).splitlines()[0].startswith("bytes per parameter")


def test_the_timeline_is_the_split_after_every_event():
    r = report()
    ax = plot.timeline(r).axes[0]
    floor = {moment.index: 0.0 for moment in r.timeline}
    for name in CATEGORIES:
        if not any(getattr(moment.bytes, name) for moment in r.timeline):
            continue
        (collection,) = [
            c for c in ax.collections if c.get_label().lstrip("_") == name.replace("_", " ")
        ]
        path = collection.get_paths()[0]
        for before, moment in itertools.pairwise(r.timeline):
            middle = (
                before.index + moment.index
            ) / 2  # a step holds its value until the next event
            low, high = floor[before.index], floor[before.index] + getattr(before.bytes, name) / GiB
            if high > low:
                assert path.contains_point((middle, (low + high) / 2))
            assert not path.contains_point((middle, high + 0.0005))
            floor[before.index] = high
    assert floor[0] * GiB == pytest.approx(r.timeline[0].bytes.total)


def test_the_timeline_marks_its_peak_and_phases_and_names_the_largest():
    r = report()
    figure = plot.timeline(r)
    ax = figure.axes[0]
    (mark,) = [line for line in ax.lines if line.get_gid() == "peak"]
    assert mark.get_xdata()[0] == 40 and mark.get_ydata()[0] * GiB == pytest.approx(r.peak.total)
    assert texts(figure, "peak") == ["13.7 GiB in step"]
    assert texts(figure, "phase") == ["forward", "backward", "step"]
    starts = {
        line.get_gid(): line.get_xdata()[0]
        for line in ax.lines
        if (line.get_gid() or "").startswith("start")
    }
    assert starts == {"start backward": 20, "start step": 40}
    below = ax.get_xlabel()
    assert "0.574 GiB: temporaries [30080×2048] in optimizer" in below
    assert "0.230 GiB: 2 × parameters [30080×2048] first in embed_in" in below
    assert "largest" not in plot.timeline(report(largest=[])).axes[0].get_xlabel()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: plot.compare(), "compare takes reports"),
        (lambda: plot.compare(report(), report(recipe={"batch_size": 9})), "differ in batch_size"),
        (lambda: plot.compare(report(), unit="GB"), "unit is 'GB', but allowed are GiB"),
        (lambda: plot.compare(report(), limit="T5000"), "'T5000' is not in the table"),
        (lambda: plot.bars([], []), "one label per value"),
        (lambda: plot.bars(["a"], [{}, {}]), "1 labels for 2 values"),
        (lambda: plot.timeline(report("predicted", timeline=[])), "a predicted one"),
        (lambda: plot.timeline(out_of_memory()), "out of memory"),
        (lambda: plot.compare(report(), out_of_memory()), "no bytes to draw: out of memory"),
    ],
)
def test_bad_input_is_one_sentence(call, words):
    with pytest.raises((ValueError, LookupError)) as caught:
        call()
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_amounts_have_three_significant_figures():
    sizes = [
        0,
        107,
        int(0.0123 * GiB),
        int(0.5 * GiB),
        int(13.68 * GiB),
        int(128.4 * GiB),
        int(1234.5 * GiB),
    ]
    assert [amount(n) for n in sizes] == [
        "0",
        "0.000000100",
        "0.0123",
        "0.500",
        "13.7",
        "128",
        "1,234",
    ]
    assert [amount(n, "B") for n in (16, 4.127, 123_456)] == ["16", "4.13", "123,456"]


def test_needs_are_intervals_against_the_line_of_their_card():
    needs = {
        "a": Interval(8 * GiB, 10 * GiB, 12 * GiB),
        "b\nc": Interval(14 * GiB, 15 * GiB, 20 * GiB),
    }
    figure = plot.fits(needs, CARD, "One is safe", "simulated")
    ax = figure.axes[0]
    bars = [(bar.get_x(), bar.get_width()) for container in ax.containers for bar in container]
    assert bars == [(8, 4), (14, 6)] and texts(figure, "tier") == ["safe", "does not fit"]
    colours = [bar.get_facecolor() for container in ax.containers for bar in container]
    assert colours == [to_rgba(style.TIER_LOOK["safe"][0]), to_rgba(style.NO_TIER_LOOK[0])]
    assert figure.rows[2] == ("b c", "14.00", "15.00", "20.00", "a card: 13.00", "does not fit")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a card: 13.0 GiB"]
    both = plot.fits(needs, ["T4", "RTX 4090"], "Both are safe")
    assert (
        texts(both, "tier") == ["safe\non T4", "safe\non RTX 4090"]
        and len(both.legends[0].get_texts()) == 2
    )
    assert [row[-1] for row in both.rows] == ["fits", "safe", "safe"]
    with pytest.raises(ValueError, match="zip"):
        plot.fits(needs, ["T4"], "One card")


def test_of_a_report_the_card_is_less_what_others_hold():
    recipe = Recipe("gpt2", 4, 256)
    alone, crowded = (predict(recipe, gpu=CARD, other_memory=held) for held in (0, 12 * GiB))
    figure = plot.fits({"alone": alone, "crowded": crowded}, CARD, "A display takes its part")
    assert texts(figure, "tier") == [alone.verdict, crowded.verdict] == ["safe", "does not fit"]


def test_the_label_of_a_tier_stands_clear_of_the_line_of_its_card():
    needs = {
        str(high): Interval(8 * GiB, 9 * GiB, int(high * GiB))
        for high in (10, 12, 12.9, 13, 13.1, 60)
    }
    for limit in (CARD, [CARD] * 5 + ["T4"]):
        figure = plot.fits(needs, limit, "A card of 13 GiB")
        ax, right = figure.axes[0], figure.axes[0].get_window_extent().x1
        lines = [
            ax.transData.transform((line.get_xdata()[0], 0))[0]
            for line in ax.lines
            if len(line.get_xdata()) == 2
        ]
        boxes = [text.get_window_extent() for text in ax.texts if text.get_gid() == "tier"]
        assert len(lines) == len(boxes) == 6
        assert all(
            (line < box.x0 or line > box.x1) and box.x1 <= right
            for line, box in zip(lines, boxes, strict=True)
        )
        sides = [box.x1 < line for line, box in zip(lines, boxes, strict=True)]
        assert sides == [True] * 4 + [False] * 2  # what fits is called so on its own side
