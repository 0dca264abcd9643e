"""Chapter 10's figures: what they are drawn from."""

from types import SimpleNamespace

import pytest
from vramlab import GiB, LoRA, Recipe, predict
from vramlab.report.report import Bytes
from vramlab_course.chapters.chapter_10 import tenants_of
from vramlab_course.figures.figures_10 import LENGTHS, growth, patches, tenants

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


def test_a_picture_has_a_line_around_each_patch():
    figure = patches(4, 2, title="8 patches become 2 tokens")
    (ax,) = figure.axes
    lines = [line.get_linewidth()[0] for line in ax.collections]
    assert lines == [2.5, 0.5, 2.5, 0.5, 2.5, 2.5, 0.5, 2.5]
    assert "64 × 32 pixels" in figure.alt


def test_a_bar_stacks_the_tenants_of_its_phase():
    phases = {
        "sample, awake": {"policy": 3 * GiB, "engine": 2 * GiB},
        "train, awake": {"policy": 3 * GiB, "policy: activations": 4 * GiB},
    }
    figure = tenants(phases, "Who is there", "counted", limit="T4")
    assert figure.rows == [
        ("GiB", "sample, awake", "train, awake"),
        ("policy", "3.0", "3.0"),
        ("engine", "2.0", "0.0"),
        ("policy: activations", "0.0", "4.0"),
        ("total", "5.0", "7.0"),
    ]
    (ax,) = figure.axes
    assert [text.get_text() for text in ax.texts] == ["5.0", "7.0"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["sample\nawake", "train\nawake"]


def test_the_engine_is_what_a_report_has_more_than_the_training_alone():
    def report(more):
        names = ("generate", "score", "backward")
        peaks = [Bytes(parameters=8 + more, optimizer_states=1, activations=at) for at in (0, 2, 5)]
        return SimpleNamespace(
            phases={n: SimpleNamespace(peak=p) for n, p in zip(names, peaks, strict=True)}
        )

    found = tenants_of(report(3), report(0))
    assert found["score"] == {
        "policy": 8,
        "policy: optimizer states": 1,
        "engine": 3,
        "scoring: logits": 2,
    }
    assert found["train"]["policy: activations"] == 5 and "scoring: logits" not in found["sample"]
