"""What makes an evaluation fit whose predictions fill the card or the host, and what it leaves."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from ..base.errors import RecipeError
from ..formulas.predict import predict
from ..hardware.gpu import Gpu
from ..recipe.evaluation import Evaluation
from ..recipe.recipe import Recipe
from ..report.report import NO_TIER, Interval, Report, format_bytes, unit_for
from ..simulation.simulate import simulate_evaluation
from .counted import host_memory
from .work import tell

SAFE = "safe"
ENOUGH = (SAFE, "likely")
SMALLER = (
    "a smaller per_device_eval_batch_size alone keeps as many outputs: all of the set are joined"
)
EXPLAIN = (
    "First `vramlab explain` with its options, for the three cheapest changes; then evaluate again"
)
ALIKE = 0.05  # of a process: two changes leave as much


def on_host(report: Report) -> int:
    """Return the bytes of host memory that a report's process needs, predictions included."""
    assert report.recipe is not None  # it is of one
    return host_memory(Recipe(**report.recipe), report.kept_on_host or 0)


def cures(
    recipe: Recipe,
    evaluation: Evaluation,
    found: Report,
    card: Gpu,
    host: int,
) -> Iterator[str]:
    """Yield what helps an evaluation, `found`, on a card and `host` bytes, and what each leaves.

    Each is simulated; nothing is yielded where `found` fits. Where the training itself does not,
    only that is: no way to evaluate would mend it.
    """
    lacking = list(_lack_of_training(recipe, card))
    yield from lacking
    if lacking or _fits(found, host):
        return

    def leaves(**changes: Any) -> Report:
        tell(f"it does not fit: simulating what is left with {_said(changes)}")
        return simulate_evaluation(recipe, dataclasses.replace(evaluation, **changes), gpu=card)

    tried: list[tuple[dict[str, Any], Report]] = [({}, found)]
    if evaluation.compute_metrics:
        for changes in _changes(evaluation):
            tried.append((changes, leaves(**changes)))
            yield _sentence(_said(changes), tried[-1][1], host)
        yield from _less(evaluation, found, leaves, host)
        if not evaluation.batch_eval_metrics:
            yield SMALLER
    if any(left.verdict == SAFE and _fits(left, host) for _, left in tried):
        return
    # what is left then is the batch's own; of what leaves as little, what changes least code
    held = [one for one in tried if on_host(one[1]) <= host] or tried
    least = min(int(left.process or 0) for _, left in held)
    changes = next(
        changes for changes, left in held if int(left.process or 0) <= (1 + ALIKE) * least
    )
    # Halved until it is safe, each time by a simulation; else the largest that fits.
    size = evaluation.per_device_eval_batch_size // 2
    fitting = ""
    is_safe = False
    while size and not is_safe:
        both = {"per_device_eval_batch_size": size, **changes}
        left = leaves(**both)
        if _fits(left, host):
            is_safe = left.verdict == SAFE
            sentence = _sentence(_said(both), left, host)
            fitting = sentence if is_safe else fitting or sentence
        size //= 2
    if fitting:
        yield fitting


def _lack_of_training(recipe: Recipe, card: Gpu) -> Iterator[str]:
    """Yield that the training step does not fit the card, nothing where it may."""
    # Formulas do not know every recipe.
    with contextlib.suppress(RecipeError):
        step = predict(recipe, gpu=card)
        if step.verdict == NO_TIER:
            yield f"before any evaluation, the training step {step.answer(card.name)}. {EXPLAIN}"


def _said(changes: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in changes.items())


def _less(
    evaluation: Evaluation,
    found: Report,
    leaves: Callable[..., Report],
    host: int,
) -> Iterator[str]:
    """Yield what fewer samples leave, and no predictions at all."""
    losses = leaves(
        compute_metrics=False,
        predict_with_generate=False,
        generation_max_length=None,
        generation_num_beams=None,
        preprocess_logits_for_metrics=None,
    )
    fewer = _fewer(evaluation, found, losses, host)
    if fewer:
        yield _sentence(f"samples={fewer}", leaves(samples=fewer), host)
    yield _sentence("prediction_loss_only=True (no compute_metrics)", losses, host)


def _fits(report: Report, host: int) -> bool:
    return report.verdict in ENOUGH and on_host(report) <= host


def _changes(evaluation: Evaluation) -> Iterator[dict[str, Any]]:
    """Yield fields that keep less of the predictions, or elsewhere."""
    if not evaluation.preprocess_logits_for_metrics and not evaluation.predict_with_generate:
        yield {"preprocess_logits_for_metrics": "argmax"}
    if evaluation.batch_eval_metrics:
        return
    yield {"batch_eval_metrics": True}
    in_time = {} if evaluation.eval_accumulation_steps else {"eval_accumulation_steps": 1}
    if in_time:
        yield in_time
    if evaluation.eval_do_concat_batches:
        yield in_time | {"eval_do_concat_batches": False}


def _fewer(evaluation: Evaluation, found: Report, losses: Report, host: int) -> int:
    """Return how many samples the card and the host have room for, in whole batches; 0: none.

    What is kept grows with them, and `losses` is the evaluation that keeps nothing.
    """
    rooms = []
    kept = found.kept_on_host or 0
    if kept:
        # As shares of the samples: how much of what they keep has room, on the host and on the
        # card.
        rooms.append((host - on_host(losses)) / kept)
    assert found.process is not None and losses.process is not None  # both are of a card
    without = Interval.of(losses.process).high
    grown = Interval.of(found.process).high - without
    if grown > 0 and found.usable:
        rooms.append((found.usable - without) / grown)
    share = min(rooms, default=0)
    size = evaluation.per_device_eval_batch_size
    samples = int(share * evaluation.samples) // size * size
    return samples if 0 < samples < evaluation.samples else 0


def _sentence(said: str, left: Report, host: int) -> str:
    assert left.process is not None  # it is of a card
    size = on_host(left)
    tier = left.verdict if size <= host else "too much for the host"
    needed = format_bytes(size, unit_for(size))
    takes = f"the process {Interval.of(left.process)}"
    if left.beyond:
        takes = f"{format_bytes(left.beyond)} missing on the card"
    return f"with {said}: {tier}, {takes}, host memory {needed}"
