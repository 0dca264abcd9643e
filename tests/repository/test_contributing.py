"""CONTRIBUTING.md names only files, commands, options and names that exist."""

import importlib
import re
import shlex

import pytest
import typer
from settings import ROOT
from vramlab.interfaces.cli import app
from vramlab_course.published import runs

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
PROSE = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
SPANS = re.findall(r"`([^`]+)`", PROSE)
FOLDERS = [
    ROOT,
    ROOT / "tests",
    *(p for p in (ROOT / "helpers").rglob("*") if p.is_dir() and p.name != "__pycache__"),
]
PLACEHOLDERS = {"NN_name": "05_lora", "NN": "05", "NAME": "gpt2"}
# Made by those who follow the page, not part of the repository.
THEIRS = {
    "my_list.json",
    "nvidia-h200-torch2.13-transformers5.23.json",
    "build/course/index.html",
    "config.json",
    "data/measurements/",
}


def filled(text: str) -> str:
    for placeholder, example in PLACEHOLDERS.items():
        text = text.replace(placeholder, example)
    return text


def commands() -> list[list[str]]:
    lines = [line.split(" #")[0].strip() for block in BLOCKS for line in block.splitlines()]
    spans = [span for span in SPANS if span.startswith(("make ", "python ", "vramlab "))]
    return [shlex.split(filled(line)) for line in [*lines, *spans] if line]


def paths() -> list[str]:
    found = [
        span
        for span in SPANS
        if re.fullmatch(r"[\w./-]+\.(py|json|md|toml|yml|txt|ipynb)|[\w./-]+/", span)
    ]
    return sorted({filled(path) for path in found} - THEIRS)


def test_the_page_has_what_is_checked_here():
    assert len(commands()) >= 14 and len(paths()) >= 40


@pytest.mark.parametrize("path", paths())
def test_every_file_is_there(path):
    is_test = re.fullmatch(r"test_\w+\.py", path)  # named alone: pytest finds it by that
    assert any((folder / path).exists() for folder in FOLDERS) or (
        is_test and list((ROOT / "tests").rglob(path))
    )


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_is_there(words):
    program, *arguments = words
    if program == "make":
        targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[
            1
        ].split()
        assert arguments[0] in targets
        for given in arguments[1:]:
            name, value = given.split("=")
            assert re.search(rf"^{name} \?=", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert value.startswith("--") or value.isdigit() or (ROOT / value).exists()
    elif program == "vramlab":
        command = typer.main.get_command(app).commands[arguments[0]]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in arguments[1:] if word.startswith("--")} <= options
    elif program == "python":
        files = [word for word in arguments if "/" in word or word.endswith(".py")]
        assert all((ROOT / file).exists() for file in files) and (files or "tests" in arguments)
    else:
        assert words == [".", ".venv/bin/activate"]


@pytest.mark.parametrize(
    "span",
    sorted(
        {s for s in SPANS if s.startswith("vramlab.")} | {"vramlab_course.memory_history.record"}
    ),
)
def test_every_dotted_name_is_there(span):
    """Modules, and names in modules."""
    module, _, name = re.match(r"[\w.]+", span)[0].rpartition(".")
    if module == "vramlab":
        assert hasattr(importlib.import_module("vramlab"), name)
    else:
        assert hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("tests/training/test_trainer_loop.py", "CASES"),
        ("tests/recipe/test_shapes.py", "SMALL"),
        ("tests/course/test_claims.py", "EXPECTED"),
    ],
)
def test_every_list_is_there(file, name):
    assert f"`{name}`" in TEXT and re.search(
        rf"^{name}\b.* = ", (ROOT / file).read_text(), re.MULTILINE
    )


def test_the_figures_it_quotes_are_those_of_the_course():
    assert f"{len(runs())} peaks that others measured" in TEXT
