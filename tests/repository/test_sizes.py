"""The packages stay small: their syntax has a ceiling, and a folder has few entries.

Syntax nodes are counted and not lines, so nothing is gained by writing densely.
"""

import ast
from pathlib import Path

import pytest
from settings import ROOT

HELPERS = ROOT / "helpers"
# Nodes of `ast.walk`. A new ability may raise a ceiling; the commit that does says by how much.
CEILINGS = {
    "vramlab": 312_750,
    "vramlab_course": 80_000,
}
PACKAGES = {
    "interfaces",
    "formulas",
    "hardware",
    "measurement",
    "planning",
    "private",
    "recipe",
    "base",
    "report",
    "simulation",
    "tracking",
    "training",
}
LONGEST = 450  # lines of a file that can be read in a sitting; comments make that easier


def nodes(folder: str) -> int:
    """Number of syntax nodes in all Python files of a package."""
    total = 0
    for path in (HELPERS / folder).rglob("*.py"):
        total += sum(1 for _ in ast.walk(ast.parse(path.read_text())))
    return total


@pytest.mark.parametrize("folder", CEILINGS)
def test_a_package_stays_under_its_ceiling(folder):
    assert nodes(folder) <= CEILINGS[folder]


def length(path: Path) -> int:
    """Number of lines of a file, without those that are a comment."""
    lines = path.read_text().splitlines()
    return sum(not line.lstrip().startswith("#") for line in lines)


def test_no_file_is_too_long():
    lengths = {path: length(path) for path in HELPERS.rglob("*.py")}
    assert {str(path): length for path, length in lengths.items() if length > LONGEST} == {}


def test_the_idea_is_seen_at_a_glance():
    entries = {path.name for path in (HELPERS / "vramlab").iterdir() if path.name != "__pycache__"}
    assert entries == {"__init__.py", "__main__.py", "py.typed", *PACKAGES}
