"""Which versions of libraries this release was tested with, and which installed lie outside.

`data/tested_versions.json` has the floor of pyproject.toml and the newest tested version of each
library. `make try-fresh` writes it.
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
        """Tell whether `version` lies below the range."""
        # The page of the calculator has no packaging, and asks for no version.
        from packaging.version import Version

        return Version(version) < Version(self.floor)

    def is_newer(self, version: str) -> bool:
        """Tell whether `version` is of a later line than the newest tested one.

        2.16.0 is where that is 2.15.1.
        """
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
    tested = json.loads(data_path("tested_versions.json").read_text(encoding="utf-8"))
    return {name: VersionRange(name, **versions) for name, versions in tested.items()}


def installed(package: str) -> str | None:
    """Return the version of a package without importing it; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def untested() -> dict[VersionRange, str]:
    """Return the libraries that are installed outside the tested range, with their version."""
    outside = {}
    for name, tested in version_ranges().items():
        version = installed(name)
        if version and tested.trouble(version):
            outside[tested] = version
    return outside


def version_trouble() -> str:
    """Name the libraries outside the tested range for the end of a sentence.

    As "; torch 2.16.0 is newer than …".
    """
    troubles = [tested.trouble(version) for tested, version in untested().items()]
    return "".join(f"; {trouble}" for trouble in troubles)
