"""The search behind `plan`: the recipes that fit, fastest first, with few predictions.

Recipes are tried in the order of their estimated time, until enough are found. One whose weights,
states and saved activations alone are too large is dropped without a prediction.
"""

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterator
from itertools import groupby, takewhile

from ..base.errors import RecipeError
from ..formulas.account import refuse_unknown
from ..recipe.knobs import unchecked
from ..recipe.recipe import Recipe
from ..report.report import GiB
from .candidate import TIGHT, WAYS, Candidate, Kind, confirm
from .counted import has_room
from .question import Question
from .search_space import (
    EFFORTS,
    families,
    least_bytes,
    micro_batches,
    sizes_of,
    warned,
    with_micro_batch,
)

NEAR = 2 * GiB  # a better recipe is worth naming if it lacks at most so much,
FASTER = 0.95  # and takes less of the time
MOST_SIMULATED = 2  # to tell whether anything fits where formulas cannot


class Search:
    """The space of one question.

    Attributes:
        candidates: its recipes.
        ends: of each family those that take the least memory.
        offloads: whether it looked for answers with offloaded activations.
        refused: by method why there are no others.
    """

    def __init__(self, question: Question) -> None:
        self.question = question
        self.refused: dict[str, list[str]] = {method: [] for method in question.methods}
        ways: list[Recipe] = []
        for method, sentences in self.refused.items():
            ways += families(question, method, sentences)
        if not ways:
            # Why there are none matters only of a model that formulas know.
            refuse_unknown(question.plain)
        batches = micro_batches(question)
        self.candidates: list[Candidate] = []
        self.ends: list[Candidate] = []
        self.offloads = False
        for number, way in enumerate(ways):
            sizes = sizes_of(way, batches)
            for size in sizes:
                candidate = Candidate(question, with_micro_batch(way, size), number)
                self.candidates.append(candidate)
                # Memory is least at either end: the whole batch at once accumulates no gradients.
                # The second of two micro-batches alone is reduced as it comes, which saves a tied
                # head's third gradient.
                steps = candidate.recipe.gradient_accumulation_steps
                if size in (sizes[0], sizes[-1]) or steps == 2:
                    self.ends.append(candidate)
        self._ordered: dict[Kind, list[Candidate]] = {}
        self._waiting: dict[Kind, list[tuple[tuple, Candidate]]] = {}

    def ordered(self, kind: Kind) -> Iterator[Candidate]:
        """Yield the candidates of a kind, fastest first.

        Their exact times are computed no sooner than it takes to tell the next.
        """
        if kind not in self._ordered:
            self._ordered[kind] = []
            # By a lower bound of its time: exact times take a prediction for paged optimizers.
            self._waiting[kind] = [(each.soonest, each) for each in self._possible(kind)]
            heapq.heapify(self._waiting[kind])
        known = self._ordered[kind]
        waiting = self._waiting[kind]
        place = 0
        while place < len(known) or waiting:
            if place < len(known):
                yield known[place]
                place += 1
                continue
            # A time is either exact already, or its candidate waits on with the exact one.
            bound, candidate = heapq.heappop(waiting)
            if candidate.rank > bound:
                heapq.heappush(waiting, (candidate.rank, candidate))
            else:
                known.append(candidate)

    def _possible(self, kind: Kind) -> Iterator[Candidate]:
        """Yield the candidates of a kind that may fit, or lack at most NEAR."""
        most = self.question.usable + NEAR
        tier = self.question.tiers[-1]
        # The last of the tiers asked for is the loosest.
        alike = [candidate for candidate in self.candidates if candidate.kind == kind]
        # The largest micro-batches come first, and what a smaller one lacks a larger one does.
        for _, family in groupby(reversed(alike), key=lambda candidate: candidate.family):
            for candidate in family:
                # Gradients are fewer where the whole batch goes at once, so a larger one may fit.
                if candidate.least > most:
                    continue
                if candidate.saved > most:
                    break
                if candidate.bound(tier) <= most:
                    yield candidate

    @property
    def predicted(self) -> int:
        """How many candidates have been predicted so far."""
        return sum("report" in vars(candidate) for candidate in self.candidates)

    def answers(
        self, confirmed: bool, tell: Callable[[int, int], None] | None = None
    ) -> dict[str, tuple[Candidate | None, str]]:
        """Return by method its answer; if `confirmed` each is simulated, and must fit then too.

        `tell` is called with how many are simulated, and of how many, as they are.
        """
        methods = self.question.methods
        # Beside each other, those that each method would ask for first.
        first = [self.answer(method, simulates=False)[0] for method in methods]
        unknown = [one for one in first if one and one.must_be_simulated and not one.tried]
        if unknown:
            confirm(unknown)
        answers = {method: self.answer(method) for method in methods}
        self.offloads = confirmed
        # A candidate of one search is never simulated twice.
        untried = [answer for answer, _ in answers.values() if answer and not answer.tried]
        if confirmed and untried:
            # All at once first, for they run beside each other.
            confirm(untried, tell)
            answers = {method: self.answer(method, confirmed) for method in methods}
        for method, (answer, tier) in list(answers.items()):
            # What is only tight is no answer while there is another.
            if confirmed and (answer is None or tier in TIGHT):
                offloaded, sure = self.offloaded(method)
                if offloaded and (answer is None or sure not in TIGHT):
                    answers[method] = offloaded, sure
        return answers

    def offloaded(self, method: str) -> tuple[Candidate | None, str]:
        """Return what fits with its activations in the host's memory, and the tier it does in.

        That is simulated: the lightest of SFTTrainer's recipes that keep small updates, else the
        lightest of all.
        """
        question = self.question
        nothing = None, question.tiers[-1]
        # `activation_offloading` is TRL's, and SFTTrainer trains what the plain Trainer does.
        if question.gpus > 1 or not question.offload or not question.may_use_sft():
            return nothing
        again = max(question.checkpointing)
        try:
            changed = dataclasses.replace(
                question,
                trainer="sft",
                checkpointing=(again,),
                offload=False,
                method=method,
            )
            ends = Search(changed).ends
        except RecipeError:
            return nothing
        # The bound takes no walk through the model, so it comes before all others.
        light = [end for end in ends if least_bytes(end.recipe) <= question.usable]
        light.sort(key=lambda end: end.bound(question.tiers[0]))
        for sound in (True, False):
            lightest = next((end for end in light if end.kind[1] is sound), None)
            if lightest is None:
                continue
            recipe = unchecked(lightest.recipe, activation_offloading=True)
            if not has_room(question, recipe):
                continue
            candidate = Candidate(lightest.question, recipe, lightest.family)
            if candidate.report is None:
                continue
            confirm([candidate])
            for tier in question.tiers:
                if candidate.simulated and candidate.fits(tier):
                    return candidate, tier
        return nothing

    def answer(
        self,
        method: str,
        confirmed: bool = False,
        simulates: bool = True,
    ) -> tuple[Candidate | None, str]:
        """Return the fastest recipe that fits and the tier it does in.

        It is of the first of `WAYS` asked for that has one. What formulas do not know is simulated
        first, unless not `simulates`.
        """
        for sound, effort, tier in WAYS:
            if tier not in self.question.tiers:
                continue
            # Fastest first, so the first that fits is the answer.
            for candidate in self.ordered((method, sound, effort)):
                if self._fits(candidate, tier, confirmed, simulates):
                    plainer = self._plainer(candidate, tier, confirmed, simulates)
                    return plainer or candidate, tier
        return None, self.question.tiers[-1]

    def _fits(self, candidate: Candidate, tier: str, confirmed: bool, simulates: bool) -> bool:
        if not candidate.fits(tier):
            return False
        needs_simulation = confirmed or candidate.must_be_simulated
        if simulates and needs_simulation and not candidate.tried:
            confirm([candidate])
        # Asked again, since the simulation may have changed the figure.
        return candidate.fits(tier)

    def _plainer(
        self, answer: Candidate, tier: str, confirmed: bool, simulates: bool
    ) -> Candidate | None:
        """Return a recipe of data parallelism that is hardly slower than a sharded `answer`.

        It sends gradients once an update, and sharding sends weights in each pass. That they hide
        behind the computing is an assumption.
        """
        if answer.recipe.group.stage == 0:
            return None
        limit = answer.rank[0] / FASTER
        alike = takewhile(lambda one: one.rank[0] <= limit, self.ordered(answer.kind))
        for candidate in alike:
            is_plain = candidate.recipe.group.stage == 0
            if is_plain and self._fits(candidate, tier, confirmed, simulates):
                return candidate
        return None

    def better(
        self,
        method: str,
        tier: str,
        answer: Candidate | None,
    ) -> Candidate | None:
        """Return what is faster than `answer` and lacks the least in `tier`, at most NEAR.

        Without an answer, or with activations offloaded, that is what lacks least.
        """
        if answer is None or answer.recipe.activation_offloading:
            return self.nearest(method, tier)
        limit = answer.rank[0] * FASTER
        # In order of time, so the rest cannot be fast enough either.
        faster = takewhile(lambda one: one.rank[0] < limit, self.ordered(answer.kind))
        highest = self.question.usable + NEAR
        near = [one for one in faster if one.bound(tier) <= highest and 0 < one.over(tier) <= NEAR]
        return min(near, key=lambda one: (one.over(tier), one.rank), default=None)

    def nearest(self, method: str, tier: str) -> Candidate | None:
        """Return what lacks the least in `tier` though nothing of the method fits."""
        nearest = None
        least = math.inf
        ends = [candidate for candidate in self.ends if candidate.method == method]
        for candidate in sorted(ends, key=lambda candidate: candidate.bound(tier)):
            # The bounds rise, so no later candidate lacks less.
            if candidate.bound(tier) - self.question.usable > least:
                break
            over = candidate.over(tier)
            if 0 < over < least:
                nearest = candidate
                least = over
        return nearest

    def any_fit(self) -> Recipe | None:
        """Return one of the lightest recipes that fit; None if none fits.

        It is sound and of the least effort if there is one.
        """
        tier = self.question.tiers[0]
        usable = self.question.usable
        light = [one for one in self.ends if least_bytes(one.recipe) <= usable]
        simulated = 0
        for candidate in sorted(light, key=self._advised_first):
            if candidate.fits(tier) and candidate.must_be_simulated:
                # They come lightest first, so what follows two that do not fit is hardly lighter.
                if simulated == MOST_SIMULATED:
                    return None
                simulated += 1
                confirm([candidate])
            if candidate.fits(tier):
                return candidate.recipe
        return None

    def lightest(self) -> Candidate | None:
        """Return the recipe that takes the least of those that are sound and of least effort."""
        return min(self.ends, key=self._lightness, default=None)

    def _advised_first(self, candidate: Candidate) -> tuple:
        """Return the same key, but that mixed precision comes before half with fp32 adapters.

        A bound of memory does not see the copies in fp32 that those make.
        """
        *best, bound = self._lightness(candidate)
        return *best, warned(candidate.recipe), bound

    def _lightness(self, candidate: Candidate) -> tuple:
        """Return the key by which what is sound comes first, then less effort, then less memory."""
        _, sound, effort = candidate.kind
        return not sound, EFFORTS.index(effort), candidate.bound(self.question.tiers[0])
