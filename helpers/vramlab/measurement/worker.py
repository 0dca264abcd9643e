"""The child process of `measure`: it reads one order, runs its recipe and writes one report."""

import json
import re
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers.modeling_utils
import transformers.trainer_pt_utils  # noqa: F401 (loaded here, while there is no order yet)

from ..hardware.host import memory
from ..hardware.nvml import Sensors, nvml_snapshot
from ..recipe.recipe import Recipe
from ..report.errors import MeasurementError, RecipeError
from ..report.report import Report, environment, format_bytes
from ..training.engines import engine_of
from ..training.process_group import one_rank_of
from ..training.quiet import silence
from .child_process import answer, end_with_parent
from .measurement_passes import clean_pass, tracked_pass
from .resident import limited, rss


def main() -> None:
    """Load the libraries, wait for an order (a line of JSON), and answer it: a report, or the error that stopped it."""
    silence()
    line = sys.stdin.readline()
    if not line:
        return  # nobody wants anything any more
    end_with_parent()
    order = json.loads(line)
    try:
        recipe = Recipe(**order.pop("recipe"))
        found = run(recipe, **order).to_dict()
    except RecipeError as error:
        found = {"error": "RecipeError", "args": [error.field, str(error.value), error.allowed]}
    except MeasurementError as error:
        found = {"error": "MeasurementError", "message": str(error)}
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{type(error).__name__}: {error} ({Path(where.filename).name}, line {where.lineno})"
        found = {"error": type(error).__name__, "message": message}
    answer(found)


def run(recipe: Recipe, repeats: int, warmup: int, device: str, memory_limit: int | None = None) -> Report:
    """Both passes of `recipe` on `device`; out of memory comes back as a report with status "oom".

    A recipe with sharding is measured as its one rank, in a process group of which no other rank exists.
    """
    before = nvml_snapshot() if device == "cuda" else None  # torch has not touched the device yet
    torch.manual_seed(0)
    import_all(recipe)
    held = rss()
    try:
        with one_rank_of(recipe.sharding), engine_of(recipe).without_peers("cpu"), limited(memory_limit, device):
            truth = clean_pass(recipe, repeats, warmup, device, before)
            report = tracked_pass(recipe, device, truth)
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        message = out_of_memory(error, device, memory_limit)
        if not message:
            raise
        report = Report.failed("measured", recipe, device, "oom", message)
        if device == "cuda":
            report.allocated, report.reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    report.environment = machine(device, before, memory_limit)
    if recipe.sharding and recipe.sharding.world_size > 1:
        report.notes.append(
            f"rank {recipe.sharding.rank} of {recipe.sharding.world_size} alone, in a process group whose collectives "
            "move nothing: bytes are a real rank's, time is that of its computation only"
        )
    if device == "cpu":
        report.notes.append(f"the process held {format_bytes(held)} before the model was built")
    return report


def import_all(recipe: Recipe) -> None:
    """Load what else building the model will need, so that it counts neither in times nor in limits."""
    if recipe.lora:
        import peft  # noqa: F401
    if recipe.quantization or "bit" in recipe.optim:
        import bitsandbytes  # noqa: F401


# Texts of torch (c10/core/impl/alloc_cpu.cpp), CUDA, cuBLAS, cuDNN and oneDNN for an allocation that failed.
OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|not enough memory|[A-Z]+_STATUS_ALLOC_FAILED|could not create a memory", re.I
)


def out_of_memory(error: Exception, device: str, limit: int | None = None) -> str:
    """What was asked for and what was free, in a sentence, if `error` says that memory ran out; else ""."""
    text = str(error)
    if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not OUT_OF_MEMORY.search(text):
        return ""
    if device == "cuda":
        if isinstance(error, MemoryError) or "DefaultCPUAllocator" in text:
            return ""  # this machine's RAM, which says nothing of the card
        text = re.split(r"\s*(?:See documentation|CUDA kernel errors|If reserved but)", text)[0].strip().rstrip(".")
        try:
            free, total = map(format_bytes, torch.cuda.mem_get_info())
        except RuntimeError:  # not even CUDA's context could be made
            return f"{text}."
        return f"{text}. The device has {free} free of {total}."
    asked = re.search(r"tried to allocate (\d+) bytes", text)
    what = f"it asked for {format_bytes(int(asked[1]))} more" if asked else "an allocation failed"
    left = f"the limit was {format_bytes(limit)}" if limit is not None else f"{format_bytes(memory()[1])} were free"
    return f"RAM ran out: {what}, and {left}."


def machine(device: str, sensors: Sensors | None, memory_limit: int | None = None) -> dict[str, Any]:
    """What the report was made on: versions, date and, on CUDA, the card and its driver."""
    more: dict[str, Any] = {"memory_limit": memory_limit} if memory_limit is not None else {}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        more |= {
            "gpu": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "total_memory": properties.total_memory,
            "driver": sensors.driver if sensors else None,
            "cuda": torch.version.cuda,
        }
    return environment(**more)


if __name__ == "__main__":
    main()
