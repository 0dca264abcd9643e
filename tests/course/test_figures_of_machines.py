"""What the drawings of chapters 00 and 11 show as tables: the peaks of both steps, and the ways
from card to card.
"""

from types import SimpleNamespace

import pytest
from vramlab import GiB, Recipe, find_gpu, simulate
from vramlab.report.report import Bytes
from vramlab_course.figures import figures_00, figures_11

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
    assert {"4.00 GiB: the loss", "6.00 GiB: the loss", "AdamW's states: 2.0 GiB", "update"} <= {
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
    assert list(parts.values()) == sorted(parts.values(), reverse=True)
    figure = figures_00.whole(parts, "a title", "about")
    assert figure.rows[-1][0] == "together" and len(figure.rows) == len(parts) + 2


def test_the_stops_of_each_way_are_drawn_and_in_the_table():
    ways = {
        "direct": ("GPU 0", "GPU 1"),
        "by a copy": ("GPU 0", "host bridge", "CPU's memory", "host bridge", "GPU 1"),
    }
    figure = figures_11.routes(ways, "a title")
    assert figure.rows[1:] == [
        ("direct", "GPU 0 → GPU 1"),
        ("by a copy", "GPU 0 → host bridge → CPU's memory → host bridge → GPU 1"),
    ]
    texts = figure.axes[0].texts
    # Each way from its last stop to its first; an arrow ends at the box drawn before it.
    assert [text.get_text() for text in texts[:3]] == ["direct", "GPU 1", "GPU 0"]
    arrows = [text.arrow_patch is not None for text in texts if hasattr(text, "arrow_patch")]
    assert arrows == [False, True, False, True, True, True, True]


def test_the_ends_of_a_run_are_in_the_table_and_read_out():
    figure = figures_11.ends({"a copy": (114.4, 140.7)}, 131.44, "a title", "about")
    assert figure.rows[1:] == [("a copy", "114–141"), ("measured", "131.4")]
    assert figure.alt == "Seconds. a copy: 114–141; measured: 131.4"
