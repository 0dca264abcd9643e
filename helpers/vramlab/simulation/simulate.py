"""The real training step on fake tensors: no GPU, no memory, seconds.

`training.train_step` runs twice on storages that have a size and no content, and what the tracker
saw is replayed. Deep models are run shallow and steps of many micro-batches with few, and their log
is made longer (`deepen.py`). With `recipe.sharding` it is the step of one rank.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from ..base.errors import RecipeError, VramLabError, needing
from ..hardware.contexts import Room
from ..hardware.gpu import DEFAULT_CHIP, Gpu, find_gpu
from ..hardware.overhead import UNIT
from ..private.of_torch import tree_map_only
from ..recipe import liger, lora_modules, parallel_limits, peft_methods, rollouts
from ..recipe.evaluation import Evaluation
from ..recipe.images import frees_late_in_backward, most_read
from ..recipe.options import TRL
from ..recipe.process_context import room_on
from ..recipe.recipe import Loop, Recipe, as_recipe
from ..report.report import Report
from ..tracking.fake_tracker import FakeTracker
from ..tracking.history import History, Log, bytes_of, to_report
from ..tracking.tracked import run_tracked
from ..tracking.tracker import ON_HOST, Event, Mark, Tracker
from ..training import training as tr
from ..training.activation_offloading import DEVICE, fake_accelerator
from ..training.engines import engine_of
from ..training.evaluation_loop import evaluate
from ..training.fixed_generation import Started
from ..training.process_group import one_rank_of
from ..training.quiet import no_collection
from ..training.trl_trainers import trl_class
from . import fakes, shallow
from .any_module import ModuleStep, loop_notes
from .colocated import colocated, with_vllm
from .compiled import TIMED, TRIED, compiled_step, failed, is_compiled
from .compiled_updates import compiled_updates, fill_code_tables, load_torchao, updates_of
from .completions import completions_known, skipped
from .cuda import CudaKernels
from .cuda_scratch import kernel_scratch, lasting_workspaces
from .deepen import deepen
from .fake_operators import keep_storage
from .fakes import compiled_late, fake_world
from .micro_batches import repeat
from .quantized_loading import loading_peak, unused_after_loading
from .repetition import NotRegular, Repetition, find
from .values import Values, readable_values
from .windows import joined_windows, unfold

# tokens whose sum the fp32 attention kernel returns together (`attention.cu`, kAlignLSE)
BLOCK = 32


@needing("simulate")
@no_collection(before=False)  # which takes a third of the time where a log is long
def simulate(
    recipe: Recipe | Any = None,
    target: str = "cuda",
    gpu: str | Gpu | None = None,
    *,
    model: torch.nn.Module | None = None,
    batch: Any = None,
    optimizer: Any = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    loop: Loop | str = "plain",
    precision: str = "fp32",
    steps: int = 2,
    full: bool = False,
    other_memory: int = 0,
    expandable_segments: bool = False,
) -> Report:
    """Return where every byte of a training step would be, without a GPU and without the memory.

    Args:
        recipe: a `Recipe` or a model's name; or leave it out and give any module by `model`,
            `batch` and `optimizer`.
        target: "cuda" describes a GPU's kernels and rounding, "cpu" this machine's.
        gpu: a name of the GPU table, for what depends on the card (attention kernel, cuBLAS
            workspace).
        model: it is as it was afterwards; what your own hooks or loss keep elsewhere, such as a
            list of outputs, is fake.
        batch: keyword arguments (mapping), positional ones (tuple) or the only one (tensor) of the
            model's forward. Small tensors of it keep their values; an unknown value that is read
            becomes a note.
        optimizer: one built on the model's parameters, a list of them, or a function of parameters
            to one.
        precision: of a module; a "-true" one also converts its parameters, buffers and floating
            inputs.
        loss: a function of (outputs, batch) to a scalar; None takes `outputs["loss"]`. What it
            holds besides counts from the start: of a module that it calls (a teacher) every
            parameter and buffer, used or not, of other tensors those that an operator takes, as
            inputs. What the step does not touch is not counted.
        steps: optimizer steps to run; the phases of the last are reported, the peak is that of all.
        full: run all layers and micro-batches instead of repeating some in the log (equal, and
            slower).
        other_memory: bytes of the card that a display or other processes hold.
        expandable_segments: the allocator has PYTORCH_ALLOC_CONF=expandable_segments:True.
    Returns:
        A report with source "simulated"; sizes in bytes. With a card its `verdict` says how sure it
        is that it fits.
    Raises:
        RecipeError: the recipe or module needs something that has no simulation; it names the field
            and the line.
    """
    check_target(target)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise RecipeError("steps", steps, "it must be a whole number of at least 1")
    card = find_gpu(gpu) if gpu else None
    recipe = None if recipe is None else as_recipe(recipe)
    vllm = None if recipe is None else colocated(recipe, card)
    # What a vLLM that stays awake holds is memory that the trainer's allocator never gets.
    taken = vllm.kept if vllm else 0
    room = room_on(recipe, card, other_memory + taken, expandable_segments)
    if recipe is not None:
        report = _of_recipe(recipe, target, card, steps, full, room)
        return with_vllm(report, vllm) if vllm else report
    loop = Loop.named(loop) if isinstance(loop, str) else loop
    return _of_module(
        ModuleStep(model, batch, optimizer, loss, loop, precision),
        target,
        card,
        steps,
        room,
    )


def check_target(target: str) -> None:
    """Raise RecipeError for a target that is neither "cuda" nor "cpu"."""
    if target not in ("cuda", "cpu"):
        raise RecipeError("target", target, "allowed are 'cuda' and 'cpu'")


def _of_recipe(
    recipe: Recipe,
    target: str,
    card: Gpu | None,
    steps: int,
    full: bool,
    room: Room | None,
) -> Report:
    parallel_limits.check_ring(recipe, target)
    notes = [TRIED, TIMED] if recipe.torch_compile and target == "cuda" else []
    if recipe.activation_offloading:
        note = "activation_offloading: reserved is that of one stream, "
        notes.append(note + "where the copies use a second one")
    notes += parallel_limits.notes(recipe.group) + rollouts.notes(recipe.rollouts)
    notes += loop_notes(recipe.loop) + lora_modules.notes(recipe)
    notes += peft_methods.notes(recipe.peft)
    if card and (why := card.why_not(recipe.precision)):
        notes.append(why)
    history = trace(recipe, target, card, steps, full, room)
    return to_report(
        history,
        "simulated",
        recipe,
        target,
        notes=notes + history.notes,
        loading=loading_peak(recipe, target),
        unused=unused_after_loading(recipe, target),
    )


def _of_module(
    step: ModuleStep,
    target: str,
    card: Gpu | None,
    steps: int,
    room: Room | None,
) -> Report:
    """Return the report of any module, which holds fake tensors while it runs."""
    step.check()
    tracker = None
    fill_code_tables()
    with fake_world(target, card) as (mode, kernels):
        try:
            with readable_values(), step.prepared(target, mode) as (training, values):
                tracker = make_tracker(training, card, kernels)
                tracker.values = values
                tracker.meets = True
                with compiled_updates(tracker, card, kernels):
                    run_tracked(training, tracker, steps, target)
        except RecipeError:
            raise
        except Exception as error:  # a module has its own ways to refuse a batch
            raise step.failed(tracker.phase if tracker else "load", error) from error
    history = History(tracker.log, tracker.marks, target == "cuda", room)
    return to_report(
        history,
        "simulated",
        None,
        target,
        title=type(step.model).__name__,
        notes=step.notes() + values.notes + tracker.notes,
    )


def trace(
    recipe: Recipe,
    target: str = "cuda",
    card: Gpu | None = None,
    steps: int = 2,
    full: bool = False,
    room: Room | None = None,
) -> History:
    """Return the history of every storage over `steps` optimizer steps of `recipe`.

    Unless `full` it is that of a shallow run, deepened, where that is the lesser work, and of few
    micro-batches. `History.notes` says where layers do not repeat.
    """
    notes = []
    if not full and not recipe.torch_compile:
        try:
            return _lengthened(recipe, target, card, steps, room, least=True)
        except NotRegular as error:
            depth = recipe.shape.num_layers
            notes.append(f"all {depth} layers were run, none repeated: {error}")
    tracker = _run(recipe, target, card, steps, full=True)
    return History(tracker.log, tracker.marks, target == "cuda", room, notes + tracker.notes)


def _lengthened(
    recipe: Recipe, target: str, card: Gpu | None, steps: int, room: Room | None, least: bool
) -> History:
    """Return the history of a run of few layers and micro-batches, made longer. Raises NotRegular.

    With `least` the fewest layers that may do; whole ones where that is the lesser work.
    """
    log: Log | list[Event]
    layers = None
    if shallow.may_be_deepened(recipe, target):
        frees_late = bool(recipe.sharding) or frees_late_in_backward(recipe.shape)
        streams = shallow.streams_weights(recipe)
        # with a fused loss the last layer has the first product of backward, and differs
        may_be_alike = least and not (recipe.use_liger_kernel or streams)
        layers = find(recipe.shape, frees_late, may_be_alike)
        if streams:
            layers = layers.widened(*shallow.streamed(recipe), least)
    # another architecture's is run twice: `_deeper`
    runs = 1 if shallow.is_written_down(recipe) else 2
    if layers is None or layers.depth <= layers.shallow * runs:
        tracker = _run(recipe, target, card, steps)
        log = tracker.log
        marks = tracker.marks
    else:
        try:
            tracker, log, marks = _deeper(recipe, target, card, steps, layers)
        except NotRegular:
            if not layers.is_least:
                raise
            return _lengthened(recipe, target, card, steps, room, least=False)
    if shallow.is_abridged(recipe):
        log, marks = repeat(log, marks, recipe.gradient_accumulation_steps)
    log, marks = unfold(log, marks)
    return History(log, marks, target == "cuda", room, tracker.notes)


def _deeper(
    recipe: Recipe,
    target: str,
    card: Gpu | None,
    steps: int,
    layers: Repetition,
) -> tuple[Tracker, Log, list[Mark]]:
    """Return the tracker of a shallow run, and its log and marks deepened. Raises NotRegular."""

    def run(extra: int, steps: int) -> Tracker:
        return _run(shallow.shallow_recipe(recipe, layers, extra), target, card, steps)

    tracker = run(0, steps)
    if not shallow.is_written_down(recipe):
        # one group more than needed, deepened and run
        whole = run(1, 1)
        # No test holds this architecture's log, so it is held here: against a real run of one
        # group more.
        deepened = History(*deepen(tracker, layers, 1)).moments()
        ran = History(whole.log, whole.marks).moments()
        # all of a step but what follows it
        if bytes_of(deepened[: len(ran) - 1]) != bytes_of(ran[:-1]):
            depth = layers.shallow + layers.period
            raise NotRegular(f"{depth} layers take something else than their repetition says")
    log, marks = deepen(tracker, layers, layers.more)
    return tracker, log, marks


@needing("simulate_evaluation")
@no_collection(before=False)
def simulate_evaluation(
    recipe: Recipe | Any,
    evaluation: Evaluation,
    target: str = "cuda",
    gpu: str | Gpu | None = None,
    full: bool = False,
) -> Report:
    """Return where every byte would be while `Trainer.evaluate` runs between two steps of training.

    The Trainer's own evaluation loop runs on fake tensors. The report's "forward" phase is the
    whole evaluation, "load" and "between_steps" are what training keeps; its peak is the
    evaluation's, `reserved` that of the process after both.

    Args:
        recipe: the training that is interrupted. target, gpu: as for `simulate`.
        full: run the model on every batch, not only where the peak can be (equal, and slower).
    Raises:
        RecipeError: another trainer's evaluation, one among ranks, or a model that does not run on
            fake tensors.
    """
    check_target(target)
    recipe = as_recipe(recipe)
    card = find_gpu(gpu) if gpu else None
    for field in ("trainer", "sharding", "lengths", "pad_to_multiple_of"):
        value = getattr(recipe, field)
        usual = getattr(Recipe, field)
        if value != usual:
            rest = "the evaluation of transformers' own Trainer is simulated with "
            raise RecipeError(field, value, f"{rest}{usual!r} only")
    if evaluation.predict_with_generate and recipe.shape.task != "seq2seq-lm":
        rest = (
            f"{recipe.name} reads no prompt apart from its answer, which a Seq2SeqTrainer "
            "needs: ask simulate_generation"
        )
        raise RecipeError("evaluation.predict_with_generate", True, rest)
    notes = ["torch_compile: the eager evaluation is simulated"] if recipe.torch_compile else []
    if not evaluation.compute_metrics:
        notes.append("without compute_metrics the Trainer keeps losses only, of all samples")
    tracker = _run(recipe, target, card, 1, evaluation, full)
    history = History(tracker.log, tracker.marks, target == "cuda", room_on(recipe, card))
    return to_report(
        history,
        "simulated",
        recipe,
        target,
        since=history.last_step[0].start,
        title=f"{recipe} · {evaluation}",
        notes=notes + tracker.notes,
        kept_on_host=tracker.kept_on_host,
        batches=(tracker.batches, evaluation.batches),
    )


def _run(
    recipe: Recipe,
    target: str,
    card: Gpu | None,
    steps: int,
    evaluation: Evaluation | None = None,
    full: bool = False,
) -> Tracker:
    compiles = evaluation is None and is_compiled(recipe)
    load_libraries(recipe)
    engine = engine_of(recipe)
    offloads = recipe.activation_offloading and target == "cuda"
    device = engine.fake_gpu if target == "cuda" else "cpu"
    if offloads:
        device = DEVICE
    with (
        fakes.lock,
        one_rank_of(recipe.sharding),
        engine.without_peers(target),
        fake_accelerator() if offloads else nullcontext(),
        fake_world(target, card) as (mode, kernels),
        completions_known() if recipe.rollouts else nullcontext(),
        readable_values() if recipe.reads_values else nullcontext(),
    ):
        try:
            with compiled_late():  # DeepSpeed imports its Muon now, which has such a function
                training = tr.build(recipe, device, target=target)
            training.abridged = not (full or evaluation) and shallow.is_abridged(recipe)
            tracker = make_tracker(training, card, kernels)
            if recipe.rollouts:
                # TRL reads masks over all sampled completions, so tensors of up to that many
                # elements keep their values.
                tracker.values = Values(mode, rollouts.plan_of(recipe).completions * recipe.seq_len)
            if recipe.reads_values:
                values = Values(mode, max(8 * math.prod(recipe.rows), most_read(recipe)))
                tracker.values = values
                fake = partial(values.faked, device)
                batches = [training.batch, *training.further]
                training.batch, *training.further = tree_map_only(torch.Tensor, fake, batches)

            then = None
            if evaluation:
                then = partial(_evaluate, tracker, training, recipe, evaluation, full)
            way: AbstractContextManager[Any] = nullcontext()
            if compiles:
                way = compiled_step(training, tracker, card, kernels)
            elif recipe.rollouts and not full:
                way = skipped(training, tracker, recipe)
            elif kernels and not full:
                way = joined_windows(tracker, kernels, recipe)
            with way, updates_of(recipe, tracker, card, kernels):
                return run_tracked(training, tracker, steps, target, then=then)
        except (VramLabError, NotRegular):
            raise
        # each model class has its own ways to fail, and to read values that a fake lacks
        except Exception as error:
            raise failed(recipe, error, compiles) from error


def _evaluate(
    tracker: FakeTracker,
    training: tr.Training,
    recipe: Recipe,
    evaluation: Evaluation,
    full: bool,
) -> None:
    """Run the evaluation under `tracker`, which is told what the host keeps of it."""

    def batch(samples: int) -> dict[str, torch.Tensor]:
        tracker.batches.append(len(tracker.log))
        made = tr.make_batch(recipe.replace(batch_size=samples), str(training.device))
        tracker.claim(made.values(), "inputs")
        return made

    kept = evaluate(training, evaluation, batch, full)
    # a CPU's predictions are where they were made
    tracker.kept_on_host = kept if tracker.round_to == UNIT else None


def load_libraries(recipe: Recipe) -> None:
    """Import what the recipe needs before `fake_world`, which replaces some functions of it."""
    with compiled_late():
        if recipe.quantization:
            import bitsandbytes  # noqa: F401
        elif recipe.adapters:
            import peft  # noqa: F401 — which imports it too
        if recipe.trainer != "transformers":
            trl_class(TRL[recipe.trainer])  # which imports both
        if liger.kernels(recipe):
            with needing("use_liger_kernel"):
                import liger_kernel.transformers  # noqa: F401
    load_torchao(recipe)


def make_tracker(
    training: tr.Training | Started,
    card: Gpu | None,
    kernels: CudaKernels | None,
) -> FakeTracker:
    """Return a tracker for fake tensors that knows rounding and scratch of CUDA's `kernels`."""
    tracker = FakeTracker(keep_storage)
    if training.device.index is not None:  # another is the host's
        tracker.only_device = training.device
    if kernels:
        kernels.on_host = partial(tracker.claim, category=ON_HOST)
        kernels.is_on_host = tracker.is_on_host
        tracker.round_to = UNIT
        chip = card.chip if card else DEFAULT_CHIP
        tracker.scratch = kernel_scratch(chip, kernels.note)
        sizes = lasting_workspaces(chip)
        # a thread each
        forward = dict(sizes)
        phases = ("generate", "score", "encode", "forward", "prefill")
        tracker.workspaces = dict.fromkeys(phases, forward)
        tracker.workspaces["backward"] = dict(sizes)
        tracker.notes = kernels.notes
    return tracker
