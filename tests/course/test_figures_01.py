"""The drawings of chapter 01 show the data that they are given, and say it in words."""

import pytest
from vramlab import plot
from vramlab_course.chapters import figures_01
from vramlab_course.numerics import FORMATS, FP16
from vramlab_course.quantizers import NF4

pytestmark = pytest.mark.usefixtures("no_figure_stays")


@pytest.mark.parametrize("number", [0.1, -6.5])
def test_every_bit_is_drawn_once_in_the_colour_of_its_part(number):
    figure = figures_01.bits(number, "a title")
    drawn = [text.get_text() for text in figure.axes[0].texts]
    assert drawn == list("".join(f.bits_of(number).replace(" ", "") for f in FORMATS))
    colours = [bar.get_facecolor() for bar in figure.axes[0].patches]
    assert len(colours) == len(drawn) == sum(f.bits for f in FORMATS)
    assert [colours.count(colour) for colour in dict.fromkeys(colours)] == [
        len(FORMATS),
        sum(f.exponent_bits for f in FORMATS),
        sum(f.fraction_bits for f in FORMATS),
    ]
    assert FP16.bits_of(number) in plot.table(figure)


def test_the_bell_stands_on_the_tables_numbers():
    figure = figures_01.bell(NF4.tolist(), 1.848)
    nf4, int4 = (line.get_xdata() for line in figure.axes[0].lines)
    assert list(nf4) == NF4.tolist() and int4[0] == -1 and len(int4) == 15
    shares = [row[2] for row in figure.rows[1:]]
    assert shares == ["6.7%"] * 7 + ["5.8%"] * 8  # as the subtitle says


def test_costs_are_drawn_from_the_least_to_the_most():
    stores = {"b, one scale": (4, 11.2), "a, blocks": (4.5, 0.9), "c": (16, -0.01)}
    figure = figures_01.costs(stores)
    assert [row[0] for row in figure.rows[1:]] == ["c", "a, blocks", "b, one scale"]
    assert [text.get_text() for text in figure.axes[0].texts] == ["0.0 %", "0.9 %", "11.2 %"]


def test_every_run_has_its_line_of_losses():
    curves = {name: [1.4, 1.0] for name in ("fp32", "fp16", "bf16", "fp16, loss × 1,024")}
    labels = [line.get_label() for line in figures_01.losses(curves, 1.35).axes[0].lines]
    assert labels[1:] == list(curves)
