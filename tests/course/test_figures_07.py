"""Drawings of chapter 07: what a trace says, a history, and where reserved memory climbs."""

import json
import re
from functools import cache

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


def test_a_trace_has_pytorchs_labels_merged_and_a_gpus_waits(tmp_path):
    def span(name, start, length, cat="cpu_op"):
        return {"ph": "X", "name": name, "cat": cat, "ts": 1e3 * start, "dur": 1e3 * length}

    events = [
        {"ph": "M", "name": "process_name"},
        {"ph": "X", "name": "without a category", "ts": 0, "dur": 1e6},
        span(WAIT, 1, 3, "user_annotation"),
        span("tokenize", 1.5, 2, "user_annotation"),
        span("aten::linear", 4, 2),
        span("aten::mm", 5, 1),  # runs within the operator above
        span("autograd::engine::evaluate_function: MmBackward0", 6, 2),
        span("cudaStreamSynchronize", 8, 1, "cuda_runtime"),
        span("Optimizer.step#AdamW.step", 9, 2, "user_annotation"),
        span("Optimizer.step#AdamW.step", 9, 9, "gpu_user_annotation"),
        span("gemm", 5, 4, "kernel"),
    ]
    path = tmp_path / "trace_0.json"
    path.write_text(json.dumps({"traceEvents": events}))
    figure = figures_07.trace(figures_07.Trace(path), "title", "about")
    kernels = ("GPU kernels", "4.0", "40%")
    loop = [
        ("enumerate(DataLoader)", "3.0", "30%"),
        ("tokenize", "2.0", "20%"),
        ("aten::", "2.0", "20%"),
    ]
    assert figure.rows[1:] == [
        *loop,
        ("autograd::engine", "2.0", "20%"),
        ("Optimizer.step", "2.0", "20%"),
        ("cudaStreamSynchronize", "1.0", "10%"),
        kernels,
    ]
    of_the_loop = figures_07.Trace(path, figures_07.LOOP)
    assert list(of_the_loop.rows) == [*(name for name, *_ in loop), "GPU kernels"]
    assert of_the_loop.rows["aten::"] == [(4, 2)]
    assert of_the_loop.share("enumerate(DataLoader)") == pytest.approx(3 / 8)


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


def test_the_text_says_what_the_cures_reserve_and_need():
    stored = json.loads(data_path("many_lengths.json").read_text())
    runs = stored["runs"]
    names = ("all padded to 1,024", "buckets 256, 512, 1,024", "first step at 1,024")
    shares = [round(100 * (runs[name]["reserved"] / runs[name]["allocated"] - 1)) for name in names]
    text = "".join(cell["source"] for cell in chapter().cells)
    assert "They reserve {} %, {} % and {} % more than is allocated".format(*shares) in text
    assert not any(runs[name]["frees"] for name in names)
    needs = {name: run["least_room"] / GiB for name, run in runs.items() if "least_room" in run}
    none, grown, loss = needs["none"], needs["expandable segments"], needs["SFTTrainer's loss"]
    assert f"By default it needs {none:.1f} GiB" in text
    reserved = [runs[name]["reserved"] / GiB for name in ("none", "expandable segments")]
    saved = f"expandable segments save {none - grown:.1f} GiB, not {reserved[0] - reserved[1]:.1f}"
    assert saved in text and f"The loss saves {none - loss:.1f} GiB" in text
    assert f"Step 15 gives back {runs['none']['frees']} segments" in text


def test_the_message_of_the_run_that_dies_is_the_stored_one():
    """By default the logits find no room, though more is free; a segment that grows has it."""
    small = json.loads(data_path("many_lengths.json").read_text())["small_card"]
    assert small["batch_size"] == 5 and small["asked"] == 5 * 1024 * 128_256 * 4 + MiB
    free = small["room"] - small["reserved"]
    idle = small["reserved"] - small["allocated"]
    asked, free, allocated, idle, unused = (
        f"{size / GiB:.2f} GiB"
        for size in (small["asked"], free, small["allocated"], idle, free + idle)
    )
    text = " ".join("".join(cell["source"] for cell in chapter().cells).split())
    said = f"Tried to allocate {asked}. … {free} is free. … {allocated} is allocated by PyTorch, "
    assert f"{said}and {idle} is reserved by PyTorch but unallocated." in text
    assert f"{unused} were not in use" in text
    assert f"They had {idle} free, and the card had {free[:-4]}" in text
    assert small["expandable segments"]["reserved"] < small["room"]


def test_a_climb_names_the_tokens_of_its_step():
    run = {"allocated": [2 * GiB, GiB, GiB], "reserved": [3 * GiB, 3 * GiB + MiB, 4 * GiB]}
    run["reserved on the card"] = [3 * GiB, 3 * GiB, 2 * GiB]
    figure = figures_07.climb(run, [512, 128, 1024], 3 * GiB, "title", "about")
    assert [text.get_text() for text in figure.axes[0].texts] == ["1,024"]
    on_the_card = figure.axes[0].lines[-1]
    assert list(on_the_card.get_ydata()) == [3, 3, 2]


def test_a_roofline_has_its_dot_at_the_turn():
    figure = figures_07.roofline({"card: 100 tokens": {1: 5, 100: 6, 4096: 240}}, "title", "about")
    (line,) = figure.axes[0].lines
    assert list(line.get_xdata()) == [1, 100, 4096] and line.get_markevery() == [1]
