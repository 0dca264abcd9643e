"""The drawings of chapter 05 show the numbers that they are given."""

import pytest
from vramlab_course.chapters import figures_05
from vramlab_course.finetuning import recorded_sweep

pytestmark = pytest.mark.usefixtures("no_figure_stays")


def test_the_layer_is_drawn_to_scale():
    figure = figures_05.layer(inputs=1024, outputs=512, r=8)
    sides = [(bar.get_width(), bar.get_height()) for bar in figure.axes[0].patches]
    assert sides == [(1024, 512), (1024, 8), (8, 512)]  # W, A and B
    assert "2.3 %" in figure.heading


def test_every_recorded_run_is_a_point_and_a_row():
    sweep = recorded_sweep()
    figure = figures_05.ranks(sweep)
    points = {(x, y) for line in figure.axes[0].lines[:3] for x, y in zip(*line.get_data(), strict=True)}
    assert points == {(run.r, run.documentation) for run in sweep.runs if run.r}
    assert len(figure.rows) == 2 + len(sweep.runs) and figure.rows[-1][0] == "all weights"
