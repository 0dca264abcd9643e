"""Measure steps of many lengths on a GPU: what the caching allocator held after each. Store and find the results.

A process reads the allocator's settings (`PYTORCH_ALLOC_CONF`) when it starts, so each setting runs in a process of its
own. Results are stored with the course's other measurements, by recipe, lengths and setting.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vramlab.measurement.records import locked, measurements_folder, write_atomically
from vramlab.recipe.recipe import Recipe
from vramlab.report.errors import MeasurementError, RecordError

SETTINGS = ("", "expandable_segments:True")  # the default, and what chapter 07 compares it with
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is the older name, which still works


def measure_lengths(recipe: Recipe, lengths: Sequence[int], settings: str = "", timeout: float = 900) -> dict[str, Any]:
    """Train `recipe` for one step of each of `lengths` (tokens) on this machine's GPU, in a fresh process.

    Returns {"allocated": peak bytes of each step, "reserved": bytes after each step, "retries": how often the allocator
    gave back all cached segments, "gpu": its name, "source": "measured"}. Raises MeasurementError without a GPU or
    when the process fails.
    """
    order = json.dumps({"recipe": recipe.to_dict(), "lengths": list(lengths)})
    environment = {**os.environ, **dict.fromkeys(VARIABLES, settings)}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", f"{__package__}.lengths"]
    try:
        child = subprocess.run(
            command, input=order, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        raise MeasurementError(
            f"{recipe} over {len(lengths)} lengths took over {timeout:g} s: raise timeout=."
        ) from None
    if child.returncode:
        last = (child.stderr.strip().splitlines() or ["nothing was printed"])[-1]
        raise MeasurementError(f"{recipe} over {len(lengths)} lengths was not measured: {last}")
    return {**json.loads(child.stdout.splitlines()[-1]), "source": "measured"}


def run(recipe: Recipe, lengths: Sequence[int]) -> dict[str, Any]:
    """The measurement in this process. Raises MeasurementError without a GPU."""
    import torch
    from vramlab.training.training import build, make_batch, train_step

    if not torch.cuda.is_available():
        raise MeasurementError("torch sees no CUDA device here")
    training = build(recipe.replace(seq_len=lengths[0]), "cuda")
    train_step(training)  # makes the optimizer's states
    allocated, reserved = [], []
    for length in lengths:
        training.batch = make_batch(recipe.replace(seq_len=length), "cuda")
        torch.cuda.reset_peak_memory_stats()
        train_step(training)
        torch.cuda.synchronize()
        allocated.append(torch.cuda.max_memory_allocated())
        reserved.append(torch.cuda.memory_reserved())
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    return {"allocated": allocated, "reserved": reserved, "retries": retries, "gpu": torch.cuda.get_device_name()}


def find_lengths(recipe: Recipe, lengths: Sequence[int], settings: str = "") -> dict[str, Any]:
    """The recorded run, with source "recorded". Raises RecordError when there is none, or its file cannot be read."""
    for path in sorted(_folder().glob("*.json")):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))["runs"].get(_key(recipe, lengths, settings))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RecordError(
                f"the record file {path.name} cannot be read ({type(error).__name__}: {error})."
            ) from error
        if found:
            return {**found, "source": "recorded"}
    raise RecordError("there is no recorded measurement of it")


def save_lengths(recipe: Recipe, lengths: Sequence[int], settings: str, found: dict[str, Any]) -> Path:
    """Add a measured run to its GPU's file; returns the file. Raises RecordError for anything but a measured run."""
    if found.get("source") != "measured":
        raise RecordError(f"only measured runs are recorded, and this one is {found.get('source')}.")
    path = _folder() / ("-".join(found["gpu"].lower().split()) + ".json")
    with locked(path):
        runs = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else {}
        runs[_key(recipe, lengths, settings)] = found
        write_atomically(path, json.dumps({"runs": dict(sorted(runs.items()))}, indent=1) + "\n")
    return path


def _folder() -> Path:
    return measurements_folder() / "lengths"


def _key(recipe: Recipe, lengths: Sequence[int], settings: str) -> str:
    return f"{recipe.key} · {','.join(map(str, lengths))} · {settings or 'default'}"


def main() -> None:
    """The child of `measure_lengths`: takes the order as JSON on stdin, prints the result as JSON."""
    order = json.load(sys.stdin)
    print(json.dumps(run(Recipe(**order["recipe"]), order["lengths"])))


if __name__ == "__main__":
    main()
