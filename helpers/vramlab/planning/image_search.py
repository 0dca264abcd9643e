"""The search behind a plan for samples with images, by simulation: no formula knows a tower.

Micro-batches have one sample. Where a processor cuts images to `max_pixels`, the largest that fits
is looked for: the peak rises with pixels nearly in a line, so few simulations find it.
"""

from collections.abc import Callable, Iterator

from ..base.errors import RecipeError
from ..hardware.overhead import expandable
from ..recipe import images
from ..recipe.options import HALF, REPEATED, Quantization
from ..recipe.process_context import context_of
from ..recipe.recipe import USUAL_LENGTH, Recipe
from ..report.report import TIERS, Interval, Report, format_bytes
from .candidate import TIGHT, Choice, simulate_briefly
from .changes import SHORTEST
from .counted import has_room, host_memory, refused_by_host
from .question import FLASH_SINCE, METHODS, Question
from .search_space import least_bytes, method_of, notes_on, precisions_to_try, rule_of

CLOSE = 1.03  # pixels that do not fit are at most so many times those that do
MOST_TRIED = 8  # sizes of images for one recipe
FIRST = 8  # the first size is that part of the whole
NONE = -1  # pixels of no image at all, not even a sample
MIXED = "-mixed"


class ImageSearch:
    """What is simulated for one question.

    Args:
        tell: called with how many simulations are done, and of how many at most: first with none,
            then after each.
    Attributes:
        reports: by recipe its simulation.
        found: the answers so far.
        refused: by method without any recipe: the rules.
        lacks: what would have to give, a sentence for each way that has no answer.
    """

    def __init__(
        self,
        question: Question,
        tell: Callable[["ImageSearch", int, int], None] | None = None,
    ) -> None:
        self.question = question
        self.tell = tell
        self.found: list[Choice] = []
        self.done = 0
        self.reports: dict[Recipe, Report] = {}
        self.refused: dict[str, tuple[str, ...]] = {}
        self.lacks: dict[str, str] = {}

    def choices(self) -> list[Choice]:
        """Return the answer of each method that has one, larger images first."""
        for number, method in enumerate(self.question.methods):
            self.done = number * MOST_TRIED
            self._tell()
            answer = self._answer(method)
            if answer:
                self.found.append(answer)
        return sorted(self.found, key=self._order)

    def _tell(self) -> None:
        """Say how far the search is."""
        most = len(self.question.methods) * MOST_TRIED
        if self.tell:
            self.tell(self, min(self.done, most), most)

    def _order(self, choice: Choice) -> tuple:
        return choice.tier in TIGHT, -_pixels(choice.recipe), METHODS.index(choice.method)

    def _answer(self, method: str) -> Choice | None:
        """Return the recipe of a method with the largest images, in the surest tier."""
        ways = list(self._ways(method))
        for tier in self.question.tiers:
            found = []
            for way in ways:
                largest = self._largest(way, tier)
                if largest:
                    found.append(largest)
                if largest and not largest[1]:  # the simplest of those with whole images
                    break
            if found:
                recipe, beyond = max(found, key=lambda one: _pixels(one[0]))
                return self._choice(self._quicker(recipe, beyond, tier), beyond)
        return None

    def _ways(self, method: str) -> Iterator[Recipe]:
        """Yield the recipes to try with whole images, the simpler ones first."""
        question = self.question
        refused = []
        optims = list(question.optims[:1])
        if method == "full":  # states in 8 bits, where those of 32 leave no room
            optims += [optim for optim in question.optims if "8bit" in optim][:1]
        for optim in dict.fromkeys(optims):
            try:
                recipe = question.plain.replace(optim=optim, **self._fields(method))
            except RecipeError as error:
                refused.append(rule_of(error))
                continue
            if has_room(question, recipe):
                yield recipe
            else:
                refused.append(refused_by_host(question))
        if refused:
            self.refused[method] = tuple(dict.fromkeys(refused))

    def _fields(self, method: str) -> dict:
        question = self.question
        precisions = list(question.precisions or precisions_to_try(question.gpu, method))
        # "-true" would round away what full training updates
        precision = min(precisions, key=lambda name: not name.endswith(MIXED))
        fields = {
            "precision": precision,
            "trainer": "sft" if question.may_use_sft() else question.plain.trainer,
            "gradient_checkpointing": max(question.checkpointing),
            "gradient_accumulation_steps": question.samples_per_gpu,
        }
        attention = question.attention
        has_flash = question.gpu.compute_capability >= FLASH_SINCE
        if REPEATED in attention and question.plain.shape.shares_keys and not has_flash:
            attention = (REPEATED,)  # a micro-batch of one sample has no mask
        if len(attention) == 1:
            fields["attn_implementation"] = attention[0]
        if method == "full":
            return fields
        fields["lora"] = None if question.peft else question.lora
        fields["peft"] = question.peft
        if method == "lora":
            # a frozen base in fp32 would be cast anew in every step
            fields["dtype"] = HALF.get(precision.removesuffix(MIXED))
        else:
            fields["quantization"] = Quantization("nf4", double=True, prepare=False)
        return fields

    def _quicker(self, recipe: Recipe, beyond: int | None, tier: str) -> Recipe:
        """Return the recipe without recomputation where its images are whole and it fits so."""
        if beyond or not recipe.gradient_checkpointing or all(self.question.checkpointing):
            return recipe
        keeping = recipe.replace(gradient_checkpointing=False)
        return keeping if self._end(keeping, tier) <= self.question.usable else recipe

    def _largest(self, way: Recipe, tier: str) -> tuple[Recipe, int | None] | None:
        """Return the recipe with the largest images that fit in a tier.

        With it come the least pixels that were seen not to fit, None where images are whole.
        """
        usable = self.question.usable
        name = f"{method_of(way)} with {way.optim}"
        held = least_bytes(way)
        # A bound that takes no simulation.
        if held > usable:
            size = format_bytes(held, digits=2)
            self.lacks[name] = f"{name}: weights, gradients and states alone are {size}"
            return None
        whole = _pixels(way)
        least = min(images.least_pixels(way) or whole, whole)
        recipes = {whole: way}
        ends = {NONE: held}
        pixels = max(least, whole // FIRST) if least < whole else whole
        # Ends when the next size is one that was tried, since sizes are rounded to the processor's
        # grid.
        while pixels not in ends and len(ends) <= MOST_TRIED:
            if pixels not in recipes:
                cut = way.replace(max_pixels=pixels, seq_len=self.question.seq_len)
                recipes[pixels] = cut
            ends[pixels] = self._end(recipes[pixels], tier)
            following = _next(ends, usable, whole)
            pixels = max(least, images.rounded(way, following) if following < whole else whole)
        fits = max(size for size, end in ends.items() if end <= usable)
        if fits == NONE:
            fewest = min(recipes.keys() & ends.keys())
            needed = format_bytes(ends[fewest], digits=2)
            self.lacks[name] = f"{name}: with images of {fewest:,} pixels it takes {needed}"
            return None
        over = [size for size in ends if size > fits]
        return recipes[fits], min(over, default=None)

    def _end(self, recipe: Recipe, tier: str) -> int:
        """Return the bytes of the process that decide whether it fits in a tier."""
        return getattr(self._needs(recipe), TIERS[tier])

    def _needs(self, recipe: Recipe) -> Interval:
        question = self.question
        report = self.reports.get(recipe)
        if report is None:
            simulated = simulate_briefly(recipe, question, recipe.shape.num_layers)
            if isinstance(simulated, str):
                raise RecipeError("model", recipe.name, f"its plan is simulated, and {simulated}")
            report = self.reports[recipe] = simulated
            self.done += 1
            self._tell()
        if not question.expandable_segments:
            return Interval.of(report.process or 0)
        peak = max(report.allocated or 0, report.peak.total)
        loading = report.loading.total if report.loading else 0
        return expandable(max(peak, loading)) + context_of(recipe, question.gpu)

    def _choice(self, recipe: Recipe, beyond: int | None) -> Choice:
        report = self.reports[recipe]
        needs = self._needs(recipe)
        notes = list(notes_on(recipe, self.question.gpu))
        if recipe.images and beyond:
            most = max(images.tokens(recipe))
            size = f"{recipe.max_pixels:,} pixels, {most:,} tokens each"
            notes.append(f"the largest images that fit: {size}; {beyond:,} pixels do not fit")
        elif recipe.images:
            notes.append(f"whole images fit: {max(images.tokens(recipe)):,} tokens each")
        left = recipe.seq_len - len(images.shown(recipe))
        notes.append(_about_text(recipe, left))
        return Choice(
            recipe=recipe,
            report=report,
            time=None,
            needs=needs,
            by_default=Interval.of(report.process or 0),
            tier=needs.tier(self.question.usable),
            host=host_memory(recipe),
            notes=tuple(notes),
            text_tokens=left,
        )


def _about_text(recipe: Recipe, left: int) -> str:
    """Return how many tokens a sample's images leave for its text, and what to ask if too few."""
    said = f"{left:,} of {recipe.seq_len:,} tokens are left for text, the chat template's included"
    # Of which Qwen3-VL's chat template takes a dozen. Nor does plan advise shorter texts.
    if left >= SHORTEST:
        return said
    enough = recipe.seq_len - left + USUAL_LENGTH
    return (
        f"{said}: nearly every sample is longer, and the program leaves it out; --tokens {enough}"
    )


def _pixels(recipe: Recipe) -> int:
    """Return the pixels of a sample's largest image as the processor hands it on."""
    sides = [height * width for height, width in images.sides(recipe)]
    return min(max(sides, default=0), images.most_pixels(recipe))


def _next(ends: dict[int, int], usable: int, whole: int) -> int:
    """Return the pixels to try next, by a line through the nearest two that were tried.

    Pixels known already where there are none between; `ends` are bytes by pixels.
    """
    below = max(size for size, end in ends.items() if end <= usable)
    above = min((size for size, end in ends.items() if end > usable), default=0)
    if below == whole or 0 < above <= CLOSE * below:
        return below
    near = below
    other = above
    if below == NONE or not above:  # all that were tried are on one side
        tried = sorted(ends, key=lambda size: abs(ends[size] - usable))
        if len(tried) > 2:
            tried.remove(NONE)  # which is a bound, and none of these
        near, other = tried[:2]
    rise = (ends[near] - ends[other]) / (near - other)
    # Where the line through both reaches what is usable.
    guess = near + (usable - ends[near]) / rise if rise > 0 else whole
    # so that it moves at all, and ends
    most = above / CLOSE if above else whole
    return int(min(max(guess, below * CLOSE), most))
