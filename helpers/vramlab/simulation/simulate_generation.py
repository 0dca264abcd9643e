"""`generate` on fake tensors: prefill and decoding, with every layer's cache.

What a decoding step takes depends on how many tokens the cache has, and not on how it came to them.
So a step far from the prompt is run after a prompt that is as long as the cache is then, and the
steps between two that do the same operations need not run: each tensor in them is at least as large
as in the first and at most as large as in the last. Deep models are run shallow, and the log is
deepened, as in training.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..base.errors import RecipeError, VramLabError, needing
from ..hardware.contexts import Room
from ..hardware.gpu import Gpu, find_gpu
from ..recipe.generation import Generation, as_generating
from ..recipe.process_context import room_on
from ..recipe.recipe import Recipe
from ..report.report import Report
from ..tracking.fake_tracker import FakeTracker
from ..tracking.history import History, Log, bytes_of, to_report
from ..tracking.tracked import run_tracked_generation
from ..tracking.tracker import Event, Mark, Storage
from ..training.fixed_generation import build_generation
from ..training.quiet import no_collection
from . import fakes
from .deepen import deepen
from .fakes import fake_world
from .quantized_caches import packed
from .quantized_loading import loading_peak, unused_after_loading
from .repetition import NotRegular, Repetition, find
from .shallow import is_written_down, may_be_deepened, shallow_recipe
from .simulate import (
    check_target,
    load_libraries,
    make_tracker,
)
from .values import Values, reason_at

FIRST = 3  # decoding steps that are run after the real prompt
# Those after a longer one until the cache has no tensor of its prefill any more, and then kept.
SETTLING = 2
LAST = 2
LASTING = ("given", "cublas")  # makers of what is there all the time


@needing("simulate_generation")
@no_collection(before=False)
def simulate_generation(
    recipe: Recipe | Any,
    prompt: int = Generation.prompt,
    new_tokens: int = Generation.new_tokens,
    target: str = "cuda",
    gpu: str | Gpu | None = None,
    *,
    full: bool = False,
    other_memory: int = 0,
    expandable_segments: bool = False,
    **options: Any,
) -> Report:
    """Return where every byte would be while `generate` answers a batch of prompts.

    transformers' own `generate` runs on fake tensors. The phases are "load", "prefill" (the
    prompts' forward pass and the first token) and "decode" (all the others, at the highest step);
    what the cache holds is `kv_cache`.

    Args:
        recipe: the model, its precision, batch size (of prompts), quantization, adapters and
            attention; what trains is not asked for. Or a model's name: one prompt, and the
            precision of its published weights.
        prompt: tokens of each prompt; of a model with an encoder those that it reads. Speech models
            have half a minute of sound instead.
        new_tokens: made for each prompt: none ends early.
        options: other fields of `Generation`. target, gpu, other_memory, expandable_segments: as
            for `simulate`.
        full: run every layer and every step, also those that must lie below others (equal, and
            slower).
    Raises:
        RecipeError: a model that does not generate, or not on fake tensors; more tokens than it has
            positions; a cache whose package is missing.
    """
    check_target(target)
    generation = Generation(prompt, new_tokens, **options)
    recipe = as_generating(recipe)
    generation.check_model(recipe)
    card = find_gpu(gpu) if gpu else None
    room = room_on(recipe, card, other_memory, expandable_segments)
    history = trace_generation(recipe, generation, target, card, full, room)
    return to_report(
        history,
        "simulated",
        recipe,
        target,
        title=generation.title(recipe),
        notes=history.notes,
        loading=loading_peak(recipe, target),
        unused=unused_after_loading(recipe, target),
    )


def trace_generation(
    recipe: Recipe,
    generation: Generation,
    target: str = "cuda",
    card: Gpu | None = None,
    full: bool = False,
    room: Room | None = None,
) -> History:
    """Return the history of every storage while `generation` runs.

    Unless `full` it has the first and the last steps and those where another operation begins, of a
    shallow run that is deepened.
    """
    notes: list[str] = []
    runs = _Runs(recipe, generation, target, card)
    layers = None
    # a static cache makes a counter for each layer before they run; on CUDA it is the host's
    counts = target == "cpu" and generation.cache_implementation == "static"
    if not (full or counts) and may_be_deepened(recipe, target):
        try:
            layers = find(recipe.shape)
        except NotRegular as error:
            notes.append(f"all {recipe.shape.num_layers} layers were run: {error}")
    try:
        parts = runs.parts(layers, full)
    except NotRegular as error:
        if layers is None:
            raise
        notes.append(f"all {recipe.shape.num_layers} layers were run: {error}")
        parts = runs.parts(None, full)
    log, marks = joined(parts)
    return History(log, marks, target == "cuda", room, notes + runs.notes)


@dataclass
class Part:
    """Some decoding steps in a row, of one run: the first comes with all before it."""

    events: list[Event]
    decode: int  # where the first step of the run begins in them
    marks: list[Mark]  # one at the begin of each kept step, and at the end of the last
    first: int  # number of the first step that is kept
    last: int
    # what the first and the last kept step do
    does: tuple[list, list]


@dataclass
class _Runs:
    """Runs of one generation, each from another step on."""

    recipe: Recipe
    generation: Generation
    target: str
    card: Gpu | None

    def __post_init__(self) -> None:
        self.notes: list[str] = []
        self.layers: Repetition | None = None

    def parts(self, layers: Repetition | None, full: bool) -> list[Part]:
        """Return the steps that may have the peak, in order. Raises NotRegular."""
        self.layers = layers if layers and layers.depth > layers.shallow else None
        asked = self.generation
        steps = asked.new_tokens - 1  # the first token is prefill's
        period = asked.period
        # all of the last two times that the cache changes its form
        behind = SETTLING + LAST if period == 1 else 2 * period
        # beams have tensors as long as all that is still to come, speech models no longer prompt
        runs_all = full or asked.num_beams > 1 or self.recipe.shape.features
        if runs_all or steps <= FIRST + behind:
            return [self.part(0, steps)]
        begin = self.part(0, FIRST)
        skipped = (steps - behind) // period * period
        end = self.part(skipped, steps - skipped)
        return [begin, *self.between(begin, end), end]

    def between(self, low: Part, high: Part) -> Iterator[Part]:
        """Yield the steps at which operations change, between two parts."""
        # The last step of one part and the first of the next do the same operations, so all
        # between them lie between these two in every size.
        if high.first - low.last < 2 or low.does[1] == high.does[0]:
            return
        if self.generation.period > 1:
            return
        # Halved until neighbours agree: a change is found in as many runs as the logarithm of the
        # steps.
        middle = (low.last + high.first) // 2
        part = self.part(middle - SETTLING - 1, SETTLING + LAST)
        yield from self.between(low, part)
        yield part
        yield from self.between(part, high)

    def part(self, skipped: int, steps: int) -> Part:
        """Run `steps` decoding steps after `skipped` ones, and return those that are as in one run.

        Raises NotRegular.
        """
        layers = self.layers
        recipe = shallow_recipe(self.recipe, layers) if layers else self.recipe
        tracker = self.run(recipe, skipped, steps)
        log: Log | list[Event] = tracker.log
        marks = tracker.marks
        if layers:
            log, marks = deepen(tracker, layers, layers.more)
            if not skipped and not is_written_down(self.recipe):
                self.check(tracker, layers, steps)
        self.notes += [note for note in tracker.notes if note not in self.notes]
        return _part(list(log), marks, skipped, steps, tracker)

    def check(self, tracker: FakeTracker, layers: Repetition, steps: int) -> None:
        """Raise NotRegular where one group of layers more takes something else than deepened."""
        whole = self.run(shallow_recipe(self.recipe, layers, 1), 0, steps)
        deepened = History(*deepen(tracker, layers, 1)).moments()
        if bytes_of(deepened) != bytes_of(History(whole.log, whole.marks).moments()):
            depth = layers.shallow + layers.period
            raise NotRegular(f"{depth} layers take something else than their repetition says")

    def run(self, recipe: Recipe, skipped: int, steps: int) -> FakeTracker:
        """Return the tracker of a run whose prompt has `skipped` tokens more.

        Raises RecipeError where it does not run on fake tensors.
        """
        load_libraries(recipe)
        with (
            fakes.lock,
            fake_world(self.target, self.card) as (mode, kernels),
            packed(self.generation),
        ):
            try:
                started = build_generation(recipe, self.generation, skipped)
                tracker = make_tracker(started, self.card, kernels)
                if recipe.shape.features:  # it reads how much sound it has heard
                    tracker.values = Values(mode)
                return run_tracked_generation(started, tracker, steps + 1)
            except VramLabError:
                raise
            # each model class has its own ways to fail, and to read values that a fake lacks
            except Exception as error:
                why = f"its generate does not run on fake tensors: {reason_at(error)}"
                rest = f"{why}; measure_generation(recipe) runs it for real"
                raise RecipeError("model", self.recipe.name, rest) from error


def _part(
    events: list[Event],
    marks: list[Mark],
    skipped: int,
    steps: int,
    tracker: FakeTracker,
) -> Part:
    """Return what of a run is as in the whole generation.

    Its `marks` are prefill's, one for each step and the last one's end.
    """
    unsettled = SETTLING if skipped else 0
    kept = marks[unsettled + 1 :] if skipped else marks
    does = []
    for step in (unsettled + 1, steps):
        # phases that have begun when it runs: those of the steps before it, prefill and itself
        does.append([(call.op, call.where) for call in tracker.calls if call.marks == step + 1])
    first, last = does
    return Part(events, marks[1][0], kept, skipped + unsettled + 1, skipped + steps, (first, last))


def joined(parts: list[Part]) -> tuple[list[Event], list[Mark]]:
    """Return the log and marks of all `parts`, in which nothing happens between two of them.

    What one leaves is freed and what the next one finds is born, in this order, so that nothing is
    higher there than in the steps themselves.
    """
    log: list[Event] = []
    marks: list[Mark] = []
    alive: list[Storage] = []
    for number, part in enumerate(parts):
        is_last = number == len(parts) - 1
        start = part.marks[0][0] if number else 0
        # the last one's end is that of the whole
        end = len(part.events) if is_last else part.marks[-1][0]
        same = _counterparts(part, parts[0])
        log += [(-storage.size, storage, "free") for storage in alive]
        for storage in _alive(part.events[:start]):
            if storage not in same:
                log.append((storage.size, storage, storage.op))
        # Marks count the events of their own run.
        shift = len(log) - start
        kept = part.marks if is_last else part.marks[:-1]
        marks += [(position + shift, name) for position, name in kept]
        for size, storage, op in part.events[start:end]:
            storage = same.get(storage, storage)
            log.append((storage.size if size > 0 else -storage.size, storage, op))
        alive = [storage for storage in _alive(part.events[:end]) if storage not in same]
    return log, marks


def _counterparts(part: Part, first: Part) -> dict[Storage, Storage]:
    """Return what is there all the time in `part`, and the same of the `first` one.

    That is the model, its prompts, cuBLAS's workspace, and what `generate` itself made of the
    prompts before the first step and holds on to: of a longer prompt it is longer. Raises
    NotRegular.
    """
    own = _lasting(part)
    others = _lasting(first)
    if [storage.dtype for storage in own] != [storage.dtype for storage in others]:
        raise NotRegular("what generate keeps of a prompt depends on its length")
    return dict(zip(own, others, strict=True))


def _lasting(part: Part) -> list[Storage]:
    early = part.events[: part.decode]
    end = part.marks[-1][0]
    lasting = []
    for storage in _alive(part.events[:end]):
        if storage.op in LASTING:
            lasting.append(storage)
    made = {storage for _, storage, _ in early}
    for storage in _alive(part.events[:end]):
        is_cached = storage.category == "kv_cache"
        if storage in made and not (storage.where or is_cached or storage.op in LASTING):
            lasting.append(storage)
    return lasting


def _alive(events: list[Event]) -> list[Storage]:
    """Return the storages that `events` make and do not free, in the order of birth."""
    alive: dict[Storage, None] = {}
    for size, storage, _ in events:
        if size > 0:
            alive[storage] = None
        else:
            alive.pop(storage, None)
    return list(alive)
