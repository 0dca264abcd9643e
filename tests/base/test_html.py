"""What a notebook shows: small tables without colours of their own, and not a dataclass's repr."""

import re

import pytest
from vramlab import Recipe, compare, explain, plan, predict
from vramlab.base import html
from vramlab.report.report import Report

RECIPE = Recipe("gpt2", batch_size=2, seq_len=64, precision="bf16-mixed")
MESSAGE = "CUDA out of memory. Tried to allocate 20.00 MiB."


def answers():
    report = predict(RECIPE, gpu="T4")
    return {
        "recipe": RECIPE,
        "report": report,
        "comparison": compare(report, predict(RECIPE)),
        "plan": plan("gpt2", "T4", seq_len=64, confirm=False),
        "explanation": explain(MESSAGE, RECIPE),
    }


@pytest.fixture(scope="module")
def shown():
    return {name: one._repr_html_() for name, one in answers().items()}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("recipe", ["gpt2", "batch_size", "bf16-mixed"]),
        (
            "report",
            [
                "predicted: gpt2",
                "optimizer states",
                "peak, in",
                "safe",
                html.FULL,
            ],
        ),
        ("comparison", ["peak total", "is taken against"]),
        ("plan", ["full", "safe", "process, at most", "tokens/s", "global batch 16"]),
        ("explanation", ["20.00 MiB asked for", "the cheapest changes"]),
    ],
)
def test_an_answer_shows_as_a_small_table(shown, name, words):
    text = shown[name]
    assert text.startswith("<table>") and text.count("<table>") == text.count("</table>") == 1
    assert [word for word in words if word not in text] == []
    assert len(text) < 6000
    assert not re.search(r"style=|color|<script|<style|class=", text), (
        "GitHub drops them, and dark pages keep theirs"
    )


def test_texts_of_others_are_escaped():
    text = html.table(("<b>",), [("<script>alert(1)</script>", "\x1b[31m")], "a & b", ["<i>"])
    assert (
        "<script>" not in text
        and "&lt;script&gt;" in text
        and "a &amp; b" in text
        and "\x1b" not in text
    )


def test_a_report_without_figures_says_why():
    failed = Report.failed("measured", RECIPE, "cuda", "oom", "asked for 2 GiB")
    assert "oom: asked for 2 GiB" in failed._repr_html_()


@pytest.mark.parametrize(("part", "filled"), [(0, 0), (1, 6), (4, 24), (9, 24)])
def test_a_bar_is_as_long_as_its_share(part, filled):
    assert html.bar(part, 4) == html.FULL * filled + html.EMPTY * (24 - filled)
