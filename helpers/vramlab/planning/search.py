"""The search behind `plan`: the recipes that fit, fastest first, with few predictions.

Recipes are tried in the order of their estimated time, until enough are found. One whose weights, states and saved
activations alone are too large is dropped without a prediction.
"""

import contextlib
import itertools
import math
import multiprocessing
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

from ..formulas import reserved
from ..formulas.predict import predict
from ..hardware.gpu import usable_memory
from ..hardware.overhead import expandable
from ..recipe.from_transformers import build
from ..recipe.knobs import unchecked
from ..recipe.process_context import context_of
from ..recipe.recipe import Recipe
from ..report.errors import RecipeError, VramLabError, needing
from ..report.report import TIERS, GiB, Interval, Report
from ..training.quiet import no_collection
from .question import METHODS, Question
from .search_space import (
    counted_as,
    families,
    held_bytes,
    host_memory,
    is_sound,
    least_bytes,
    method_of,
    micro_batches,
    notes_on,
    with_micro_batch,
    without_switches,
)
from .step_time import StepTime, estimate, step_time

NEAR, FASTER = 2 * GiB, 0.95  # a better recipe is worth naming if it lacks at most so much, and takes less of the time
# Whether it is sound (`search_space.is_sound`), whether it offloads, and its tier, the best first. A step that waits for the
# host takes several times as long, so what is likely to fit without goes before it; updates that are rounded away are never
# made up for, so what rounds them goes after both. What fits at the lowest figures only is no answer while there is another.
SURE, TIGHT = ("safe", "likely"), ("tight",)
WAYS = [
    (sound, offloads, tier)
    for tiers in (SURE, TIGHT)
    for sound, offloads, tier in itertools.product((True, False), (False, True), tiers)
]
DEEPEST = 24  # layers of a recipe that is simulated though none of its layers can stand for another


@dataclass(frozen=True)
class Choice:
    """A recipe with its memory and its estimated time."""

    recipe: Recipe
    report: Report  # the simulation where there was one, else the prediction
    time: StepTime
    needs: Interval  # bytes of the process with the allocator's settings that were asked for
    by_default: Interval  # the same with the allocator's default settings, for a script of one's own
    tier: str  # the surest in which it fits, "" where it fits in none
    host: int = 0  # bytes of host memory that have to be free for all ranks
    over: int = 0  # bytes that it lacks in the tier asked for
    notes: tuple[str, ...] = ()  # what to know before choosing it
    epoch: float | None = None  # seconds of one over the data set, where its lengths are known
    without: dict[str, int] = field(default_factory=dict)  # by switch that is on: bytes that leaving it out adds
    unsimulated: str = ""  # why the formulas answer where a simulation was asked for

    @property
    def method(self) -> str:
        """ "full", "lora" or "qlora"."""
        return method_of(self.recipe)

    @property
    def order(self) -> tuple:
        """Sort key, smallest for the best: by `WAYS`, then by time."""
        return WAYS.index((is_sound(self.recipe), _offloads(self.recipe), self.tier)), self.seconds

    @property
    def seconds(self) -> float:
        """Of an epoch where the data's lengths are known, else of a step."""
        return self.epoch or self.time.seconds


class Candidate:
    """One recipe of the space; its figures are computed when they are first asked for.

    Where formulas do not know its adapters, plain ones stand for them until it is simulated, and only then it fits.
    """

    def __init__(self, question: Question, recipe: Recipe, family: int):
        self.question, self.recipe, self.family, self.method = question, recipe, family, method_of(recipe)
        counted = counted_as(recipe)
        self.must_be_simulated = counted is not recipe
        self.rows = [counted]  # what its micro-batches may be: of one length, or padded
        if lengths := question.lengths_of(recipe.batch_size):
            self.rows.append(unchecked(counted, lengths=lengths))
        self.kind = self.method, is_sound(recipe), _offloads(recipe)
        self.simulated: Report | None = None
        self.tried, self.unsimulated = False, ""

    @cached_property
    def rank(self) -> tuple:
        """Sort key, smallest for the fastest to three digits (the rest is noise), then for the simplest family and the
        larger micro-batch: by an epoch where the data's lengths are known, else by a step, whose rows are padded, unless
        they cannot be."""
        parts = estimate(self.rows[-1], self.question.gpu, self.question.link)
        seconds = epoch_of(self.question, self.recipe, parts) or sum(parts.values())
        return float(f"{seconds:.3g}"), self.family, -self.recipe.batch_size

    def bound(self, tier: str) -> int:
        """A lower bound of the upper end of `interval` for `tier`."""
        if self.question.expandable_segments:
            inside = expandable(self._held, 1.0 if self.simulated else reserved.EXACT)
        else:
            sharding = self.recipe.sharding
            inside = reserved.reserved(Counter(), self._held, bool(sharding and sharding.stage))
        return getattr(inside + self._context, TIERS[tier])

    @cached_property
    def _context(self) -> Interval:
        return context_of(self.recipe, self.question.gpu)

    @cached_property
    def _held(self) -> int:
        return held_bytes(self.rows[0], self.question.gpu.chip)

    @cached_property
    def report(self) -> Report | None:
        """The prediction; None where the formulas refuse the recipe.

        Of rows of one length and padded ones, which need a mask, those that take more; `recipe` says which.
        """
        with contextlib.suppress(RecipeError):
            found = [(predict(recipe, self.question.gpu), recipe.lengths) for recipe in self.rows]
            report, lengths = max(found, key=lambda pair: pair[0].peak.total)
            self.recipe = unchecked(self.recipe, lengths=lengths)
            return report
        return None

    @property
    def interval(self) -> Interval:
        """Bytes of the process, simulated if it was, else predicted, with the allocator's settings that were asked for."""
        return self.interval_with(self.question.expandable_segments)

    def interval_with(self, expandable_segments: bool) -> Interval:
        """The same with the allocator's setting."""
        report = self.simulated or self.report
        if not expandable_segments:
            return report.process
        peak = max(report.allocated, report.peak.total)
        known = 1.0 if self.simulated else min(reserved.EXACT, (report.reserved.low + 1) / peak)
        loading = report.loading.total if report.loading else 0
        return expandable(max(peak, loading), known) + self._context

    def over(self, tier: str) -> float:
        """Bytes that it lacks in `tier`, negative where it fits; infinite without a prediction, or a simulation that it
        needs."""
        if self.report is None or (self.must_be_simulated and self.tried and not self.simulated):
            return math.inf
        return getattr(self.interval, TIERS[tier]) - self.question.usable

    def fits(self, tier: str) -> bool:
        return self.bound(tier) <= self.question.usable and self.over(tier) <= 0

    def simulation(self) -> Report | str:
        """Its simulation, or why there is none here."""
        return simulate_briefly(self.recipe, self.question)

    def choice(self, tier: str | None = None) -> Choice:
        """It as an answer; `tier`: the one in which bytes are missing, if any are."""
        found = next((name for name in TIERS if self.fits(name)), "")
        time = step_time(self.rows[-1], self.question.gpu, self.question.link)
        report, over = self.simulated or self.report, self.over(tier or found or "tight")
        return Choice(
            recipe=self.recipe,
            report=report,
            time=time,
            needs=self.interval,
            by_default=self.interval_with(False),
            tier=found,
            host=host_memory(self.recipe),
            over=max(0, int(over)),
            notes=tuple(notes_on(self.recipe, self.question.gpu)),
            epoch=epoch_of(self.question, self.recipe, time.parts),
            without=without_switches(self.recipe, self.question.gpu),
            unsimulated=self.unsimulated,
        )


class Search:
    """The space of one question. `candidates`: its recipes; `ordered`: those of a kind, fastest first."""

    def __init__(self, question: Question):
        self.question, batches = question, micro_batches(question)
        self.refused: dict[str, list[str]] = {method: [] for method in question.methods}  # why there are no others
        ways = [family for method in self.refused for family in families(question, method, self.refused[method])]
        sizes = [(way, i, size) for i, way in enumerate(ways) for size in batches]
        every = self.candidates = [Candidate(question, with_micro_batch(way, size), i) for way, i, size in sizes]
        self.ordered = cache(lambda kind: sorted((c for c in every if c.kind == kind), key=lambda c: c.rank))
        # Memory is least at either end: the whole batch at once accumulates no gradients. The second of two micro-batches
        # alone is reduced as it comes, which saves a tied head's third gradient.
        self.ends = [
            one
            for one in every
            if one.recipe.batch_size in (batches[0], batches[-1]) or one.recipe.gradient_accumulation_steps == 2
        ]

    @property
    def predicted(self) -> int:
        """How many candidates have been predicted so far."""
        return sum("report" in vars(candidate) for candidate in self.candidates)

    def answers(self, confirmed: bool) -> dict[str, tuple[Candidate | None, str]]:
        """By method its answer; if `confirmed` each is simulated, and must fit then too."""
        found = {method: self.answer(method) for method in self.question.methods}
        candidates = [candidate for candidate, _ in found.values() if candidate and not candidate.tried]
        if confirmed and candidates:
            confirm(candidates)
            found = {method: self.answer(method, confirmed) for method in found}
        return found

    def answer(self, method: str, confirmed: bool = False) -> tuple[Candidate | None, str]:
        """The fastest recipe that fits and the tier it does in: of the first of `WAYS` asked for that has one."""
        for sound, offload, tier in WAYS:
            for found in self.ordered((method, sound, offload)) if tier in self.question.tiers else ():
                if found.fits(tier) and (confirmed or found.must_be_simulated) and not found.tried:
                    confirm([found])
                if found.fits(tier):
                    return found, tier
        return None, self.question.tiers[-1]

    def better(self, method: str, tier: str, answer: Candidate | None) -> Candidate | None:
        """What is faster than `answer` and lacks the least in `tier`, at most NEAR; without an answer what lacks least."""
        if answer is None:
            return self.nearest(method, tier)
        chosen = [c for c in self.ordered(answer.kind) if c.rank[0] < answer.rank[0] * FASTER]
        near = [c for c in chosen if c.bound(tier) <= self.question.usable + NEAR and 0 < c.over(tier) <= NEAR]
        return min(near, key=lambda c: (c.over(tier), c.rank), default=None)

    def nearest(self, method: str, tier: str) -> Candidate | None:
        """What lacks the least in `tier` though nothing of the method fits."""
        best, least = None, math.inf
        for found in sorted((c for c in self.ends if c.method == method), key=lambda c: c.bound(tier)):
            if found.bound(tier) - self.question.usable > least:
                break
            if 0 < found.over(tier) < least:
                best, least = found, found.over(tier)
        return best

    def any_fit(self) -> Recipe | None:
        """One of the lightest recipes that fit, sound and without offload if there is one; None if none fits."""
        tier, usable = self.question.tiers[0], self.question.usable
        ends = [c for c in self.ends if least_bytes(c.recipe) <= usable]
        ends.sort(key=lambda c: (not c.kind[1], c.kind[-1], c.bound(tier)))
        for candidate in ends:
            if candidate.fits(tier) and candidate.must_be_simulated:
                confirm([candidate])
            if candidate.fits(tier):
                return candidate.recipe
        return None


def simulate_briefly(recipe: Recipe, question: Question, deepest: int = DEEPEST) -> Report | str:
    """The simulation, in which two micro-batches stand for any more; or why there is none here: `deepest` layers at most
    where none can stand for another."""
    layers = recipe.shape.num_layers
    try:
        with needing("a simulation"):
            from ..simulation.simulate import may_be_deepened, simulate

        if layers > deepest and not may_be_deepened(recipe, "cuda"):
            return f"none of {layers} layers can stand for another in this recipe; plan simulates up to {deepest}"
        steps = min(2, recipe.gradient_accumulation_steps)
        other = max(0, usable_memory(question.gpu) - question.usable)
        asked = {"gpu": question.gpu, "other_memory": other}
        return simulate(recipe.replace(gradient_accumulation_steps=steps), **asked)
    except (VramLabError, ImportError) as error:
        return str(error)


@no_collection(before=False)
def confirm(candidates: list[Candidate]) -> None:
    """Simulate the candidates: several at once, in processes of their own, where this one may be forked."""
    forks = sys.platform == "linux" and "torch" not in sys.modules and threading.active_count() == 1
    workers = min(len(candidates), os.cpu_count() or 1)
    try:
        with needing("a simulation"):
            build(candidates[0].recipe.shape)  # loads the libraries once for all
        if forks and workers > 1:  # had torch been used, a forked process could wait for its threads
            fork, quiet = multiprocessing.get_context("fork"), (signal.SIGINT, signal.SIG_IGN)
            with fork.Pool(workers, signal.signal, quiet) as pool:
                reports = pool.map(Candidate.simulation, candidates, chunksize=1)
        else:
            reports = list(map(Candidate.simulation, candidates))
    except (VramLabError, ImportError) as error:
        reports = [str(error)] * len(candidates)
    for candidate, report in zip(candidates, reports, strict=True):
        candidate.tried = True
        if isinstance(report, str):
            candidate.unsimulated = report
        else:
            candidate.simulated = report


def epoch_of(question: Question, recipe: Recipe, parts: dict[str, float]) -> float | None:
    """Seconds of an epoch over the data set, whose steps take `parts` where all samples are the longest; None where no
    lengths are known. Rows are padded to the longest of a micro-batch drawn at random, joined, or packed: then there are
    fewer."""
    if not question.lengths:
        return None
    packed = question.packing and (recipe.packing or recipe.trainer == "transformers")
    drawn = 1 if packed or recipe.padding_free else recipe.batch_size
    share = question.mean_width(drawn) / question.plain.seq_len
    seconds, steps = sum(parts.values()), len(question.lengths) / question.global_batch
    if packed:
        return steps * share * seconds
    return steps * (seconds - (1 - share) * (parts["matmuls"] + parts["attention"] + parts["memory"]))


def best_first(choices: Sequence[Choice]) -> list[Choice]:
    """The choices by `WAYS`, then by time; of those as fast as the fastest within the error of its time the simplest method
    first."""
    left, found = sorted(choices, key=lambda choice: choice.order), []
    while left:
        alike = [choice for choice in left if is_as_fast(choice, left[0])]
        found.append(min(alike, key=lambda choice: METHODS.index(choice.method)))
        left.remove(found[-1])
    return found


def is_as_fast(choice: Choice, other: Choice) -> bool:
    """Whether `choice`, as good a way as `other`, takes as long within the error of the other's time."""
    error = other.time.high / other.time.seconds
    return choice.order[0] == other.order[0] and choice.seconds <= error * other.seconds


def _offloads(recipe: Recipe) -> bool:
    return bool(recipe.sharding and recipe.sharding.offload)
