"""Which published runs set constants of their own project's estimator, by that project's files.

    pip download --no-deps --no-binary :all: fitcheck-llm==0.3.1 vramcalc==0.1.2
    # Reads the two archives there, and holds data/published_runs.json against them.
    python benchmarks/fitted_runs.py FOLDER

Without the archives `stored()` is what was read from them. The scoreboard asks it, so that a tool
is neither praised for a run that set its constants nor denied one that did not.
"""

import hashlib
import json
import sys
import tarfile
from collections import Counter
from pathlib import Path

from vramlab.base.data import data_path

MiB = 2**20


def stored() -> dict:
    """`data/published_runs.json`, as it is."""
    return json.loads(data_path("published_runs.json").read_text(encoding="utf-8"))


def set_constants_of(tool: str, facts: dict) -> list[bool]:
    """Tell of each run, in the file's order, whether it set a constant of `tool`.

    Only those that the scoreboard's figures rest on count.
    """
    source = facts["sources"].get(tool, {})
    # A constant that no compared figure holds, as an allowance that is left out, makes no run a
    # known one.
    picked = [fit["runs"] for fit in source.get("fitted", []) if fit["compared"]]
    found = []
    for run in facts["runs"]:
        own = run["source"] == tool
        # Each of `picked` is a filter, such as {"role": "fit"}, which a run's own fields meet or
        # not.
        found.append(own and any(wanted.items() <= run.items() for wanted in picked))
    return found


def differences(folder: Path, facts: dict) -> list[str]:
    """Sentences about where `facts` and the archives in `folder` disagree."""
    found = []
    for tool, source in facts["sources"].items():
        if "sha256" not in source:
            continue
        # "fitcheck-llm 0.3.1 (PyPI, …)" is fitcheck_llm-0.3.1.tar.gz, as PyPI writes the names of
        # archives.
        name = source["package"].partition(" (")[0].replace("-", "_").replace(" ", "-") + ".tar.gz"
        archive = folder / name
        if hashlib.sha256(archive.read_bytes()).hexdigest() != source["sha256"]:
            found.append(f"{name} is another archive than the one that was read")
        with tarfile.open(archive) as files:
            found += unsaid(files, source)
            if tool == "fitcheck-llm":
                found += other_roles(files, facts)
    return found


def unsaid(files: tarfile.TarFile, source: dict) -> list[str]:
    """What `fitted` quotes and the archive does not say."""
    found = []
    for fit in source["fitted"]:
        # The quotation may go over several lines of a comment.
        said = " ".join(text_of(files, fit["file"]).replace("#", " ").split())
        if fit["says"] not in said:
            found.append(f"{fit['file']} does not say {fit['says']!r}")
    return found


def other_roles(files: tarfile.TarFile, facts: dict) -> list[str]:
    """Runs whose role is another in the manifest.

    A run is found by its allocated bytes, and a repeat counts as its first.
    """
    manifest = json.loads(text_of(files, "data/measurements/manifest.json"))
    measured: dict[str, list[dict]] = {}
    roles: dict[int, set[str]] = {}
    for row in manifest["rows"]:
        file = row["file"]
        if file not in measured:
            rows = json.loads(text_of(files, f"data/measurements/{file}"))
            # Of its files some are a list, and some have it in an object.
            measured[file] = rows["runs"] if isinstance(rows, dict) else rows
        allocated = measured[file][row["index"]]["measured"]["peak_allocated_mib"]
        # Stored in MiB with decimals, of which whole bytes are made again.
        roles.setdefault(round(allocated * MiB), set()).add(row["role"])
    found = []
    for run in facts["runs"]:
        if run["source"] != "fitcheck-llm":
            continue
        said = roles.get(run["allocated"], set()) - {"repeat"}
        if said != {run["role"]}:
            found.append(
                f"the run of {run['allocated']} bytes is {run['role']} here and {sorted(said)} "
                f"there"
            )
    return found


def text_of(files: tarfile.TarFile, path: str) -> str:
    """A file of an archive whose members lie in one folder."""
    # A source distribution has all of its files in one folder, named by name and version.
    folder = files.getnames()[0].partition("/")[0]
    return files.extractfile(f"{folder}/{path}").read().decode()


def main(folder: Path) -> None:
    facts = stored()
    found = differences(folder, facts)
    roles = Counter(run["role"] for run in facts["runs"] if run["source"] == "fitcheck-llm")
    print(
        "fitcheck-llm's own runs:",
        ", ".join(f"{number} {role}" for role, number in roles.most_common()),
    )
    print(*found or ["as the archives say"], sep="\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
