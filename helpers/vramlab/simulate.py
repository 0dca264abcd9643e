"""The real training step on fake tensors: no GPU, no memory, seconds.

`simulate(recipe)` builds the recipe's model from storages that have a size and no content, runs `training.train_step`
on it twice (the second step is the steady one) and replays what `tracker.Tracker` saw. Deep models are run at two
small depths and carried to their own exactly (`depth.py`).
"""

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from . import training as tr
from .allocator import replay
from .cuda import ALLOCATION_UNIT, CudaKernels, cublas_workspaces, kernel_scratch
from .depth import NotAffine, extrapolate
from .errors import RecipeError
from .gpu import find_gpu
from .history import History, largest
from .recipe import Loop, Recipe
from .report import Interval, Report, environment
from .tracked import run_tracked
from .tracker import Tracker

STEPS = 2
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


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
        optimizer: one built on the model's parameters, or a function of parameters to one.
        loss: a function of (outputs, batch) to a scalar; None takes `outputs["loss"]`.
        steps: optimizer steps to run; the phases of the last are reported, the peak is that of all.
        full: run the whole depth instead of extrapolating from two small ones (equal, slower, a denser timeline).
    Returns:
        A report with source "simulated"; sizes in bytes.
    Raises:
        RecipeError: the recipe needs something that has no simulation.
    """
    if target not in ("cuda", "cpu"):
        raise RecipeError("target", target, "allowed are 'cuda' and 'cpu'")
    card = find_gpu(gpu) if gpu else None
    if recipe is None:
        history = trace_module(model, batch, optimizer, loss, loop, precision, target, card, steps)
        return to_report(history, "simulated", None, target, title=type(model).__name__)
    if recipe.sharding and recipe.sharding.world_size > 1:
        raise RecipeError("sharding", recipe.sharding.world_size, "simulate describes one rank of one: ask predict")
    notes = ["torch_compile: the eager step is simulated"] if recipe.torch_compile else []
    if card and (why := card.why_not(recipe.precision)):
        notes.append(why)
    depth = recipe.shape.num_layers
    depths = None if full else shallow_depths(recipe)
    if depths:
        histories = [trace(recipe.replace(num_layers=d), target, card, steps) for d in depths]
        with contextlib.suppress(NotAffine):
            deep = extrapolate(*histories, depths, depth, ALLOCATION_UNIT if target == "cuda" else 1)
            reserved = _between([replay(h.log).reserved for h in histories], depths, depth, deep.peak.total, target)
            return Report(
                source="simulated",
                recipe=recipe.to_dict(),
                title=str(recipe),
                target=target,
                phases=deep.phases,
                peak=deep.peak,
                peak_phase=deep.peak_phase,
                largest=deep.largest,
                timeline=deep.timeline,
                reserved=reserved,
                environment=environment(gpu=card.name if card else None),
                notes=notes,
            )
    return to_report(trace(recipe, target, card, steps), "simulated", recipe, target, gpu=card, notes=notes)


def shallow_depths(recipe: Recipe) -> tuple[int, int] | None:
    """Two depths that stand for the recipe's own, or None when it is as cheap to run it whole.

    Layers may come in kinds that repeat with a period (Gemma 2's sliding and full attention); both depths keep the
    pattern's place and the number of layers modulo the period.
    """
    shape = recipe.shape
    if shape.num_decoder_layers not in (0, shape.num_layers):
        return None
    kinds = shape.config.get("layer_types") or [""] * shape.num_layers
    period = next(p for p in range(1, len(kinds) + 1) if all(k == kinds[i % p] for i, k in enumerate(kinds)))
    low = max(3, 2 * period)
    low += (shape.num_layers - low) % period
    return (low, low + period) if shape.num_layers > low + period else None


def _between(reserved: list[int], depths: tuple[int, int], depth: int, peak: int, target: str) -> Interval | None:
    """Reserved bytes at `depth` from those of the two depths: never under the peak."""
    if target == "cpu":
        return None
    a, b = reserved
    value = max(peak, a + (b - a) * (depth - depths[0]) // (depths[1] - depths[0]))
    return Interval(peak, value, value + max(value // 20, 64 * 1024 * 1024))


@contextlib.contextmanager
def fake_world(target: str, card=None) -> Iterator[FakeTensorMode]:
    """Fake tensors that transformers treats as real ones, with the kernels of `target` in place.

    transformers takes a fake tensor for a sign of tracing and then builds causal masks that it skips otherwise
    (`masking_utils._ignore_causal_mask_sdpa`), which changes the attention kernel too; here it must take the real branch.
    """
    from transformers.utils import generic, import_utils

    saved = {module: module.is_fake_tensor for module in (generic, import_utils) if hasattr(module, "is_fake_tensor")}
    capability = {"compute_capability": card.compute_capability} if card else {}
    kernels = CudaKernels(**capability) if target == "cuda" else contextlib.nullcontext()
    try:
        for module in saved:
            module.is_fake_tensor = lambda tensor: False
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, kernels, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Paged optimizers are not supported on CPU")
            yield mode
    finally:
        for module, function in saved.items():
            module.is_fake_tensor = function


def make_tracker(training: tr.Training, target: str, card=None) -> Tracker:
    """A tracker for fake tensors: it knows the rounding and scratch of `target`, and answers reads of values."""
    tracker = Tracker("cpu")
    if target == "cuda":
        tracker.round_to, tracker.scratch = ALLOCATION_UNIT, kernel_scratch
        tracker.at_phase = cublas_workspaces(card)
    # A fake tensor has no values to read: every mask is full, every count is one, and no gradient overflowed.
    tracker.constant = {torch.bool: True, **dict.fromkeys(FLOATS, 1.0), torch.int64: 1}
    if training.scaler:
        training.scaler._maybe_opt_step = lambda optimizer, state, *args, **kwargs: optimizer.step(*args, **kwargs)
    return tracker


def trace(recipe: Recipe, target: str = "cuda", card=None, steps: int = STEPS) -> History:
    """Run `steps` optimizer steps of `recipe` on fake tensors and return the history of every storage."""
    with fake_world(target, card):
        training = tr.build(recipe, "cpu", target=target)
        return run_tracked(training, make_tracker(training, target, card), steps, target)


def trace_module(model, batch, optimizer, loss, loop, precision, target, card, steps) -> History:
    """The same for any module: its parameters, buffers and batch are copied as fake tensors, the original is untouched."""
    if model is None or batch is None or optimizer is None:
        raise RecipeError("model", model, "give a recipe, or a module with model=, batch= and optimizer=")
    loop = Loop.named(loop) if isinstance(loop, str) else loop
    with fake_world(target, card) as mode:
        with FakeCopyMode(mode):
            fake, fake_batch = copy.deepcopy((model, batch))
        multi_tensor = target == "cuda" if loop.foreach is None else loop.foreach
        training = tr.Training(
            model=fake,
            optimizer=_refit(optimizer, model, fake, multi_tensor),
            batch=fake_batch,
            device=torch.device("cpu"),
            multi_tensor=multi_tensor,
            loop=loop,
            precision=precision,
            loss_of=loss or tr.loss_of,
            scaler=torch.amp.GradScaler("cpu") if precision == "fp16-mixed" else None,
        )
        return run_tracked(training, make_tracker(training, target, card), steps, target)


def _refit(optimizer: Any, model: torch.nn.Module, fake: torch.nn.Module, multi_tensor: bool) -> torch.optim.Optimizer:
    """`optimizer` again, without its state, on the fake model's parameters; a function is simply called with them."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        with tr.real_tensors():
            return optimizer([p for p in fake.parameters() if p.requires_grad])
    twin = dict(zip(map(id, model.parameters()), fake.parameters(), strict=True))
    groups = [{**group, "params": [twin[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    new = copy.copy(optimizer)
    new.__dict__ = {**optimizer.__dict__, "param_groups": groups, "state": type(optimizer.state)(dict)}
    if "foreach" in optimizer.defaults and optimizer.defaults["foreach"] is None and not optimizer.defaults.get("fused"):
        for group in groups:
            group["foreach"] = multi_tensor
    return new


def to_report(history: History, source: str, recipe: Recipe | None, target: str, **more: Any) -> Report:
    """The report of a replayed run."""
    at = history.highest()
    card = more.pop("gpu", None)
    if target == "cuda" and source == "simulated":
        peak = int(history.live[at])
        reserved = replay(history.log).reserved
        more["reserved"] = Interval(peak, reserved, reserved + max(reserved // 20, 64 * 1024 * 1024))
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
