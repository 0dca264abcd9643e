"""The search behind `plan`: the recipes that fit, fastest first, with few predictions.

Recipes are tried in the order of their estimated time, until enough are found. One whose weights, states and saved
activations alone are too large is dropped without a prediction.
"""

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from ..formulas.predict import predict
from ..hardware import reserved
from ..recipe.recipe import Recipe
from ..report.errors import RecipeError
from ..report.report import CATEGORIES, Interval, Report, format_bytes
from .plan_code import code as code_of
from .question import ENGINES, METHODS, OPTIMS, Question
from .search_space import families, held_bytes, method_of, micro_batches, notes_on, with_micro_batch
from .step_time import StepTime, estimate, step_time


@dataclass(frozen=True)
class Choice:
    """A recipe that fits: its predicted memory, its estimated time, and what to know before choosing it."""

    recipe: Recipe
    report: Report
    time: StepTime
    notes: tuple[str, ...] = ()

    @property
    def method(self) -> str:
        """ "full", "lora" or "qlora"."""
        return method_of(self.recipe)

    def code(self) -> str:
        """Python text that sets up this training with transformers, ready to paste."""
        return code_of(self.recipe)


@dataclass(frozen=True)
class Miss:
    """A recipe that does not fit: by how many bytes (`over`), and the `category` that needs most `more`."""

    recipe: Recipe
    report: Report
    time: StepTime
    over: int
    category: str
    more: int

    def __str__(self) -> str:
        rate, over = f"{self.time.tokens_per_second:,.0f} tokens/s", format_bytes(self.over, digits=2)
        text = f"{self.recipe} ({rate}) does not fit: {over} over"
        if self.more > 0:
            more, category = format_bytes(self.more, digits=2), self.category.replace("_", " ")
            text += f"; {more} more {category} than the best that fits"
        return text


class Candidate:
    """One recipe of the space; its figures are computed when they are first asked for."""

    def __init__(self, question: Question, recipe: Recipe, family: int):
        self.question, self.recipe, self.family, self.method = question, recipe, family, method_of(recipe)

    @cached_property
    def rank(self) -> tuple:
        """Sort key, smallest for the fastest; the larger micro-batch where two take equally long."""
        seconds = sum(estimate(self.recipe, self.question.gpu, self.question.link).values())
        return *order(seconds, self.recipe), self.family, -self.recipe.batch_size

    @cached_property
    def bound(self) -> int:
        """A lower bound of `needs`."""
        held = held_bytes(self.recipe, self.question.gpu.chip)
        inside = reserved.reserved(Counter(), held)
        process = reserved.process(inside, self.question.gpu)
        return {"process": process.high, "reserved": inside.high, "allocated": held}[self.question.tier]

    @cached_property
    def report(self) -> Report | None:
        """The prediction; None where the formulas refuse the recipe, or do not see what its offload saves."""
        card, sharding = self.question.gpu, self.recipe.sharding
        try:
            report = predict(self.recipe, card)
            if sharding and sharding.world_size == 1:
                plain = predict(self.recipe.replace(sharding=None), card)
                return report if report.peak.total < plain.peak.total else None
            return report
        except RecipeError:
            return None

    @cached_property
    def needs(self) -> float:
        """Upper end of the predicted tier in bytes; infinite without a prediction."""
        return upper(self.report, self.question.tier) if self.report else math.inf

    @property
    def fits(self) -> bool:
        return self.bound <= self.question.usable and self.needs <= self.question.usable

    def choice(self) -> Choice:
        time = step_time(self.recipe, self.question.gpu, self.question.link)
        return Choice(self.recipe, self.report, time, tuple(notes_on(self.recipe)))

    def miss(self, fitting: Report | None = None) -> Miss:
        """Why it does not fit: the category that is most above that of `fitting`, or the largest."""
        peak, time = self.report.peak, step_time(self.recipe, self.question.gpu, self.question.link)
        more = {name: getattr(peak, name) - (getattr(fitting.peak, name) if fitting else 0) for name in CATEGORIES}
        category = max(more, key=more.get)
        return Miss(self.recipe, self.report, time, self.needs - self.question.usable, category, more[category])


class Search:
    """The space of one question. `candidates`: its recipes."""

    def __init__(self, question: Question):
        batches = micro_batches(question)
        found = enumerate(family for method in question.methods for family in families(question, method))
        self.candidates = [Candidate(question, with_micro_batch(family, n), i) for i, family in found for n in batches]
        # Memory is least at either end: the whole batch at once accumulates no gradients.
        self.ends = [candidate for candidate in self.candidates if candidate.recipe.batch_size in (batches[0], 1)]

    @property
    def predicted(self) -> int:
        """How many candidates have been predicted so far."""
        return sum("report" in vars(candidate) for candidate in self.candidates)

    def ranked(self, method: str, top: int) -> tuple[list[Choice], list[Miss]]:
        """The `top` fastest recipes that fit, one of each family, and what is faster than the first and does not."""
        found: list[Candidate] = []
        missed: list[Candidate] = []
        families_done = set()
        for candidate in sorted((c for c in self.candidates if c.method == method), key=lambda c: c.rank):
            if candidate.family in families_done:
                continue
            if not candidate.fits:
                missed += [] if found else [candidate]
                continue
            families_done.add(candidate.family)
            if not any(differ_in_optimizer_only(candidate.recipe, other.recipe) for other in found):
                found.append(candidate)
            if len(found) == top:
                break
        if not found:
            return [], []
        next_faster = next((candidate for candidate in reversed(missed) if candidate.report), None)
        chosen = dict.fromkeys((next_faster, _lightest(missed)))
        misses = [candidate.miss(found[0].report) for candidate in chosen if candidate]
        return [candidate.choice() for candidate in found], misses

    def any_fit(self) -> Recipe | None:
        """One of the lightest recipes that fit, without offload if there is one; None if none fits."""
        offloads = {c: bool(c.recipe.sharding and c.recipe.sharding.offload) for c in self.ends}
        ends = sorted(self.ends, key=lambda c: (offloads[c], c.bound))
        return next((candidate.recipe for candidate in ends if candidate.fits), None)

    def lightest(self) -> Miss | None:
        """The recipe that needs least; None if nothing can be predicted."""
        found = _lightest(self.ends)
        return found and found.miss()


def _lightest(candidates: list[Candidate]) -> Candidate | None:
    """The candidate that needs least. In the order of their bounds, so that not all have to be predicted."""
    best = None
    for candidate in sorted(candidates, key=lambda candidate: candidate.bound):
        if best and candidate.bound >= best.needs:
            break
        if candidate.needs < (best.needs if best else math.inf):
            best = candidate
    return best


def order(seconds: float, recipe: Recipe) -> tuple:
    """Rank by time to three digits (the rest is noise), then by what is simpler."""
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


def differ_in_optimizer_only(recipe: Recipe, other: Recipe) -> bool:
    return recipe.replace(optim=other.optim) == other


def upper(report: Report, tier: str) -> int:
    """Upper end of the report's tier, in bytes; where loading takes more than training, by so much more."""
    value = report.peak.total if tier == "allocated" else getattr(report, tier)
    more = max(report.loading.total - report.peak.total, 0) if report.loading else 0
    return (value.high if isinstance(value, Interval) else value) + more
