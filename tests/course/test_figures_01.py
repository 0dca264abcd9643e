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


def test_the_network_has_eight_weights_and_two_biases():
    words = [text.get_text() for text in figures_01.network().axes[0].texts if text.get_text()]
    assert sorted(words) == sorted([*(f"w{n}" for n in range(1, 9)), "B1", "B2", "H1", "H2", "X1", "X2", "Y1", "Y2"])


@pytest.mark.parametrize("number", [0.1, -6.5])
def test_every_bit_is_drawn_once_in_the_colour_of_its_part(number):
    figure = figures_01.bits(number)
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


def test_lost_gradients_are_shown_layer_by_layer():
    sizes, lost = [1e-9, 1e-8, 1e-6, 1e-5, 1e-4], {"a": [1, 1, 0.5, 0, 0], "b": [0] * 5, "c": [0] * 5}
    figure = figures_01.vanished(sizes, lost)
    above, below = figure.axes
    assert list(above.lines[0].get_ydata()) == sizes
    assert [line.get_ydata()[0] for line in above.lines[1:3]] == [2**-14, 2**-24]
    assert [list(line.get_ydata()) for line in below.lines] == [[100 * s for s in shares] for shares in lost.values()]
    assert "a 100%, b 0%" in plot.alt_text(figure) and "1e-09" in plot.table(figure)


def test_the_bell_stands_on_the_tables_numbers():
    figure = figures_01.bell(NF4, 1.85)
    lines = figure.axes[0].collections[0].get_segments()
    assert [segment[0][0] for segment in lines] == pytest.approx(NF4.tolist())
    assert figure.axes[0].texts[-1].get_text() == "15"


def test_what_precision_is_worth_is_relative_to_the_first():
    names = "fp32 bf16 int8,_blocks int4,_one_scale NF4,_double int3,_blocks int2,_blocks".replace("_", "\0").split()
    scores = {name.replace("\0", " "): (32 / 2**i, 2 + i / 10) for i, name in enumerate(names)}
    figure = figures_01.worth(scores, 0.5, "a model")
    table = plot.table(figure)
    assert "+0.0 %" in table and "-0.0" not in table and "+30.0 %" in table and f"{2**4:.1f}" in table
    points = {(x, y) for line in figure.axes[0].lines[:2] for x, y in zip(*line.get_data(), strict=True)}
    assert points == set(scores.values())
