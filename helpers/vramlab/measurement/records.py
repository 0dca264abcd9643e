"""Recorded measurements: one JSON file per GPU and versions, of reports keyed by recipe, made by `measure` and nothing else,
and of facts (`facts.py`), made by `vramlab card`."""

import contextlib
import copy
import dataclasses
import datetime
import json
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..recipe.knobs import rebuild
from ..recipe.recipe import Recipe, key_of
from ..report.data import data_path
from ..report.errors import FileError, RecordError, ReportError
from ..report.files import read_text, strict_json, write_atomically
from ..report.report import PHASES, Report
from ..report.text import CONTROLS
from .facts import Fact

MOMENTS = 60  # of the timeline that are kept
LOCK_SECONDS = 300  # to wait for other writers
MOST_FILE = 32 * 1024**2  # bytes of a record file; one with 189 reports has 4 MiB
MOST_LETTERS = {"message": 4000, "notes": 1000, "title": 1000}  # of one text, by field
MOST_ENTRIES = {"largest": 100, "timeline": 2 * MOMENTS + 1, "notes": 30}
FIRST_DAY = datetime.date(2026, 11, 1)  # the project is no older
# What an environment says in every record, each with what it may be; None is allowed too.
VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+_-]{0,39}")
VERSIONS = ("python", "system", "torch", "transformers", "peft", "bitsandbytes", "accelerate", "cuda", "driver")
GPU_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z ()/.+_-]{0,63}")
FORMS = dict.fromkeys(VERSIONS, VERSION)
FORMS |= {"gpu": GPU_NAME, "compute_capability": re.compile(r"[0-9]{1,2}\.[0-9]")}
MOST_NUMBER = {"multiprocessors": 10_000, "total_memory": 2**44}


def measurements_folder() -> Path:
    """Return the folder of the course's records."""
    return data_path("measurements")


def file_name(environment: dict[str, Any]) -> str:
    """Name the file of a GPU and versions of torch and transformers: "nvidia-h200-torch2.11-transformers5.17.json"."""
    parts = [re.sub(r"[^a-z0-9]+", "-", str(environment.get("gpu") or "cpu").lower()).strip("-")]
    for name in ("torch", "transformers"):
        parts.append(name + ".".join(str(environment.get(name)).split("+")[0].split(".")[:2]))
    return "-".join(parts) + ".json"


@dataclasses.dataclass
class RecordFile:
    """The content of a record file: reports by recipe key, facts by theirs."""

    reports: dict[str, Report] = dataclasses.field(default_factory=dict)
    facts: dict[str, Fact] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        """Return the file's text. A file without facts says nothing of them."""
        content = {"reports": {key: self.reports[key].to_dict() for key in sorted(self.reports)}}
        if self.facts:
            content["facts"] = {key: self.facts[key].to_dict() for key in sorted(self.facts)}
        return json.dumps(content, indent=1) + "\n"


def load(path: str | os.PathLike, missing_ok: bool = False) -> dict[str, Report]:
    """Return the reports of one record file by recipe key. Raises RecordError as `read_records`."""
    return read_records(path, missing_ok).reports


def read_records(path: str | os.PathLike, missing_ok: bool = False, source: str = "measured") -> RecordFile:
    """Return what one record file holds.

    Raises RecordError if the file cannot be read, or an entry is no report or fact of that `source`, or not of the recipe
    or question that its key means.
    """
    path = Path(path)
    if missing_ok and not path.exists():
        return RecordFile()
    key = ""
    try:
        content = strict_json(read_text(path, MOST_FILE))
        found = RecordFile(content["reports"], content.get("facts", {}))
        if content.keys() - {"reports", "facts"}:
            raise ValueError("it says more than 'reports' and 'facts'")
        for key, entry in found.reports.items():
            found.reports[key] = report = Report.from_dict(entry)
            if report.recipe is None or key_of(report.recipe) != key:
                raise ReportError(f"it is the report of another recipe: {report.title}")
            if report.source != source:
                raise ReportError(f"it is a {report.source} report, but records are {source}")
            check(report)
        for key, entry in found.facts.items():
            found.facts[key] = fact = Fact.from_dict(entry)
            if fact.key != key:
                raise ReportError(f"it is another fact: {fact.key}")
            if fact.source != source:
                raise ReportError(f"it is a fact that was {fact.source}, but records are {source}")
            _check_environment(fact.environment)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        where = f"entry {key}: " if isinstance(error, ReportError) else ""
        why = f"({type(error).__name__}: {where}{str(error).rstrip('.')}): mend or remove it"
        raise RecordError(f"the record file {path.name} cannot be read {why}.") from error
    return found


def check(report: Report) -> None:
    """Raise ReportError unless what a measured report says beside its bytes has the form of a record: its environment, its
    date, and the length and letters of its texts. Whether it can be true is not judged here."""
    _check_environment(report.environment)
    if unknown := {*report.phases, report.peak_phase} - {*PHASES, ""}:
        raise ReportError(f"it has a phase {min(unknown)!r:.60}, but phases are {', '.join(PHASES)}")
    for name, most in MOST_ENTRIES.items():
        if len(getattr(report, name)) > most:
            raise ReportError(f"its {name} has {len(getattr(report, name)):,} entries, but {most} are the most")
    for field, text in _texts(report):
        most = MOST_LETTERS.get(field, 300)
        if len(text) > most:
            raise ReportError(f"its {field} has a text of {len(text):,} characters, but {most:,} are the most")
        if found := CONTROLS.search(text):
            raise ReportError(f"its {field} has the control character U+{ord(found[0]):04X}")


def _check_environment(about: dict[str, Any]) -> None:
    """Raise ReportError unless each of the names that records have is there as what it must be, or is left out."""
    for name, form in FORMS.items():
        value = about.get(name)
        if value is not None and not (isinstance(value, str) and form.fullmatch(value)):
            raise ReportError(f"its environment's {name} is {value!r:.60}, which is none")
    for name, most in MOST_NUMBER.items():
        value = about.get(name)
        if value is not None and (type(value) is not int or not 0 < value <= most):
            raise ReportError(f"its environment's {name} is {value!r:.60}, but it must be from 1 to {most:,}")
    if about.get("date") is not None:
        check_date(about["date"])


def _texts(report: Report) -> Iterator[tuple[str, str]]:
    """Return each text of a report with its field."""
    yield from ((name, getattr(report, name)) for name in ("title", "target", "message"))
    yield from (("notes", note) for note in report.notes)
    yield from (("timeline", moment.phase) for moment in report.timeline)
    for group in report.largest:
        yield from (("largest", text) for text in (group.category, group.dtype, group.op, group.where))
    yield from (("recipe", text) for text in _leaves(report.recipe))


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, str):
        yield value


def check_date(said: Any) -> None:
    """Raise ReportError unless `said` is a day like "2026-11-23", from the project's first to this one (or the next, as it
    is somewhere already). A clock that is behind the project's first day judges no future."""
    try:
        day = datetime.date.fromisoformat(said) if re.fullmatch(r"\d{4}-\d\d-\d\d", said) else None
    except (TypeError, ValueError):
        day = None
    today = datetime.date.today()
    last = today + datetime.timedelta(days=1) if today >= FIRST_DAY else datetime.date.max
    if day is None or not FIRST_DAY <= day <= last:
        raise ReportError(f"its date is {said!r:.60}, but it must be a day from {FIRST_DAY} to this one")


def save(report: Report, folder: str | os.PathLike | None = None) -> Path:
    """Add a measured report to its file, in place of an older one of the same recipe. Return the file.

    The file is replaced as a whole, so a full disk or a kill loses nothing; a lock makes other processes wait. Raises
    RecordError for what is no measurement or failed, for a CPU's in the course's own folder, and where it cannot write.
    """
    if report.source != "measured" or not report.recipe:
        raise RecordError(f"only measured reports of a recipe are recorded, and this one is {report.source}.")
    folder = Path(folder or measurements_folder())
    if report.target != "cuda" and folder.resolve() == data_path("measurements").resolve():
        raise RecordError("the course's records are a GPU's, and this was measured on a CPU: name another folder.")
    return add(report, folder / file_name(report.environment))


def add(found: Report | Fact, path: Path) -> Path:
    """Add one result to the record file at `path`, all of whose entries have its source, as `save` does. Return the file."""
    import filelock

    if isinstance(found, Fact):
        found, key = _as_read(found), found.key
    else:
        found = _shortened(found)
        key = key_of(found.recipe)
    lock = filelock.FileLock(path.with_name(f".{path.name}.lock"), timeout=LOCK_SECONDS, mode=0o666)
    with writing(path), lock:
        records = read_records(path, missing_ok=True, source=found.source)
        kind = records.facts if isinstance(found, Fact) else records.reports
        kind[key] = found
        write_atomically(path, records.to_json())
    _files.cache_clear()
    return path


def _as_read(fact: Fact) -> Fact:
    """Return a fact as it is read from its file. Raises RecordError for one that no reader would take."""
    try:
        _check_environment(fact.environment)
        return Fact.from_dict(json.loads(json.dumps(fact.to_dict())))
    except (ReportError, TypeError) as error:
        raise RecordError(f"what was found cannot be recorded: {str(error).rstrip('.')}.") from error


def _shortened(report: Report) -> Report:
    """Return a report as it is recorded. Raises RecordError for one that failed or has not a record's form."""
    if report.status not in ("ok", "oom"):
        raise RecordError(f"a run that failed is not recorded: {report.message}")
    recipe = rebuild(Recipe, "recipe", report.recipe)
    timeline = report.timeline[:: max(1, len(report.timeline) // MOMENTS)]
    short = dataclasses.replace(report, recipe=recipe.to_dict(), timeline=timeline)
    try:
        check(short)
    except ReportError as error:
        raise RecordError(f"what was measured cannot be recorded: {str(error).rstrip('.')}.") from error
    return short


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make the folder of `path`; raise RecordError where it cannot be written, or others lock it over LOCK_SECONDS."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except FileError as error:
        raise RecordError(str(error)) from error
    except (OSError, NotImplementedError) as error:  # filelock.Timeout is an OSError
        why = getattr(error, "strerror", None) or error
        raise RecordError(f"{path.name} could not be written ({why}); it is as it was before.") from error


@lru_cache
def _files(folder: str) -> tuple[dict[str, Report], ...]:
    return tuple(load(path) for path in sorted(Path(folder).glob("*.json")))


def find_record(recipe: Recipe, gpu: str | None = None) -> Report:
    """Return the newest record of exactly this recipe, on a `gpu` with that in its name; RecordError if there is none."""
    found = [report for reports in _files(str(measurements_folder())) if (report := reports.get(recipe.key))]
    if gpu:
        found = [r for r in found if gpu.lower() in str(r.environment.get("gpu", "")).lower()]
    if not found:
        raise RecordError("there is no recorded measurement of it" + (f" on {gpu}" if gpu else ""))
    newest = max(found, key=lambda report: str(report.environment.get("date")))
    return dataclasses.replace(copy.deepcopy(newest), source="recorded")
