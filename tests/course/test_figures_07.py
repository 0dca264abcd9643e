"""Drawings of chapter 07: the share of waiting, and the steps in which reserved memory climbs."""

from types import SimpleNamespace

from vramlab.faces.plot import table
from vramlab.report.report import GiB
from vramlab_course.chapters.figures_07 import climb, labelled, loops
from vramlab_course.fragmentation import Followed


def event(name, start, end, device="CPU"):
    times = SimpleNamespace(start=1e6 * start, elapsed_us=lambda: 1e6 * (end - start))
    return SimpleNamespace(name=name, time_range=times, device_type=SimpleNamespace(name=device))


def test_waiting_is_what_pytorch_labels_and_the_last_has_no_batch():
    wait = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    names = [(wait, 1, 4), ("forward", 4, 5), ("aten::mm", 4, 5), ("forward", 4, 5, "CUDA"), ("update", 5, 7)]
    spans = labelled(SimpleNamespace(events=lambda: [event(*one) for one in [*names, (wait, 7, 7.5)]]))
    assert spans == {"waiting for texts": [(1, 3)], "forward": [(4, 1)], "backward": [], "update": [(5, 2)]}
    assert table(loops({"a loop": spans}, "title", "about")).split()[-2:] == ["6.0", "50%"]


def test_a_climb_names_the_tokens_of_its_step():
    run = Followed([GiB, 2 * GiB, GiB, GiB], [4 * GiB] * 4, [1, 2, 3, 4], [GiB, 3 * GiB, 3 * GiB, 4 * GiB], [], [], 0)
    figure = climb(run, [512, 128, 1024], 3 * GiB, "title", "about")
    assert [text.get_text() for text in figure.axes[0].texts] == ["512", "1,024"]
