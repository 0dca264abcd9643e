"""`measure`: run the real training step on this machine, in fresh processes, or look it up.

Nothing leaks from one experiment to the next, and running out of memory gives a report and kills no
notebook. Each makes two passes (`measurement_passes.py`), a clean one and one under the tracker.
"""

import contextlib
from collections.abc import Callable
from typing import Any

from ..base.errors import MeasurementError, RecipeError, RecordError
from ..hardware import host
from ..hardware.gpu import current_device, source_of
from ..recipe.generation import Generation, as_generating
from ..recipe.recipe import Recipe, as_recipe
from ..report.report import Report, format_bytes
from .host_memory import oom_kills
from .launch import SIGKILL, LateError, Launcher, RankError, rank_name
from .records import find_record

SECONDS_ON_CPU = 120
MOST_RANKS = 4  # processes on a CPU: each holds the libraries, and they take turns on the cores
# A cautious figure for two cores in fp32; half precision is slower on most CPUs.
CPU_FLOPS = 2e10
FREE_SHARE = 0.6  # the libraries, the program itself and other programs need some
WORKER = "vramlab.measurement.worker"  # the module, whose libraries only the child loads


def measure(
    recipe: Recipe | Any,
    repeats: int = 3,
    warmup: int = 2,
    *,
    device: str | None = None,
    recorded: bool | None = None,
    timeout: float = 1800,
    estimate: Callable[[Recipe], int] | None = None,
) -> Report:
    """Measure memory and speed of `recipe` here, or where it does not fit return a GPU's record.

    Memory that runs out gives status "oom", with what was asked for. With sharding it is the report
    of the recipe's rank: among real processes, on as many GPUs or up to MOST_RANKS of them on a
    CPU; on fewer GPUs, alone in a fake process group, whose collectives move nothing.

    Args:
        recipe: a recipe; or what `Recipe` takes for a model, with every other field at its default.
        repeats, warmup: timed optimizer steps, and steps before them (two at least, so that all
            states exist).
        device: "cuda" or "cpu"; None takes CUDA where there is one.
        recorded: True only looks the recipe up in the records, False only runs it here, None runs
            it if it fits here.
        timeout: seconds after which the processes are ended.
        estimate: gives the bytes that one process needs, to skip on a CPU what needs more than is
            free.
    Raises:
        MeasurementError: neither can be had; the message says why and what would do.
        RecipeError: the device cannot compute in the recipe's precision, or an argument is out of
            range.
    """
    recipe = as_recipe(recipe)
    for name, value, least in (("repeats", repeats, 1), ("warmup", warmup, 2)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise RecipeError(name, value, f"measure needs a whole number of at least {least}")
    _check_device(device)
    if recorded:
        return _record_of(recipe, "recorded=True asks for no run")
    if recipe.rollouts and recipe.rollouts.use_vllm:
        raise RecipeError("rollouts.use_vllm", True, "measure runs no vLLM: simulate it")
    # Whatever asks for no run needs no torch, which this loads.
    here = current_device()
    device = device or here.kind
    reason = (
        "torch sees no CUDA device here"
        if device == "cuda" != here.kind
        else cannot(recipe, device)
    )
    if not reason and recorded is None and device == "cpu":
        reason = too_much(recipe, estimate)
    if reason:
        return _record_of(recipe, reason, look=recorded is None)
    if device == "cuda" and here.gpu:
        here.gpu.require(recipe.precision)
    order = {"recipe": recipe, "repeats": repeats, "warmup": warmup, "device": device}
    return run_here(order, timeout)


def _check_device(device: str | None) -> None:
    if device not in (None, "cuda", "cpu"):
        raise RecipeError("device", device, "allowed are 'cuda', 'cpu' and None")


def measure_generation(
    recipe: Recipe | Any,
    prompt: int = Generation.prompt,
    new_tokens: int = Generation.new_tokens,
    *,
    device: str | None = None,
    timeout: float = 1800,
    **options: Any,
) -> Report:
    """Measure memory and speed of `generate` here, in a fresh process.

    Its phases are those of `simulate_generation`, whose arguments it takes; `speed` is of a
    decoding step.

    Args:
        device: "cuda" or "cpu"; None takes CUDA where there is one.
        timeout: seconds after which the process is ended.
        options: other fields of `Generation`.
    Raises:
        MeasurementError: it failed; the message says why.
        RecipeError: a model that does not generate, or an argument that is out of range.
    """
    generation = Generation(prompt, new_tokens, **options)
    recipe = as_generating(recipe)
    generation.check_model(recipe)
    if new_tokens < 2:
        raise RecipeError(
            "generation.new_tokens",
            new_tokens,
            "the first step is not timed: take 2",
        )
    _check_device(device)
    here = current_device()
    device = device or here.kind
    reason = cannot(recipe, device)
    if device == "cuda" != here.kind:
        reason = "torch sees no CUDA device here"
    if reason:
        rest = "simulate_generation() describes it anywhere"
        raise MeasurementError(f"{recipe} does not generate here because {reason}; {rest}.")
    if device == "cuda" and here.gpu:
        here.gpu.require(recipe.precision)
    order = {"recipe": recipe, "generation": generation, "device": device}
    return run_here(order, timeout, function="run_generation")


def _record_of(recipe: Recipe, reason: str, look: bool = True) -> Report:
    """Return the record, unless `look` is False.

    Raises MeasurementError with the `reason` for which nothing was run.
    """
    why = "records were not to be used (recorded=False)"
    if look:
        try:
            return find_record(recipe)
        except RecordError as error:
            why = str(error).rstrip(".")
    instead = "simulate() describes it anywhere"
    raise MeasurementError(
        f"{recipe} was not measured here because {reason}, and {why}; {instead}."
    )


def cannot(recipe: Recipe, device: str) -> str:
    """Return why `device` cannot run `recipe` at all, as a clause, or ""."""
    if recipe.group.world_size > MOST_RANKS and device == "cpu":
        processes = f"{recipe.group.world_size} processes"
        return f"it needs {processes} and measure() starts {MOST_RANKS} at most on a CPU"
    if recipe.attn_implementation == "flash_attention_2" and device == "cpu":
        return "flash-attention needs a GPU"
    if recipe.group.cp_size > 1 and device == "cpu":
        return "torch's ring attention needs GPUs"
    return ""


def too_much(
    recipe: Recipe,
    estimate: Callable[[Recipe], int] | None = None,
) -> str:
    """Return why to skip `recipe` on this machine's CPU, or "".

    `estimate` gives the bytes that one process needs.
    """
    ranks = recipe.group.world_size
    _, free = host.memory()
    needed = ranks * estimate(recipe) if estimate else 0
    if needed > FREE_SHARE * free:
        about = f"about {format_bytes(needed, digits=1)}"
        return f"it needs {about} and {format_bytes(free, digits=1)} of RAM are free"
    seconds = 6 * ranks * operations(recipe) / CPU_FLOPS  # it is run some six times
    if seconds > SECONDS_ON_CPU:
        return f"it would take this CPU about {seconds / 60:,.0f} minutes"
    return ""


def operations(recipe: Recipe) -> int:
    """Return the operations of a step.

    About 6 per parameter and token (Kaplan et al. 2020, sec. 2.1), 8 when layers are recomputed.
    """
    each = 8 if recipe.gradient_checkpointing else 6
    return each * recipe.shape.num_parameters * recipe.tokens


def run_here(
    order: dict[str, Any],
    timeout: float = 1800,
    launcher: Launcher | None = None,
    function: str = "run",
) -> Report:
    """Have fresh processes measure `order`, the arguments of the worker's `function`.

    All ranks, or one where there are fewer GPUs. Return the report of the recipe's rank; memory
    that runs out on any gives status "oom". `launcher`: one of the caller, who ends it.
    """
    import torch

    recipe = order["recipe"]
    device = order["device"]
    # A rank alone keeps its bytes: collectives of a fake group move nothing.
    ranks = recipe.group.world_size
    if device == "cuda" and ranks > torch.cuda.device_count():
        ranks = 1
    if ranks > 1:
        function = "run_rank"
    # Without more of them, a killed child was killed by somebody.
    kills = oom_kills()
    try:
        with contextlib.nullcontext(launcher) if launcher else Launcher() as child:
            reports = child.run(
                f"{WORKER}:{function}",
                order,
                world_size=ranks,
                device=device,
                timeout=timeout,
                preload=f"{WORKER}:preload",
            )
    except MeasurementError as error:
        if isinstance(error, RankError):
            asked = error.oom
            if device == "cpu" and error.code == SIGKILL and oom_kills() > kills:
                asked = "killed by the kernel because RAM ran out."
            if asked:
                text = f"{rank_name(error.rank, ranks)}: {asked}"
                card = current_device().name if device == "cuda" else None
                return Report.failed(source_of(device), recipe, device, "oom", text, gpu=card)
        kind = LateError if isinstance(error, LateError) else MeasurementError
        raise kind(f"{recipe} could not be measured: {error}") from error
    # Ranks hold different bytes, so the answer is that of the one that was asked for.
    report = reports[recipe.group.rank if ranks > 1 else 0]
    if ranks > 1:
        peaks = ", ".join(format_bytes(each.allocated) for each in reports)
        report.notes.append(f"{ranks} processes on this machine; their peaks by rank: {peaks}")
    return report
