"""Version sets for pip's `-c`, made from pyproject.toml: the floors, or exactly what is installed.

`floors` gives every direct dependency at the lowest version that pyproject.toml allows; `installed`
gives every package that the project needs, direct or not, as this environment has it.
"""

import json
import re
import sys
import tomllib
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from settings import ROOT

HEADER = """# The exact set that CI runs: what `pip install -e .[course,lab,site,test]` brings, \
written by `make constraints`.
# Use it as `pip install -c constraints.txt …`. Versions carry no build tag, so any build of torch \
fits.
"""


TESTED = ROOT / "data" / "tested_versions.json"
# Extras whose libraries a user's figures depend on.
OF_USERS = (
    "simulate",
    "quantization",
    "plot",
    "deepspeed",
    "schedulefree",
    "trl",
    "liger",
    "diffusion",
)

# Extras that no environment of the project has: what is installed changes what others print.
APART = ("torchao",)


def direct() -> list[Requirement]:
    """Every dependency that pyproject.toml names, those of the extras too, each once."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [of for name, of in project["optional-dependencies"].items() if name not in APART]
    lines = dict.fromkeys([*project["dependencies"], *(line for extra in extras for line in extra)])
    return [Requirement(line) for line in lines]


def floor(requirement: Requirement) -> str:
    """The version behind `>=`. Raises ValueError when the dependency has none."""
    found = [part.version for part in requirement.specifier if part.operator == ">="]
    if len(found) != 1:
        raise ValueError(
            f"{requirement} in pyproject.toml needs exactly one floor, like {requirement.name}>=1.0"
        )
    return found[0]


def floors() -> list[str]:
    """`name==floor` for every direct dependency."""
    return sorted(f"{canonicalize_name(r.name)}=={floor(r)}" for r in direct())


def installed() -> list[str]:
    """`name==version` for every direct dependency and all that those need, as installed here."""
    # Walked from what pyproject.toml names: `pip list` would also have what somebody installed by
    # hand.
    pending = [(r, "") for r in direct()]
    found = {}
    while pending:
        requirement, extra = pending.pop()
        name = canonicalize_name(requirement.name)
        # Markers ask for the operating system, the version of Python, or an extra.
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        extras = ["", *requirement.extras]
        # Known already; without this a circle of dependencies would never end.
        if all((name, e) in found for e in extras):
            continue
        distribution = metadata.distribution(requirement.name)
        version = re.sub(
            r"\+.*", "", distribution.version
        )  # "2.13.0+cpu" is 2.13.0 to everybody else
        for e in extras:
            if (name, e) not in found:
                found[name, e] = version
                pending += [(Requirement(line), e) for line in distribution.requires or []]
    return sorted({f"{name}=={version}" for (name, _), version in found.items()})


def pinned() -> dict[str, str]:
    """The version of each package in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def tested(newest: dict[str, str]) -> dict[str, dict[str, str]]:
    """What `data/tested_versions.json` holds.

    That is the floor and the newest tested version of each library that users install.

    newest: versions of another environment that the tests or `make try-fresh` ran in; where they
        are newer they count.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for name in OF_USERS for line in extras[name])]
    found = {}
    for requirement in sorted(map(Requirement, lines), key=lambda requirement: requirement.name):
        versions = [pinned()[requirement.name], newest.get(requirement.name, "0")]
        found[requirement.name] = {
            "floor": floor(requirement),
            # By version and not as text, in which 10.0 comes before 9.0.
            "newest": max(versions, key=Version),
        }
    return found


def write_tested(newest: dict[str, str]) -> None:
    """Write `data/tested_versions.json`; what it already names as newest stays tested."""
    before = json.loads(TESTED.read_text()) if TESTED.exists() else {}
    known = {
        name: max(each["newest"], newest.get(name, "0"), key=Version)
        for name, each in before.items()
    }
    TESTED.write_text(json.dumps(tested(newest | known), indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["floors"]:
        print(*floors(), sep="\n")
    elif sys.argv[1:] == ["installed"]:
        print(HEADER + "\n".join(installed()))
    else:
        sys.exit("usage: pins.py floors|installed")
