"""Drawings of chapter 07: what a trace says, a history, and where reserved memory climbs."""

import json
import re
from functools import cache
from types import SimpleNamespace

import nbformat
import pytest
import settings
from vramlab.base.data import data_path
from vramlab.interfaces.plot import table
from vramlab.report.report import GiB, MiB
from vramlab_course import blank
from vramlab_course.figures import figures_07
from vramlab_course.memory_history import Snapshot


@cache
def chapter():
    (path,) = [path for path in settings.chapters() if path.name.startswith("07")]
    return nbformat.read(path, as_version=4)


WAIT = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def event(name, start, end, device="CPU"):
    times = SimpleNamespace(start=1e6 * start, elapsed_us=lambda: 1e6 * (end - start))
    return SimpleNamespace(name=name, time_range=times, device_type=SimpleNamespace(name=device))


def seen(*events):
    """The trace of events (name, start, end), or those with their device; the last waiting finds no
    batch.
    """
    last = max(end for _, _, end, *_ in events)
    given = [*events, (WAIT, last, last + 0.5)]
    return figures_07.traced(SimpleNamespace(events=lambda: [event(*one) for one in given]))


def test_waiting_is_what_pytorch_labels_and_the_last_has_no_batch():
    found = seen(
        (WAIT, 1, 4),
        ("tokenize", 1.5, 3.5),
        ("forward", 4, 5),
        ("aten::mm", 4, 5),
        ("forward", 4, 5, "CUDA"),
        ("update", 5, 7),
    )
    assert found.labels == {
        "waiting for data": [(1, 3)],
        "forward": [(4, 1)],
        "backward": [],
        "update": [(5, 2)],
        "tokenize": [(1.5, 2)],
    }
    assert (found.seconds, found.share("waiting for data"), found.total("update")) == (6, 0.5, 2)


def test_operators_that_overlap_are_one_span_and_kernels_have_a_row():
    kernels = [("gemm", 4.2, 4.4, "CUDA"), ("gemm", 4.4, 4.5, "CUDA")]
    found = seen(
        (WAIT, 1, 4), ("aten::linear", 4, 5), ("aten::mm", 4.1, 4.9), ("aten::add", 6, 7), *kernels
    )
    assert found.lanes["operators"] == [(4, 1), (6, 1)]
    assert found.lanes["GPU kernels"] == [pytest.approx((4.2, 0.3))]
    figure = figures_07.trace(found, "title", "about")
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        "labels",
        "operators",
        "GPU kernels",
    ]
    assert "100%" in table(figure)


def test_a_trainers_trace_has_pytorchs_labels_and_a_gpus_waits(tmp_path):
    def span(name, start, length, cat="cpu_op"):
        return {"ph": "X", "name": name, "cat": cat, "ts": 1e3 * start, "dur": 1e3 * length}

    events = [
        {"ph": "M", "name": "process_name"},
        {"ph": "X", "name": "without a category", "ts": 0, "dur": 1e6},
        span(WAIT, 0, 3, "user_annotation"),
        span("aten::linear", 3, 2),
        span("aten::mm", 4, 1),  # runs within the operator above
        span("autograd::engine::evaluate_function: MmBackward0", 5, 2),
        span("cudaStreamSynchronize", 7, 1, "cuda_runtime"),
        span("Optimizer.step#AdamW.step", 8, 2, "user_annotation"),
        span("Optimizer.step#AdamW.step", 8, 9, "gpu_user_annotation"),
        span("gemm", 4, 4, "kernel"),
    ]
    path = tmp_path / "trace_0.json"
    path.write_text(json.dumps({"traceEvents": events}))
    figure = figures_07.trainer_trace(path, "title", "about")
    assert figure.rows[1:] == [
        ("enumerate(DataLoader)", "3.0", "30%"),
        ("aten::", "2.0", "20%"),
        ("autograd::engine", "2.0", "20%"),
        ("Optimizer.step", "2.0", "20%"),
        ("cudaStreamSynchronize", "1.0", "10%"),
        ("GPU kernels", "4.0", "40%"),
    ]


def test_histories_stand_in_a_row_with_a_dot_at_each_batch():
    def change(action, address, size, line):
        frames = [{"filename": f"{line}.py", "line": 3, "name": "f"}]
        return {"action": action, "addr": address, "size": size, "frames": frames}

    def batch(number):
        return [
            change("alloc", number, MiB, "kept"),
            change("alloc", 9, 2 * MiB, "gone"),
            change("free_completed", 9, 2 * MiB, ""),
        ]

    leak = [*batch(1), *batch(2)]
    cured = [*batch(1), change("free_completed", 1, MiB, "")] * 2
    snapshots = {
        name: Snapshot({"device_traces": [events]})
        for name, events in {"leaking": leak, "cured": cured}.items()
    }
    figure = figures_07.histories(snapshots, 2, "title", "about")
    rows = [line.split() for line in table(figure).splitlines()[2:]]
    assert rows == [["leaking:", "1.0"], ["leaking:", "2.0"], *[["cured:", "0.0"]] * 2]
    (axes,) = figure.axes
    assert [line.get_xdata()[0] for line in axes.lines] == [3, 6, 7 + 4, 7 + 8]
    tops = [
        max(path.vertices[:, 1].max() for path in area.get_paths()) for area in axes.collections
    ]
    assert tops == [4, 3]
    assert [text.get_text() for text in axes.texts] == ["1", "2", "0", "0"]


def test_the_six_requests_of_the_chapter_are_what_its_allocator_does():
    """Its solution serves them; the text shows each segment in MiB, and both sums."""
    caching = blank.find("07.Caching").own()()
    blocks, lines = {}, []
    for name, size in (("A", 6), ("B", 5), ("A", 0), ("C", 4), ("D", 10), ("B", 0)):
        if size:
            blocks[name] = caching.malloc(size * MiB)
        else:
            caching.free(blocks.pop(name))
        names = {id(block): name for name, block in blocks.items()}
        drawn = [
            "".join(names.get(id(block), ".") * (block.size // MiB) for block in segment)
            for segment in caching.segments
        ]
        lines.append([*drawn, str(caching.allocated // MiB), str(caching.reserved // MiB)])
    text = "".join(cell["source"] for cell in chapter().cells)
    told = [line.split() for line in text.splitlines() if re.match(r"\d  [A-D] ", line)]
    assert [line[-len(drawn) :] for line, drawn in zip(told, lines, strict=True)] == lines


def test_the_small_print_says_what_the_other_cures_reserve():
    runs = json.loads(data_path("many_lengths.json").read_text())["runs"]
    names = ("all padded to 1,024", "buckets 256, 512, 1,024", "first step at 1,024")
    shares = [round(100 * (runs[name]["reserved"] / runs[name]["allocated"] - 1)) for name in names]
    said = "They reserve {} %, {} % and {} % more than is allocated".format(*shares)
    assert said in "".join(cell["source"] for cell in chapter().cells)
    assert not any(runs[name]["frees"] for name in names)
    least = f"survives even with {runs['none']['least_room'] / GiB:.1f} GiB (simulated)"
    assert least in "".join(cell["source"] for cell in chapter().cells)


def test_a_climb_names_the_tokens_of_its_step():
    run = {"allocated": [2 * GiB, GiB, GiB], "reserved": [3 * GiB, 3 * GiB + MiB, 4 * GiB]}
    figure = figures_07.climb(run, [512, 128, 1024], 3 * GiB, "title", "about")
    assert [text.get_text() for text in figure.axes[0].texts] == ["1,024"]
