"""Recorded measurements: one JSON file per GPU and versions.

It has reports keyed by recipe, made by `measure` and nothing else, and facts (`facts.py`), made by
`vramlab card`.
"""

import contextlib
import copy
import dataclasses
import datetime
import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..base.data import data_path
from ..base.errors import FileError, RecordError, ReportError
from ..base.files import read_text, strict_json, write_atomically
from ..base.text import CONTROLS
from ..recipe.knobs import rebuild
from ..recipe.recipe import Recipe, key_of
from ..report.report import ALL_PHASES, Report
from .facts import Fact

MOMENTS = 60  # of the timeline that are kept
LOCK_SECONDS = 300  # to wait for other writers
MOST_FILE = 32 * 1024**2  # bytes of a record file; one with 189 reports has 4 MiB
MOST_LETTERS = {"message": 4000, "notes": 1000, "title": 1000}  # of one text, by field
MOST_ENTRIES = {"largest": 100, "timeline": 2 * MOMENTS + 1, "notes": 30}
FIRST_DAY = datetime.date(2026, 11, 1)  # the project is no older
# What an environment says in every record, each with what it may be; None is allowed too.
VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+_-]{0,39}")
VERSIONS = (
    "python",
    "system",
    "torch",
    "transformers",
    "peft",
    "bitsandbytes",
    "accelerate",
    "cuda",
    "driver",
)
GPU_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z ()/.+_-]{0,63}")
FORMS = dict.fromkeys(VERSIONS, VERSION)
FORMS |= {"gpu": GPU_NAME, "compute_capability": re.compile(r"[0-9]{1,2}\.[0-9]")}
MOST_NUMBER = {"multiprocessors": 10_000, "total_memory": 2**44}


def measurements_folder() -> Path:
    """Return the folder of the course's records."""
    return data_path("measurements")


def file_name(environment: dict[str, Any]) -> str:
    """Name the file of a GPU and versions of torch and transformers.

    For example "nvidia-h200-torch2.11-transformers5.17.json".
    """
    device = str(environment.get("gpu") or "cpu").lower()
    parts = [re.sub(r"[^a-z0-9]+", "-", device).strip("-")]
    for name in ("torch", "transformers"):
        # Neither the build, as +cu130, nor the patch release is in the name.
        public = str(environment.get(name)).split("+")[0]
        release = ".".join(public.split(".")[:2])
        parts.append(name + release)
    return "-".join(parts) + ".json"


@dataclasses.dataclass
class RecordFile:
    """The content of a record file: reports by recipe key, facts by theirs."""

    reports: dict[str, Report] = dataclasses.field(default_factory=dict)
    facts: dict[str, Fact] = dataclasses.field(default_factory=dict)

    _texts: dict[str, tuple[Report | Fact, str]] = dataclasses.field(
        default_factory=dict, repr=False, compare=False
    )

    def to_json(self) -> str:
        """Return the file's text. A file without facts says nothing of them."""
        sections = [self._section("reports", self.reports)]
        if self.facts:
            sections.append(self._section("facts", self.facts))
        return "{\n" + ",\n".join(sections) + "\n}\n"

    def _section(self, name: str, entries: Mapping[str, Report | Fact]) -> str:
        """Return one member of the file as `json.dumps(…, indent=1)` writes it.

        The text of an entry is made once: a card's hundreds are written again with each new one.
        """
        lines = []
        for key in sorted(entries):
            entry, text = self._texts.get(key, (None, ""))
            if entry is not entries[key]:
                text = json.dumps(entries[key].to_dict(), indent=1).replace("\n", "\n  ")
                self._texts[key] = (entries[key], text)
            lines.append(f"  {json.dumps(key)}: {text}")
        content = "{\n" + ",\n".join(lines) + "\n }" if lines else "{}"
        return f' "{name}": {content}'


def load(path: str | os.PathLike, missing_ok: bool = False) -> dict[str, Report]:
    """Return the reports of one record file by recipe key. Raises RecordError as `read_records`."""
    return read_records(path, missing_ok).reports


def read_records(
    path: str | os.PathLike,
    missing_ok: bool = False,
    source: str = "measured",
) -> RecordFile:
    """Return what one record file holds.

    Raises RecordError if the file cannot be read, or an entry is no report or fact of that
    `source`, or not of the recipe or question that its key means.
    """
    path = Path(path)
    if missing_ok and not path.exists():
        return RecordFile()
    key = ""
    records = RecordFile()
    try:
        content = strict_json(read_text(path, MOST_FILE))
        reports = content["reports"]
        facts = content.get("facts", {})
        # What nobody reads could hide in a file that is published.
        if content.keys() - {"reports", "facts"}:
            raise ValueError("it says more than 'reports' and 'facts'")
        for key, entry in reports.items():
            records.reports[key] = _report_of(key, entry, source)
        for key, entry in facts.items():
            records.facts[key] = _fact_of(key, entry, source)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        # Other errors are of the file as a whole, and of no entry.
        where = f"entry {key}: " if isinstance(error, ReportError) else ""
        why = f"({type(error).__name__}: {where}{str(error).rstrip('.')}): mend or remove it"
        raise RecordError(f"the record file {path.name} cannot be read {why}.") from error
    return records


def _report_of(key: str, entry: dict[str, Any], source: str) -> Report:
    """Return the report of an entry. Raises ReportError where it is no record of `key`."""
    report = Report.from_dict(entry)
    # A key is computed from the recipe, so a report that was moved under another is found.
    if report.recipe is None or key_of(report.recipe) != key:
        raise ReportError(f"it is the report of another recipe: {report.title}")
    if report.source != source:
        raise ReportError(f"it is a {report.source} report, but records are {source}")
    check(report)
    return report


def _fact_of(key: str, entry: dict[str, Any], source: str) -> Fact:
    """Return the fact of an entry. Raises ReportError where it is no record of `key`."""
    fact = Fact.from_dict(entry)
    if fact.key != key:
        raise ReportError(f"it is another fact: {fact.key}")
    if fact.source != source:
        raise ReportError(f"it is a fact that was {fact.source}, but records are {source}")
    _check_environment(fact.environment)
    return fact


def check(report: Report) -> None:
    """Raise ReportError unless what a report says besides its bytes has the form of a record.

    That is its environment, its date, and the length and letters of its texts. Whether it can be
    true is not judged here.
    """
    _check_environment(report.environment)
    unknown = {*report.phases, report.peak_phase} - {*ALL_PHASES, ""}
    if unknown:
        known = ", ".join(ALL_PHASES)
        raise ReportError(f"it has a phase {min(unknown)!r:.60}, but phases are {known}")
    for name, most in MOST_ENTRIES.items():
        count = len(getattr(report, name))
        if count > most:
            raise ReportError(f"its {name} has {count:,} entries, but {most} are the most")
    for field, text in _texts(report):
        most = MOST_LETTERS.get(field, 300)
        if len(text) > most:
            size = f"{len(text):,} characters, but {most:,} are the most"
            raise ReportError(f"its {field} has a text of {size}")
        control = CONTROLS.search(text)
        if control:
            raise ReportError(f"its {field} has the control character U+{ord(control[0]):04X}")


def _check_environment(about: dict[str, Any]) -> None:
    """Raise ReportError unless each name that records have is as it must be, or is left out."""
    for name, form in FORMS.items():
        value = about.get(name)
        if value is not None and not (isinstance(value, str) and form.fullmatch(value)):
            raise ReportError(f"its environment's {name} is {value!r:.60}, which is none")
    for name, most in MOST_NUMBER.items():
        value = about.get(name)
        if value is not None and (type(value) is not int or not 0 < value <= most):
            allowed = f"it must be from 1 to {most:,}"
            raise ReportError(f"its environment's {name} is {value!r:.60}, but {allowed}")
    if about.get("date") is not None:
        check_date(about["date"])


def _texts(report: Report) -> Iterator[tuple[str, str]]:
    """Yield each text of a report with its field."""
    for name in ("title", "target", "message"):
        yield name, getattr(report, name)
    for note in report.notes:
        yield "notes", note
    for moment in report.timeline:
        yield "timeline", moment.phase
    for group in report.largest:
        for text in (group.category, group.dtype, group.op, group.where):
            yield "largest", text
    for text in _leaves(report.recipe):
        yield "recipe", text


def _leaves(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value, names too."""
    if isinstance(value, dict):
        # Names are text of the file too.
        value = [*value, *value.values()]
    if isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, str):
        yield value


def check_date(said: Any) -> None:
    """Raise ReportError unless `said` is a day like "2026-11-23".

    From the project's first to this one (or the next, as it is somewhere already). A clock that is
    behind the project's first day judges no future.
    """
    day = None  # of what is no text, or no day
    with contextlib.suppress(TypeError, ValueError):
        if re.fullmatch(r"\d{4}-\d\d-\d\d", said):
            day = datetime.date.fromisoformat(said)
    # It may be tomorrow already where it was measured.
    today = datetime.date.today()
    last = datetime.date.max
    if today >= FIRST_DAY:
        last = today + datetime.timedelta(days=1)
    if day is None or not FIRST_DAY <= day <= last:
        allowed = f"it must be a day from {FIRST_DAY} to this one"
        raise ReportError(f"its date is {said!r:.60}, but {allowed}")


def save(report: Report, folder: str | os.PathLike | None = None) -> Path:
    """Add a measured report to its file, in place of one of the same recipe. Return the file.

    The file is replaced as a whole, so a full disk or a kill loses nothing; a lock makes other
    processes wait. Raises RecordError for what is no measurement or failed, for a CPU's in the
    course's own folder, and where it cannot write.
    """
    if report.source != "measured" or not report.recipe:
        only = "only measured reports of a recipe are recorded"
        raise RecordError(f"{only}, and this one is {report.source}.")
    folder = Path(folder or measurements_folder())
    if report.target != "cuda" and folder.resolve() == data_path("measurements").resolve():
        rest = "this was measured on a CPU: name another folder"
        raise RecordError(f"the course's records are a GPU's, and {rest}.")
    return add(report, folder / file_name(report.environment))


def add(result: Report | Fact, path: Path) -> Path:
    """Add one result to the record file at `path`, as `save` does. Return the file.

    All its entries have the same source.
    """
    import filelock

    # Whatever cannot be recorded is refused before the file is locked.
    if isinstance(result, Fact):
        entry: Report | Fact = _as_read(result)
    else:
        entry = _shortened(result)
    # Other processes may record into the same file, and each writes it as a whole.
    # Beside the file and not the file itself, which is replaced as a whole.
    lock_file = path.with_name(f".{path.name}.lock")
    lock = filelock.FileLock(lock_file, timeout=LOCK_SECONDS, mode=0o666)
    with writing(path), lock:
        records = _content(path, result.source)
        if isinstance(entry, Fact):
            records.facts[entry.key] = entry
        else:
            records.reports[key_of(entry.recipe or {})] = entry
        write_atomically(path, records.to_json())
        _last[path.absolute(), result.source] = (_version(path), records)
    _files.cache_clear()
    return path


# What this process wrote last, by file and source: the version that it then had, and its content.
_last: dict[tuple[Path, str], tuple[tuple[int, ...], RecordFile]] = {}


def _version(path: Path) -> tuple[int, ...]:
    """Return what changes when a file is replaced or written to; () where there is none."""
    if not path.exists():
        return ()
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size


def _content(path: Path, source: str) -> RecordFile:
    """Return what a record file holds, to be added to.

    It is read again only where somebody else has written it.
    """
    version, records = _last.pop((path.absolute(), source), ((), RecordFile()))
    if version and version == _version(path):
        return records
    return read_records(path, missing_ok=True, source=source)


def _as_read(fact: Fact) -> Fact:
    """Return a fact as it is read from its file.

    Raises RecordError for one that no reader would take.
    """
    try:
        _check_environment(fact.environment)
        return Fact.from_dict(json.loads(json.dumps(fact.to_dict())))
    except (ReportError, TypeError) as error:
        raise RecordError(
            f"what was found cannot be recorded: {str(error).rstrip('.')}."
        ) from error


def _shortened(report: Report) -> Report:
    """Return a report as it is recorded.

    Raises RecordError for one that failed or has not a record's form.
    """
    if report.status not in ("ok", "oom"):
        raise RecordError(f"a run that failed is not recorded: {report.message}")
    recipe = rebuild(Recipe, "recipe", report.recipe or {})
    # Some moments show the course of a step as well as all of thousands.
    timeline = report.timeline[:: max(1, len(report.timeline) // MOMENTS)]
    short = dataclasses.replace(report, recipe=recipe.to_dict(), timeline=timeline)
    try:
        check(short)
    except ReportError as error:
        raise RecordError(
            f"what was measured cannot be recorded: {str(error).rstrip('.')}."
        ) from error
    return short


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make the folder of `path`.

    Raises RecordError where it cannot be written, or others lock it over LOCK_SECONDS.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except FileError as error:
        raise RecordError(str(error)) from error
    except (OSError, NotImplementedError) as error:  # filelock.Timeout is an OSError
        why = getattr(error, "strerror", None) or error
        rest = f"({why}); it is as it was before"
        raise RecordError(f"{path.name} could not be written {rest}.") from error


@lru_cache
def _files(folder: str) -> tuple[dict[str, Report], ...]:
    return tuple(load(path) for path in sorted(Path(folder).glob("*.json")))


def find_record(recipe: Recipe, gpu: str | None = None) -> Report:
    """Return the newest record of exactly this recipe, on a `gpu` with that in its name.

    Raises RecordError if there is none.
    """
    records = []
    for reports in _files(str(measurements_folder())):
        report = reports.get(recipe.key)
        if report and _is_on(report, gpu):
            records.append(report)
    if not records:
        where = f" on {gpu}" if gpu else ""
        raise RecordError(f"there is no recorded measurement of it{where}")
    # A copy, for the files are read once and kept.
    newest = max(records, key=lambda report: str(report.environment.get("date")))
    return dataclasses.replace(copy.deepcopy(newest), source="recorded")


def _is_on(report: Report, gpu: str | None) -> bool:
    """Tell whether the GPU of a report has `gpu` in its name; any has None."""
    name = str(report.environment.get("gpu", ""))
    return not gpu or gpu.lower() in name.lower()
