"""The Dockerfile, as far as it can be checked without building it: its base, its versions, what it
copies.
"""

import re
import shlex
import tomllib

from packaging.specifiers import SpecifierSet
from settings import ROOT

TEXT = (ROOT / "Dockerfile").read_text()
# Instructions with their continued lines joined, comments left out.
LINES = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE)).splitlines()
STEPS = [line.split(maxsplit=1) for line in LINES if line.strip()]


def of(kind: str) -> list[str]:
    return [rest for name, rest in STEPS if name == kind]


def test_the_base_is_named_with_a_version_that_the_package_allows():
    base = re.fullmatch(r"BASE=python:(\d+\.\d+)-slim", of("ARG")[0])
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert base and base[1] in SpecifierSet(required) and of("FROM") == ["${BASE}"]
    workflow = (ROOT / ".github/workflows/test.yml").read_text()
    assert (
        base[1] == re.search(r'python-version: "(.*?)"', workflow)[1]
    )  # for which the constraints were written


def test_packages_come_with_the_versions_of_ci():
    (install,) = [shlex.split(rest) for rest in of("RUN") if rest.startswith("pip")]
    assert (
        install[install.index("-c") + 1] == "constraints.txt"
        and (ROOT / "constraints.txt").exists()
    )
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert set(re.search(r"\[(.*)\]", install[-1])[1].split(",")) <= set(extras)


def test_readers_do_not_work_as_root():
    assert [name for name, _ in STEPS].index("USER") > max(
        i for i, (name, _) in enumerate(STEPS) if name == "RUN"
    )
    (user,) = of("USER")
    assert f"--chown={user}" in of("COPY")[0] and any(
        f"useradd --create-home {user}" in rest for rest in of("RUN")
    )


def test_what_the_course_needs_is_copied_and_the_rest_is_not():
    ignored = set((ROOT / ".dockerignore").read_text().split("\n"))
    assert {".git", ".venv", "build", "**/__pycache__"} <= ignored
    needed = {
        "helpers",
        "notebooks",
        "data",
        "tests",
        "constraints.txt",
        "pyproject.toml",
        "README.md",
        "Makefile",
    }
    assert not needed & ignored and all((ROOT / name).exists() for name in needed)
