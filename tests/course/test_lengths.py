"""Runs over many lengths on a GPU: refused plainly without one, stored and found again exactly."""

import json

import pytest
import torch
from vramlab import MeasurementError, Recipe, RecordError
from vramlab_course import lengths

RECIPE = Recipe("pythia-70m", batch_size=1, seq_len=32, num_layers=1)
FOUND = {"allocated": [1, 2], "reserved": [3, 4], "retries": 0, "gpu": "Tesla T4", "source": "measured"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(lengths, "measurements_folder", lambda: tmp_path)
    return tmp_path / "lengths"


def test_a_run_is_found_by_recipe_lengths_and_setting(folder):
    with pytest.raises(RecordError, match="no recorded measurement"):
        lengths.find_lengths(RECIPE, [32, 64])
    path = lengths.save_lengths(RECIPE, [32, 64], "", FOUND)
    lengths.save_lengths(RECIPE, [32, 64], "expandable_segments:True", {**FOUND, "reserved": [2, 2]})
    assert path.parent == folder and path.name == "tesla-t4.json"
    assert lengths.find_lengths(RECIPE, [32, 64]) == {**FOUND, "source": "recorded"}
    assert lengths.find_lengths(RECIPE, [32, 64], "expandable_segments:True")["reserved"] == [2, 2]
    for other in ((RECIPE, [64, 32], ""), (RECIPE.replace(batch_size=2), [32, 64], ""), (RECIPE, [32, 64], "x:1")):
        with pytest.raises(RecordError):
            lengths.find_lengths(*other)


def test_a_record_is_not_recorded_again(folder):
    with pytest.raises(RecordError, match="only measured runs"):
        lengths.save_lengths(RECIPE, [32], "", {**FOUND, "source": "recorded"})


def test_a_broken_file_is_named(folder):
    folder.mkdir()
    (folder / "tesla-t4.json").write_text("[]")
    with pytest.raises(RecordError, match=r"tesla-t4\.json cannot be read"):
        lengths.find_lengths(RECIPE, [32])


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it can be measured")
def test_without_a_gpu_the_child_says_so():
    with pytest.raises(MeasurementError, match="torch sees no CUDA device here"):
        lengths.measure_lengths(RECIPE, [32])


def test_the_child_trains_a_step_of_each_length(monkeypatch, capsys):
    """On the CPU, with the card's figures made up: the loop itself is the real one."""
    seen = []
    from vramlab.training import training

    build, step = training.build, training.train_step
    monkeypatch.setattr(training, "build", lambda recipe, device: build(recipe, "cpu"))
    monkeypatch.setattr(training, "make_batch", lambda recipe, device, make=training.make_batch: make(recipe, "cpu"))
    monkeypatch.setattr(
        training, "train_step", lambda run: (seen.append(tuple(run.batch["input_ids"].shape)), step(run))[1]
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # a CUDA build's optimizer asks
    cuda = {"is_available": True, "max_memory_allocated": 7, "memory_reserved": 9, "get_device_name": "Tesla T4"}
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_alloc_retries": 1})
    for name in ("reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    found = lengths.run(RECIPE, [16, 48])
    assert seen == [(1, 16), (1, 16), (1, 48)]
    assert found == {"allocated": [7, 7], "reserved": [9, 9], "retries": 1, "gpu": "Tesla T4"}
    assert json.dumps(found)
