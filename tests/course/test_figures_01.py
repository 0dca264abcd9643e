"""The drawings of chapter 01 show the data that they are given, and say it in words."""

import matplotlib.pyplot as plt
import pytest
from vramlab import plot
from vramlab_course.chapters import figures_01
from vramlab_course.numerics import FORMATS, FP16
from vramlab_course.quantizers import NF4


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


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
    figure = figures_01.bell(NF4, 1.85)
    lines = figure.axes[0].collections[0].get_segments()
    assert [segment[0][0] for segment in lines] == pytest.approx(NF4.tolist())
    assert figure.axes[0].texts[-1].get_text() == "15"
