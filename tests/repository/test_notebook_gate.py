"""The gate refuses every form of a notebook that nbval, GitHub or readers stumble over: each test
spoils one thing.
"""

import copy
import subprocess
import sys

import canonical
import nbformat
import pytest
import settings
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from scratch import CLAIM, PLOT, URL, code


@pytest.fixture
def gate(tmp_path):
    """A function that says what the gate finds in a notebook (a node, or the file's text)."""

    def found(notebook) -> str:
        path = tmp_path / "99_scratch.ipynb"
        path.write_text(notebook if isinstance(notebook, str) else canonical.text(notebook))
        return "\n".join(canonical.problems(path, URL))

    return found


def test_the_good_notebook_passes(notebook, gate):
    assert gate(notebook) == ""
    assert [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"] == [
        1,
        2,
        3,
        4,
    ]


# What nbval alone lets through, or what GitHub and readers stumble over: the gate's part.


def spoil_count(nb):
    code(nb, "claim").execution_count = None


def spoil_count_gap(nb):
    code(nb, "live").execution_count = 7


def spoil_count_order(nb):
    code(nb, "claim").execution_count, code(nb, "plot").execution_count = 3, 2


def spoil_count_and_output(nb):
    code(nb, "claim").execution_count, code(nb, "claim").outputs = None, []


def spoil_skip_tag(nb):
    code(nb, "claim").metadata.tags = ["nbval-skip"]


def spoil_exception_tag(nb):
    code(nb, "claim").metadata.tags = ["raises-exception"]


def spoil_ignore_comment(nb):
    code(nb, "claim").source = "# NBVAL_IGNORE_OUTPUT\n" + CLAIM


def spoil_old_ignore_comment(nb):
    code(nb, "claim").source = "#PYTEST_VALIDATE_IGNORE_OUTPUT\n" + CLAIM


def spoil_skip_comment(nb):
    code(nb, "claim").source = CLAIM + "\n  ## nbval_skip"


def spoil_widget_state(nb):
    nb.metadata.widgets = {"application/vnd.jupyter.widget-state+json": {"state": {}}}


def spoil_widget_output(nb):
    code(nb, "claim").outputs.append(
        new_output("display_data", {"application/vnd.jupyter.widget-view+json": {"a": 1}})
    )


def spoil_javascript(nb):
    code(nb, "claim").outputs.append(
        new_output("display_data", {"application/javascript": "alert(1)"})
    )


def spoil_semicolon(nb):
    code(nb, "plot").source = PLOT.replace("\nplt.show()", ";")


def spoil_show_semicolon(nb):
    code(nb, "plot").source += ";"


def spoil_no_show(nb):
    code(nb, "plot").source = PLOT.replace("\nplt.show()", "")


def spoil_show_not_last(nb):
    code(nb, "plot").source += "\nprint('done')"


def spoil_alt(nb):
    code(nb, "plot").outputs[-1].metadata = {}


def spoil_magic(nb):
    code(nb, "plot").source = "%matplotlib inline\n" + PLOT


def spoil_install(nb):
    code(nb, "claim").source = "%pip install torch\n" + CLAIM


def spoil_error(nb):
    code(nb, "claim").outputs.append(
        new_output("error", ename="ValueError", evalue="no", traceback=[])
    )


def spoil_stderr(nb):
    code(nb, "claim").outputs.append(new_output("stream", name="stderr", text="UserWarning: old\n"))


def spoil_path_in_source(nb):
    code(nb, "claim").source += "\nopen('/home/ann/data.json')"


def spoil_windows_path(nb):
    code(nb, "claim").source += "\nopen('C:\\\\Users\\\\ann')"


def spoil_path_in_stream(nb):
    code(nb, "claim").outputs[0].text += "saved to /tmp/x.json\n"


def spoil_path_in_html(nb):
    code(nb, "claim").outputs.append(
        new_output("display_data", {"text/html": "<b>/Users/ann/x</b>"})
    )


def spoil_path_in_markdown(nb):
    nb.cells[0].source += "\n\nIt lies in `/root/course`."


def spoil_fold(nb):
    nb.cells[0].source += "\n\n<details><summary>More</summary>\nOf it.\n</details>"


def spoil_open_fold(nb):
    nb.cells[0].source += "\n\n<details><summary>More</summary>\n\nOf it.\n"


def spoil_language_of_a_block(nb):
    nb.cells[0].source += "\n\n```python\nimport json\n!ls\n```"


def spoil_kernelspec(nb):
    nb.metadata.kernelspec.name = "my-venv"


def spoil_language_version(nb):
    nb.metadata.language_info.version = "3.11.7"


def spoil_stray_metadata(nb):
    nb.metadata.toc = {}


def spoil_cell_metadata(nb):
    code(nb, "claim").metadata.collapsed = True


def spoil_cell_id(nb):
    code(nb, "claim").id = "a1b2c3d4"


def spoil_empty_cell(nb):
    code(nb, "claim").source = "\n"


def spoil_setup_cell(nb):
    code(nb, "setup").source += "\n!pip install -U torch"


def spoil_setup_address(nb):
    code(nb, "setup").source = canonical.setup_source("https://github.com/other/place")


def spoil_setup_missing(nb):
    nb.cells.remove(code(nb, "setup"))


def spoil_badge(nb):
    nb.cells[0].source = "# Scratch"


def spoil_badge_target(nb):
    nb.cells[0].source = nb.cells[0].source.replace("99_scratch", "98_other")


def spoil_title(nb):
    nb.cells[0].source = "Scratch\n\n" + canonical.badge(URL, "notebooks/99_scratch.ipynb")


def spoil_size(nb):
    code(nb, "plot").outputs[-1].data["image/png"] = "A" * 1_000_001


def spoil_live_claim(nb):
    code(nb, "live").outputs[0].text += "live: peak 2.650 GiB\n"


def spoil_trailing_blank(nb):
    code(nb, "claim").source = CLAIM.replace("\n", "  \n")


SPOILED = {
    spoil_count: "cell 3: no execution count",
    spoil_count_and_output: "cell 3: no execution count",
    spoil_count_gap: "cell 5: execution count 7 where a run from top to bottom gives 4",
    spoil_count_order: "cell 3: execution count 3",
    spoil_skip_tag: "cell 3: tags are not used (nbval-skip)",
    spoil_exception_tag: "cell 3: tags are not used (raises-exception)",
    spoil_ignore_comment: "the marker '# NBVAL_IGNORE_OUTPUT' switches",
    spoil_old_ignore_comment: "the marker '#PYTEST_VALIDATE_IGNORE_OUTPUT' switches",
    spoil_skip_comment: "the marker '# nbval_skip' switches",
    spoil_widget_state: "holds widget state",
    spoil_widget_output: "cannot render: application/vnd.jupyter.widget-view+json",
    spoil_javascript: "cannot render: application/javascript",
    spoil_semicolon: "cell 4: ends with a semicolon",
    spoil_show_semicolon: "cell 4: ends with a semicolon",
    spoil_no_show: "cell 4: draws a figure and does not end with plt.show()",
    spoil_show_not_last: "cell 4: draws a figure and does not end with plt.show()",
    spoil_alt: "cell 4: a figure without alternative text",
    spoil_magic: "cell 4: %matplotlib",
    spoil_install: "cell 3: only the set-up cell installs",
    spoil_error: "cell 3: an error output: ValueError",
    spoil_stderr: "cell 3: output on stderr: UserWarning: old",
    spoil_path_in_source: "cell 3: an absolute path in the source",
    spoil_windows_path: "cell 3: an absolute path in the source",
    spoil_path_in_stream: "cell 3: an absolute path in the output: 'saved to /tmp/x.json'",
    spoil_path_in_html: "cell 3: an absolute path in the output",
    spoil_path_in_markdown: "cell 1: an absolute path in the source",
    spoil_fold: "cell 1: a fold that not every viewer shows",
    spoil_open_fold: "cell 1: a fold that not every viewer shows",
    spoil_language_of_a_block: "cell 1: a ```python block with a line for the shell",
    spoil_kernelspec: "kernelspec or language_info",
    spoil_language_version: "kernelspec or language_info",
    spoil_stray_metadata: "other metadata than the canonical: toc",
    spoil_cell_metadata: "cell 3: stray cell metadata: collapsed",
    spoil_cell_id: "cell ids other than",
    spoil_empty_cell: "cell 3: an empty code cell",
    spoil_setup_cell: "first code cell that is not the set-up cell",
    spoil_setup_address: "first code cell that is not the set-up cell",
    spoil_setup_missing: "first code cell that is not the set-up cell",
    spoil_badge: "has no Colab badge",
    spoil_badge_target: "has no Colab badge",
    spoil_title: "begins with a title",
    spoil_size: "and 1,000,000 is the limit",
    spoil_live_claim: "cell 5: prints a size as a live figure",
    spoil_trailing_blank: "not laid out as --write",
}


@pytest.mark.parametrize("spoil", SPOILED, ids=lambda spoil: spoil.__name__)
def test_gate_refuses(spoil, notebook, gate):
    spoil(notebook)
    assert SPOILED[spoil] in gate(notebook)


def test_gate_refuses_other_files(notebook, gate, good):
    assert "no valid notebook" in gate("{}")
    assert "no valid notebook" in gate("not even JSON")
    assert "not laid out" in gate(good.rstrip("\n"))
    notebook.nbformat_minor = 4
    for cell in notebook.cells:
        del cell["id"]
    assert gate(canonical.nbformat.writes(notebook)) == "has format 4.4, not 4.5"


def test_gate_lets_pass_what_only_looks_wrong(notebook, gate):
    notebook.cells[
        0
    ].source += "\n\nSee https://example.org/home/tmp, 1/work and ratio/root; 8 GB/s; a;b."
    notebook.cells[0].source += "\n\n<details><summary>More</summary>\n\n- Of it.\n\n</details>"
    notebook.cells[0].source += "\n\n```\nimport json\n!ls\n```"
    code(notebook, "claim").source += "\n# a url: https://example.org/tmp/x; skip nbval here"
    code(notebook, "live").outputs[0].text += "live: 12.4 GB/s and 3.1 TFLOP/s\n"
    assert gate(notebook) == ""


def test_a_live_size_with_an_assert_passes(notebook, gate):
    code(notebook, "live").outputs[0].text += "live: rss 0.812 GiB\n"
    code(notebook, "live").source += "\nassert 0.5 < 0.812 < 1"
    assert gate(notebook) == ""


def test_write_puts_right_all_but_results(notebook, tmp_path, good):
    original = copy.deepcopy(notebook)
    for spoil in (
        spoil_cell_id,
        spoil_stray_metadata,
        spoil_kernelspec,
        spoil_widget_state,
        spoil_trailing_blank,
    ):
        spoil(notebook)
    for spoil in (spoil_cell_metadata, spoil_setup_address, spoil_badge_target):
        spoil(notebook)
    path = tmp_path / "99_scratch.ipynb"
    path.write_text(canonical.text(notebook))
    assert canonical.write(path, URL) and path.read_text() == good
    assert not canonical.write(path, URL), "the second time changes nothing"
    spoil_count(original)
    path.write_text(canonical.text(original))
    canonical.write(path, URL)
    assert "no execution count" in "\n".join(canonical.problems(path, URL)), (
        "a count is never invented"
    )


def test_write_keeps_the_text_of_a_widget_that_has_one(notebook, gate, tmp_path):
    """The calculator's output is live on a page that runs it and text in the file; a progress bar
    is still refused.
    """
    path = tmp_path / "99_scratch.ipynb"

    def written(text: str) -> nbformat.NotebookNode:
        data = {canonical.WIDGET: {"model_id": "a"}, "text/plain": text}
        code(notebook, "claim").outputs[:] = [new_output("execute_result", data, execution_count=2)]
        path.write_text(canonical.text(notebook))
        assert "cannot render: application/vnd.jupyter.widget-view+json" in gate(notebook)
        canonical.write(path, URL)
        return nbformat.read(path, as_version=4)

    kept = written("a table\nof 12.4 GiB")
    assert (
        code(kept, "claim").outputs[0].data == {"text/plain": "a table\nof 12.4 GiB"}
        and gate(kept) == ""
    )
    assert "cannot render" in gate(written("HBox(children=(FloatProgress(value=0.0),))"))


def test_write_adds_badge_and_setup_cell(tmp_path):
    path = tmp_path / "99_new.ipynb"
    path.write_text(
        canonical.text(
            new_notebook(cells=[new_markdown_cell("# New\n\nText."), new_code_cell("1 + 1")])
        )
    )
    canonical.write(path, URL)
    cells = nbformat.read(path, as_version=4).cells
    assert cells[0].source == f"# New\n\n{canonical.badge(URL, 'notebooks/99_new.ipynb')}\n\nText."
    assert [cell.source for cell in cells[1:]] == [canonical.setup_source(URL), "1 + 1"]


def test_a_gpu_may_be_asked_for(notebook, gate):
    notebook.metadata.update(canonical.GPU)
    assert gate(notebook) == ""


def test_gate_as_a_command(tmp_path, good):
    path = tmp_path / "99_scratch.ipynb"
    path.write_text(
        good.replace(URL, settings.repository_url()).replace(
            URL[19:], settings.repository_url()[19:]
        )
    )
    command = [sys.executable, settings.TOOLS / "canonical.py", "--check", path]
    run = subprocess.run(command, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "notebook gate: 1 of 1 in canonical form\n"), (
        run.stdout
    )
    path.write_text(path.read_text().replace('"name": "python3"', '"name": "mine"'))
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 1 and "notebooks/99_scratch.ipynb: has other metadata" in run.stdout


# Blanks and guesses


STUB = """def double(number):
    ...


double = blank.check("99.double", double)"""
GUESS = 'cost = guess("How much?", "%", mine=None)'
COMPARE = "cost.compare(11.18)"
FOUND = "found 11.2 % · your guess: none\n"


def with_hands(nb, stub=STUB, asked=GUESS, compared=COMPARE, printed=FOUND):
    """The good notebook and three cells: a blank, a guess, and what is compared with it."""
    for source, text in ((stub, ""), (asked, ""), (compared, printed)):
        cell = new_code_cell(source, execution_count=len(nb.cells))
        cell.id, cell.outputs = (
            f"cell-{len(nb.cells) + 1:02d}",
            [new_output("stream", text=text)] if text else [],
        )
        nb.cells.append(cell)
    return nb


def test_blanks_and_guesses_left_to_the_reader_pass(notebook, gate):
    assert gate(with_hands(notebook)) == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"stub": STUB.replace("...", "return 2 * number")},
            "cell 6: the blank '99.double' is filled in",
        ),
        (
            {"stub": STUB[STUB.index("double = ") :]},
            "the blank '99.double' is not defined in the cell that checks it",
        ),
        ({"asked": GUESS.replace("None", "12")}, "cell 7: a guess without 'mine=None'"),
        ({"asked": GUESS.replace(", mine=None", "")}, "cell 7: a guess without 'mine=None'"),
        (
            {"asked": GUESS + "\n" + COMPARE, "compared": "1 + 1"},
            "cell 7: the guess 'cost' is compared in its own cell",
        ),
        ({"compared": "1 + 1", "printed": ""}, "cell 7: the guess 'cost' is compared with nothing"),
        (
            {"printed": FOUND.replace("none", "12 %, which is close")},
            "a guess is stored with the notebook: 12 %",
        ),
    ],
)
def test_a_blank_or_guess_that_is_taken_from_the_reader_is_refused(changes, words, notebook, gate):
    assert words in gate(with_hands(notebook, **changes))


@pytest.mark.parametrize(
    ("text", "away"),
    [
        ("Four bits cost 11.2 %.", True),
        ("It is 11.2% worse", True),
        ("an 11.2-% loss", True),
        ("Four bits cost 111.2 %.", False),
        ("Four bits cost 11.2 GiB.", False),
        ("version 1.11.2 % of", False),
    ],
)
@pytest.mark.parametrize("where", ["text", "output", "alternative text"])
def test_a_number_that_is_given_away_above_is_refused(text, away, where, notebook, gate):
    if where == "text":
        notebook.cells[0].source += f"\n\n{text}"
    elif where == "output":
        code(notebook, "claim").outputs[0].text += f"{text}\n"
    else:
        code(notebook, "plot").outputs[-1].metadata["image/png"]["alt"] = text
    found = gate(with_hands(notebook))
    assert (
        "cell 8: 11.2 % is to be guessed, and stands in a cell above already" in found
    ) == away, found


@pytest.mark.parametrize("where", ["stream", "alternative text"])
@pytest.mark.parametrize(("text", "away"), [("Four bits cost 11.2 %.", True), ("Drawn.", False)])
def test_a_number_beside_the_fold_is_refused(where, text, away, notebook, gate):
    nb = with_hands(notebook, printed="")
    fold = {"text/plain": FOUND, "text/html": f"<details><pre>\n{FOUND}</pre></details>"}
    beside = new_output("stream", text=text)
    if where == "alternative text":
        about = {"image/png": {"alt": text}}
        beside = new_output("display_data", {"image/png": "AAAA"}, metadata=about)
        nb.cells[-1].source += "\nplt.show()"
    nb.cells[-1].outputs = [new_output("display_data", fold), beside]
    found = gate(nb)
    assert ("cell 8: 11.2 % is to be guessed, and stands beside the fold" in found) == away, found
    assert away or found == ""


def test_a_number_without_a_unit_is_looked_for_whole(notebook, gate):
    notebook.cells[0].source += "\n\nThere are 160 and 16.5 and 1,016."
    printed = "found 16 · your guess: none\n"
    assert gate(with_hands(notebook, printed=printed)) == ""
    notebook.cells[0].source += " And 16."
    assert "16 is to be guessed" in gate(notebook)
