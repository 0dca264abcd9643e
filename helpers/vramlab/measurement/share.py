"""`share`: make files of measured reports that say nothing of who measured, and show where to send them."""

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..recipe.shapes import model_names
from ..report.errors import RecordError
from ..report.files import write_atomically
from ..report.report import Report, format_bytes, repository, text_table
from .facts import Fact
from .records import VERSIONS, RecordFile, file_name, measurements_folder, read_records, writing

# All that is told of the machine, with VERSIONS: no name, no user, no path.
CARD = ("gpu", "compute_capability", "multiprocessors", "total_memory")
SENT = re.compile(r"-[0-9a-f]{12}\.json$")  # a file named by its content, as `content_name` does
PATH = re.compile(r"(?<![\w./\\])(?:~|[A-Za-z]:)?[\\/](?:[^\s\\/'\",:;]+[\\/])*[^\s\\/'\",:;]+")


@dataclass(frozen=True)
class Submission:
    """A file that may be sent: where it lies, its reports and facts, and what was left out and why."""

    file: Path
    reports: tuple[Report, ...]
    left_out: tuple[str, ...] = ()
    facts: tuple[Fact, ...] = ()

    @property
    def page(self) -> str | None:
        """The page that takes the file from a reader who is signed in there; None while the project has no address."""
        address = repository()
        return f"{address}/upload/main/data/measurements" if address and "your--account" not in address else None

    def __str__(self) -> str:
        seen = (*self.reports, *self.facts)[0].environment
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
                *(f"{fact.title}: {fact.words}" for fact in self.facts),
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
        source: a record file or a folder of them, as `record` makes them; None takes what this machine added to the
            course's: files named by their content came with the package, and somebody else measured them.
    Raises:
        RecordError: there is no record that can be shared, or a file cannot be read or written.
    """
    own = source is None
    source = Path(source or measurements_folder())
    made: list[Submission] = []
    why = "there is no record of a GPU in it, and `vramlab card` on a GPU makes one"
    paths = [source] if source.suffix == ".json" else sorted(source.glob("*.json"))
    if own:
        paths = [path for path in paths if not SENT.search(path.name)]
        why = "this machine has measured nothing there; `vramlab card` on a GPU does, then say its folder: "
        why += "`vramlab share my_records`"
    for path in paths:
        records = read_records(path)
        left_out = []
        for kind in (records.reports, records.facts):
            for key, entry in list(kind.items()):
                if reason := _private(entry):
                    left_out.append(f"{entry.title}: {reason}")
                    del kind[key]
        why = "; ".join(left_out) or why
        if records.reports or records.facts:
            made.append(_written(records, left_out, Path(folder)))
    if not made:
        raise RecordError(f"nothing in {source} can be shared: {why}.")
    return made


def _private(entry: Report | Fact) -> str:
    """Say why a report or a fact is not for others; "" when it is."""
    recipe = entry.asked.get("recipe") if isinstance(entry, Fact) else entry.recipe
    if isinstance(entry, Report) and entry.target != "cuda":
        return "it was measured on a CPU"
    if recipe and recipe["model"] not in model_names():
        return "its model is not of the catalogue, so nobody else could run it"
    missing = [name for name in CARD if not entry.environment.get(name)]
    return f"it does not say the card's {', '.join(missing)}" if missing else ""


def _written(records: RecordFile, left_out: list[str], folder: Path) -> Submission:
    content: dict[str, dict[str, Any]] = {"reports": {}}
    for kind, entries in vars(records).items():
        for key, entry in sorted(entries.items()):
            said = _cleaned(entry.to_dict())
            said["environment"] = {name: said["environment"].get(name) for name in (*VERSIONS, *CARD, "date")}
            content.setdefault(kind, {})[key] = said
    text = json.dumps(content, indent=1) + "\n"
    first = next(iter((*records.reports.values(), *records.facts.values())))
    path = folder / content_name(first.environment, text)
    with writing(path):
        write_atomically(path, text)
    sent = read_records(path)
    return Submission(path, tuple(sent.reports.values()), tuple(left_out), tuple(sent.facts.values()))


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
