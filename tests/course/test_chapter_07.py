"""Chapter 07's helpers: what a loop waits, the operators that took most, and the runs it shows."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader
from vramlab.measurement.records import measurements_folder, read_records
from vramlab.report.report import GiB
from vramlab_course.chapters import chapter_07
from vramlab_course.look import top_operators


def test_a_loop_that_waits_says_so_without_its_first_batch(monkeypatch, capsys):
    clock = iter([0, 2, 3, 5, 6, 16, 17])  # three batches arrive after 2, 2 and 10 s
    monkeypatch.setattr(chapter_07, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    seen = []
    loader = DataLoader(torch.zeros(16, 30), batch_size=4)
    chapter_07.tried("slow", loader, lambda batches: seen.extend(batches))
    assert [tuple(batch.shape) for batch in seen] == [(4, 30)] * 3
    assert re.search(r"slow +waits +(\d+) ms a batch \(median of 3\)", _line(capsys))[1] == "2000"


def _line(capsys) -> str:
    return capsys.readouterr().out


def row(name, cpu, gpu=0, device="CPU"):
    times = {"self_cpu_time_total": cpu, "self_device_time_total": gpu}
    return SimpleNamespace(key=name, count=2, device_type=SimpleNamespace(name=device), **times)


def operators(*rows):
    said = top_operators(SimpleNamespace(key_averages=lambda: list(rows)))
    return [line.split() for line in said]


def test_operators_are_ranked_by_their_own_time_on_a_gpu_by_its_kernels():
    mm, sort = ["6.0", "ms", "in", "2", "of", "aten::mm"], ["3.0", "ms", "in", "2", "of", "sort"]
    assert operators(row("sort", 3000), row("aten::mm", 6000)) == [mm, sort]
    kernel = row("gemm", 0, 6000, "CUDA")
    assert operators(row("sort", 9000, 3000), row("aten::mm", 1, 6000), kernel) == [mm, sort]


def test_the_recorded_runs_are_those_that_the_text_tells_of():
    runs = chapter_07.recorded_lora()
    names = [name.removeprefix("H200, 8B, ").removesuffix(", checkpointing") for name, *_ in runs]
    one, four = ("LoRA, 1 × 1,024", "QLoRA, 1 × 1,024"), ("LoRA, 4 × 1,024", "QLoRA, 4 × 1,024")
    assert names[:-1] == [*one, *four, *["LoRA, 4 × 2,048, Liger"] * 2]
    plain, packed, plain_four, packed_four, kept, again = [1e3 * run[3] for run in runs[:-1]]
    assert round(packed - plain) == 97
    assert round(packed_four) - round(plain_four) == 15
    assert kept / again == pytest.approx(0.70, abs=0.01)  # 43 and 30 % MFU
    assert [run[2].gradient_checkpointing for run in runs] == [True] * 4 + [False, True, True]
    # None stands for PEFT's choice for a Llama, q and v.
    assert [run[2].lora.target_modules for run in runs[:-1]] == [None] * 4 + ["all-linear"] * 2
    assert {run[2].lora.r for run in runs[:-1]} == {16}
    t4 = chapter_07.recorded_on_t4().recipe
    assert (t4.batch_size, t4.seq_len, t4.gradient_checkpointing) == (4, 1024, True)


def test_segments_of_one_length_are_those_of_the_logits():
    """What the H200 reserved beyond the need is three segments of the logits' size."""
    runs = {}
    for path in sorted(measurements_folder().glob("nvidia-h200-*.json")):
        for fact in read_records(path).facts.values():
            if fact.kind == "steps" and fact.asked["recipe"]["model"] == "llama-3.2-1b":
                name = "expandable segments" if fact.asked["expandable"] else "none"
                runs[name] = fact.found
    more = {name: run["reserved"] - run["allocated"] for name, run in runs.items()}
    logits = 4 * 1024 * 128_256 * 4
    assert more["none"] == pytest.approx(3 * logits, rel=0.01)
    assert more["expandable segments"] < 1.3 * GiB
    default, grown = runs["none"], runs["expandable segments"]
    sizes = [default["allocated"], default["reserved"], grown["reserved"]]
    assert [f"{size / GiB:.2f}" for size in sizes] == ["23.08", "28.96", "24.36"]
    assert grown["allocated"] == default["allocated"]
