"""The real training step on this machine, in a fresh process.

Each experiment has a process of its own, so nothing leaks from one to the next and running out of memory kills no
notebook: it comes back as a report. The child (`worker.py`) makes two passes (`passes.py`), a clean one for the truth
(allocator peaks, NVML, time) and one under the tracker for the split.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from ..hardware import host
from ..hardware.gpu import current_device
from ..hardware.nvml import nvml_snapshot
from ..recipe.recipe import Recipe, as_recipe
from ..report.errors import MeasurementError, RankError, RecipeError, RecordError
from ..report.report import Report, environment, format_bytes
from .child_process import Apart
from .records import find_record

SECONDS_ON_CPU = 120
MOST_RANKS = 4  # processes on a CPU: each holds the libraries, and they take turns on the cores
CPU_FLOPS = 2e10  # a cautious figure for two cores in fp32; half precision is slower on most CPUs
WORKER = [
    sys.executable,
    "-P",
    "-m",
    "vramlab.measurement.worker",
]  # -P: a torch.py in the notebook's folder is not meant


def measure(
    recipe: Recipe | Any,
    repeats: int = 3,
    warmup: int = 2,
    *,
    device: str | None = None,
    recorded: bool | None = None,
    memory_limit: int | None = None,
    timeout: float = 1800,
    worker: Apart | None = None,
    estimate: Callable[[Recipe], int] | None = None,
) -> Report:
    """The memory and speed of `recipe`, measured here; or, where it does not fit this machine, as recorded on a GPU.

    With sharding it is those of rank `recipe.sharding.rank`: of real processes, on as many GPUs or up to MOST_RANKS of
    them on a CPU; on fewer GPUs, of that rank alone among ranks that are not there (its collectives move nothing).

    Args:
        recipe: a recipe; or what `Recipe` takes for a model, with every other field at its default.
        repeats, warmup: timed optimizer steps, and steps before them (two at least, so that all states exist).
        device: "cuda" or "cpu"; None takes CUDA where there is one.
        recorded: True only looks the recipe up in the records, False only runs it here, None runs it if it fits here.
        memory_limit: bytes that training may take, as if the machine had no more: to run out of memory without harm.
        timeout: seconds after which the child is ended.
        worker: a child that was started before (`start_worker`), so that it has loaded its libraries by now.
        estimate: gives the bytes that one process needs, so that a CPU is not asked for more than is free; None asks
            nothing but the time.
    Returns:
        source "measured" (or "recorded"), sizes in bytes; status "oom" when memory ran out, with what was asked for.
    Raises:
        MeasurementError: neither can be had; the message says why and what would do.
        RecipeError: the device cannot compute in the recipe's precision, or an argument is out of range.
    """
    recipe = as_recipe(recipe)
    for name, value, least in (("repeats", repeats, 1), ("warmup", warmup, 2), ("memory_limit", memory_limit, 1)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise RecipeError(name, value, f"measure needs a whole number of at least {least}")
    if device not in (None, "cuda", "cpu"):
        raise RecipeError("device", device, "allowed are 'cuda', 'cpu' and None")
    if recorded:
        return _recorded(recipe, "recorded=True asks for no run")
    here = current_device()
    if device == "cuda" and here.kind != "cuda":
        return _recorded(recipe, "torch sees no CUDA device here")
    device = device or here.kind
    reason = cannot(recipe, device)
    if not reason and recorded is None and device == "cpu":
        reason = too_much(recipe, None if memory_limit else estimate)
    if reason:
        return _recorded(recipe, reason, look=recorded is None)
    if device == "cuda" and here.gpu:
        here.gpu.require(recipe.precision)
    if real_ranks(recipe, device):
        return run_on_ranks(recipe, repeats, warmup, device, timeout, memory_limit)
    return run_child(recipe, repeats, warmup, device, timeout, memory_limit, worker)


def start_worker() -> Apart:
    """A child that loads its libraries and waits for an order; leave its with-block to end it."""
    return Apart(WORKER)


def _recorded(recipe: Recipe, reason: str, look: bool = True) -> Report:
    try:
        if look:
            return find_record(recipe)
        error = "records were not to be used (recorded=False)"
    except RecordError as failed:
        error = str(failed).rstrip(".")
    raise MeasurementError(
        f"{recipe} was not measured here because {reason}, and {error}; simulate() and predict() describe it anywhere."
    )


def cannot(recipe: Recipe, device: str) -> str:
    """Why `device` cannot run `recipe` at all, as a clause; "" when it can."""
    if recipe.sharding and recipe.sharding.world_size > MOST_RANKS and device == "cpu":
        return f"it needs {recipe.sharding.world_size} processes and measure() starts {MOST_RANKS} at most on a CPU"
    if recipe.attn_implementation == "flash_attention_2" and device == "cpu":
        return "flash-attention needs a GPU"
    return ""


def too_much(recipe: Recipe, estimate: Callable[[Recipe], int] | None = None) -> str:
    """Reason to skip `recipe` on this machine's CPU, or ''; `estimate` gives the bytes that one process needs."""
    ranks = recipe.sharding.world_size if recipe.sharding else 1
    free, needed = host.memory()[1], ranks * estimate(recipe) if estimate else 0
    if needed > 0.6 * free:
        # twice: libraries, the program itself, and whatever else the machine is doing
        return f"it needs about {format_bytes(needed, digits=1)} and {format_bytes(free, digits=1)} of RAM are free"
    seconds = 6 * ranks * operations(recipe) / CPU_FLOPS  # it is run some six times
    if seconds > SECONDS_ON_CPU:
        return f"it would take this CPU about {seconds / 60:,.0f} minutes"
    return ""


def operations(recipe: Recipe) -> int:
    """Of a step: about 6 a parameter and token (Kaplan et al. 2020, table 1), 8 when layers are recomputed."""
    return (8 if recipe.gradient_checkpointing else 6) * recipe.shape.num_parameters * recipe.tokens


def real_ranks(recipe: Recipe, device: str) -> bool:
    """Whether the ranks of `recipe` are all started here, each with a processor of its own."""
    ranks = recipe.sharding.world_size if recipe.sharding else 1
    return ranks > 1 and (device == "cpu" or gpus() >= ranks)


def gpus() -> int:
    """How many CUDA devices torch sees."""
    import torch

    return torch.cuda.device_count()


def run_on_ranks(
    recipe: Recipe, repeats: int, warmup: int, device: str, timeout: float, memory_limit: int | None = None
) -> Report:
    """Have `recipe.sharding.world_size` processes run `recipe`; returns the report of the recipe's rank.

    Memory that runs out on any rank is a report with status "oom" that names it.
    """
    from .launch import Launcher

    arguments = {"recipe": recipe.to_dict(), "repeats": repeats, "warmup": warmup, "device": device}
    arguments["memory_limit"] = memory_limit
    ranks, module = recipe.sharding.world_size, "vramlab.measurement.rank_training"
    with Launcher() as launcher:
        try:
            answers = launcher.answers(
                f"{module}:measure", arguments, ranks, device, timeout, None, f"{module}:preload"
            )
        except RankError as error:
            if not error.oom:
                raise
            return _failed(recipe, device, f"Rank {error.rank} of {ranks}: {error.oom}", memory_limit)
    reports = [Report.from_dict(answer) for answer in answers]
    report = reports[recipe.sharding.rank]
    peaks = ", ".join(format_bytes(r.allocated) for r in reports)
    report.notes.append(f"{ranks} processes on this machine; their peaks by rank: {peaks}")
    return report


def run_child(
    recipe: Recipe,
    repeats: int,
    warmup: int,
    device: str,
    timeout: float,
    memory_limit: int | None = None,
    worker: Apart | None = None,
) -> Report:
    """Have a fresh process run `recipe` (see `worker.py`) and read the report it leaves.

    Ctrl-C and timeouts end the child's whole process group; should this process be killed, the child ends by itself.
    """
    order = {"recipe": recipe.to_dict(), "repeats": repeats, "warmup": warmup, "device": device}
    with worker or start_worker() as child:
        child.send(json.dumps({**order, "memory_limit": memory_limit}))
        try:
            code, last_words = child.wait(timeout)
        except subprocess.TimeoutExpired:
            raise MeasurementError(f"{recipe} took over {timeout:g} s and was ended: raise timeout=.") from None
        answer, out_of_memory = child.answer(), child.out_of_memory()
    if answer is not None:
        return _answer(recipe, answer)
    if code == -getattr(signal, "SIGKILL", 9):
        return _killed(recipe, device, out_of_memory)
    words = "\n".join(last_words) or "nothing was printed"
    raise MeasurementError(f"the process that measured {recipe} ended with code {code}; its last words:\n{words}")


def _answer(recipe: Recipe, answer: dict) -> Report:
    if "error" not in answer:
        return Report.from_dict(answer)
    if answer["error"] == "RecipeError":
        raise RecipeError(*answer["args"])
    raise MeasurementError(f"{recipe} could not be measured: {answer['message']}")


def _killed(recipe: Recipe, device: str, out_of_memory: bool) -> Report:
    """A report if the kernel killed the process for its memory and that is what was measured, else an error."""
    if out_of_memory and device == "cpu":
        return _failed(recipe, device, "The kernel killed the process because RAM ran out.")
    why = (
        "because this machine's RAM ran out, not the GPU's memory"
        if out_of_memory
        else "by somebody, not for its memory"
    )
    raise MeasurementError(f"the process that measured {recipe} was killed {why}: that is no result.")


def _failed(recipe: Recipe, device: str, message: str, memory_limit: int | None = None) -> Report:
    """The report of a run that ran out of memory and could not say so itself."""
    report = Report.failed("measured", recipe, device, "oom", message)
    more = {"memory_limit": memory_limit} if memory_limit is not None else {}
    if device == "cuda":
        sensors = nvml_snapshot()
        more |= {"gpu": sensors.name, "driver": sensors.driver}
    report.environment = environment(**more)
    return report
