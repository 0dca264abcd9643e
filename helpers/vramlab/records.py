"""Recorded measurements: one JSON file per GPU and version set, keyed by recipe, made by `measure` and nothing else."""

import contextlib
import dataclasses
import json
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from .data import data_path
from .errors import RecordError
from .recipe import Recipe
from .report import Report, Speed

WANTED = "VRAMLAB_COLLECT"  # names a file: recipes are then written there instead of being measured
MOMENTS = 60  # of the timeline that are kept


def measurements_folder() -> Path:
    """Where the course's recorded measurements lie."""
    return Path(data_path("measurements"))


def file_name(environment: dict[str, Any]) -> str:
    """The file for a GPU and versions of torch and transformers, "nvidia-h200-torch2.11-transformers5.17.json"."""
    device = re.sub(r"[^a-z0-9]+", "-", str(environment.get("gpu") or "cpu").lower()).strip("-")
    minor = {
        name: ".".join(str(environment.get(name)).split("+")[0].split(".")[:2]) for name in ("torch", "transformers")
    }
    return "-".join([device, *(name + version for name, version in minor.items())]) + ".json"


def load(path: str | os.PathLike, missing_ok: bool = False) -> dict[str, Report]:
    """The reports of one record file by recipe key. Raises RecordError when it cannot be read."""
    path = Path(path)
    if missing_ok and not path.exists():
        return {}
    try:
        reports = json.loads(path.read_text(encoding="utf-8"))["reports"]
        return {key: Report.from_dict(entry) for key, entry in reports.items()}
    except FileNotFoundError:
        raise RecordError(f"the record file {path.name} does not exist.") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"({type(error).__name__}: {error}): mend or remove it"
        raise RecordError(f"the record file {path.name} cannot be read {why}.") from error


def save(report: Report, folder: str | os.PathLike | None = None) -> Path:
    """Add a measured report to its file, replacing an older one of the same recipe. Returns the file.

    The file is written whole beside the old one and then put in its place, so a full disk or a kill loses nothing.

    Raises:
        RecordError: the report is no measurement of a recipe on a machine as it is; or a CPU's, and `folder` is the
            course's own; or the file cannot be read or written.
    """
    if report.source != "measured" or not report.recipe:
        raise RecordError(f"only measured reports of a recipe are recorded, and this one is {report.source}.")
    if report.environment.get("memory_limit"):
        raise RecordError("a run under memory_limit says nothing of the machine, so it is not recorded.")
    folder = Path(folder or measurements_folder())
    if report.target != "cuda" and folder.resolve() == Path(data_path("measurements")).resolve():
        raise RecordError("the course's records are a GPU's, and this was measured on a CPU: name another folder.")
    path = folder / file_name(report.environment)
    short = dataclasses.replace(report, timeline=report.timeline[:: max(1, len(report.timeline) // MOMENTS)])
    reports = {**load(path, missing_ok=True), Recipe(**report.recipe).key: short}
    entries = {key: reports[key].to_dict() for key in sorted(reports)}
    write_atomically(path, json.dumps({"reports": entries}, indent=1) + "\n")
    _files.cache_clear()
    return path


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader sees the old content or the new, never a part. Raises RecordError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise RecordError(f"{path.name} could not be written ({error.strerror}); it is as it was before.") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


@lru_cache
def _files(folder: str) -> tuple[dict[str, Report], ...]:
    return tuple(load(path) for path in sorted(Path(folder).glob("*.json")))


def find_record(recipe: Recipe, gpu: str | None = None) -> Report:
    """The recorded measurement of exactly this recipe, newest first; `gpu` asks for a card by name.

    Returns a report with source "recorded". Raises RecordError when there is none.
    """
    if stand_in := log_wanted(recipe):
        return dataclasses.replace(stand_in, source="recorded")
    found = [report for reports in _files(str(measurements_folder())) if (report := reports.get(recipe.key))]
    if gpu:
        found = [r for r in found if gpu.lower() in str(r.environment.get("gpu", "")).lower()]
    if not found:
        raise RecordError("there is no recorded measurement of it" + (f" on {gpu}" if gpu else ""))
    newest = max(found, key=lambda report: str(report.environment.get("date")))
    return Report.from_dict({**newest.to_dict(), "source": "recorded"})


def log_wanted(recipe: Recipe) -> Report | None:
    """While recipes are being collected from notebooks, note this one; else None.

    Returns something with a measurement's shape and predicted figures, so that the code around goes on to its next
    recipe. It stays within the process that collects.
    """
    path = os.environ.get(WANTED)
    if not path:
        return None
    from .predict import predict

    with open(path, "a", encoding="utf-8") as file:
        file.write(recipe.to_json() + "\n")
    report = predict(recipe)
    total = report.peak.total
    likely = {name: size and size.value for name, size in (("reserved", report.reserved), ("process", report.process))}
    figures = {"allocated": total, "requested": total, "rss": total, "timeline": [], **likely}
    speed = Speed(1.0, 1.0, 1.0, 3, float(recipe.tokens))
    return dataclasses.replace(report, source="measured", speed=speed, **figures)
