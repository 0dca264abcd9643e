"""The drawings of chapter 05 show the numbers that they are given."""

import itertools

import pytest
from vramlab_course.chapters.chapter_05 import published
from vramlab_course.figures import figures_05
from vramlab_course.finetuning import recorded_sweep

pytestmark = pytest.mark.usefixtures("no_figure_stays")


def test_the_flow_names_the_sizes_of_each_matrix():
    figure = figures_05.flow(inputs=1024, outputs=512, r=8)
    texts = [text.get_text() for text in figure.axes[0].texts]
    for words in ("512 × 1,024\n524,288 numbers", "8 × 1,024\n8,192", "512 × 8\n4,096"):
        assert any(words in text for text in texts), words
    # Inputs are the width and outputs the height, in one scale for W, A and B.
    sizes = [size for box in figure.axes[0].patches for size in (box.get_width(), box.get_height())]
    wide, tall, *thin = sizes
    assert thin == pytest.approx([wide, tall * 8 / 512, wide * 8 / 1024, tall])
    assert figure.axes[0].get_aspect() * tall / wide == pytest.approx(512 / 1024)


def test_each_published_run_is_a_point_beside_the_band():
    figure = figures_05.solved(published(), 3.8, "A title", "about")
    ax = figure.axes[0]
    points = [tuple(line.get_xydata()[0]) for line in ax.lines]
    assert points == [(run.solved, y) for y, run in enumerate(published())]
    (band,) = ax.patches
    assert band.get_x() + band.get_width() / 2 == pytest.approx(points[0][0])
    assert band.get_width() == pytest.approx(2 * 3.8)
    assert figure.rows[2] == ("LoRA r=32", "20.8", "47.8")


def test_every_seed_is_a_point_of_what_was_forgotten_and_learned():
    sweep = recorded_sweep()
    figure = figures_05.tradeoff(sweep, "A title", sweep.lower)
    lines = [[*map(tuple, line.get_xydata())] for line in figure.axes[0].lines]
    shown = [run for run in [*sweep.runs, *sweep.lower] if run.r is None or "," not in run.targets]
    for run in [*shown, sweep.run(8, "q_proj, v_proj")]:
        assert [figures_05.gains(sweep, run)] in lines
        seeds = zip(run.seeds["programs"], run.seeds["documentation"], strict=True)
        base = sweep.base
        points = [(a - base["programs"], base["documentation"] - b) for a, b in seeds]
        assert points in lines
    assert len(figure.rows) == 1 + len(shown) + 1
    # Arrows are drawn to what is asked for alone.
    assert len(figures_05.tradeoff(sweep, "A title").rows) == len(figure.rows) - 3


def test_the_chapter_s_differences_hold_with_every_seed():
    sweep = recorded_sweep()
    every, slow = sweep.run(None), sweep.lower[1]
    assert (slow.r, slow.targets, slow.learning_rate) == (8, "all-linear", 0.003)
    order = [every, sweep.run(64), sweep.run(8), sweep.run(1), sweep.run(8, "q_proj, v_proj")]
    for more, less in [*itertools.pairwise(order), (sweep.run(8), slow)]:
        pairs = zip(more.seeds["documentation"], less.seeds["documentation"], strict=True)
        assert all(a < b for a, b in pairs)
    fast = sweep.run(8).seeds["programs"]
    assert all(a > b for a, b in zip(fast, slow.seeds["programs"], strict=True))
    # All weights, slowly trained, forgot what slow adapters did, and learned more.
    whole, *adapters = (run for run in sweep.lower if run.targets in ("all", "all-linear"))
    for run in adapters:
        assert run.programs == pytest.approx(whole.programs, abs=0.002)
        pairs = zip(run.seeds["documentation"], whole.seeds["documentation"], strict=True)
        assert all(a > b for a, b in pairs)
