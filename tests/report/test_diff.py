"""`diff`: categories and tensors that came and went, in bytes, of recipes, commits and environments."""

import json

import pytest
from tiny_models import config
from typer.testing import CliRunner
from vramlab import LoRA, Recipe, Report, diff, predict, simulate
from vramlab.faces.cli import app

A = Recipe(config("gpt2"), batch_size=2, seq_len=32, num_layers=2)


@pytest.fixture(scope="module")
def reports():
    return [simulate(recipe, target="cpu") for recipe in (A, A.replace(gradient_checkpointing=True))]


def test_what_came_and_went_in_bytes(reports):
    before, after = reports
    found = diff(before, after)
    assert found.peak == after.peak.total - before.peak.total < 0
    values = found.to_dict()
    assert values["rows"]["activations"] == (before.peak.activations, after.peak.activations)
    for old, new, group in found.tensors:
        alike = [[t for t in r.largest if (t.category, t.op, t.where, t.dtype) == _key(group)] for r in reports]
        sizes = [sum(t.size * t.count for t in one) or None for one in alike]
        assert sizes == [old, new]
    assert any(new is None for _, new, _ in found.tensors)
    assert "gone: " in str(found) and "B is " in str(found) and "Δ is taken against A" in str(found)


def _key(group):
    return group.category, group.op, group.where, group.dtype


def test_no_difference_is_said_plainly(reports):
    found = diff(reports[0], reports[0])
    assert found.peak == 0 and found.tensors == () and found.notes == () and "−" not in str(found)


def test_two_environments_are_named(reports):
    newer = Report.from_dict(reports[0].to_dict())
    newer.environment["transformers"], newer.environment["date"] = "9.9", "2030-01-01"
    assert diff(reports[0], newer).notes == (f"transformers: {reports[0].environment['transformers']} → 9.9",)


def test_reports_of_unlike_recipes_name_them():
    found = str(diff(predict(A), predict(Recipe("bert-base", lora=LoRA(r=2)))))
    assert found.startswith("different recipes") and "note: B is bert-base" in found


def test_a_report_without_figures_is_refused(reports):
    failed = Report.failed("measured", A, "cuda", "oom", "no room")
    with pytest.raises(ValueError, match="without figures"):
        diff(reports[0], failed)


def test_the_command_takes_options_recipes_and_reports(tmp_path, reports):
    files = [tmp_path / f"{name}.json" for name in "ab"]
    for file, report in zip(files, reports, strict=True):
        file.write_text(report.to_json())
    run = CliRunner().invoke
    found = run(app, ["diff", *map(str, files), "--json"])
    assert json.loads(found.output) == json.loads(json.dumps(diff(*reports).to_dict()))
    files[0].write_text(A.to_json())
    found = run(app, ["diff", str(files[0]), str(files[1]), "--target", "cpu", "--json"])
    assert json.loads(found.output)["peak"] == diff(*reports).peak
    words = "gpt2 --num-layers 1 --seq-len 16 --batch-size "
    assert json.loads(run(app, ["diff", words + "1", words + "2", "--json"]).output)["peak"] != 0
    found = run(app, ["diff", words + "0", words + "1"])
    assert found.exit_code == 2 and "batch_size" in found.output
