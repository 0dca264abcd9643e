"""The packages stay small: lines have ceilings, and a folder has few entries."""

import pytest
from settings import ROOT

HELPERS = ROOT / "helpers"
# Lines of Python. They may fall, and a ceiling falls with them.
CEILINGS = {
    "vramlab": 16000,
    "vramlab/report": 600,
    "vramlab/hardware": 990,
    "vramlab/recipe": 2100,
    "vramlab/training": 1868,
    "vramlab/tracking": 880,
    "vramlab/formulas": 2880,
    "vramlab/simulation": 1979,
    "vramlab/measurement": 1245,
    "vramlab/planning": 1300,
    "vramlab/faces": 2035,
    "vramlab_course/claims": 1200,
    "vramlab_course": 6000,
}
LONGEST = 450


def lines(folder: str) -> dict[str, int]:
    return {
        str(path.relative_to(HELPERS)): len(path.read_text().splitlines()) for path in (HELPERS / folder).rglob("*.py")
    }


@pytest.mark.parametrize("folder", CEILINGS)
def test_a_package_stays_under_its_ceiling(folder):
    assert sum(lines(folder).values()) <= CEILINGS[folder]


def test_no_file_is_too_long():
    assert {name: count for name, count in lines(".").items() if count > LONGEST} == {}


def test_the_idea_is_seen_at_a_glance():
    entries = {path.name for path in (HELPERS / "vramlab").iterdir() if path.name != "__pycache__"}
    packages = {name.split("/")[1] for name in CEILINGS if name.startswith("vramlab/")}
    assert entries == {"__init__.py", "__main__.py", *packages}
