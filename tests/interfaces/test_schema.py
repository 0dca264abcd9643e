"""Every --json answers its published schema, and exit codes mean the same everywhere."""

import json

import jsonschema
import pytest
from typer.testing import CliRunner
from vramlab.base.data import data_path
from vramlab.interfaces.cli import app
from vramlab.interfaces.schema import VERSION, schema_of, schemas
from vramlab.report.report import Report

SMALL = ("gpt2", "--num-layers", "1", "--seq-len", "16")
MESSAGE = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 14.56 "
    "GiB of which "
)
MESSAGE += "1.00 MiB is free."
ASKED = {
    "predict": ("predict", *SMALL, "--gpu", "T4"),
    "predict a run": ("predict", *SMALL, "--lengths", "FILE"),
    "simulate": ("simulate", *SMALL),
    "evaluate": ("evaluate", *SMALL),
    "generate": ("generate", "gpt2", "--num-layers", "1", "--prompt", "16", "--new-tokens", "4"),
    "plan": ("plan", "gpt2", "--seq-len", "16", "--gpu", "T4", "--no-confirm"),
    "plan without": (
        "plan",
        "llama-3.1-70b",
        "--gpu",
        "T4",
        "--no-confirm",
        "--method",
        "full",
        "--no-offload",
    ),
    "explain": ("explain", MESSAGE, *SMALL),
    "explain alone": ("explain", MESSAGE),
    "doctor": ("doctor",),
    "diff": ("diff", " ".join(SMALL), "gpt2 --num-layers 2 --seq-len 16"),
    "models": ("models", "gpt2"),
    "gpus": ("gpus", "T4"),
}


def run(*words):
    return CliRunner().invoke(app, list(words))


def cases():
    """Yield the names in ASKED; what steps on fake tensors is a Report as the prediction is, and
    slow.
    """
    for name in ASKED:
        marks = [pytest.mark.slow] if name in ("simulate", "evaluate", "generate") else []
        yield pytest.param(name, marks=marks)


@pytest.mark.parametrize("case", [*cases()])
def test_an_answer_is_as_its_schema_says(case, tmp_path):
    file = tmp_path / "lengths.jsonl"
    file.write_text("16\n12\n8\n")
    words = [str(file) if word == "FILE" else word for word in ASKED[case]]
    answer = json.loads(run(*words, "--json").stdout)
    assert answer["schema"] == VERSION
    schema = schema_of(words[0])
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(answer, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(answer | {"schema": VERSION + 1}, schema)


def test_a_field_that_is_missing_or_of_another_kind_does_not_pass():
    answer = json.loads(run("predict", *SMALL, "--json").stdout)
    for wrong in ({"peak": {}}, {"title": 3}, {"status": None}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(answer | wrong, schema_of("predict"))
    assert Report.from_dict(answer).title == answer["title"], (
        "the version does not keep a report from being read"
    )


def test_the_published_file_is_the_derived_one():
    """data/schema.json is in the wheel and on the site; `vramlab schema > data/schema.json` writes
    it.
    """
    assert json.loads(data_path("schema.json").read_text(encoding="utf-8")) == schemas()
    assert json.loads(run("schema").stdout) == schemas()
    assert json.loads(run("schema", "plan").stdout) == schema_of("plan")
    assert run("schema", "share").exit_code == 2


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("predict", *SMALL, "--gpu", "T4"), 0),
        (("predict", "llama-3.1-70b", "--gpu", "T4"), 1),
        (("plan", *ASKED["plan without"][1:]), 1),
        (("predict", "gpt9"), 2),
        (("gpus", "--frobnicate"), 2),
        (("explain", "hello there"), 2),
        (("doctor",), 0),
    ],
)
def test_exit_codes_mean_the_same_everywhere(words, code):
    assert run(*words).exit_code == code


def test_doctor_is_content_without_optional_extras(monkeypatch):
    from vramlab.interfaces import doctor

    own = {name for name, _ in doctor.requirements("")}
    assert own and "torch" not in own
    installed = doctor.installed
    monkeypatch.setattr(doctor, "installed", lambda name: installed(name) if name in own else None)
    found = doctor.doctor()
    missing = {check.name for check in found.checks if check.status == "missing"}
    assert {"torch", "transformers"} <= missing and found.ok
    monkeypatch.setattr(doctor, "installed", lambda name: None)
    assert not doctor.doctor().ok
