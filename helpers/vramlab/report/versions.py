"""Which versions of libraries this release was tested with, and which of those installed lie outside.

`data/tested_versions.json` has the floor of pyproject.toml and the newest tested version of each library. `make try-fresh`
writes it.
"""

import json
from dataclasses import dataclass
from functools import cache
from importlib import metadata

from .data import data_path

LINE = 2  # parts of a version in which a newer one counts as untested: patch releases do not


@dataclass(frozen=True)
class VersionRange:
    """The tested range of one library, both ends included."""

    name: str
    floor: str
    newest: str

    def is_older(self, version: str) -> bool:
        """Return whether `version` lies below the range."""
        from packaging.version import Version  # the page of the calculator has it not, and asks for no version

        return Version(version) < Version(self.floor)

    def is_newer(self, version: str) -> bool:
        """Return whether `version` is of a later line than the newest tested one: 2.16.0 where that is 2.15.1."""
        from packaging.version import Version

        return Version(version).release[:LINE] > Version(self.newest).release[:LINE]

    def trouble(self, version: str) -> str:
        """Say on which side of the range `version` lies; "" where it is inside."""
        if self.is_older(version):
            return f"{self.name} {version} is older than {self.floor}, the oldest that works"
        if self.is_newer(version):
            return f"{self.name} {version} is newer than {self.newest}, the newest tested"
        return ""


@cache
def version_ranges() -> dict[str, VersionRange]:
    """Return the tested range of each library, by the name of its distribution."""
    found = json.loads(data_path("tested_versions.json").read_text(encoding="utf-8"))
    return {name: VersionRange(name, **versions) for name, versions in found.items()}


def installed(package: str) -> str | None:
    """Return the version of a package without importing it; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def untested() -> dict[VersionRange, str]:
    """Return the libraries that are installed in a version outside the tested range, and that version."""
    found = {tested: installed(name) for name, tested in version_ranges().items()}
    return {tested: version for tested, version in found.items() if version and tested.trouble(version)}


def version_trouble() -> str:
    """Name the libraries outside the tested range for the end of a sentence, as "; torch 2.16.0 is newer than …"."""
    return "".join(f"; {tested.trouble(version)}" for tested, version in untested().items())
