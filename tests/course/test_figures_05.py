"""The drawings of chapter 05 show the numbers that they are given."""

import pytest
from vramlab import GiB
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


def test_marks_are_simulated_and_lines_predicted():
    predicted = {
        "all": {2048: GiB, 4096: 2 * GiB, 32768: 8 * GiB},
        "LoRA": {2048: 0, 4096: GiB, 32768: 7 * GiB},
    }
    simulated = {"all": {2048: GiB, 32768: 8 * GiB}, "LoRA": {2048: 0, 32768: 6 * GiB}}
    figure = figures_05.over_length(predicted, simulated, "A title", "about")
    lines = [[*map(tuple, line.get_xydata())] for line in figure.axes[0].lines]
    assert lines[0] == [(2048, 1), (4096, 2), (32768, 8)] and lines[1] == [(2048, 1), (32768, 8)]
    assert lines[3] == [(2048, 0), (32768, 6)] and figure.rows[2] == ("LoRA", "0.0", "6.0")


def test_every_seed_is_a_point_of_what_was_forgotten_and_learned():
    sweep = recorded_sweep()
    figure = figures_05.frontier(sweep, "A title")
    lines = [[*map(tuple, line.get_xydata())] for line in figure.axes[0].lines]
    for run in [*sweep.runs, *sweep.lower]:
        mean = (run.programs, run.documentation)
        ends = {line[1] for line in lines if len(line) == 2 and line[0] == mean}
        assert ends == set(zip(run.seeds["programs"], run.seeds["documentation"], strict=True))
    assert len(figure.rows) == 2 + len(sweep.runs) + len(sweep.lower) and "all weights" in [
        row[0] for row in figure.rows
    ]
    assert [row[3] for row in figure.rows[2:]] == sorted(row[3] for row in figure.rows[2:])
