"""What the drawings of chapter 00 show as tables: the peaks of both steps, and their parts."""

from types import SimpleNamespace

import pytest
from vramlab import GiB, Recipe, find_gpu, simulate
from vramlab.report.report import Bytes
from vramlab_course.figures import figures_00

pytestmark = pytest.mark.usefixtures("no_figure_stays")


def run(*moments: Bytes):
    return SimpleNamespace(timeline=[SimpleNamespace(bytes=moment) for moment in moments])


def test_the_second_step_starts_with_the_states_of_the_first():
    first = run(
        Bytes(parameters=GiB),
        Bytes(parameters=GiB, activations=3 * GiB),
        Bytes(GiB, optimizer_states=2 * GiB),
    )
    second = run(
        Bytes(GiB, optimizer_states=2 * GiB),
        Bytes(GiB, optimizer_states=2 * GiB, activations=3 * GiB),
    )
    figure = figures_00.two_steps(first, second, 5 * GiB, "a title", "about")
    assert figure.rows[1:] == [("1", "0.00", "4.00"), ("2", "2.00", "6.00")]
    assert {"4.00 GiB: the loss", "6.00 GiB: the loss", "AdamW's states: 2.00 GiB", "update"} <= {
        text.get_text() for text in figure.axes[0].texts
    }


def test_the_parts_at_the_peak_are_all_of_it():
    """Counted from the model's shape: 3 tensors of logits, a matrix of scores for each head."""
    recipe = Recipe("qwen3-0.6b", 4, 512, "fp16-mixed", "adamw_torch_fused", num_layers=6)
    card = find_gpu("T4")
    parts = figures_00.parts_at_peak(recipe, card)
    assert sum(parts.values()) == simulate(recipe, gpu="T4").peak.total
    shape = recipe.shape
    assert parts["the loss"] == 3 * 4 * 2048 * shape.vocab_size
    assert parts["attention"] > 4 * 6 * shape.num_heads * 512 * 512 * 4
    assert parts["parameters"] == 4 * shape.num_parameters
    stays, rest = list(parts.values())[:2], list(parts.values())[2:]
    assert list(parts)[:2] == ["optimizer states", "parameters"]
    assert stays + rest == sorted(stays, reverse=True) + sorted(rest, reverse=True)


def test_each_peak_is_a_bar_of_its_parts():
    peaks = {"all": Bytes(GiB, 2 * GiB, activations=3 * GiB), "LoRA": Bytes(GiB)}
    figure = figures_00.stacked(peaks, 5 * GiB, "a title", "about")
    assert figure.rows[1:] == [("all", "6.0"), ("LoRA", "1.0")]
    ends = [bar.get_x() + bar.get_width() for bar in figure.axes[0].patches]
    assert ends == [1, 1, 3, 6, 1, 1, 1, 1]  # parameters, states, gradients, and the rest
