"""Chapter 08's helpers: a program leaves the notebook's process as it was, and two recipes are
named in the cloud.
"""

import sys

import pytest
import vramlab
from vramlab import GiB, Recipe
from vramlab_course.chapters.chapter_08 import cloud, run


def test_a_program_that_fails_leaves_arguments_and_callback(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", "")
    program = tmp_path / "train.py"
    program.write_text(
        "import sys, vramlab; print(1); raise SystemExit(f'{vramlab.WatchCallback.__name__} "
        "{sys.argv[1:]}')"
    )
    before = sys.argv, vramlab.WatchCallback
    with pytest.raises(SystemExit, match=r"Kept \['--data', 'x', '--watch'\]"):
        run(program, "--data", "x")
    assert (sys.argv, vramlab.WatchCallback) == before
    assert capsys.readouterr().out == ""


def test_two_recipes_are_named_in_the_cloud():
    plain = Recipe("gpt2")
    rows = [
        (900.0, (12 * GiB, 13 * GiB, 14 * GiB), plain),
        (1000.0, (18 * GiB, 20 * GiB, 22 * GiB), plain),
    ]
    figure = cloud(rows, {"saves most": rows[0], "chosen": rows[1]}, 23 * GiB, "title", "about")
    where = {text.get_text(): getattr(text, "xy", None) for text in figure.axes[0].texts}
    assert (where["saves most"], where["chosen"]) == ((13, 900), (20, 1000))
