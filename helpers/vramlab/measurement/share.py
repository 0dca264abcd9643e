"""`share`: make files of measured reports that say nothing of who measured, and show where to send them."""

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..recipe.recipe import key_of
from ..recipe.shapes import model_names
from ..report.errors import RecordError
from ..report.files import write_atomically
from ..report.report import Report, format_bytes, repository, text_table
from .records import VERSIONS, file_name, load, measurements_folder, writing

# All that is told of the machine, with VERSIONS: no name, no user, no path.
CARD = ("gpu", "compute_capability", "multiprocessors", "total_memory")
PATH = re.compile(r"(?<![\w./\\])(?:~|[A-Za-z]:)?[\\/](?:[^\s\\/'\",:;]+[\\/])*[^\s\\/'\",:;]+")


@dataclass(frozen=True)
class Submission:
    """A file that may be sent: where it lies, its reports, and what was left out and why."""

    file: Path
    reports: tuple[Report, ...]
    left_out: tuple[str, ...] = ()

    @property
    def page(self) -> str | None:
        """The page that takes the file from a reader who is signed in there; None while the project has no address."""
        address = repository()
        return f"{address}/upload/main/data/measurements" if address and "your--account" not in address else None

    def __str__(self) -> str:
        seen = self.reports[0].environment
        rows = [("recipe", "allocated", "reserved")]
        for report in self.reports:
            sizes = (format_bytes(n) if n else report.status for n in (report.allocated, report.reserved))
            rows.append((report.title, *sizes))
        told = " · ".join(f"{name} {seen[name]}" for name in (*CARD, *VERSIONS, "date") if seen.get(name))
        where = self.page or "a pull request that adds it to data/measurements/ of the project's repository"
        return "\n".join(
            [
                f"{self.file}, {self.file.stat().st_size:,} bytes: {len(self.reports)} reports, with the split of each",
                text_table(rows),
                *(f"left out: {reason}" for reason in self.left_out),
                f"Of your machine it tells: {told}.",
                "Nothing else is in it (it is text: open it), and nothing has been sent.",
                f"To send it: {where}",
            ]
        )


def share(source: str | os.PathLike | None = None, folder: str | os.PathLike = ".") -> list[Submission]:
    """Write a file for each card and versions among some records into `folder`, to be sent by whoever wants to. Each is
    named by its content, so that a changed one is seen, and an equal one is not sent twice.

    Args:
        source: a record file or a folder of them, as `record` makes them; None takes the course's.
    Raises:
        RecordError: there is no record that can be shared, or a file cannot be read or written.
    """
    source, made = Path(source or measurements_folder()), []
    why = "there is no record of a GPU in it, and `vramlab record` on a GPU makes one"
    for path in [source] if source.suffix == ".json" else sorted(source.glob("*.json")):
        reasons = [(report, _private(report)) for report in load(path).values()]
        left_out = [f"{report.title}: {reason}" for report, reason in reasons if reason]
        why = "; ".join(left_out) or why
        if reports := [report for report, reason in reasons if not reason]:
            made.append(_written(reports, left_out, Path(folder)))
    if not made:
        raise RecordError(f"nothing in {source} can be shared: {why}.")
    return made


def _private(report: Report) -> str:
    """Say why a report is not for others; "" when it is."""
    if report.target != "cuda":
        return "it was measured on a CPU"
    if report.recipe["model"] not in model_names():
        return "its model is not of the catalogue, so nobody else could run it"
    missing = [name for name in CARD if not report.environment.get(name)]
    return f"it does not say the card's {', '.join(missing)}" if missing else ""


def _written(reports: list[Report], left_out: list[str], folder: Path) -> Submission:
    entries = {}
    for report in reports:
        entry = _cleaned(report.to_dict())
        entry["environment"] = {name: entry["environment"].get(name) for name in (*VERSIONS, *CARD, "date")}
        entries[key_of(report.recipe)] = entry
    text = json.dumps({"reports": dict(sorted(entries.items()))}, indent=1) + "\n"
    path = folder / content_name(reports[0].environment, text)
    with writing(path):
        write_atomically(path, text)
    return Submission(path, tuple(load(path).values()), tuple(left_out))


def _cleaned(value: Any) -> Any:
    """Return a JSON value whose texts name no file or folder of this machine."""
    if isinstance(value, dict):
        return {name: _cleaned(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_cleaned(each) for each in value]
    return PATH.sub("…", value) if isinstance(value, str) else value


def content_name(environment: dict[str, Any], text: str) -> str:
    """Name a submission by its card, versions and content: "tesla-t4-torch2.13-transformers5.23-0123456789ab.json"."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{file_name(environment).removesuffix('.json')}-{digest}.json"
