"""The figure of a profiler's trace: the data it draws, and that it says it in words."""

import matplotlib
import pytest
from vramlab import plot
from vramlab_course.over_time import trace
from vramlab_course.trace import Event, Trace

matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def closed():
    yield
    matplotlib.pyplot.close("all")


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
