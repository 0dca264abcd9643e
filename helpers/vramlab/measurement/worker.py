"""What a measuring process does: run both passes of a recipe and report.

Alone, or as one of several ranks.
"""

import dataclasses
import importlib
import os
import re
from collections.abc import Callable
from typing import Any

import torch

from ..hardware.gpu import source_of
from ..hardware.host import memory
from ..hardware.nvml import Sensors, nvml_snapshot
from ..private import of_compiler
from ..recipe.generation import Generation
from ..recipe.optimizers import MODELLED
from ..recipe.recipe import Recipe
from ..report.report import Report, environment, format_bytes
from ..training.engines import engine_of
from ..training.make_optimizer import torchao_optimizers
from ..training.models import build_model
from ..training.process_group import one_rank_of, real_rank
from .generation_passes import clean_generation, tracked_generation
from .launch import RankError
from .measurement_passes import clean_pass, tracked_pass


def run(
    recipe: Recipe,
    repeats: int,
    warmup: int,
    device: str,
) -> Report:
    """Measure `recipe` in this process.

    With sharding as its one rank, in a process group that has no other. Running out of memory gives
    a report with status "oom".
    """
    before = nvml_snapshot()  # torch has not touched the device yet
    with one_rank_of(recipe.sharding), engine_of(recipe).without_peers("cpu"):
        report = _both_passes(recipe, repeats, warmup, device, before)
    if recipe.group.world_size > 1:
        rank = f"rank {recipe.group.rank} of {recipe.group.world_size} alone"
        group = "in a process group whose collectives move nothing"
        time = "time is that of its computation only"
        report.notes.append(f"{rank}, {group}: bytes are a real rank's, {time}")
    return report


def run_rank(
    recipe: Recipe,
    repeats: int,
    warmup: int,
    device: str,
) -> Report:
    """Measure `recipe` as one of real ranks.

    Running out of memory raises RankError, so that the others are ended.
    """
    before = nvml_snapshot(int(os.environ["LOCAL_RANK"]))
    with real_rank(device) as rank:
        report = _both_passes(
            on_rank(recipe, rank),
            repeats,
            warmup,
            device,
            before,
        )
        # Raised inside, so that this rank ends and the others are not waited for.
        if report.status == "oom":
            raise RankError(report.message, rank, oom=report.message)
    return report


def preload(recipe: Recipe, **others: Any) -> None:
    """Import what a rank will need.

    A layer on the meta device: the model's class is looked up when it is built.
    """
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401

    of_compiler.dynamo("eval_frame")
    import_libraries(recipe)
    if recipe.sharding:
        importlib.import_module(f"vramlab.training.engines.{recipe.sharding.engine}")
    build_model(recipe.replace(num_layers=1, sharding=None), "meta")


def on_rank(recipe: Recipe, rank: int) -> Recipe:
    """Return `recipe` as rank `rank` runs it."""
    if recipe.sharding is None:
        return recipe
    return recipe.replace(sharding=dataclasses.replace(recipe.sharding, rank=rank))


def run_generation(recipe: Recipe, generation: Generation, device: str) -> Report:
    """Measure a generation in this process.

    Running out of memory gives a report with status "oom".
    """
    before = nvml_snapshot()

    def passes() -> Report:
        truth = clean_generation(recipe, generation, device, before)
        return tracked_generation(recipe, generation, device, truth)

    return _reported(passes, recipe, device, before)


def _both_passes(
    recipe: Recipe,
    repeats: int,
    warmup: int,
    device: str,
    before: Sensors,
) -> Report:
    def passes() -> Report:
        truth = clean_pass(recipe, repeats, warmup, device, before)
        return tracked_pass(recipe, device, truth)

    return _reported(passes, recipe, device, before)


def _reported(
    passes: Callable[[], Report],
    recipe: Recipe,
    device: str,
    before: Sensors,
) -> Report:
    """Return the report of `passes`, or that memory ran out."""
    # Data and values are the same in each measurement, and on all ranks.
    torch.manual_seed(0)
    import_libraries(recipe)
    try:
        report = passes()
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        message = out_of_memory(error, device)
        if not message:
            raise
        report = Report.failed(
            source_of(device),
            recipe,
            device,
            "oom",
            message,
        )
        if device == "cuda":
            # What it had reached when it failed.
            report.allocated = torch.cuda.max_memory_allocated()
            report.reserved = torch.cuda.max_memory_reserved()
    report.environment = card_environment(before) if device == "cuda" else environment()
    return report


def card_environment(sensors: Sensors) -> dict[str, Any]:
    """Return the environment of what is measured on this process's card.

    `sensors` know its driver.
    """
    properties = torch.cuda.get_device_properties(0)
    return environment(
        gpu=properties.name,
        compute_capability=f"{properties.major}.{properties.minor}",
        multiprocessors=properties.multi_processor_count,
        total_memory=properties.total_memory,
        driver=sensors.driver,
        cuda=torch.version.cuda,
    )


def import_libraries(recipe: Recipe) -> None:
    """Import what building the model will need, so that it counts in no times or limits."""
    if recipe.adapters:
        import peft  # noqa: F401
    if recipe.quantization or MODELLED[recipe.optim].library == "bitsandbytes":
        import bitsandbytes  # noqa: F401
    if MODELLED[recipe.optim].compiles_updates:
        torchao_optimizers(recipe.optim)


# Messages of torch (c10/core/impl/alloc_cpu.cpp), CUDA, cuBLAS, cuDNN and oneDNN for an allocation
# that failed.
OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|not enough memory"
    r"|[A-Z]+_STATUS_ALLOC_FAILED|could not create a memory",
    re.I,
)
# What torch's message goes on with after it has said what there is.
ADVICE = re.compile(r"\s*(?:See documentation|CUDA kernel errors|If reserved but)")


def out_of_memory(error: Exception, device: str) -> str:
    """Say in a sentence that memory ran out; "" where `error` is another one.

    Where `error` does, it says what was asked for and what was free.
    """
    text = str(error)
    is_by_class = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if not is_by_class and not OUT_OF_MEMORY.search(text):
        return ""
    if device == "cuda":
        if isinstance(error, MemoryError) or "DefaultCPUAllocator" in text:
            return ""  # this machine's RAM, not the card's memory
        said, *_ = ADVICE.split(text)
        return said.strip()
    asked = re.search(r"tried to allocate (\d+) bytes", text)
    what = "an allocation failed"
    if asked:
        what = f"it asked for {format_bytes(int(asked[1]))} more"
    _, free = memory()
    return f"RAM ran out: {what}, and {format_bytes(free)} were free."
