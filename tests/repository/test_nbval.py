"""nbval as `make test` runs it: a claim that changed fails, and only tagged lines are left out of
the comparison.
"""

import os
import re
import subprocess
import sys

import canonical
import execute
import join_solutions
import nbformat
import pytest
import scratch
import settings
from nbval.plugin import get_sanitize_patterns
from scratch import code
from vramlab.interfaces.doctor import environment_stamp
from vramlab_course.live import live


@pytest.fixture
def nbval(tmp_path):
    """A function that runs nbval as `make test` does and gives (exit status, output)."""

    def verdict(notebook) -> tuple[int, str]:
        path = tmp_path / "99_scratch.ipynb"
        path.write_text(canonical.text(notebook))
        sanitize = settings.TOOLS / "sanitize.cfg"
        command = [sys.executable, "-m", "pytest", "-q", "--nbval"]
        command += [
            f"-pno:{plugin}" for plugin in ("cacheprovider", "xdist", "hypothesispytest", "anyio")
        ]
        command += [
            "--nbval-current-env",
            "--nbval-cell-timeout=60",
            f"--nbval-sanitize-with={sanitize}",
            str(path),
        ]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(settings.TOOLS), os.environ.get("PYTHONPATH", "")]),
        }
        run = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
        )
        return run.returncode, run.stdout + run.stderr

    return verdict


def test_nbval_refuses_a_changed_claim(notebook, nbval):
    code(notebook, "claim").outputs[0].text = "peak 2.651 GiB\n"
    status, output = nbval(notebook)
    assert (
        status == 1 and "1 failed, 3 passed" in output and "Cell 1: Cell outputs differ" in output
    )


def test_nbval_leaves_out_tagged_lines_and_nothing_else(notebook, nbval):
    """Another machine's stamp and times pass, however many; the same cell fails when an untagged
    line differs.
    """
    live = code(notebook, "live")
    live.outputs[
        0
    ].text = "machine: Python 3.13\nmachine: a GPU\nmachine: another\nlive: took 99.0 s\n"
    live.outputs[0].text += "live: took 98.0 s\n"
    status, output = nbval(notebook)
    assert status == 0 and "4 passed" in output
    live.outputs[0].text += "took 99.0 s\n"
    assert nbval(notebook)[0] == 1


LOOKS_UP = """from vramlab import MeasurementError, Recipe, measure

try:
    measure(Recipe({model!r}, batch_size=8, seq_len=512), recorded=True)
except MeasurementError:
    print("no record")"""


@pytest.mark.parametrize(("model", "listed"), [("gpt2", True), ("gpt2-xl", False)])
def test_a_notebook_looks_up_what_is_on_the_courses_list(model, listed, tmp_path):
    """Else nothing would ever be recorded for it, and no reader would learn why."""
    run = execute.run(scratch.write(tmp_path / "00_x.ipynb", LOOKS_UP.format(model=model)))
    assert ("is not in data/wanted.json, so no GPU records it: add {" in run.error) is not listed, (
        run.error
    )
    assert run.failed_cell == (0 if listed else 3)


@pytest.mark.parametrize(
    "line",
    [
        "took 99.0 s",
        "peak live: 99.0 s",
        " live: took 99.0 s",
        "live:took 99.0 s",
        "the machine: 99 GiB",
    ],
)
def test_only_whole_lines_that_begin_with_the_tag_are_left_out(line, sanitize):
    assert sanitize(f"{line}\n") == f"{line}\n"


def test_sanitizer_keeps_claims_between_tagged_lines(sanitize):
    text = "machine: A\nmachine: B\npeak 2.650 GiB\nlive: 3 s\nlive: 4 s\nloss 3.14"
    assert sanitize(text) == "machine\npeak 2.650 GiB\nlive\nloss 3.14"


@pytest.fixture
def sanitize():
    """nbval's own sanitizing with the project's file."""
    patterns = get_sanitize_patterns((settings.TOOLS / "sanitize.cfg").read_text())
    assert len(patterns) == 2

    def applied(text: str) -> str:
        for pattern, replacement in patterns:
            text = re.sub(pattern, replacement, text)
        return text

    return applied


def test_live_tags_every_line_and_the_stamp_too(capsys, sanitize):
    live("step", 1.5, "s\n\nrss 3")
    print(environment_stamp())
    text = capsys.readouterr().out
    assert text.startswith("live: step 1.5 s\nlive: \nlive: rss 3\nmachine: python 3.")
    assert sanitize(text) == "live\nmachine\n"


def test_kernels_draw_inline():
    """An inherited MPLBACKEND would leave every figure out of the outputs."""
    assert "MPLBACKEND" not in os.environ and "MPLBACKEND" not in {
        **settings.DETERMINISTIC,
        **settings.OFFLINE,
    }


def test_the_joined_solutions_hold_every_cell_and_share_no_name():
    """The cells of each notebook stand behind a cell that resets all names."""
    parts = "".join(cell.source + "\0" for cell in join_solutions.joined().cells)
    parts = parts.split(join_solutions.RESET + "\0")[1:]
    paths = sorted((settings.NOTEBOOKS / "solutions").glob("*.ipynb"))
    assert len(parts) == len(paths) >= 12
    for part, path in zip(parts, paths, strict=True):
        cells = nbformat.read(path, as_version=4).cells
        assert part.startswith("".join(cell.source + "\0" for cell in cells))
