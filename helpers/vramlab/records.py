"""Recorded measurements: one JSON file per GPU and version set, keyed by recipe, made by `measure` and nothing else."""

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from .data import data_path
from .errors import RecordError
from .recipe import Recipe
from .report import Report

WANTED = "VRAMLAB_COLLECT"  # names a file: recipes are then written there instead of being measured


def measurements_folder() -> Path:
    """Where the course's recorded measurements lie."""
    return Path(data_path("measurements"))


def record_name(report: Report) -> str:
    """The file a report belongs to: GPU and versions of torch and transformers, "nvidia-h200-torch2.11-transformers5.17.json"."""
    env = report.environment
    device = re.sub(r"[^a-z0-9]+", "-", str(env.get("gpu") or "cpu").lower()).strip("-")
    versions = [f"{name}{'.'.join(str(env.get(name)).split('+')[0].split('.')[:2])}" for name in ("torch", "transformers")]
    return "-".join([device, *versions]) + ".json"


def load(path: str | os.PathLike) -> dict[str, Report]:
    """The reports of one record file by recipe key. Raises RecordError when it cannot be read."""
    try:
        entries = json.loads(Path(path).read_text())["reports"]
        return {key: Report.from_dict(entry) for key, entry in entries.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"the record file {Path(path).name} cannot be read: {error}") from error


def save(report: Report, folder: str | os.PathLike | None = None) -> Path:
    """Add a measured report to its file, replacing an older one of the same recipe. Returns the file.

    The file is written whole beside the old one and then put in its place, so a full disk or a kill loses nothing.
    Raises RecordError: the report is not a measurement, or the file cannot be written.
    """
    if report.source != "measured" or not report.recipe:
        raise RecordError(f"only measured reports of a recipe are recorded, and this one is {report.source}")
    path = Path(folder or measurements_folder(), record_name(report))
    entries = json.loads(path.read_text())["reports"] if path.exists() else {}
    entry = report.to_dict()
    entries[Recipe(**report.recipe).key] = {**entry, "timeline": entry["timeline"][:: max(1, len(entry["timeline"]) // 60)]}
    text = json.dumps({"reports": dict(sorted(entries.items()))}, indent=1) + "\n"
    write_atomically(path, text)
    _files.cache_clear()
    return path


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader sees the old content or the new, never a part. Raises RecordError."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
            temporary = Path(file.name)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if temporary:
            with contextlib.suppress(OSError):
                temporary.unlink()
        raise RecordError(f"{path.name} could not be written ({error.strerror}); the file is as it was before") from error


@lru_cache
def _files(folder: str) -> tuple[tuple[str, dict[str, Report]], ...]:
    return tuple((path.stem, load(path)) for path in sorted(Path(folder).glob("*.json")))


def find_record(recipe: Recipe, gpu: str | None = None) -> Report:
    """The recorded measurement of exactly this recipe, newest first; `gpu` asks for a card by name.

    Returns a report with source "recorded". Raises RecordError when there is none; the message says what there is.
    """
    found = [report for _, reports in _files(str(measurements_folder())) if (report := reports.get(recipe.key))]
    if gpu:
        found = [r for r in found if gpu.lower() in str(r.environment.get("gpu", "")).lower()]
    if not found:
        raise RecordError("there is no recorded measurement of it" + (f" on {gpu}" if gpu else ""))
    newest = max(found, key=lambda report: str(report.environment.get("date")))
    return Report.from_dict({**newest.to_dict(), "source": "recorded"})


def all_records() -> Iterator[Report]:
    """Every recorded report, as "recorded"."""
    for _, reports in _files(str(measurements_folder())):
        for report in reports.values():
            yield Report.from_dict({**report.to_dict(), "source": "recorded"})


def log_wanted(recipe: Recipe) -> Report | None:
    """While recipes are being collected from notebooks, note this one and return its prediction in place of a run."""
    path = os.environ.get(WANTED)
    if not path:
        return None
    from .predict import predict

    with open(path, "a") as file:
        file.write(recipe.to_json() + "\n")
    return predict(recipe)
