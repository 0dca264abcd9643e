"""Traces summarised: worked out by hand on made-up events, and held against a real profiler."""

import gzip
import json
import time

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from vramlab_course.trace import Event, Trace, TraceError, kind_of


def op(name, start, end, thread=1, kind="cpu_op"):
    return Event(name, kind, start, end, thread)


def region(label, start, end):
    return op(label, start, end, kind="user_annotation")


HAND = Trace(
    [
        region("load", 0, 4),
        region("step", 4, 10),
        region("inner", 5, 8),
        op("aten::linear", 5, 7),
        op("aten::addmm", 5.5, 6.5),
        op("aten::gelu", 7, 8),
        op("aten::softmax", 9, 10),
    ]
)


def test_busy_idle_and_gaps_by_hand():
    assert HAND.busy == [(5, 8), (9, 10)]
    assert HAND.seconds == 10 and HAND.idle == pytest.approx(0.6)
    assert [(gap.start, gap.end, gap.region) for gap in HAND.gaps(0.5)] == [(0, 5, "load"), (8, 9, "step")]
    assert [gap.seconds for gap in HAND.gaps(2)] == [5]


def test_a_gap_at_the_end_counts():
    trace = Trace([op("aten::mm", 0, 1), region("save", 1, 3)])
    assert [(gap.start, gap.end, gap.region) for gap in trace.gaps()] == [(1, 3, "save")]


def test_an_operator_counts_its_own_time_only():
    shares = HAND.by_kind()
    assert shares["contractions"] == pytest.approx(2 / 4) and shares["normalizations"] == pytest.approx(1 / 4)
    assert shares["element-wise and other"] == pytest.approx(1 / 4) and sum(shares.values()) == pytest.approx(1)


def test_kernels_of_two_streams_do_not_nest():
    kernels = [op("gemm", 0, 4, 7, "kernel"), op("gelu", 1, 3, 7, "kernel"), op("aten::mm", 0, 9)]
    trace = Trace(kernels)
    assert trace.on_device and trace.busy == [(0, 4)]
    assert trace.by_kind() == {"contractions": pytest.approx(4 / 6), "element-wise and other": pytest.approx(2 / 6)}


def test_regions_count_passages():
    trace = Trace([op("aten::mm", 0, 9), region("a", 0, 2), region("b", 2, 3), region("a", 4, 5)])
    found = trace.regions()
    assert list(found) == ["a", "b"] and found["a"].count == 2 and found["a"].seconds == 3


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", "contractions"),
        ("ampere_sgemm_128x64_tn", "contractions"),
        ("aten::native_layer_norm_backward", "normalizations"),
        ("aten::_softmax", "normalizations"),
        ("pytorch_flash::flash_fwd_kernel", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("aten::gelu", "element-wise and other"),
    ],
)
def test_kinds_by_name(name, kind):
    assert kind_of(name) == kind


def test_a_real_trace_shows_a_planted_wait(tmp_path):
    x = torch.randn(64, 64)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            with record_function("wait"):
                time.sleep(0.05)
            with record_function("work"):
                (x @ x).softmax(-1)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = Trace.load(tmp_path / "trace.json")
    assert trace.regions()["wait"].count == trace.regions()["work"].count == 3
    assert trace.regions()["wait"].seconds >= 0.15
    waits = [gap for gap in trace.gaps(0.045) if gap.region == "wait"]
    assert len(waits) == 3 and sum(gap.seconds for gap in waits) >= 0.14
    assert set(trace.by_kind()) >= {"contractions", "normalizations"} and not trace.on_device
    with gzip.open(tmp_path / "trace.json.gz", "wt") as file:
        file.write((tmp_path / "trace.json").read_text())
    assert Trace.load(tmp_path / "trace.json.gz").events == trace.events
    with pytest.raises(TraceError, match=r"Trace\.load"):
        Trace.of(profiler)  # torch writes a trace once


def test_the_wait_for_a_loader_is_found():
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for batch in torch.utils.data.DataLoader(torch.zeros(6), batch_size=2):
            batch + 1
    trace = Trace.of(profiler)
    assert len(trace.waiting()) in (3, 4)  # the last one finds that there is no more
    with pytest.raises(TraceError, match="no DataLoader"):
        HAND.waiting()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("not json", "is no trace of torch.profiler"),
        ("{}", "KeyError"),
        ('{"traceEvents": []}', "holds no work"),
        (json.dumps({"traceEvents": [{"ph": "X", "name": "a", "cat": "python_function", "ts": 1}]}), "holds no work"),
        ('{"traceEvents": 3}', "is no trace"),
    ],
)
def test_what_is_no_trace_is_said(tmp_path, content, said):
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(TraceError, match=said):
        Trace.load(path)
    with pytest.raises(TraceError, match="nowhere"):
        Trace.load(tmp_path / "nowhere.json")
