"""The real training step on fake tensors: no GPU, no memory, seconds.

`simulate(recipe)` builds the recipe's model from storages that have a size and no content, runs `training.train_step`
on it twice (the second step is the steady one) and replays what `tracker.Tracker` saw. Deep models are run
shallow, and their log is deepened exactly (`deepen.py`). With `recipe.sharding` it is the step of one rank, in a process
group whose other ranks need not exist (`process_group.one_rank_of`), as `engines` has it run.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from ..hardware.gpu import DEFAULT_CHIP, Gpu, find_gpu
from ..hardware.overhead import UNIT
from ..recipe import lora_modules
from ..recipe.recipe import Loop, Recipe, as_recipe
from ..recipe.weights import unquantized
from ..report.errors import RecipeError, VramLabError, needing
from ..report.report import Report
from ..tracking.history import History
from ..tracking.reporting import to_report
from ..tracking.tracked import run_tracked
from ..tracking.tracker import Storage, Tracker
from ..training import training as tr
from ..training.engines import engine_of
from ..training.process_group import one_rank_of
from . import any_module
from .as_run import as_it_ran
from .as_run import check as check_as_run
from .cuda import CudaKernels, cublas_workspaces
from .cuda_scratch import kernel_scratch
from .deepen import deepen
from .fakes import fake_world
from .repetition import GROUPS, NotRegular, cut, find
from .result_storages import keep_storage
from .values import packed_sequences

STEPS = 2
FLOATS, INTEGERS = (torch.float32, torch.float16, torch.bfloat16), (torch.int64, torch.int32)


@needing("simulate")
def simulate(
    recipe: Recipe | Any = None,
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
    as_run: str | None = None,
) -> Report:
    """Where every byte of a training step would be, without a GPU and without the memory.

    Args:
        recipe: what to train, a `Recipe` or a model's name; or leave it out and give any module by `model`, with
            `batch`, `optimizer` and `loss`.
        target: "cuda" describes a GPU's kernels and rounding, "cpu" this machine's.
        gpu: a name of the GPU table, for what depends on the card (attention kernel, cuBLAS workspace).
        batch: keyword arguments (mapping), positional ones (tuple) or the only one (tensor) of the model's forward.
        optimizer: one built on the model's parameters, a list of them, or a function of parameters to one.
        precision: of a module; a "-true" one also converts its parameters, buffers and floating inputs.
        loss: a function of (outputs, batch) to a scalar; None takes `outputs["loss"]`.
        steps: optimizer steps to run; the phases of the last are reported, the peak is that of all.
        full: run the whole depth instead of deepening a shallow run (equal, and slower).
        as_run: a name of `as_run.AS_RUN`, such as "transformers 4.57": what that version, or a script, does in attention
            and the installed transformers does not. None simulates the installed one.
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
    card, recipe = find_gpu(gpu) if gpu else None, as_recipe(recipe) if recipe is not None else None
    notes = check_as_run(as_run, recipe)
    if recipe is None:
        tracker = trace_module(model, batch, optimizer, loss, loop, precision, target, card, steps)
        history = History(tracker.log, tracker.marks, allocator=target == "cuda", limit=_room(card))
        title, notes = type(model).__name__, any_module.notes(model, loop) + tracker.values.notes + list(tracker.notes)
        return to_report(history, "simulated", None, target, card=card, title=title, notes=notes)
    notes += ["torch_compile: the eager step is simulated"] if recipe.torch_compile else []
    notes += any_module.loop_notes(recipe.loop) + unquantized(recipe) + lora_modules.notes(recipe.shape, recipe.lora)
    if card and (why := card.why_not(recipe.precision)):
        notes.append(why)
    with as_it_ran(as_run):
        history = trace(recipe, target, card, steps, full)
    return to_report(history, "simulated", recipe, target, card=card, notes=notes + history.notes)


def trace(
    recipe: Recipe, target: str = "cuda", card: Gpu | None = None, steps: int = STEPS, full: bool = False
) -> History:
    """The history of every storage over `steps` optimizer steps of `recipe`, on fake tensors.

    A model of layers that repeat is run shallow and deepened (`repetition.py`, `deepen.py`) where that is the lesser
    work, unless `full`. One whose layers do not repeat is run whole, and `History.notes` says so.
    """
    notes = []
    if not full and may_be_deepened(recipe, target):
        try:
            if history := _deepened(recipe, target, card, steps):
                return history
        except NotRegular as error:
            notes.append(f"all {recipe.shape.num_layers} layers were run, none repeated: {error}")
    tracker = _run(recipe, target, card, steps)
    return History(tracker.log, tracker.marks, allocator=target == "cuda", limit=_room(card), notes=notes)


def may_be_deepened(recipe: Recipe, target: str) -> bool:
    """Whether a shallow run could say what `recipe` takes, and take less time."""
    if target == "cpu" and recipe.shape.config.get("sliding_window"):
        return False  # a sliding cache makes a scalar a layer before the layers run; on CUDA it is the host's
    if lora_modules.differ_by_layer(recipe.shape, recipe.lora) or not divided_by_layer(recipe):
        return False
    return recipe.shape.num_layers > _layers_run(GROUPS, 1, is_written_down(recipe))


def is_written_down(recipe: Recipe) -> bool:
    """Whether the architecture is one whose deepened log the tests hold against the whole run, and returns no more."""
    shape = recipe.shape
    more = ("output_hidden_states", "output_attentions", "output_router_logits")
    return shape.layout is not None and not any(shape.settings.get(name) for name in more)


def _layers_run(shallow: int, period: int, written_down: bool) -> float:
    """Layers to run, over two steps, for a deepened log; others than those written down are checked by one more step."""
    return shallow if written_down else shallow + (shallow + period) / 2


def _deepened(recipe: Recipe, target: str, card: Gpu | None, steps: int) -> History | None:
    """The deepened history of `recipe`; None if running it whole is no more work. Raises NotRegular."""
    shape, sure, cuda = recipe.shape, is_written_down(recipe), target == "cuda"
    layers = find(shape)
    if _layers_run(layers.shallow, layers.period, sure) >= layers.depth:
        return None

    def run(extra: int, steps: int) -> Tracker:
        config = cut(shape, layers.kept(extra)).config
        return _run(recipe.replace(model=config, num_layers=None, task=shape.task), target, card, steps)

    tracker = run(0, steps)
    if not sure:  # one group more than needed, deepened and run
        tried, ran = History(*deepen(tracker, layers, 1)), run(1, 1)
        if tried.first_step() != History(ran.log, ran.marks).first_step():
            raise NotRegular(f"{layers.shallow + layers.period} layers take something else than their repetition says")
    history = History(*deepen(tracker, layers, layers.more), allocator=cuda, limit=_room(card))
    if recipe.sharding is None and recipe.quantization is None:
        loaded = history.log[: history.stretches[0][2]]
        found = sum(math.prod(s.shape) for size, s, _ in loaded if size > 0 and is_base_weight(s))
        if found != layers.parameters:
            raise NotRegular(f"its repetition has {found:,} parameters, and the model {layers.parameters:,}")
    return history


def is_base_weight(storage: Storage) -> bool:
    """Whether `storage` is a parameter of the model itself, not of an adapter."""
    return storage.category == "parameters" and not any(s in storage.where for s in ("lora_", "modules_to_save"))


def divided_by_layer(recipe: Recipe) -> bool:
    """Whether a rank's share of a deep model is its share of a shallow one and of the layers between.

    DDP's buckets and DeepSpeed's flat buffers run across layers, one unit has all of them, a pipeline deals them out.
    """
    sharding = recipe.sharding
    return sharding is None or sharding.engine == "tensor" or (sharding.engine == "fsdp" and sharding.wrap == "layers")


def _run(recipe: Recipe, target: str, card: Gpu | None, steps: int) -> Tracker:
    if recipe.quantization:
        import bitsandbytes  # noqa: F401 — before fake_world, which then replaces some of its functions

    engine = engine_of(recipe)
    device = engine.fake_gpu if target == "cuda" else "cpu"
    with one_rank_of(recipe.sharding), engine.without_peers(target), fake_world(target, card) as (_, kernels):
        training = tr.build(recipe, device, target=target)
        try:
            return run_tracked(training, make_tracker(training, card, kernels), steps, target)
        except VramLabError:
            raise
        except Exception as error:  # each model class has its own ways to fail, and to read values that a fake lacks
            why = any_module.reason_at(error)
            rest = f"its training step does not run on fake tensors: {why}; measure(recipe) runs it for real"
            raise RecipeError("model", recipe.name, rest) from error


def make_tracker(training: tr.Training, card: Gpu | None, kernels: CudaKernels | None) -> Tracker:
    """A tracker for fake tensors: it answers reads of values, and knows rounding and scratch of CUDA's `kernels`."""
    tracker = Tracker("cpu")
    tracker.keep_storage = keep_storage
    if training.device.index is not None:  # another is the host's
        tracker.only_device = training.device
    if kernels:
        kernels.on_host, kernels.is_on_host = tracker.mark_on_host, tracker.is_on_host
        tracker.round_to, tracker.scratch = UNIT, kernel_scratch(card.chip if card else DEFAULT_CHIP)
        tracker.at_phase, tracker.notes = cublas_workspaces(card), kernels.notes
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


def _room(card: Gpu | None) -> int | None:
    """Bytes of segments that the card can hold besides CUDA's context."""
    return card.total - card.context_interval.value if card else None
