"""The package as a recipe of conda-forge (`recipe.yaml`, version 1 of its form).

It is made of pyproject.toml and of a release's source distribution.

    python tests/tools/conda_recipe.py dist/vramlab-0.1.0.tar.gz > recipe.yaml

It goes into a pull request to conda-forge/staged-recipes once the release is on PyPI. What an extra
of pip brings is a `run_constraints` here: conda-forge has no extras.
"""

import argparse
import hashlib
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_sdist_filename
from settings import ROOT

PYPI = "https://pypi.org/packages/source/v/vramlab/vramlab-${{ version }}.tar.gz"
NAMES = {"torch": "pytorch"}  # of PyPI to conda-forge's
# Extras whose packages change what the installed tool answers.
EXTRAS = ("simulate", "quantization", "plot", "trl", "schedulefree")
RECIPE = """\
# yaml-language-server: $schema=https://raw.githubusercontent.com/prefix-dev/recipe-format/main/schema.json
schema_version: 1

context:
  version: "{version}"
  python_min: "{python}"

package:
  name: vramlab
  version: ${{{{ version }}}}

source:
  url: {url}
  sha256: {sha256}

build:
  number: 0
  noarch: python
  script: ${{{{ PYTHON }}}} -m pip install . -vv --no-deps --no-build-isolation
  python:
    entry_points:
      - vramlab = vramlab.__main__:main

requirements:
  host:
    - python ${{{{ python_min }}}}.*
    - pip
    - {build}
  run:
    - python >=${{{{ python_min }}}}
{run}
  run_constraints:
{constraints}

tests:
  - python:
      imports:
        - vramlab
      pip_check: true
      python_version: ${{{{ python_min }}}}.*
  - script:
      - vramlab predict gpt2
      - vramlab plan gpt2 --gpu T4 --method lora

about:
  homepage: {homepage}
  summary: {summary}
  license: {license}
  license_file: LICENSE
"""


def recipe(archive: Path, root: Path = ROOT) -> str:
    """Return the recipe's text.

    Raises ValueError where `archive` is no source distribution of the package.
    """
    document = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    project = document["project"]
    # `parse_sdist_filename` raises a ValueError for a wheel and for any other file.
    name, version = parse_sdist_filename(archive.name)
    if name != project["name"]:
        raise ValueError(f"{archive.name} is no source distribution of {project['name']}")
    extras = project["optional-dependencies"]
    optional = sorted({line for extra in EXTRAS for line in extras[extra]})
    # The recipe's text has room for one, so a second one stops here.
    (build,) = document["build-system"]["requires"]
    return RECIPE.format(
        version=version,
        python=project["requires-python"].removeprefix(">="),
        url=PYPI,
        sha256=hashlib.sha256(archive.read_bytes()).hexdigest(),
        build=_conda(build),
        run=_listed(project["dependencies"]),
        constraints=_listed(optional),
        homepage=project["urls"]["Repository"],
        summary=project["description"],
        license=project["license"],
    )


def _listed(lines: list[str]) -> str:
    return "\n".join(f"    - {_conda(line)}" for line in lines)


def _conda(line: str) -> str:
    # Extras and markers of a requirement are left out: a noarch package has neither.
    requirement = Requirement(line)
    name = canonicalize_name(requirement.name)
    return f"{NAMES.get(name, name)} {requirement.specifier}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("archive", type=Path, help="the source distribution of a release")
    print(recipe(parser.parse_args().archive), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
