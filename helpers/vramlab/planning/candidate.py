"""A recipe of the space that `plan` searches, and what it becomes as an answer.

Recipes are held against the card by their prediction, and answers by their simulation.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ..base.errors import RecipeError, VramLabError, needing
from ..formulas import reserved
from ..formulas.predict import predict
from ..hardware.gpu import usable_memory
from ..hardware.overhead import expandable
from ..recipe.knobs import unchecked
from ..recipe.process_context import context_of
from ..recipe.recipe import Recipe
from ..report.report import TIERS, Interval, Report
from ..simulation.colocated import colocated
from ..training.quiet import no_collection
from .counted import counted_as, host_memory
from .question import METHODS, Question
from .search_space import (
    EFFORTS,
    effort_of,
    is_sound,
    least_bytes,
    method_of,
    notes_on,
    saved_bytes,
    without_switches,
)
from .step_time import WAITS, StepTime, estimate, issuing, step_time
from .work import tell_work
from .workers import simulations

Kind = tuple[str, bool, str]  # of a recipe: its method, whether it is sound, its effort

SURE = ("safe", "likely")
TIGHT = ("tight",)
# Whether it is sound (`search_space.is_sound`), its effort, and its tier, the best first. What
# cannot clip its gradients comes after what can, with 8-bit states too.
# A step that waits for the host takes several times as long, so what is likely to fit without goes
# before it; updates that are rounded away are never made up for, so what rounds them goes after
# both. What fits at the lowest figures only is no answer while there is another.
WAYS = [
    *itertools.product((True, False), EFFORTS, SURE),
    *itertools.product((True, False), EFFORTS, TIGHT),
]
OFFLOADED_LAYERS = 48  # of one with offloaded activations: half a minute
# Of a recipe none of whose layers can stand for another: 20 seconds for 36, so 70B's in a minute.
DEEPEST = 80


@dataclass(frozen=True)
class Choice:
    """A recipe with its memory and its estimated time.

    Attributes:
        report: the simulation where there was one, else the prediction.
        needs: bytes of the process with the allocator's settings that were asked for.
        by_default: the same with the allocator's default settings, for a script of one's own.
        tier: the surest in which it fits, "" where it fits in none.
        time: of a step; None where images are read, which no formula knows.
        host: bytes of host memory that have to be free for all ranks.
        over: bytes that it lacks in the tier asked for.
        notes: what to know before choosing it.
        epoch: seconds of one over the data set, where its lengths are known.
        without: by switch that is on, bytes that leaving it out adds.
        unsimulated: why the formulas answer where a simulation was asked for.
        text_tokens: tokens of a sample that are left for text, where the model reads images.
    """

    recipe: Recipe
    report: Report
    time: StepTime | None
    needs: Interval
    by_default: Interval
    tier: str
    host: int = 0
    over: int = 0
    notes: tuple[str, ...] = ()
    epoch: float | None = None
    without: dict[str, int] = field(default_factory=dict)
    unsimulated: str = ""
    text_tokens: int | None = None

    @property
    def method(self) -> str:
        """ "full", "lora" or "qlora"."""
        return method_of(self.recipe)

    @property
    def order(self) -> tuple:
        """Sort key, smallest for the best: by `WAYS`, then by time."""
        way = is_sound(self.recipe), effort_of(self.recipe), self.tier
        return WAYS.index(way), self.seconds

    @property
    def seconds(self) -> float:
        """Of an epoch where the data's lengths are known, else of a step."""
        return self.epoch or (self.time.seconds if self.time else math.inf)


class Candidate:
    """One recipe of the space; its figures are computed when they are first asked for.

    Where formulas do not know its adapters, plain ones stand for them until it is simulated, and
    only then it fits.
    """

    def __init__(self, question: Question, recipe: Recipe, family: int) -> None:
        self.question = question
        self.recipe = recipe
        # The number of its family, the simplest first: see `families`.
        self.family = family
        self.method = method_of(recipe)
        self.kind: Kind = (self.method, is_sound(recipe), effort_of(recipe))
        counted = counted_as(recipe)
        self.must_be_simulated = counted is not recipe
        self.rows = [counted]  # what its micro-batches may be: of one length, or padded
        lengths = question.lengths_of(recipe)
        if lengths:
            self.rows.append(unchecked(counted, lengths=lengths))
        # Padded rows where lengths are known: they are what nearly every step has.
        self.timed = self.rows[-1]
        if lengths and recipe.packing:
            usual = question.data.packed_lengths(recipe.batch_size, is_usual=True)
            self.timed = unchecked(counted, lengths=usual)
        if recipe.activation_offloading:
            self.timed = unchecked(self.timed, activation_offloading=True)
        self.simulated: Report | None = None
        self.tried = False  # to simulate it
        self.unsimulated = ""

    @cached_property
    def rank(self) -> tuple:
        """Sort key, smallest for the fastest to three digits (the rest is noise).

        Of these the simplest family and the larger micro-batch come first: in 30 of 31 pairs of
        records that differ in it the larger was the faster, and in the last 1 % slower. The time is
        that of an epoch where the data's lengths are known, else of a step, whose rows are padded,
        unless they cannot be.
        """
        # What a paged optimizer moves takes a prediction, all other parts of the time take none.
        return self._rank(pages=True) if self.recipe.optim.startswith("paged") else self.soonest

    @cached_property
    def soonest(self) -> tuple:
        """A lower bound of `rank`, without what a paged optimizer moves."""
        return self._rank(pages=False)

    def _rank(self, pages: bool) -> tuple:
        parts = estimate(
            self.timed,
            self.question.gpu,
            self.question.link,
            pages,
        )
        seconds = epoch_of(self.question, self.timed, parts) or sum(parts.values())
        return float(f"{seconds:.3g}"), self.family, -self.recipe.batch_size

    def bound(self, tier: str) -> int:
        """Return a lower bound of the upper end of `interval` for `tier`."""
        # Two bounds that are cheap in different ways; the higher one excludes more.
        least_held = max(self.least, self.saved)
        if self.question.expandable_segments:
            # A simulated peak is exact.
            error = 1.0 if self.simulated else reserved.EXACT
            inside = expandable(least_held, error)
        else:
            is_sharded = bool(self.recipe.group.stage)
            inside = reserved.reserved(Counter(), least_held, is_sharded)
        process = inside + self._context
        return getattr(process if self.simulated else self._beside_vllm(process), TIERS[tier])

    @cached_property
    def _context(self) -> Interval:
        return context_of(self.recipe, self.question.gpu)

    @cached_property
    def least(self) -> int:
        """A lower bound of its peak, which takes no walk."""
        return least_bytes(self.rows[0])

    @cached_property
    def saved(self) -> int:
        """A lower bound of its peak, which a larger micro-batch does not lower."""
        if self.recipe.activation_offloading:
            return self.least
        return saved_bytes(self.rows[0], self.question.gpu.chip)

    @cached_property
    def report(self) -> Report | None:
        """The prediction; None where the formulas refuse the recipe.

        Of rows of one length and padded ones, which need a mask, those that take more; `recipe`
        says which.
        """
        reports = []
        try:
            for recipe in self.rows:
                reports.append(predict(recipe, self.question.gpu))
        except RecipeError:
            return None
        peaks = [report.peak.total for report in reports]
        highest = peaks.index(max(peaks))
        # The recipe answers for the rows that take more, and its script is told of the mask.
        self.recipe = unchecked(self.recipe, lengths=self.rows[highest].lengths)
        return reports[highest]

    @property
    def interval(self) -> Interval:
        """Bytes of the process, with the allocator's settings that were asked for.

        Simulated if it was, else predicted.
        """
        return self.interval_with(self.question.expandable_segments)

    def interval_with(self, expandable_segments: bool) -> Interval:
        """Return the same with the allocator's setting."""
        process = self._best_known().process_with(expandable_segments)
        return process if self.simulated else self._beside_vllm(process)

    def _beside_vllm(self, process: Interval) -> Interval:
        """Return the least that a process takes for which formulas say `process`, with its vLLM.

        In what vLLM leaves it the allocator frees what it has cached, which formulas do not replay:
        their upper end says little there, and the simulation decides.
        """
        vllm = colocated(self.recipe, self.question.gpu)
        return Interval.of(process.low) + vllm.training if vllm else process

    def _best_known(self) -> Report:
        """Return the simulation where there was one, else the prediction."""
        report = self.simulated or self.report
        if report is None:
            raise LookupError(f"no formula knows {self.recipe}, and it is not simulated")
        return report

    def over(self, tier: str) -> float:
        """Return the bytes that it lacks in `tier`, negative where it fits.

        That is infinite without a prediction, or a simulation that it needs.
        """
        if self.report is None:
            return math.inf
        if self.must_be_simulated and self.tried and not self.simulated:
            return math.inf
        return getattr(self.interval, TIERS[tier]) - self.question.usable

    def fits(self, tier: str) -> bool:
        """Tell whether it fits in `tier`; the bound spares most predictions."""
        return self.bound(tier) <= self.question.usable and self.over(tier) <= 0

    def simulation(self) -> Report | str:
        """Return its simulation, or why there is none here."""
        offloads = self.recipe.activation_offloading
        return simulate_briefly(
            self.recipe,
            self.question,
            OFFLOADED_LAYERS if offloads else DEEPEST,
        )

    def choice(self, tier: str | None = None) -> Choice:
        """Return it as an answer; `tier`: the one in which bytes are missing, if any are."""
        question = self.question
        surest = next((name for name in TIERS if self.fits(name)), "")
        time = step_time(
            self.timed,
            question.gpu,
            question.link,
        )
        over = self.over(tier or surest or "tight")
        return Choice(
            recipe=self.recipe,
            report=self._best_known(),
            time=time,
            needs=self.interval,
            by_default=self.interval_with(False),
            tier=surest,
            host=host_memory(self.recipe),
            over=max(0, int(over)),
            notes=tuple(notes_on(self.recipe, question.gpu)),
            epoch=epoch_of(question, self.timed, time.parts),
            without=without_switches(self.recipe, question.gpu),
            unsimulated=self.unsimulated,
        )


def simulate_briefly(
    recipe: Recipe,
    question: Question,
    deepest: int = DEEPEST,
) -> Report | str:
    """Return the simulation, in which two micro-batches stand for any more.

    Where none of its layers can stand for another, those may be `deepest` at most, unless it
    samples, which no formula answers. Without a simulation here, return why.
    """
    layers = recipe.shape.num_layers
    try:
        with needing("a simulation"):
            from ..simulation.shallow import may_be_deepened
            from ..simulation.simulate import simulate

        is_too_deep = layers > deepest and not recipe.rollouts
        if is_too_deep and not may_be_deepened(recipe, "cuda"):
            why = f"none of {layers} layers can stand for another in this recipe"
            return f"{why}; plan simulates up to {deepest}"
        if not recipe.rollouts:  # of which all micro-batches are sampled at once
            # The second micro-batch adds to gradients that are there, as all later ones do.
            steps = min(2, recipe.gradient_accumulation_steps)
            recipe = recipe.replace(gradient_accumulation_steps=steps)
        return simulate(
            recipe,
            gpu=question.gpu,
            # What the question's memory leaves out of the card counts as held by others.
            other_memory=max(0, usable_memory(question.gpu) - question.usable),
        )
    except (VramLabError, ImportError) as error:
        return str(error)


@no_collection(before=False)
def confirm(candidates: list[Candidate], tell: Callable[[int, int], None] | None = None) -> None:
    """Simulate the candidates, several at once where this process may be forked.

    `tell` is called before the first and after each, with how many are done, and of how many.
    """
    count = len(candidates)
    if tell:
        tell(0, count)
    tell_work([candidate.recipe for candidate in candidates if candidate.recipe.rollouts])
    answers = zip(candidates, simulations(candidates), strict=True)
    for done, (candidate, simulation) in enumerate(answers, 1):
        candidate.tried = True
        if isinstance(simulation, str):
            candidate.unsimulated = simulation
        else:
            candidate.simulated = simulation
        if tell:
            tell(done, count)


def epoch_of(
    question: Question,
    recipe: Recipe,
    parts: dict[str, float],
) -> float | None:
    """Return the seconds of an epoch over the data set; None where no lengths are known.

    Its steps take `parts` where all samples are the longest. Rows are padded to the longest of a
    micro-batch drawn at random, joined, or packed: then there are fewer.
    """
    if not question.lengths:
        return None
    # Packed and joined rows have no padding: each sample counts by its own length.
    drawn = 1 if recipe.joins else recipe.batch_size
    share = question.data.mean_width(drawn) / question.plain.seq_len
    seconds = sum(parts.values())
    rows = len(question.lengths)
    in_step = recipe.batch_size * recipe.gradient_accumulation_steps * question.gpus
    if question.packing and recipe.trainer == "transformers":
        # The written program joins whole samples and cuts rows of them, so every token is in one.
        return sum(question.lengths) / question.plain.seq_len / in_step * seconds
    if recipe.packing:
        # What the last sample leaves free in a row stays free.
        share *= rows / question.data.packed_rows
        rows = question.data.packed_rows
    steps = rows / in_step
    # Products, attention's fused kernels and memory traffic shrink with the rows, all else does
    # not.
    by_width = share * (parts["matmuls"] + parts["attention"] + parts["memory"])
    # Kernels of narrow rows run sooner, and are issued no sooner.
    issued = issuing(recipe, question.gpu) - by_width
    others = sum(parts.get(name, 0.0) for name in ("optimizer", *WAITS))
    return steps * (by_width + others + max(parts["launches"], issued))


def best_first(choices: Sequence[Choice]) -> list[Choice]:
    """Return the choices by `WAYS`, then by time.

    Of those as fast as the fastest within the error of its time the simplest method comes first.
    """
    left = sorted(choices, key=lambda choice: choice.order)
    ordered = []
    while left:
        # Compared with the fastest that is left, so the list may change within the error of its
        # time.
        alike = [choice for choice in left if is_as_fast(choice, left[0])]
        # What waits for the host is no simpler if it has to hold more there.
        if left[0].recipe.group.offload:
            alike = [choice for choice in alike if choice.host <= left[0].host]
        simplest = min(alike, key=lambda choice: METHODS.index(choice.method))
        ordered.append(simplest)
        left.remove(simplest)
    return ordered


def is_as_fast(choice: Choice, other: Choice) -> bool:
    """Tell whether `choice`, as good a way as `other`, takes as long.

    That is within the error of the other's time.
    """
    assert other.time  # of a model that formulas know
    # How much longer than likely the other may take.
    error = other.time.high / other.time.seconds
    return choice.order[0] == other.order[0] and choice.seconds <= error * other.seconds
