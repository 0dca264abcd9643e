"""pyproject.toml, environment.yml and constraints.txt say the same, and CI runs what the README
tells readers.
"""

import json
import os
import re
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pins
import pytest
import try_fresh
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from settings import ROOT

CONDA = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
PIP_SECTION = next(entry["pip"] for entry in CONDA if isinstance(entry, dict))
CONSTRAINTS = {
    canonicalize_name(requirement.name): requirement
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
    for requirement in [Requirement(line)]
}


def pin(name: str) -> Version:
    (specifier,) = CONSTRAINTS[canonicalize_name(name)].specifier
    assert specifier.operator == "==", f"{name} is not pinned"
    return Version(specifier.version)


def test_conda_has_every_dependency_with_the_same_floor():
    conda = {str(Requirement(line)) for line in PIP_SECTION if not line.startswith("-e")}
    assert conda == {str(requirement) for requirement in pins.direct()}


def test_conda_installs_the_package_and_the_same_python():
    assert "-e ." in PIP_SECTION
    assert "python>=3.11" in CONDA
    assert 'requires-python = ">=3.11"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("requirement", pins.direct(), ids=str)
def test_every_dependency_has_a_floor_and_a_pin_that_it_admits(requirement):
    assert pins.floor(requirement)
    assert pin(requirement.name) in requirement.specifier


def test_pins_are_exact_and_carry_no_build_tag():
    versions = [pin(name) for name in CONSTRAINTS]
    assert not [version for version in versions if version.local]


def test_pins_are_those_the_course_was_written_with():
    assert (str(pin("torch")), str(pin("transformers"))) == ("2.13.0", "5.23.0")


def is_exact_set() -> bool:
    """Whether this environment holds every direct dependency at its pin."""
    try:
        return all(Version(version(r.name)).public == str(pin(r.name)) for r in pins.direct())
    except PackageNotFoundError:
        return False


@pytest.mark.skipif(
    not is_exact_set(), reason="this environment was made with other versions than constraints.txt"
)
def test_pins_cover_what_the_dependencies_bring():
    missing = {Requirement(line).name for line in pins.installed()} - set(CONSTRAINTS)
    # A CUDA build of torch and other systems bring packages that the pinned set does not know.
    assert not {name for name in missing if not name.startswith(("nvidia-", "cuda-", "triton"))}


def test_floors_are_the_lowest_that_pyproject_admits():
    floors = pins.floors()
    assert "torch==2.11" in floors and "transformers==5.15" in floors
    assert len(floors) == len(
        {canonicalize_name(requirement.name) for requirement in pins.direct()}
    )


def test_floors_are_tried_as_pyproject_says_them(tmp_path):
    """`make try-fresh FRESH=--floor`: pip gets each floor, and another version fails."""
    flag, constraints = try_fresh.floor_flags(tmp_path)
    assert flag == "-c" and Path(constraints).read_text().splitlines() == pins.floors()
    floors = {"torch": "2.11.0+cu130", "transformers": "5.15.0", "some-other": "1.0"}
    assert try_fresh.not_at_the_floor(floors) == []
    assert try_fresh.not_at_the_floor(floors | {"torch": "2.11.1"}) == [
        "torch 2.11.1 is not the floor, 2.11"
    ]


def test_what_is_tried_is_what_pyproject_requires_and_the_oldest_python():
    """The schedule tries the newest of everything, and the floors with the oldest Python that is
    allowed.
    """
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"]
    tried = {each["versions"]: each for each in jobs["fresh"]["strategy"]["matrix"]["include"]}
    assert tried["floors"] == {"versions": "floors", "python": "3.11", "flags": "--floor"}
    assert tried["newest"]["flags"] == ""
    assert "FRESH=${{ matrix.flags }}" in jobs["fresh"]["steps"][-1]["run"]
    assert {each["set"]: each["python"] for each in jobs["range"]["strategy"]["matrix"]["include"]}[
        "floors"
    ] == "3.11"


def test_the_tested_range_that_the_wheel_carries_is_pyprojects_and_the_constraints():
    """Written by `make try-fresh`, whose versions may be newer than those of constraints.txt."""
    carried = json.loads(pins.TESTED.read_text())
    newest = {name: versions["newest"] for name, versions in carried.items()}
    assert pins.tested(newest) == carried
    assert all(Version(newest[name]) >= pin(name) for name in carried)
    assert {"torch", "transformers", "peft", "trl", "deepspeed", "typer"} <= set(carried)


def test_a_dependency_without_a_floor_is_refused():
    with pytest.raises(ValueError, match=r"exactly one floor, like rich>=1\.0"):
        pins.floor(Requirement("rich<15"))


def test_every_package_is_distributed():
    given = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {
        path.parent.relative_to(ROOT / "helpers")
        for path in (ROOT / "helpers").rglob("__init__.py")
    }
    assert {*given["packages"]} == {".".join(folder.parts) for folder in folders} | {
        "vramlab.data_files"
    }
    assert given["package-dir"]["vramlab.data_files"] == "data" and given["package-data"][
        "vramlab.data_files"
    ] == ["**/*"]


def test_ci_calls_make_test_and_can_be_executed():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().splitlines()[-1] == "exec make test"
    subprocess.run(["bash", "-n", script], check=True)


def test_make_help_names_every_target():
    text = subprocess.run(
        ["make", "help"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[
        1
    ].split()
    assert [name for name in targets if name != "help" and f"make {name} " not in text] == []


def test_make_runs_nothing_by_default():
    plan = subprocess.run(
        ["make", "-n", "--no-print-directory"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    assert [line for line in plan.splitlines() if not line.startswith("echo")] == []


def installed_bytes() -> int:
    """Bytes of the wheel's files, by pyproject.toml's packages and what they leave out."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    total = 0
    for package in tools["packages"]:
        if package != "vramlab.data_files":
            total += sum(
                path.stat().st_size
                for path in (ROOT / "helpers" / package.replace(".", "/")).glob("*.py")
            )
    total += sum(
        path.stat().st_size for path in (ROOT / "helpers/vramlab/planning/templates").rglob("*.*")
    )
    left_out = ("base_model", "on_card")
    for path in (ROOT / "data").rglob("*"):
        if path.is_file() and path.relative_to(ROOT / "data").parts[0] not in left_out:
            total += path.stat().st_size
    return total


def test_the_page_says_how_large_the_package_is():
    """To a quarter of a megabyte; pip's own notes on the installation are 0.06 MB of it."""
    text = (ROOT / "site/use.md").read_text()
    said = float(re.search(r"without torch: ([\d.]+) MB of files", text)[1])
    assert installed_bytes() / 1e6 == pytest.approx(said, abs=0.25)
