"""`diff`: categories and tensors that came and went, in bytes, of recipes, commits and
environments.
"""

import dataclasses
import json

import pytest
from tiny_models import config
from typer.testing import CliRunner
from vramlab import LoRA, Recipe, Report, ReportError, diff, predict, simulate
from vramlab.interfaces.cli import app

A = Recipe(config("gpt2"), batch_size=2, seq_len=32, num_layers=2)


@pytest.fixture(scope="module")
def reports():
    return [
        simulate(recipe, target="cpu") for recipe in (A, A.replace(gradient_checkpointing=True))
    ]


def test_what_came_and_went_in_bytes(reports):
    before, after = reports
    found = diff(before, after)
    change = after.peak.total - before.peak.total
    assert (
        found.differences("peak total") == {"B": (change, change / before.peak.total)}
        and change < 0
    )
    assert found.row("activations").values == (before.peak.activations, after.peak.activations)
    gone = [t for t in before.largest if t.op == "tanh"]
    size = sum(t.size * t.count for t in gone) / 2**10
    assert f"note: −{size:.3f} KiB gone: {gone[0]}" in str(found).split("\n")
    assert "note: B is " in str(found) and "Δ is taken against A" in str(found)


def test_a_compiled_steps_buffers_are_not_told_one_by_one(reports):
    compiled = Report.from_dict(reports[1].to_dict())
    compiled.recipe["torch_compile"] = True
    compiled.notes = ["torch_compile: no formula knows its time", "another note"]
    *_, told, timed = diff(reports[0], compiled).notes
    assert "have no modules' names" in told and timed == compiled.notes[0]
    assert not any("gone: " in note for note in diff(reports[0], compiled).notes)


def test_no_difference_is_said_plainly(reports):
    found = diff(reports[0], reports[0])
    assert (
        found.differences("peak total") == {"B": (0, 0.0)}
        and found.notes == ()
        and "−" not in str(found)
    )


def test_two_environments_are_named(reports):
    newer = Report.from_dict(reports[0].to_dict())
    newer.environment["transformers"], newer.environment["date"] = "9.9", "2030-01-01"
    named = f"transformers: {reports[0].environment['transformers']} → 9.9"
    assert diff(reports[0], newer).notes == (named,)
    other = Report.from_dict(reports[1].to_dict())  # and holds other tensors
    other.environment["transformers"] = "9.9"
    found = diff(reports[0], other)
    assert named in found.notes and any("gone: " in note for note in found.notes)


def test_reports_of_unlike_recipes_name_them():
    found = str(diff(predict(A), predict(Recipe("bert-base", lora=LoRA(r=2)))))
    assert found.startswith("different recipes") and "note: B is bert-base" in found


def test_a_report_without_figures_is_refused(reports):
    failed = Report.failed("measured", A, "cuda", "oom", "no room")
    with pytest.raises(ReportError, match="without figures"):
        diff(reports[0], failed)


def test_the_command_takes_options_recipes_and_reports(tmp_path, reports):
    files = [tmp_path / f"{name}.json" for name in "ab"]
    for file, report in zip(files, reports, strict=True):
        file.write_text(report.to_json())
    run = CliRunner().invoke
    found = run(app, ["diff", *map(str, files), "--json"])
    said = json.loads(json.dumps(dataclasses.asdict(diff(*reports))))
    assert json.loads(found.output) == {"schema": 1, **said}
    assert run(app, ["diff", *map(str, files)]).output == str(diff(*reports)) + "\n"
    files[0].write_text(A.to_json())
    found = run(app, ["diff", str(files[0]), str(files[1]), "--target", "cpu"])
    assert found.output == str(diff(*reports)) + "\n"
    words = "gpt2 --num-layers 1 --seq-len 16 --batch-size "
    assert "batch 2" in run(app, ["diff", words + "1", words + "2"]).output
    files[0].write_text("[1]")
    assert run(app, ["diff", str(files[0]), words + "1"]).exit_code == 2
    files[0].write_text(Report.failed("measured", A, "cuda", "oom", "no room").to_json())
    found = run(app, ["diff", str(files[0]), str(files[1])])
    assert found.exit_code == 2 and "without figures" in found.output
    found = run(app, ["diff", words + "0", words + "1"])
    assert found.exit_code == 2 and "--batch-size is 0" in found.output
