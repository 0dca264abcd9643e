"""Memory histories: a hand-made one in torch's form, and real code recorded on the CPU, leaks
included.
"""

import json

import numpy as np
import pytest
import torch
from torch import nn
from vramlab.hardware.snapshot import UNKNOWN, Line, SnapshotError, user_line
from vramlab.report.report import MiB
from vramlab_course.memory_history import Snapshot, record

FRAMES = [
    {
        "filename": "/env/lib/python3.11/site-packages/torch/nn/functional.py",
        "line": 9,
        "name": "linear",
    },
    {"filename": "/home/ann/train.py", "line": 12, "name": "step"},
    {"filename": "/home/ann/main.py", "line": 3, "name": "main"},
]


def event(action, addr=0, size=0, frames=FRAMES):
    return {"action": action, "addr": addr, "size": size, "stream": 0, "frames": frames}


HAND = {
    "device_traces": [
        [
            event("segment_alloc", 1000, 20 * MiB),
            event("alloc", 1000, 8 * MiB),
            event("alloc", 9000, 4 * MiB, FRAMES[2:]),
            event("free_requested", 1000, 8 * MiB),
            event("free_completed", 1000, 8 * MiB),
            event("alloc", 1000, 2 * MiB),
            event("free_completed", 77, 1 * MiB),  # made before the history began
        ]
    ],
    "segments": [{"device": 0, "total_size": 30 * MiB, "allocated_size": 9 * MiB, "blocks": []}],
}


def test_over_time_by_hand():
    snapshot = Snapshot(HAND)
    mib = (
        np.array([4, 4, 12, 16, 16, 8, 10, 9]) * MiB
    )  # 4 MiB were alive before: the segments say 9 at the end
    assert (snapshot.allocated == mib).all()
    assert snapshot.peak == 3 and snapshot.source == "measured"


def test_blocks_and_lines_by_hand():
    snapshot = Snapshot(HAND)
    first, second, third = snapshot.blocks
    assert (first.size, first.born, first.freed) == (8 * MiB, 2, 5)
    assert second.freed is None and second.line == Line("main.py", 3, "main")
    assert third.line == Line("train.py", 12, "step")
    assert [(group.size // MiB, group.count, group.line.file) for group in snapshot.largest()] == [
        (8, 1, "train.py"),
        (4, 1, "main.py"),
    ]
    assert [group.size // MiB for group in snapshot.left()] == [4, 2]


def test_a_line_in_a_library_only_when_there_is_no_other():
    assert user_line(FRAMES[:1]).file == "functional.py"
    assert user_line([]) == UNKNOWN
    assert (
        user_line([{"filename": "/tmp/ipykernel_7/123.py", "line": 4, "name": "f"}]).file == "cell"
    )
    course = {
        "filename": "/env/lib/python3.11/site-packages/vramlab_course/chapters/tiny_gpt.py",
        "line": 4,
        "name": "f",
    }
    assert user_line([FRAMES[0], course, FRAMES[1]]).file == "tiny_gpt.py"


def model_and_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    return model, torch.randn(512, 256)


def train(model, optimizer, x):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_healthy_step_leaves_nothing_and_a_second_is_the_same():
    model, x = model_and_batch()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, x)
    peaks = []
    for _ in range(2):
        with record("cpu") as memory:
            train(model, optimizer, x)
        assert memory.snapshot.left() == () and str(memory.snapshot.left()) == "nothing"
        peaks.append(int(memory.snapshot.allocated.max()))
    assert peaks[0] == peaks[1] > 6 * MiB and memory.snapshot.source == "simulated"


def test_uncleared_gradients_are_left_with_their_line():
    model, x = model_and_batch()
    with record("cpu") as memory:
        model(x).square().mean().backward()  # the line that is looked for
    (group,) = memory.snapshot.left()
    assert group.size == sum(p.nbytes for p in model.parameters()) and group.count == 4
    assert (
        group.line.file == "test_memory_history.py"
        and "the line that is looked for" in group.line.text
    )


def test_a_loss_in_a_list_keeps_its_graph_only_without_backward():
    model, x = model_and_batch()
    left = {}
    for backward in (True, False):
        losses = []
        with record("cpu") as memory:
            for _ in range(3):
                loss = model(x).square().mean()
                if backward:
                    loss.backward()
                    model.zero_grad()
                losses.append(loss)
            del loss
        left[backward] = sum(group.size for group in memory.snapshot.left(count=99))
    assert left[True] == 3 * 4 and left[False] > 3 * 4 * MiB


def test_what_was_there_before_is_not_in_it():
    old = torch.zeros(MiB)
    with record("cpu") as memory:
        old.add_(1)
        view = old[:10]
        new = view + 1
    assert [block.size for block in memory.snapshot.blocks] == [40] and len(new) == 10


def test_a_history_may_come_from_json():
    assert Snapshot(json.loads(json.dumps(HAND))).blocks == Snapshot(HAND).blocks


def test_an_error_inside_comes_out_as_it_is():
    with pytest.raises(RuntimeError, match="nothing yet"), record("cpu"):
        raise RuntimeError("nothing yet")
    with pytest.raises(SnapshotError, match="no history"), record("cpu"):
        pass
    with pytest.raises(RuntimeError), record("cpu") as memory:
        kept = torch.zeros(1000)
        raise RuntimeError
    assert len(memory.snapshot.blocks) == 1 and len(kept)


def test_on_a_gpu_the_history_is_torchs_own(monkeypatch):
    """With torch's functions replaced: what is asked of them, and in which order."""
    asked = []
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda **options: asked.append(options)
    )
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: HAND)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: asked.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with record("cuda", max_entries=7) as memory:
        pass
    assert asked == [{"max_entries": 7, "stacks": "python"}, "synchronize", {"enabled": None}]
    assert memory.snapshot.source == "measured" and memory.snapshot.peak == 3
