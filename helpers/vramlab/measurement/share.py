"""`share`: make files of measured reports that say nothing of who measured.

And show where to send them.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.errors import RecordError
from ..base.files import write_atomically
from ..recipe.shapes import model_names
from ..report.report import Report, format_bytes, repository, text_table
from .facts import Fact
from .records import VERSIONS, RecordFile, file_name, measurements_folder, read_records, writing

# All that is told of the machine, with VERSIONS: no name, no user, no path.
CARD = ("gpu", "compute_capability", "multiprocessors", "total_memory")
SENT = re.compile(r"-[0-9a-f]{12}\.json$")  # a file named by its content, as `content_name` does
PATH = re.compile(r"(?<![\w./\\])(?:~|[A-Za-z]:)?[\\/](?:[^\s\\/'\",:;]+[\\/])*[^\s\\/'\",:;]+")


@dataclass(frozen=True)
class Submission:
    """A file that may be sent: where it lies, what it has, and what was left out and why."""

    file: Path
    reports: tuple[Report, ...]
    left_out: tuple[str, ...] = ()
    facts: tuple[Fact, ...] = ()

    @property
    def page(self) -> str | None:
        """The page that takes the file from a reader who is signed in there.

        None while the project has no address.
        """
        address = repository()
        if not address or "your--account" in address:
            return None
        return f"{address}/upload/main/data/measurements"

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("recipe", "allocated", "reserved")]
        for report in self.reports:
            rows.append((report.title, _size(report, "allocated"), _size(report, "reserved")))
        bytes_of_file = f"{self.file.stat().st_size:,} bytes"
        lines = [
            f"{self.file}, {bytes_of_file}: {len(self.reports)} reports, with the split of each",
            text_table(rows),
        ]
        lines += [f"{fact.title}: {fact.words}" for fact in self.facts]
        lines += [f"left out: {reason}" for reason in self.left_out]
        where = self.page
        if not where:
            folder = "data/measurements/ of the project's repository"
            where = f"a pull request that adds it to {folder}"
        lines += [
            f"Of your machine it tells: {self._machine()}.",
            "Nothing else is in it (it is text: open it), and nothing has been sent.",
            f"To send it: {where}",
        ]
        return "\n".join(lines)

    def _machine(self) -> str:
        """Return all that the file says of the machine."""
        entries: tuple[Report | Fact, ...] = (*self.reports, *self.facts)
        # All entries are of one card and versions, as the file is named by them.
        about = entries[0].environment
        names = (*CARD, *VERSIONS, "date")
        return " · ".join(f"{name} {about[name]}" for name in names if about.get(name))


def _size(report: Report, name: str) -> str:
    """Return a size of a report, or what became of it where there is none."""
    size = getattr(report, name)
    return format_bytes(size) if size else report.status


def share(
    source: str | os.PathLike | None = None,
    folder: str | os.PathLike = ".",
) -> list[Submission]:
    """Write a file for each card and versions among some records into `folder`.

    They are sent by whoever wants to. Each is named by its content, so that a changed one is seen,
    and an equal one is not sent twice.

    Args:
        source: a record file or a folder of them, as `record` makes them; None takes what this
            machine added to the course's: files named by their content came with the package, and
            somebody else measured them.
    Raises:
        RecordError: there is no record that can be shared, or a file cannot be read or written.
    """
    own = source is None
    source = Path(source or measurements_folder())
    submissions = []
    why = "there is no record of a GPU in it, and `vramlab card` on a GPU makes one"
    paths = [source]
    if source.suffix != ".json":
        paths = sorted(source.glob("*.json"))
    if own:
        paths = [path for path in paths if not SENT.search(path.name)]
        why = (
            "this machine has measured nothing there; `vramlab card` on a GPU does, then say its "
            "folder: `vramlab share my_records`"
        )
    for path in paths:
        records = read_records(path)
        left_out = [*_leave_out(records.reports), *_leave_out(records.facts)]
        why = "; ".join(left_out) or why
        if records.reports or records.facts:
            submissions.append(_written(records, left_out, Path(folder)))
    if not submissions:
        raise RecordError(f"nothing in {source} can be shared: {why}.")
    return submissions


def _leave_out(entries: dict[str, Any]) -> Iterator[str]:
    """Remove what is not for others from `entries`, and say why."""
    # A list, for entries go while it is walked.
    for key, entry in list(entries.items()):
        reason = _private(entry)
        if reason:
            yield f"{entry.title}: {reason}"
            del entries[key]


def _private(entry: Report | Fact) -> str:
    """Say why a report or a fact is not for others; "" when it is."""
    recipe = entry.asked.get("recipe") if isinstance(entry, Fact) else entry.recipe
    if isinstance(entry, Report) and entry.target != "cuda":
        return "it was measured on a CPU"
    if recipe and recipe["model"] not in model_names():
        return "its model is not of the catalogue, so nobody else could run it"
    # Without these a report could not be held against a simulation of the card.
    missing = [name for name in CARD if not entry.environment.get(name)]
    return f"it does not say the card's {', '.join(missing)}" if missing else ""


def _written(records: RecordFile, left_out: list[str], folder: Path) -> Submission:
    """Write what may be sent of `records`."""
    content = {"reports": _sendable(records.reports)}
    # A file without facts says nothing of them.
    if records.facts:
        content["facts"] = _sendable(records.facts)
    text = json.dumps(content, indent=1) + "\n"
    entries: list[Report | Fact] = [*records.reports.values(), *records.facts.values()]
    path = folder / content_name(entries[0].environment, text)
    with writing(path):
        write_atomically(path, text)
    # Read again, so that what is shown is what the file says.
    sent = read_records(path)
    return Submission(
        file=path,
        reports=tuple(sent.reports.values()),
        left_out=tuple(left_out),
        facts=tuple(sent.facts.values()),
    )


def _sendable(entries: dict[str, Any]) -> dict[str, Any]:
    """Return entries as JSON, without what tells whose machine it was."""
    sendable = {}
    for key, entry in sorted(entries.items()):
        cleaned = _cleaned(entry.to_dict())
        about = cleaned["environment"]
        cleaned["environment"] = {name: about.get(name) for name in (*VERSIONS, *CARD, "date")}
        sendable[key] = cleaned
    return sendable


def _cleaned(value: Any) -> Any:
    """Return a JSON value whose texts name no file or folder of this machine."""
    if isinstance(value, dict):
        return {name: _cleaned(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_cleaned(each) for each in value]
    # A message of an out-of-memory may name a file of the user's.
    return PATH.sub("…", value) if isinstance(value, str) else value


def content_name(environment: dict[str, Any], text: str) -> str:
    """Name a submission by its card, versions and content.

    For example "tesla-t4-torch2.13-transformers5.23-0123456789ab.json".
    """
    # Twelve digits of a hash are enough to tell some thousands of files apart.
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{file_name(environment).removesuffix('.json')}-{digest}.json"
