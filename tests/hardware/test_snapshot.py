"""Memory snapshots in torch's form: what was alive at the peak, by line; files are read, and never
executed.
"""

import pickle

import pytest
from vramlab.hardware.snapshot import BEFORE, Snapshot, SnapshotError, read_snapshot, user_line
from vramlab.report.report import MiB

LAYER = {
    "filename": "/env/lib/python3.11/site-packages/transformers/models/gpt2/modeling_gpt2.py",
    "line": 7,
    "name": "f",
}
FRAMES = [
    {"filename": "/pytorch/c10/cuda/CUDACachingAllocator.cpp", "line": 1, "name": "malloc"},
    {
        "filename": "/env/lib/python3.11/site-packages/torch/nn/functional.py",
        "line": 9,
        "name": "linear",
    },
    LAYER,
    {"filename": "/home/ann/train.py", "line": 12, "name": "step"},
]


def event(action, addr=0, size=0, frames=(), **more):
    return {
        "action": action,
        "addr": addr,
        "size": size,
        "stream": 0,
        "frames": list(frames),
        "time_us": 0,
        **more,
    }


def block(size, state="active_allocated", **more):
    return {"size": size, "requested_size": size, "state": state, **more}


CONTENT = {
    "device_traces": [
        [],
        [
            event("segment_alloc", 4000, 20 * MiB),
            event("alloc", 4000, 8 * MiB, FRAMES),
            event("alloc", 5000, 2 * MiB, FRAMES[3:]),
            event("free_completed", 4000, 8 * MiB),
            event("oom", 0, 30 * MiB, device_free=MiB),
        ],
    ],
    "segments": [
        {
            "device": 1,
            "address": 4000,
            "total_size": 20 * MiB,
            "allocated_size": 2 * MiB,
            "blocks": [block(8 * MiB, "inactive", address=4000), block(2 * MiB, address=5000)],
        },
        {
            "device": 1,
            "address": 1,
            "total_size": 6 * MiB,
            "allocated_size": 6 * MiB,
            "blocks": [block(6 * MiB, address=1)],
        },
        {
            "device": 1,
            "address": 9,
            "total_size": 2 * MiB,
            "allocated_size": 0,
            "blocks": [block(2 * MiB, "inactive")],
        },
        {"device": 0, "address": 7, "total_size": 2 * MiB, "allocated_size": 2 * MiB, "blocks": []},
    ],
    "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1},
}


def dumped(path, content, write=pickle.dumps):
    path.write_bytes(write(content))
    return path


def test_a_snapshot_is_explained_without_running_it(tmp_path):
    snapshot = read_snapshot(dumped(tmp_path / "memory.pickle", CONTENT))
    assert (snapshot.peak, max(snapshot.allocated), max(snapshot.reserved)) == (
        3,
        16 * MiB,
        28 * MiB,
    )
    assert [(group.size // MiB, group.line.file) for group in snapshot.largest()] == [
        (8, "modeling_gpt2.py"),
        (6, BEFORE.file),
        (2, "train.py"),
    ]
    assert snapshot.scattered == 18 * MiB
    said = str(snapshot)
    for words in (
        "peak: 16.000 MiB allocated, 28.000 MiB reserved, after event 3 of 5",
        "modeling_gpt2.py:7",
        "at the end: 8.000 MiB allocated, 28.000 MiB reserved",
        "fragmentation: 18.000 MiB free among living blocks; 2.000 MiB in segments that are all "
        "free",
        "out of memory: 30.000 MiB asked for, 1.000 MiB free",
    ):
        assert words in said


def test_a_snapshot_without_a_history_says_what_to_do():
    with pytest.raises(SnapshotError, match="record before"):
        Snapshot({**CONTENT, "device_traces": [[]]})


def test_the_line_is_the_innermost_python_code_outside_of_torch():
    assert user_line(FRAMES).file == "modeling_gpt2.py"
    assert user_line(FRAMES[3:]).file == "train.py"
    assert user_line(FRAMES[:2]).file == "CUDACachingAllocator.cpp"


class Hidden:
    def __reduce__(self):
        return print, ("this ran",)


@pytest.mark.parametrize(
    ("bytes_", "said"),
    [
        (pickle.dumps({"device_traces": [Hidden()]}), "names builtins.print"),
        (pickle.dumps({**CONTENT, "more": Hidden}), "names test_snapshot.Hidden"),
        (b"cos\nsystem\n(S'true'\ntR.", "names os.system"),
        (pickle.dumps([1]), "no memory snapshot"),
        (pickle.dumps({}), "no memory snapshot"),
        (pickle.dumps({"device_traces": []}), "no memory snapshot"),
        (b"\x80\x04broken", "no memory snapshot"),
        (b"", "no memory snapshot"),
    ],
)
def test_anything_else_is_refused_in_one_sentence(tmp_path, capsys, bytes_, said):
    with pytest.raises(SnapshotError, match=said) as error:
        read_snapshot(dumped(tmp_path / "m.pickle", bytes_, bytes))
    assert "\n" not in str(error.value) and capsys.readouterr().out == ""


def test_a_file_that_is_not_there_is_said(tmp_path):
    with pytest.raises(SnapshotError, match="No such file"):
        read_snapshot(tmp_path / "none.pickle")
