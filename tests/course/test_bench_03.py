"""Chapter 03's bench: what it prints is what the witnesses say, and it refuses to print when they differ."""

import pytest
import torch
from vramlab import Recipe, predict
from vramlab_course.base_model import base_model_folder
from vramlab_course.chapters import bench_03
from vramlab_course.chapters.slow_rows import SlowRows
from vramlab_course.pace import Pace

BIG = Recipe("gpt2", batch_size=2, seq_len=64, num_layers=2)
SMALL = Recipe(base_model_folder(), batch_size=2, seq_len=16)


@pytest.fixture(scope="module")
def bench():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_03, "simulation", lambda recipe: predict(recipe, gpu=bench_03.CARD))
        patch.setattr(bench_03, "pace", lambda function, against, rounds: Pace(2.0, 1.0, 3.0))
        patch.setattr(bench_03, "stepper", lambda recipe: None)
        yield bench_03.Bench(BIG, SMALL)


def test_a_trick_is_asked_of_every_witness(bench, capsys):
    peaks = bench.try_out("batch", {"batch 4": {"batch_size": 4}, "paged": {"optim": "paged_adamw_32bit"}})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[2:5]] == ["unchanged", "batch 4", "paged"]
    assert "needs a GPU" in lines[4] or bench.here.gpu
    assert lines[5] == "live: here, batch 4: a token takes 1.00 × as long (0.50 to 1.50)"  # twice the tokens
    assert peaks["batch 4"] > peaks["unchanged"] > peaks["paged"]
    assert bench.measured["batch: batch 4"][0] > bench.measured["unchanged"][0] and "batch: paged" not in bench.measured


def test_a_formula_that_is_off_is_not_printed(bench, monkeypatch):
    monkeypatch.setattr(bench_03, "simulation", lambda recipe: predict(recipe.replace(num_layers=4), gpu="A100"))
    with pytest.raises(AssertionError, match="formula and simulation differ"):
        bench.try_out("batch", {})


def test_the_trainer_learns_the_same_texts_each_time():
    first, again = (bench_03.train(SMALL, watched=False) for _ in range(2))
    assert first == again and first[0] is None and len(first[1]) == 2


def test_the_front_leaves_out_what_is_beaten():
    points = [(3, 5, "c"), (1, 1, "a"), (2, 1, "worse"), (2, 4, "b"), (3, 4, "worse"), (4, 5, "no better")]
    assert [name for *_, name in bench_03.front(points)] == ["a", "b", "c"]


def test_slow_rows_are_the_same_everywhere_and_end():
    rows = SlowRows(3, seconds=0.0)
    assert torch.equal(rows[1]["input_ids"], SlowRows(3, seconds=0.0)[1]["labels"])
    assert len(rows) == len(list(rows)) == 3
