"""What AGENTS.md and the skill tell an agent to run is run as it stands there."""

import json
import re
import shlex
from pathlib import Path

import pytest
from settings import ROOT
from typer.testing import CliRunner
from vramlab.interfaces.cli import app
from vramlab.interfaces.schema import VERSION

SKILL = ROOT / "data" / "SKILL.md"
# Which words stand for a file of the reader's, and what such a file may say.
LOG = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB. "
    "GPU 0 has a total capacity of 14.56 GiB"
)


def commands(path: Path) -> list[str]:
    """Return every line of a file's shell blocks."""
    blocks = re.findall(r"^ *```bash\n(.*?)^ *```", path.read_text(), re.DOTALL | re.MULTILINE)
    return [line.strip() for block in blocks for line in block.splitlines()]


def test_both_files_have_commands():
    assert len(commands(SKILL)) == 6
    assert len(commands(ROOT / "AGENTS.md")) == 6


@pytest.mark.parametrize("command", [each for each in commands(SKILL) if " run " not in each])
def test_the_skill_s_commands_answer(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.log").write_text(LOG)
    name, *rest = shlex.split(command.removeprefix("vramlab "))
    answer = CliRunner().invoke(app, [name, *rest])
    assert answer.exit_code in (0, 1), answer.output
    assert json.loads(answer.stdout)["schema"] == VERSION


def test_the_skill_s_other_commands_and_words_exist():
    text = SKILL.read_text()
    named = set(re.findall(r"vramlab (\w+)", text))
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert named <= known
    assert {"plan", "predict", "simulate", "explain", "run", "diff", "models", "gpus"} <= named
    head = re.match(r"---\nname: ([\w-]+)\ndescription: >-\n(.*?)---\n", text, re.DOTALL)
    assert head[1] == "vramlab"
    assert len(head[2]) < 1024  # what a skill's description may have


def test_the_command_line_prints_the_skill():
    answer = CliRunner().invoke(app, ["skill"])
    assert answer.exit_code == 0
    assert answer.stdout == SKILL.read_text()


def test_what_an_agent_is_told_to_run_here_is_what_the_gate_runs():
    """The commands of AGENTS.md but its tests and `predict` stand in the Makefile's gate."""
    gate = re.search(r"^gate:.*?\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    for command in commands(ROOT / "AGENTS.md"):
        words = command.split()
        if words[:3] == ["python", "-m", "pytest"]:
            assert (ROOT / words[4]).exists()
        elif words[:3] == ["python", "-m", "vramlab"]:
            assert CliRunner().invoke(app, words[3:]).exit_code == 0
        else:
            told = command.replace("python tests/tools/", "")
            assert told.split(" --no")[0] in gate.replace("$(TOOLS)/", ""), command
