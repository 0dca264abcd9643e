"""`make course`, `make notebooks` and the set-up cell, on notebooks made here: what runs, what
fails, what is left.
"""

import os
import re
import signal
import subprocess
import sys
import time

import canonical
import course
import execute
import nbformat
import page
import pytest
import scratch
import settings
import try_colab
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbformat.v4 import new_markdown_cell
from rich.console import Console

FORMULAS = r"""Inline $M = 4N$ and in a block:

$$ s\,b\,h \left(34 + \frac{5 a s}{h}\right) $$

\begin{equation} x \le 512 \end{equation}

but \$5 is money and $\frac$ is no formula."""


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """The folder, the exit status and the output of a course of two notebooks, the first of which
    fails.
    """
    folder = tmp_path_factory.mktemp("course")
    broken = scratch.write(folder / "00_broken.ipynb", "print('before')", "1 / 0", "print('never')")
    whole = scratch.write(folder / "01_whole.ipynb", scratch.CLAIM, scratch.PLOT)
    notebook = nbformat.read(whole, as_version=4)
    notebook.cells.append(new_markdown_cell(FORMULAS))
    whole.write_text(canonical.text(notebook))
    before = [path.read_bytes() for path in (broken, whole)]
    script = f"""import sys; sys.path.insert(0, {str(settings.TOOLS)!r})
from pathlib import Path
import course
notebooks = [Path({str(broken)!r}), Path({str(whole)!r})]
sys.exit(course.run_course(notebooks, Path("out"), lambda: "recipe  1 < 2"))"""
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert [path.read_bytes() for path in (broken, whole)] == before, (
        "the committed notebooks are never touched"
    )
    return folder / "out", run


def test_a_failing_chapter_is_named_and_the_others_run(left):
    _, run = left
    assert run.returncode == 1
    assert "00_broken.ipynb, cell 4 (1 / 0): ZeroDivisionError: division by zero" in run.stderr
    assert re.search(r"^00_broken  \d+ s  failed in cell 4$", run.stdout, re.MULTILINE)
    assert re.search(r"^01_whole  \d+ s  ok$", run.stdout, re.MULTILINE)
    assert "1 of 2 chapters ran to the end" in run.stdout and "recipe  1 < 2" in run.stdout


def test_nobody_watching_means_no_bar(left):
    _, run = left
    assert "\x1b" not in run.stdout + run.stderr and "━" not in run.stdout
    assert len(run.stderr.splitlines()) <= 3, run.stderr


def test_executed_notebooks_are_left(left):
    out, _ = left
    whole = nbformat.read(out / "01_whole.ipynb", as_version=4)
    assert [cell.execution_count for cell in whole.cells if cell.cell_type == "code"] == [1, 2, 3]
    broken = nbformat.read(out / "00_broken.ipynb", as_version=4)
    assert broken.cells[2].outputs[0].text == "before\n" and broken.cells[4].execution_count is None


def test_pages_need_no_network(left):
    out, _ = left
    for path in out.glob("*.html"):
        text = path.read_text()
        fetched = re.findall(
            r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=[\"']?(?!data:)([^\"'\s>]+)", text
        )
        fetched += re.findall(r"@import|url\(\s*[\"']?https?:", text)
        assert fetched == [] and "<script" not in text, path.name


def test_pages_draw_formulas_themselves(left):
    text = (left[0] / "01_whole.html").read_text()
    assert (
        len(re.findall("<math [^>]*>", text)) == 3
        and len(re.findall('<math [^>]*display="block"', text)) == 2
    )
    assert "$5 is money" in text and r"\frac" in text, "what is no formula stays as it was written"


def test_index_links_every_page(left):
    out, _ = left
    text = (out / "index.html").read_text()
    for name in ("00_broken", "01_whole"):
        assert f'href="{name}.html"' in text and f'href="{name}.ipynb"' in text
        assert (out / f"{name}.html").exists() and (out / f"{name}.ipynb").exists()
    assert (
        "stopped in cell 4" in text
        and "ZeroDivisionError: division by zero" in text
        and "ran to the end" in text
    )
    assert "recipe  1 &lt; 2" in text and "torch 2." in text
    assert "together" in text and "calculator.ipynb" in text


def test_pages_link_to_their_neighbours_and_solutions(tmp_path):
    paths = [scratch.write(tmp_path / f"0{n}_x.ipynb", "1") for n in (0, 1, 2)]
    (tmp_path / "solutions").mkdir()
    scratch.write(tmp_path / "solutions" / "01_x_solutions.ipynb", "2")
    run = execute.Run(paths[1], nbformat.read(paths[1], as_version=4), 1.0)
    page.save(run, tmp_path, paths)
    text = (tmp_path / "01_x.html").read_text()
    for name in ("index", "00_x", "02_x", "01_x_solutions"):
        assert f'href="{name}.html"' in text
    assert 'href="01_x.html"' in (tmp_path / "01_x_solutions.html").read_text()
    assert 'href="01_x_solutions.html"' in page.index([run], "here")
    assert "white-space: pre;" in text, "wide tables scroll"


def test_a_failing_table_fails_the_course(tmp_path, capsys):
    path = scratch.write(tmp_path / "00_whole.ipynb", "1 + 1")

    def table() -> str:
        raise ValueError("no table today")

    assert course.run_course([path], tmp_path / "out", table) == 1
    said = capsys.readouterr()
    assert "1 of 1 chapters ran to the end" in said.out and "no table today" in said.err


def test_the_calculator_is_checked_like_a_chapter_and_is_none():
    """`make course` leaves static pages, on which no slider moves."""
    name = settings.NOTEBOOKS / "calculator.ipynb"
    assert name in settings.all_notebooks() and name not in settings.chapters()
    assert set(settings.chapters()) < set(settings.all_notebooks())


def test_a_course_without_chapters_fails(tmp_path):
    assert course.run_course([], tmp_path / "out", lambda: "") == 1


@pytest.mark.slow
def test_the_bar_counts_cells(tmp_path):
    paths = [scratch.write(tmp_path / f"0{n}_x.ipynb", *["pass"] * n) for n in (1, 3)]
    console = Console(
        force_terminal=True, width=100, record=True, file=(tmp_path / "screen").open("w")
    )
    runs = execute.run_all(paths, console, lambda run: None)
    assert [run.error for run in runs] == ["", ""]
    assert "6/6" in (tmp_path / "screen").read_text(), "two set-up cells and four others"


@pytest.mark.parametrize(
    ("source", "error"),
    [
        (
            "import os\nos.write(2, b'out of luck\\n')\nos._exit(1)",
            "the kernel died (was it killed for its memory?) out of luck",
        ),
        ("import time\ntime.sleep(60)", "took longer than 3 s"),
        ("def (", "SyntaxError"),
    ],
)
def test_every_end_is_told(source, error, tmp_path):
    run = execute.run(scratch.write(tmp_path / "00_x.ipynb", "1 + 1", source), timeout=3)
    assert error in run.error and run.failed_cell == 4
    assert "00_x.ipynb, cell 4" in execute.failures([run])[0]


def test_make_notebooks_stores_good_runs_only(tmp_path, good):
    whole = tmp_path / "99_scratch.ipynb"
    whole.write_text(good.replace("2.652 GiB", "9.999 GiB"))
    broken = scratch.write(tmp_path / "98_broken.ipynb", "1 / 0")
    command = [sys.executable, settings.TOOLS / "execute.py", whole, broken]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (
        run.returncode == 1 and "98_broken.ipynb, cell 3 (1 / 0): ZeroDivisionError" in run.stderr
    )
    assert '"execution_count": 1' not in broken.read_text(), (
        "a notebook that fails keeps what it had"
    )
    assert "peak 2.652 GiB" in whole.read_text() and "9.999" not in whole.read_text()
    assert "a figure without alternative text" in "\n".join(canonical.problems(whole)), (
        "plain matplotlib has none"
    )
    once = whole.read_text()
    subprocess.run([*command[:2], whole], check=True, capture_output=True, timeout=300)
    assert whole.read_text() == once, "running twice changes nothing"


def test_a_figure_keeps_its_alternative_text(notebook):
    run = execute.Run(settings.NOTEBOOKS / "99_scratch.ipynb", notebook, 1.0)
    assert 'alt="A line that rises from 1 to 3"' in page.chapter(run)


def test_the_setup_cell_does_nothing_at_home(tmp_path):
    run = execute.run(scratch.write(tmp_path / "00_x.ipynb", "print(hosted)"))
    assert (
        run.notebook.cells[1].outputs == [] and run.notebook.cells[2].outputs[0].text == "False\n"
    )


@pytest.mark.slow  # builds the package; `make test` holds the list of packages against the folders
def test_the_setup_cell_on_colab(tmp_path):
    """An environment without the package and an empty folder: only the package is new, and its data
    came with it.
    """
    check = """from vramlab.base.data import data_path

assert any(data_path("models").iterdir())
assert "environment" in str(data_path())"""
    said = try_colab.try_notebook(scratch.write(tmp_path / "99_scratch.ipynb", check), tmp_path)
    assert said["failures"] == [] and not said["before"]
    assert said["newly"] == ["vramlab"], said["found"]


def test_ctrl_c_ends_the_kernel_and_says_so(tmp_path):
    sleeper = (
        "import os, pathlib, "
        "time\n\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(60)"
    )
    notebook = scratch.write(tmp_path / "00_x.ipynb", sleeper)
    command = [sys.executable, settings.TOOLS / "execute.py", notebook]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pid = tmp_path / "pid"
    deadline = time.monotonic() + 60
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130 and said.strip() == "Stopped."
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.mark.parametrize(
    "failure", [DeadKernelError("Kernel died"), AssertionError(), CellTimeoutError("late"), None]
)
def test_ctrl_c_is_one_however_the_kernels_client_takes_it(failure, monkeypatch, tmp_path):
    class Client(execute.NotebookClient):
        def execute(self, **options):
            self._async_cleanup_kernel_future = None  # what its handler of the signal leaves
            if failure:
                raise failure

    monkeypatch.setattr(execute, "NotebookClient", Client)
    with pytest.raises(KeyboardInterrupt):
        execute.run(scratch.write(tmp_path / "00_x.ipynb", "1 + 1"))


@pytest.mark.parametrize(
    "tool", ["canonical.py --check", "execute.py", "course.py", "try_colab.py"]
)
def test_a_notebook_that_is_not_there_is_named(tool):
    name, *flags = tool.split()
    command = [sys.executable, settings.TOOLS / name, *flags, "nowhere.ipynb"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr.endswith("there is no notebook nowhere.ipynb\n")
