"""The drawings of chapter 01 show the data that they are given, and say it in words."""

import pytest
from vramlab import plot
from vramlab_course.figures import figures_01
from vramlab_course.number_formats import FORMATS

pytestmark = pytest.mark.usefixtures("no_figure_stays")


def test_a_format_reaches_from_its_smallest_to_its_largest_number():
    figure = figures_01.ranges()
    subnormal, normal = figure.axes[0].patches[::2], figure.axes[0].patches[1::2]
    for f, low, high, label in zip(FORMATS, subnormal, normal, figure.axes[0].texts, strict=True):
        assert low.get_x() == pytest.approx(f.smallest) and high.get_x() == pytest.approx(
            f.smallest_normal
        )
        assert high.get_x() + high.get_width() == pytest.approx(f.max)
        assert label.get_text().strip() == f"1/{2**f.fraction_bits:,}"
    assert "fp16 1 + 5 + 10 6.0e-08 65,504 1/1,024" in " ".join(plot.table(figure).split())


def test_shares_stand_at_the_levels_of_each_table():
    tables = {"NF4": {-1.0: 0.02, 0.0: 0.88, 1.0: 0.1}, "int4": {-1.0: 0.3, 1.0: 0.7}}
    figure = figures_01.code_shares(tables)
    lines = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].lines}
    assert lines["NF4"] == [[-1, 2], [0, 88], [1, pytest.approx(10)]]
    assert lines["int4"] == [[-1, 30], [1, 70]]
    assert figure.rows[1:] == [("NF4", "2.0%", "88.0%"), ("int4", "30.0%", "70.0%")]
    assert figure.heading == "A code's share of the numbers: NF4's 2 to 88 %, int4's 30 to 70 %"


def test_costs_are_drawn_from_the_least_to_the_most():
    stores = {"b, one scale": (4, 11.2), "a, blocks of 64": (4.5, 0.9), "c": (16, -0.01)}
    against = {"a, blocks of 64": "+0.2 ± 0.4"}
    figure = figures_01.costs(stores, "a title", against)
    assert [row[0] for row in figure.rows[1:]] == ["c", "a, blocks of 64", "b, one scale"]
    assert [text.get_text() for text in figure.axes[0].texts] == [
        "0.0 %",
        "0.9 % (+0.2 ± 0.4)",
        "11.2 %",
    ]
    ends = [bar.get_x() + bar.get_width() for bar in figure.axes[0].patches]
    assert ends == pytest.approx([0.9, 11.2])  # in their full length, and none for what costs none
