"""Figures of what happens one thing after the other: the data they draw, and that they say it in words."""

import matplotlib
import numpy as np
import pytest
from vramlab import plot
from vramlab.report.report import GiB, MiB
from vramlab_course.fragmentation import Followed
from vramlab_course.memory_history import Snapshot
from vramlab_course.over_time import POINTS, _thin, blocks, events, trace
from vramlab_course.trace import Event, Trace

matplotlib.use("Agg")
FOLLOWED = Followed(
    [GiB, 2 * GiB, GiB, 3 * GiB, GiB],
    [2 * GiB, 4 * GiB, 4 * GiB, 5 * GiB, 5 * GiB],
    [1, 3, 5],
    [2 * GiB, 4 * GiB, 5 * GiB],
    [1, 1],
    [0, 2],
    4,
)
FRAME = [{"filename": "/home/ann/train.py", "line": 12, "name": "step"}]
OTHER = [{"filename": "/home/ann/model.py", "line": 3, "name": "forward"}]


@pytest.fixture(autouse=True)
def closed():
    yield
    matplotlib.pyplot.close("all")


def event(action, addr, size, frames):
    return {"action": action, "addr": addr, "size": size, "frames": frames}


def history():
    made = [
        event("alloc", 1, 4 * MiB, FRAME),
        event("alloc", 2, 8 * MiB, OTHER),
        event("free_completed", 1, 4 * MiB, []),
    ]
    return Snapshot({"device_traces": [made]}, source="simulated")


def test_events_draws_reserved_and_allocated_with_steps():
    figure = events(FOLLOWED, limit=6 * GiB, title="T", subtitle="S")
    (ax,) = figure.axes
    assert ax.lines[0].get_ydata().tolist() == [2, 4, 4, 5, 5]
    assert ax.get_xlim() == (-1, 2) and ax.get_ylim()[1] > 6
    assert figure.rows[1:] == [("1", "2.000", "4.000", "1", "0"), ("2", "3.000", "5.000", "1", "2")]
    assert "reserved 5.00 GiB" in plot.alt_text(figure) and "T, S" in plot.alt_text(figure)


def test_blocks_are_stacked_by_line_up_to_the_total():
    figure = blocks(history(), title="T")
    (ax,) = figure.axes
    tops = [collection.get_paths()[0].vertices[:, 1].max() for collection in ax.collections]
    assert max(tops) == 12 and len(ax.collections) == 3  # two lines, and nothing by others
    assert figure.rows[1:] == [("model.py:3 forward", "1", "8.000"), ("train.py:12 step", "1", "4.000")]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["model.py:3 forward", "train.py:12 step", "all other lines"]
    assert "highest 12.000 MiB; largest at the peak: model.py:3 forward." in plot.alt_text(figure)


def test_what_blocks_says_of_the_peak_is_not_of_an_earlier_moment():
    third = [{"filename": "/home/ann/loss.py", "line": 7, "name": "loss"}]
    made = [
        event("alloc", 1, 8 * MiB, OTHER),
        event("free_completed", 1, 8 * MiB, []),
        event("alloc", 2, 4 * MiB, FRAME),
        event("alloc", 3, 6 * MiB, third),
    ]
    figure = blocks(Snapshot({"device_traces": [made]}, source="simulated"))
    assert "highest 10.000 MiB; largest at the peak: loss.py:7 loss." in plot.alt_text(figure)


@pytest.mark.parametrize("count", [1, 2])
def test_a_trace_or_two_above_each_other(count):
    wait = Event("enumerate(DataLoader)#_X.__next__", "user_annotation", 0, 2, 1)
    found = Trace([wait, Event("forward", "user_annotation", 2, 3, 1), Event("aten::mm", "cpu_op", 2, 3, 1)])
    figure = trace(dict.fromkeys(("a", "b")[:count], found), ["forward"])
    assert len(figure.axes) == count
    assert figure.rows[:2] == [("seconds", "waiting", "forward", "nothing computed"), ("a", "2.000", "1.000", "67%")]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["waiting", "forward", "computing"]
    assert "a: nothing computed for 67% of the time" in plot.alt_text(figure)


def test_thinning_keeps_every_line_s_highs_and_lows():
    flat, spiky = np.zeros(100_000), np.zeros(100_000)
    spiky[54_321], spiky[77_777] = 5, -5
    at = _thin(flat, spiky)
    assert len(at) <= POINTS + 4 and {0, 54_321, 77_777, 99_999} <= set(at.tolist()) and sorted(at) == at.tolist()
    assert _thin([1, 2, 3]).tolist() == [0, 1, 2]
