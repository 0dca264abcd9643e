"""Version sets for pip's `-c`, made from pyproject.toml: the floors, or exactly what is installed.

`floors` gives every direct dependency at the lowest version that pyproject.toml allows; `installed` gives every package
that the project needs, direct or not, as this environment has it.
"""

import re
import sys
import tomllib
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from settings import ROOT

HEADER = """# The exact set that CI runs: what `pip install -e .[course,lab,site,test]` brings, written by `make constraints`.
# Use it as `pip install -c constraints.txt …`. Versions carry no build tag, so any build of torch fits.
"""


def direct() -> list[Requirement]:
    """Every dependency that pyproject.toml names, those of the extras too, each once."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    lines = dict.fromkeys([*project["dependencies"], *(line for extra in extras for line in extra)])
    return [Requirement(line) for line in lines]


def floor(requirement: Requirement) -> str:
    """The version behind `>=`. Raises ValueError when the dependency has none."""
    found = [part.version for part in requirement.specifier if part.operator == ">="]
    if len(found) != 1:
        raise ValueError(f"{requirement} in pyproject.toml needs exactly one floor, like {requirement.name}>=1.0")
    return found[0]


def floors() -> list[str]:
    """`name==floor` for every direct dependency."""
    return sorted(f"{canonicalize_name(r.name)}=={floor(r)}" for r in direct())


def installed() -> list[str]:
    """`name==version` for every direct dependency and all that those need, as installed here."""
    pending, found = [(r, "") for r in direct()], {}
    while pending:
        requirement, extra = pending.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        extras = ["", *requirement.extras]
        if all((name, e) in found for e in extras):
            continue
        distribution = metadata.distribution(requirement.name)
        version = re.sub(r"\+.*", "", distribution.version)  # "2.13.0+cpu" is 2.13.0 to everybody else
        for e in extras:
            if (name, e) not in found:
                found[name, e] = version
                pending += [(Requirement(line), e) for line in distribution.requires or []]
    return sorted({f"{name}=={version}" for (name, _), version in found.items()})


if __name__ == "__main__":
    if sys.argv[1:] == ["floors"]:
        print(*floors(), sep="\n")
    elif sys.argv[1:] == ["installed"]:
        print(HEADER + "\n".join(installed()))
    else:
        sys.exit("usage: pins.py floors|installed")
