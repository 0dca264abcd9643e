"""Chapter 10's figures: what they are drawn from."""

import pytest
from vramlab import GiB, LoRA, Recipe, find_gpu, predict
from vramlab.hardware.gpu import usable_memory
from vramlab_course.figures.figures_10 import LENGTHS, growth, held

pytestmark = pytest.mark.usefixtures("no_figure_stays")


def test_the_lines_are_the_predicted_peaks():
    run = Recipe("llama-3.2-1b", 1, 2048, "bf16-mixed", dtype="bfloat16", lora=LoRA(r=16))
    ladder = {"no switch": run, "+ checkpointing": run.replace(gradient_checkpointing=True)}
    figure = growth(ladder, limit="H100", title="It grows")
    for row, recipe in zip(figure.rows[1:], ladder.values(), strict=True):
        longest = predict(recipe.replace(seq_len=LENGTHS[-1]), gpu="H100").peak.total / GiB
        assert row[-1] == f"{longest:,.1f}" and len(row) == 1 + len(LENGTHS)
    (ax,) = figure.axes
    for line, row in zip(ax.lines, figure.rows[1:], strict=False):
        assert [f"{value:,.1f}" for value in line.get_ydata()] == list(row[1:])
        assert max(line.get_ydata()) < ax.get_ylim()[1]
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert "The card has" in figure.alt and "no switch" in figure.alt


def test_a_bar_stacks_what_is_held_at_its_moment():
    moments = {
        "a\ntext": {"kept": 3 * GiB},
        "a photo": {"kept": 3 * GiB, "for a moment": 4 * GiB},
    }
    figure = held(moments, "What is there", "counted", limit="RTX 4090")
    assert figure.rows == [
        ("GiB", "a text", "a photo"),
        ("kept", "3.0", "3.0"),
        ("for a moment", "0.0", "4.0"),
        ("total", "3.0", "7.0"),
    ]
    (ax,) = figure.axes
    assert [text.get_text() for text in ax.texts] == ["3.0", "7.0"]
    (line,) = ax.lines
    assert line.get_ydata()[0] == pytest.approx(usable_memory(find_gpu("RTX 4090")) / GiB)
    assert line.get_ydata()[0] < ax.get_ylim()[1]
