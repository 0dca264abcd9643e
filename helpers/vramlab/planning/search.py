"""The search behind `plan`: what fits, fastest first, with as few predictions as can be.

    bound       weights, states and what the layers keep are too much already: no need to predict the rest
    monotone    of one family, a larger micro-batch needs more memory and less time: halve the divisors until the
                largest that fits is found (one micro-batch alone keeps no gradients while it computes, and is tried first)
    best first  families are opened in the order of their fastest recipe, so the search ends when enough are found

None of the three changes the answer (memory is monotone but for the rounding of small blocks, a hundred-thousandth).
"""

import heapq
from collections import Counter
from dataclasses import dataclass

from ..formulas.predict import predict
from ..hardware import reserved
from ..recipe.recipe import Recipe
from ..report.errors import RecipeError
from ..report.report import CATEGORIES, Interval, Report, format_bytes
from .plan_code import code as code_of
from .plan_notes import notes_on
from .search_space import (
    ENGINES,
    METHODS,
    OPTIMS,
    Question,
    described,
    families,
    held_bytes,
    method_of,
    micro_batches,
    with_micro_batch,
)
from .step_time import StepTime, estimate, step_time

Place = tuple[int, int]  # the number of a family in the space, and a micro-batch


@dataclass(frozen=True)
class Choice:
    """One recipe that fits: its predicted memory, its estimated time, and what to know before choosing it."""

    recipe: Recipe
    report: Report
    time: StepTime
    notes: tuple[str, ...] = ()

    @property
    def method(self) -> str:
        """ "full", "lora" or "qlora"."""
        return method_of(self.recipe)

    def code(self) -> str:
        """Python text that sets up this very training with transformers, ready to paste."""
        return code_of(self.recipe)


@dataclass(frozen=True)
class Miss:
    """A recipe that would be faster and does not fit: by how many bytes, and which category needs most more."""

    recipe: Recipe
    report: Report
    time: StepTime
    over: int
    category: str
    more: int

    def __str__(self) -> str:
        rate, excess = f"{self.time.tokens_per_second:,.0f} tokens/s", format_bytes(self.over, digits=2)
        text = f"{described(self.recipe)} ({rate}) does not fit: {excess} over"
        if self.more > 0:
            text += (
                f"; {format_bytes(self.more, digits=2)} more {self.category.replace('_', ' ')} than the best that fits"
            )
        return text


class Search:
    """The search for one question: what was predicted, and how large the space is (`considered`).

    A recipe is known here by its place: the number of its family and its micro-batch.
    """

    def __init__(self, question: Question):
        self.question, self.sizes = question, micro_batches(question)
        self.families: list[Recipe] = []
        self.of_method: dict[str, range] = {}
        for method in question.methods:
            first = len(self.families)
            self.families += families(question, method)
            self.of_method[method] = range(first, len(self.families))
        self.considered = len(self.families) * len(self.sizes)
        self.reports: dict[Place, Report | None] = {}
        self.bounds: dict[Place, int] = {}

    def recipe(self, place: Place) -> Recipe:
        """The recipe at a place of the space."""
        return with_micro_batch(self.families[place[0]], place[1])

    def report(self, place: Place) -> Report | None:
        """`predict`'s report; None where the formulas do not take the recipe, or do not see its offload."""
        if place not in self.reports:
            recipe = self.recipe(place)
            try:
                report = predict(recipe, self.question.gpu)
                if recipe.sharding and recipe.sharding.world_size == 1:
                    alone = predict(recipe.replace(sharding=None), self.question.gpu)
                    report = report if report.peak.total < alone.peak.total else None
            except RecipeError:
                report = None
            self.reports[place] = report
        return self.reports[place]

    def fits(self, place: Place) -> bool:
        """Whether the upper end of the asked tier is within the usable memory."""
        if self.least(place) > self.question.usable:
            return False
        report = self.report(place)
        return report is not None and upper(report, self.question.tier) <= self.question.usable

    def least(self, place: Place) -> int:
        """A lower bound of the upper end of the asked tier, from what is surely held."""
        if place not in self.bounds:
            held = held_bytes(self.recipe(place), self.question.gpu.chip)
            inside = reserved.reserved(Counter(), held)
            outside = {"process": reserved.process(inside, self.question.gpu).high, "reserved": inside.high}
            self.bounds[place] = outside.get(self.question.tier, held)
        return self.bounds[place]

    def largest(self, family: int) -> tuple[Place | None, Place | None]:
        """(the largest micro-batch of a family that fits, the smallest larger one)."""
        sizes = self.sizes
        if self.fits((family, sizes[0])):
            return (family, sizes[0]), None
        low, high = 1, len(sizes)  # of sizes, largest first: the first that fits is in [low, high]
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.fits((family, sizes[middle])) else (middle + 1, high)
        return (family, sizes[low]) if low < len(sizes) else None, (family, sizes[low - 1])

    def ranked(self, method: str, top: int) -> tuple[list[Choice], list[Miss]]:
        """The `top` fastest recipes that fit, one of each family, and what is faster than the first of them."""
        queue = [
            (self.order((family, self.sizes[0])), (family, self.sizes[0]), False) for family in self.of_method[method]
        ]
        heapq.heapify(queue)
        found: list[Place] = []
        faster: set[Place] = set()
        while queue and len(found) < top:
            _, place, fits = heapq.heappop(queue)
            if fits:
                if not any(twins(self.recipe(place), self.recipe(other)) for other in found):
                    found.append(place)
                continue
            family, largest = place[0], None
            if self.least((family, 1)) <= self.question.usable:
                largest, larger = self.largest(family)
                faster |= {larger} - {None}
            if largest is None:  # then every micro-batch is a miss, and the smallest may be the slower one
                faster |= {(family, self.sizes[0]), (family, 1)}
            else:
                heapq.heappush(queue, (self.order(largest), largest, True))
        choices = [self.choice(place) for place in found]
        return choices, self.misses(found[0], faster) if found else []

    def misses(self, best: Place, places: set[Place]) -> list[Miss]:
        """Of what is faster than `best` and does not fit: the slowest, and the one that lacks least."""
        limit, beside = self.order(best), self.report(best)
        faster = [place for place in places if (self.order(place), place) < (limit, best)]
        slowest = nearest = None
        for place in sorted(faster, key=lambda place: (self.order(place), place), reverse=True):
            if self.report(place):
                slowest = self.miss(place, beside)
                break
        for place in sorted(faster, key=lambda place: (self.least(place), place)):
            if nearest and self.least(place) >= nearest.over + self.question.usable:
                break
            if self.report(place):
                miss = self.miss(place, beside)
                nearest = miss if nearest is None or miss.over < nearest.over else nearest
        return [miss for miss in (slowest, nearest) if miss][: 1 if slowest == nearest else 2]

    def order(self, place: Place) -> tuple:
        """Fastest first; see `order`."""
        recipe = self.recipe(place)
        return order(sum(estimate(recipe, self.question.gpu, self.question.link).values()), recipe)

    def choice(self, place: Place) -> Choice:
        """A recipe that fits, with all that is known of it."""
        recipe = self.recipe(place)
        return Choice(recipe, self.report(place), self.time(recipe), tuple(notes_on(recipe)))

    def time(self, recipe: Recipe) -> StepTime:
        """`step_time` on the question's cards."""
        return step_time(recipe, self.question.gpu, self.question.link)

    def miss(self, place: Place, beside: Report | None = None) -> Miss:
        """Why a recipe does not fit: the category that grew most `beside` one that does, or simply the largest."""
        report, recipe = self.report(place), self.recipe(place)
        over = upper(report, self.question.tier) - self.question.usable
        grown = {
            name: getattr(report.peak, name) - (getattr(beside.peak, name) if beside else 0) for name in CATEGORIES
        }
        category = max(CATEGORIES, key=lambda name: grown[name])
        return Miss(recipe, report, self.time(recipe), over, category, grown[category])

    def by_bound(self) -> list[Place]:
        """The places where memory can be least, most hopeful first: the whole batch at once, and the smallest part."""
        places = {(family, size) for family in range(len(self.families)) for size in (self.sizes[0], 1)}
        return sorted(places, key=lambda place: (self.least(place), place))

    def any_fit(self) -> Recipe | None:
        """A recipe that fits, one of the lightest, without offload if there is one; None if none does."""
        places = sorted(self.by_bound(), key=lambda place: self.offloads(place[0]))  # stable
        return next((self.recipe(place) for place in places if self.fits(place)), None)

    def offloads(self, family: int) -> bool:
        """Whether a family keeps something on the host."""
        sharding = self.families[family].sharding
        return bool(sharding and sharding.offload)

    def lightest(self) -> Miss | None:
        """The recipe that needs least of the asked tier; by the bound, so that not all have to be predicted."""
        best, least = None, None
        for place in self.by_bound():
            if least is not None and self.least(place) >= least:
                break
            report = self.report(place)
            if report and (least is None or upper(report, self.question.tier) < least):
                best, least = place, upper(report, self.question.tier)
        return best and self.miss(best)


def order(seconds: float, recipe: Recipe) -> tuple:
    """How recipes are ranked: by time to three digits (the rest is noise), then what is simpler."""
    sharding = recipe.sharding
    simpler = (
        METHODS.index(method_of(recipe)),
        ENGINES.index(sharding.engine) + 1 if sharding else 0,
        bool(sharding and sharding.offload),
        recipe.gradient_checkpointing,
        OPTIMS.index(recipe.optim) if recipe.optim in OPTIMS else len(OPTIMS),
        recipe.attn_implementation != "sdpa",
    )
    return float(f"{seconds:.3g}"), simpler


def twins(recipe: Recipe, other: Recipe) -> bool:
    """Whether two recipes differ in the optimizer only: then the faster one is listed, or the simpler (see `order`)."""
    return recipe.replace(optim=other.optim) == other


def upper(report: Report, tier: str) -> int:
    """The most that the report's tier may need, in bytes."""
    value = report.peak.total if tier == "allocated" else getattr(report, tier)
    return value.high if isinstance(value, Interval) else value
