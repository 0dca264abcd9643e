"""What a reader meets in the lines of packages that are unfolded, and what the script counts."""

import ast
import sys

import pytest
from settings import ROOT

sys.path.append(str(ROOT / "benchmarks"))
from readability import WITH_DOCSTRING, Counts, counted

MOST_NODES = 9.2  # in a line of code; nanochat has 9.1
MOST_NODES_OF_ALL = {"vramlab": 9.0, "vramlab_course": 9.35}
MOST_PACKED = 5  # in 1,000 statements
# Of 99 in 100 statements, in nodes: nanochat has 37, httpx 46, torchtitan 50.
LARGE_STATEMENT = 46
FEWEST_COMMENTS = 7  # in 100 lines of code, as httpx has
UNFOLDED = ("formulas", "planning", "hardware", "report")
# Clean of conditional expressions as statements and of long statements, and more in time.
ALL = sorted(path.name for path in (ROOT / "helpers/vramlab").iterdir() if path.is_dir())
FOLDERS = [f"vramlab/{name}" for name in ALL if name != "__pycache__"] + ["vramlab_course"]
PACKED = {
    "a, b = 1, f()": 1,
    "a = b, c = 1, 2": 1,
    "a, b = b, a": 0,
    "a, b = f()": 0,
    "a, b = [f(x) for x in y]": 0,
    "a = 1, 2": 0,
}
CONDITIONAL = {
    "f() if a else g()": 1,
    "n += 1 if a else 0": 1,
    "for x in xs if a else ():\n    f(x)": 1,
    "n = 1 if a else 0": 0,
    "f(1 if a else 0)": 0,
}


@pytest.mark.parametrize("package", UNFOLDED)
def test_a_package_stays_open(package):
    counts = counted(ROOT / "helpers/vramlab" / package)
    statements = counts.nodes["statements"]
    assert counts.nodes["nodes"] / counts.lines <= MOST_NODES
    assert 1000 * counts.nodes["packed"] / statements <= MOST_PACKED
    assert 100 * counts.comments / counts.lines >= FEWEST_COMMENTS


@pytest.mark.parametrize("package", MOST_NODES_OF_ALL)
def test_tool_and_course_are_open(package):
    counts = counted(ROOT / "helpers" / package)
    assert counts.nodes["nodes"] / counts.lines <= MOST_NODES_OF_ALL[package]
    assert 1000 * counts.nodes["packed"] / counts.nodes["statements"] <= MOST_PACKED


@pytest.mark.parametrize("folder", FOLDERS)
def test_statements_are_short_and_say_if(folder):
    counts = counted(ROOT / "helpers" / folder)
    assert counts.large_statement <= LARGE_STATEMENT
    assert counts.nodes["conditional"] == 0
    assert counts.wide == 0


def test_the_first_sentence_of_a_docstring_is_on_one_line():
    broken = []
    for path in sorted((ROOT / "helpers/vramlab").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, WITH_DOCSTRING):
                _, *others = (ast.get_docstring(node) or "").splitlines() or [""]
                if others and others[0]:
                    broken.append(f"{path.name}: {others[0]}")
    assert broken == []


def counts_of(text: str) -> Counts:
    """Return the counts of one file."""
    counts = Counts()
    counts.add(text)
    return counts


@pytest.mark.parametrize("text", PACKED)
def test_a_packed_assignment_is_no_swap_and_no_unpacking(text):
    assert counts_of(text).nodes["packed"] == PACKED[text]


@pytest.mark.parametrize("text", CONDITIONAL)
def test_a_conditional_statement_stands_for_an_if(text):
    assert counts_of(text).nodes["conditional"] == CONDITIONAL[text]


def test_the_size_of_a_statement_is_its_own():
    text = "TABLE = {1: [2, 3]}\n\n\ndef f(x):\n    if x:\n        return x + 1\n"
    sizes = sorted(counts_of(text).sizes)
    assert sizes == [3, 6]  # if and its name; return, sum, name, sign, number
    assert counts_of("x = 1\n" * 98 + "x = f(1, 2)\n" * 2).large_statement == 8


def test_docstrings_comments_and_blank_lines_are_no_code():
    text = '"""Two\n\nlines."""\n\n# why\nx = 1  # where from\n'
    counts = counts_of(text)
    assert (counts.lines, counts.all_lines, counts.comments) == (1, 6, 2)
    assert counts.nodes["nodes"] == 5  # module, assignment, name with its context, constant
    assert counts_of("x = '" + 100 * "y" + "'").wide == 1
