"""Chapter 07's helpers: what a loop waits, the operators that took most, and the runs it shows."""

import re
from types import SimpleNamespace

import pytest
import torch
from vramlab.report.report import GiB
from vramlab_course.chapters import chapter_07


def test_a_loop_that_waits_says_so_without_its_first_batch(monkeypatch, capsys):
    clock = iter([0, 2, 3, 5, 6, 16, 17])  # three batches arrive after 2, 2 and 10 s
    monkeypatch.setattr(chapter_07, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    seen = []
    chapter_07.tried("slow", torch.zeros(16, 30), lambda batches: seen.extend(batches))
    assert [tuple(batch.shape) for batch in seen] == [(4, 30)] * 3
    found = re.search(r"slow +(\d+) tokens/s, waits +(\d+) ms, trains +(\d+) ms", _line(capsys))
    assert found.groups() == ("40", "2000", "1000")


def _line(capsys) -> str:
    return capsys.readouterr().out


def test_operators_are_ranked_by_their_own_time_and_labels_are_left_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    took = {"aten::mm": 3000, "aten::sort": 6000, "forward": 90_000, "aten::add": 1000}
    rows = [
        SimpleNamespace(key=name, count=2, self_cpu_time_total=time) for name, time in took.items()
    ]
    table = chapter_07.top_operators(SimpleNamespace(key_averages=lambda: rows), count=2)
    assert [line.split() for line in table.splitlines()[2:]] == [
        ["aten::sort", "2", "6", "60"],
        ["aten::mm", "2", "3", "30"],
    ]


def test_the_recorded_runs_are_those_that_the_text_tells_of():
    first, second = [run for run in chapter_07.recorded_8b("H200") if not run[0].quantization]
    assert (first[0].batch_size, second[0].batch_size) == (1, 4)
    assert all(recipe.gradient_checkpointing for recipe, _ in (first, second))
    assert second[1] / first[1] == pytest.approx(2.2, abs=0.05)  # four times the tokens
    t4 = chapter_07.recorded_on_t4().recipe
    assert (t4.batch_size, t4.seq_len, t4.gradient_checkpointing) == (4, 1024, True)


def test_segments_of_one_length_are_those_of_the_logits():
    """What the H200 reserved beyond the need is three segments of the logits' size."""
    runs = chapter_07.recorded_segments()
    more = {name: run["reserved"] - run["allocated"] for name, run in runs.items()}
    logits = 4 * 1024 * 128_256 * 4
    assert more["none"] == pytest.approx(3 * logits, rel=0.01)
    assert more["expandable segments"] < 1.3 * GiB
    assert chapter_07.overhead({"allocated": 100, "reserved": 125}) == 25
