"""The real training step on fake tensors: no GPU, no memory, seconds.

`simulate(recipe)` builds the recipe's model from storages that have a size and no content, runs `training.train_step`
on it twice (the second step is the steady one) and replays what `tracker.Tracker` saw. Deep models are run
shallow, and their log is deepened exactly (`deepen.py`). With `recipe.sharding` it is the step of one rank, in a process
group whose other ranks need not exist (`world.one_rank_of`), as `engines` has it run.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from . import any_module
from . import training as tr
from .cuda import CudaKernels, cublas_workspaces
from .cuda_scratch import kernel_scratch
from .deepen import GROUPS, NotRegular, deepen
from .engines import engine_of
from .errors import RecipeError
from .fakes import fake_world
from .gpu import USUAL, Gpu, find_gpu
from .history import History, largest
from .lora_modules import differ_by_layer
from .overhead import CONTEXT, UNIT
from .recipe import Loop, Recipe
from .report import Interval, MiB, Report, environment
from .tracked import run_tracked
from .tracker import Tracker
from .values import packed_sequences
from .world import one_rank_of

STEPS = 2
FLOATS, INTEGERS = (torch.float32, torch.float16, torch.bfloat16), (torch.int64, torch.int32)


def simulate(
    recipe: Recipe | None = None,
    target: str = "cuda",
    gpu: str | None = None,
    *,
    model: torch.nn.Module | None = None,
    batch: Any = None,
    optimizer: Any = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    loop: Loop | str = "plain",
    precision: str = "fp32",
    steps: int = STEPS,
    full: bool = False,
) -> Report:
    """Where every byte of a training step would be, without a GPU and without the memory.

    Args:
        recipe: what to train; or leave it out and give any module by `model`, with `batch`, `optimizer` and `loss`.
        target: "cuda" describes a GPU's kernels and rounding, "cpu" this machine's.
        gpu: a name of the GPU table, for what depends on the card (attention kernel, cuBLAS workspace).
        batch: keyword arguments (mapping), positional ones (tuple) or the only one (tensor) of the model's forward.
        optimizer: one built on the model's parameters, a list of them, or a function of parameters to one.
        precision: of a module; a "-true" one also converts its parameters, buffers and floating inputs.
        loss: a function of (outputs, batch) to a scalar; None takes `outputs["loss"]`.
        steps: optimizer steps to run; the phases of the last are reported, the peak is that of all.
        full: run the whole depth instead of deepening a shallow run (equal, and slower).
    Returns:
        A report with source "simulated"; sizes in bytes.
    Raises:
        RecipeError: the recipe or module needs something that has no simulation; it names the field and the line.

    Small tensors of a module's batch and buffers keep their values; an unknown value that is read becomes a note.
    """
    if target not in ("cuda", "cpu"):
        raise RecipeError("target", target, "allowed are 'cuda' and 'cpu'")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise RecipeError("steps", steps, "it must be a whole number of at least 1")
    card = find_gpu(gpu) if gpu else None
    if recipe is None:
        tracker = trace_module(model, batch, optimizer, loss, loop, precision, target, card, steps)
        history = History(tracker.log, tracker.marks, allocator=target == "cuda")
        notes = any_module.notes(model, loop) + tracker.values.notes
        return to_report(history, "simulated", None, target, card=card, title=type(model).__name__, notes=notes)
    notes = ["torch_compile: the eager step is simulated"] if recipe.torch_compile else []
    if card and (why := card.why_not(recipe.precision)):
        notes.append(why)
    return to_report(trace(recipe, target, card, steps, full), "simulated", recipe, target, card=card, notes=notes)


def trace(
    recipe: Recipe, target: str = "cuda", card: Gpu | None = None, steps: int = STEPS, full: bool = False
) -> History:
    """The history of every storage over `steps` optimizer steps of `recipe`, on fake tensors.

    A model of more than five groups of layers is run with five and deepened (`deepen.py`), unless `full`.
    """
    cuda = target == "cuda"
    period, depth = layer_period(recipe), recipe.shape.num_layers
    # a sliding cache makes a scalar a layer before the layers run; on CUDA it is the host's
    full = full or (not cuda and bool(recipe.shape.config.get("sliding_window")))
    full = full or differ_by_layer(recipe.shape, recipe.lora)
    full = full or not divided_by_layer(recipe)
    more = 0 if full else depth // period - GROUPS
    if more > 0 and recipe.shape.num_decoder_layers in (0, depth):
        tracker = _run(recipe.replace(num_layers=depth - more * period), target, card, steps)
        with contextlib.suppress(NotRegular):
            return History(*deepen(tracker, period, more), allocator=cuda)
    tracker = _run(recipe, target, card, steps)
    return History(tracker.log, tracker.marks, allocator=cuda)


def divided_by_layer(recipe: Recipe) -> bool:
    """Whether a rank's share of a deep model is its share of a shallow one and of the layers between.

    DDP's buckets and DeepSpeed's flat buffers run across layers, one unit has all of them, a pipeline deals them out.
    """
    sharding = recipe.sharding
    return sharding is None or sharding.engine == "tensor" or (sharding.engine == "fsdp" and sharding.wrap == "layers")


def layer_period(recipe: Recipe) -> int:
    """After how many layers the kinds of layers repeat: 1 in most models, 2 in Gemma 2 (sliding and full attention)."""
    kinds = recipe.shape.config.get("layer_types") or [""]
    return next(p for p in range(1, len(kinds) + 1) if all(k == kinds[i % p] for i, k in enumerate(kinds)))


def _run(recipe: Recipe, target: str, card: Gpu | None, steps: int) -> Tracker:
    engine = engine_of(recipe)
    device = engine.fake_gpu if target == "cuda" else "cpu"
    with one_rank_of(recipe.sharding), engine.without_peers(), fake_world(target, card) as (_, kernels):
        training = tr.build(recipe, device, target=target)
        return run_tracked(training, make_tracker(training, card, kernels), steps, target)


def make_tracker(training: tr.Training, card: Gpu | None, kernels: CudaKernels | None) -> Tracker:
    """A tracker for fake tensors: it answers reads of values, and knows rounding and scratch of CUDA's `kernels`."""
    tracker = Tracker("cpu")
    if training.device.index is not None:  # another is the host's
        tracker.only = training.device
    if kernels:
        kernels.on_host, kernels.is_on_host = tracker.forget, tracker.forgotten
        tracker.round_to, tracker.scratch = UNIT, kernel_scratch(card.chip if card else USUAL)
        tracker.at_phase = cublas_workspaces(card)
    # A fake tensor has no values to read: every mask is full, every count is one, and no gradient overflowed.
    tracker.constant = {torch.bool: True, **dict.fromkeys(FLOATS, 1.0), **dict.fromkeys(INTEGERS, 1)}
    if training.scaler:
        training.scaler._maybe_opt_step = lambda optimizer, state, *args, **kwargs: optimizer.step(*args, **kwargs)
    return tracker


def trace_module(model, batch, optimizer, loss, loop, precision, target, card, steps) -> Tracker:
    """The same for any module: parameters, buffers and batch are copied as fake tensors, the original is untouched."""
    loop = Loop.named(loop) if isinstance(loop, str) else loop
    any_module.check(model, batch, optimizer, loss, loop, precision)
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    phase = "load"
    with fake_world(target, card) as (mode, kernels), any_module.untouched(model), packed_sequences():
        try:
            training, values = any_module.prepare(model, batch, optimizer, loss, loop, precision, target, mode)
            tracker = make_tracker(training, card, kernels)
            tracker.values, phase = values, ""
            return run_tracked(training, tracker, steps, target)
        except RecipeError:
            raise
        except Exception as error:  # a module has its own ways to refuse a batch
            raise any_module.failed(model, batch, optimizer, phase or tracker.phase, error) from error


def to_report(
    history: History, source: str, recipe: Recipe | None, target: str, card: Gpu | None = None, **more: Any
) -> Report:
    """The report of a replayed run. On CUDA the log also goes through the allocator's model, for what it reserves."""
    at = history.highest()
    if source == "simulated" and history.replayed:
        replayed = history.replayed
        more |= {"allocated": replayed.allocated, "requested": replayed.requested}
        more["reserved"] = _about(replayed.reserved, replayed.allocated)
        more["process"] = _with_context(more["reserved"], card)
    counted = {key: (len(found), found[0].where) for key, found in history.groups(at).items()}
    return Report(
        source=source,
        recipe=recipe.to_dict() if recipe else None,
        title=more.pop("title", str(recipe) if recipe else ""),
        target=target,
        phases=history.phases(),
        peak=history.split(at),
        peak_phase=history.phase_at(at),
        largest=largest(counted),
        timeline=history.timeline(),
        environment=environment(gpu=card.name if card else None),
        **more,
    )


def _about(reserved: int, allocated: int) -> Interval:
    """Segments as the allocator's model reserves them; another order of loading and freeing can change a few.

    Of the published runs in `data/published_runs.json` that say what was reserved, 97 % lie below the upper end.
    """
    return Interval(allocated, reserved, reserved + max(reserved // 10, 64 * MiB))


def _with_context(reserved: Interval, card: Gpu | None) -> Interval:
    """What the device shows for the process: the segments and CUDA's context beside them."""
    context = card.context_interval if card else CONTEXT
    return Interval(reserved.low + context.low, reserved.value + context.value, reserved.high + context.high)
