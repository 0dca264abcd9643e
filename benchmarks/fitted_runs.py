"""Which of the published runs set which constants of their own project's estimator, by that
project's own files.

    pip download --no-deps --no-binary :all: fitcheck-llm==0.3.1 vramcalc==0.1.2
    python benchmarks/fitted_runs.py FOLDER   # reads the two archives there, holds
    data/published_runs.json against them

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
    """For each run in the file's order: did it set a constant of `tool` that the scoreboard's
    figures rest on?
    """
    source = facts["sources"].get(tool, {})
    picked = [fit["runs"] for fit in source.get("fitted", []) if fit["compared"]]
    found = []
    for run in facts["runs"]:
        own = run["source"] == tool
        found.append(own and any(wanted.items() <= run.items() for wanted in picked))
    return found


def differences(folder: Path, facts: dict) -> list[str]:
    """Sentences about where `facts` and the archives in `folder` disagree."""
    found = []
    for tool, source in facts["sources"].items():
        if "sha256" not in source:
            continue
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
        said = " ".join(text_of(files, fit["file"]).replace("#", " ").split())
        if fit["says"] not in said:
            found.append(f"{fit['file']} does not say {fit['says']!r}")
    return found


def other_roles(files: tarfile.TarFile, facts: dict) -> list[str]:
    """Runs whose role is another in the manifest; a run is found by its allocated bytes, a repeat
    counts as its first.
    """
    manifest = json.loads(text_of(files, "data/measurements/manifest.json"))
    measured: dict[str, list[dict]] = {}
    roles: dict[int, set[str]] = {}
    for row in manifest["rows"]:
        file = row["file"]
        if file not in measured:
            rows = json.loads(text_of(files, f"data/measurements/{file}"))
            measured[file] = rows["runs"] if isinstance(rows, dict) else rows
        allocated = measured[file][row["index"]]["measured"]["peak_allocated_mib"]
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
