"""Recorded measurements: one JSON file per GPU and versions, keyed by recipe, made by `measure` and nothing else."""

import contextlib
import copy
import dataclasses
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
from ..report.errors import RecordError, ReportError
from ..report.report import Report

MOMENTS = 60  # of the timeline that are kept
LOCK_SECONDS = 300  # to wait for other writers


def measurements_folder() -> Path:
    """Return the folder of the course's records."""
    return data_path("measurements")


def file_name(environment: dict[str, Any]) -> str:
    """Name the file of a GPU and versions of torch and transformers: "nvidia-h200-torch2.11-transformers5.17.json"."""
    parts = [re.sub(r"[^a-z0-9]+", "-", str(environment.get("gpu") or "cpu").lower()).strip("-")]
    for name in ("torch", "transformers"):
        parts.append(name + ".".join(str(environment.get(name)).split("+")[0].split(".")[:2]))
    return "-".join(parts) + ".json"


def load(path: str | os.PathLike, missing_ok: bool = False) -> dict[str, Report]:
    """Return the reports of one record file by recipe key.

    Raises RecordError if the file cannot be read, or an entry is no measured report of the recipe that its key means.
    """
    path = Path(path)
    if missing_ok and not path.exists():
        return {}
    try:
        reports = json.loads(path.read_text(encoding="utf-8"))["reports"]
        for key, entry in reports.items():
            reports[key] = report = Report.from_dict(entry)
            if report.recipe is None or key_of(report.recipe) != key:
                raise ReportError(f"it is the report of another recipe: {report.title}")
            if report.source != "measured":
                raise ReportError(f"it is a {report.source} report, but records are measured")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        where = f"entry {key}: " if isinstance(error, ReportError) else ""
        why = f"({type(error).__name__}: {where}{str(error).rstrip('.')}): mend or remove it"
        raise RecordError(f"the record file {path.name} cannot be read {why}.") from error
    return reports


def save(report: Report, folder: str | os.PathLike | None = None) -> Path:
    """Add a measured report to its file, in place of an older one of the same recipe. Return the file.

    The file is replaced as a whole, so a full disk or a kill loses nothing; a lock makes other processes wait. Raises
    RecordError for what is no measurement or failed, for a CPU's in the course's own folder, and where it cannot write.
    """
    if report.source != "measured" or not report.recipe:
        raise RecordError(f"only measured reports of a recipe are recorded, and this one is {report.source}.")
    if report.status not in ("ok", "oom"):
        raise RecordError(f"a run that failed is not recorded: {report.message}")
    import filelock

    folder = Path(folder or measurements_folder())
    if report.target != "cuda" and folder.resolve() == data_path("measurements").resolve():
        raise RecordError("the course's records are a GPU's, and this was measured on a CPU: name another folder.")
    path = folder / file_name(report.environment)
    recipe = rebuild(Recipe, "recipe", report.recipe)
    timeline = report.timeline[:: max(1, len(report.timeline) // MOMENTS)]
    short = dataclasses.replace(report, recipe=recipe.to_dict(), timeline=timeline)
    lock = filelock.FileLock(path.with_name(f".{path.name}.lock"), timeout=LOCK_SECONDS, mode=0o666)
    with writing(path), lock:
        reports = {**load(path, missing_ok=True), recipe.key: short}
        entries = {key: reports[key].to_dict() for key in sorted(reports)}
        write_atomically(path, json.dumps({"reports": entries}, indent=1) + "\n")
    _files.cache_clear()
    return path


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make the folder of `path`; raise RecordError where it cannot be written, or others lock it over LOCK_SECONDS."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except (OSError, NotImplementedError) as error:  # filelock.Timeout is an OSError
        why = getattr(error, "strerror", None) or error
        raise RecordError(f"{path.name} could not be written ({why}); it is as it was before.") from error


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader sees the old content or the new, never a part. Raises RecordError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    with writing(path):
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


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
