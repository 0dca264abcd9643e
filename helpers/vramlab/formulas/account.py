"""Bytes by category at the peaks and ends of a micro-batch, from one or two layers of each stack.

One of the layers that are run stands for all others like it. With L layers, S bytes that one saves
in the forward pass and D that one adds in the backward pass, the bytes at a moment are those of
the ledger plus (L - 2) · S from the second layer on, and plus (L - 2) · (S + D) below it on the
way back. Between top and bottom of a stack backward is affine.
"""

from collections.abc import Iterator
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import NamedTuple

from ..base.errors import RecipeError
from ..hardware.gpu import DEFAULT_CHIP, Chip
from ..hardware.overhead import torch_release
from ..recipe.knobs import unchecked
from ..recipe.recipe import Recipe
from . import model_states
from .deepspeed_memory import DeepSpeedEngine
from .engine_memory import ROOT, Engine
from .fsdp_memory import FsdpEngine
from .fused_head import reference_recipe
from .graph import Tensor
from .ledger import Ledger
from .memory import NEVER, Entry
from .model import Model
from .model_states import Settings
from .parameters import parameters_of

# DDP's ranks do in a micro-batch what one device does.
ENGINES = {"fsdp": FsdpEngine, "deepspeed": DeepSpeedEngine}
# What layers that are not run add: (how many, between event, and event).
Extra = tuple[tuple[int, int, int], ...]
Moment = tuple[int, Extra]  # an event, and what is added there
Piece = tuple[int, int, Extra]  # first event, last event, what is added to all of them
Split = dict[str, int]  # category to bytes
IN_LEDGER = ("gradients", "activations", "temporaries", "workspace")  # categories of its blocks
# Equal blocks: (bytes, category, shape, width, operator) to [how many, where the first is].
Groups = dict[tuple, list]


class Splits(NamedTuple):
    """Bytes by category at the peaks of forward and backward, and at their ends."""

    forward: Split
    backward: Split
    forward_end: Split
    backward_end: Split


def refuse_unknown(recipe: Recipe) -> None:
    """Raise RecipeError for a recipe whose model's family the formulas do not know."""
    if recipe.shape.layout is None:
        allowed = f"predict does not know {recipe.shape.family}: ask simulate"
        raise RecipeError("model", recipe.name, allowed)


class Account:
    """The forward and backward pass of one micro-batch; attributes that end in "end" are events.

    Attributes:
        gradients_exist: new gradients are added to those of an earlier micro-batch, or zeroed in
            place.
        live: bytes before the first event, and after each.
        passes: (model, event at which it is over) of models that run without gradients.
        pieces: by phase, its events in stretches to which the same is added for layers that are
            not run.
    Raises:
        RecipeError: the formulas do not know the family.
    """

    def __init__(self, recipe: Recipe, chip: Chip = DEFAULT_CHIP):
        self.gradients_exist = recipe.gradient_accumulation_steps > 1 or not recipe.loop.set_to_none
        asked = recipe
        recipe = model_states.compute_recipe(asked)
        refuse_unknown(recipe)
        ledger = Ledger(chip)
        parameters = parameters_of(recipe)
        kind: type[Engine] = Engine
        if recipe.sharding:
            kind = ENGINES.get(recipe.sharding.engine, Engine)
        self.recipe = recipe
        self.ledger = ledger
        self.engine = kind(ledger, parameters, asked, recipe)
        self.engine.begin(self.gradients_exist)
        self.model = Model(recipe, parameters, ledger, self.engine)

        loss = self._forward()
        self.passes: list[tuple[Model, int]] = []
        # TRL computes the reference's log-probabilities in the step, between the policy's forward
        # and backward pass, unless they are columns of the data set.
        if recipe.trainer in ("dpo", "kto") and not recipe.precompute_ref_log_probs:
            self.passes.append(self._without_gradients(chip))
        self.forward_end = len(ledger.events)
        for entry in ledger.events:
            # What lives into backward was saved for it.
            if entry.category == "temporaries" and entry() is not None:
                entry.category = "activations"
        ledger.backward(loss, self.engine.complete)
        # The caller names the loss while backward runs, and lets go of it now.
        del loss
        # The graph goes with the loss, and its leaves with it.
        if not recipe.loop.keep_outputs:
            ledger.leaves.clear()
        self.engine.finish()
        self.end = len(ledger.events)
        self.live = _number(ledger.events)
        self.at_peaks: dict[str, Groups] = {}
        forward, extra = self._forward_pieces()
        self.pieces = {"forward": forward, "backward": self._backward_pieces(extra)}

    def _forward(self) -> Tensor:
        """Run the model; return the loss, and keep the outputs that the loop keeps."""
        ledger = self.ledger
        model = self.model
        logits, loss = model.forward()
        # Autocast's context ends after the model, and its cache with it.
        ledger.casts.clear()
        self.autocast_end = len(ledger.events)
        logits = model.head.returned(logits)
        caches = model.take_caches()
        self.kept = [logits, *caches] if self.recipe.loop.keep_outputs else []
        del caches
        self.engine.leave(ROOT)
        return loss

    def _without_gradients(self, chip: Chip) -> tuple[Model, int]:
        """Run the reference model beside what the policy saved; return an item of `passes`."""
        frozen = reference_recipe(self.recipe)
        parameters = parameters_of(frozen)
        for parameter in parameters.values():
            # Nobody freezes a model of its own, so autocast keeps copies of its weights.
            parameter.needs = self.recipe.has_reference
        ledger = Ledger(chip, self.ledger.events, no_grad=True)
        model = Model(
            frozen,
            parameters,
            ledger,
            Engine(ledger, parameters, frozen, frozen),
        )
        model.forward()
        ledger.casts.clear()
        ledger.nodes.clear()  # which refer to the model
        model.table = None
        return model, len(ledger.events)

    def _forward_pieces(self) -> tuple[list[Piece], Extra]:
        """Cut the forward pass where a layer that stands for others begins.

        Returns:
            The pieces, and what is added at the end of the pass.
        """
        pieces = []
        first = 0
        extra: Extra = ()
        for model, over in [(self.model, self.autocast_end), *self.passes]:
            for section in model.sections:
                pieces.append((first, section.begin, extra))
                first = section.begin
                extra = (*extra, (section.more, section.begin, section.end))
            pieces.append((first, over, extra))
            extra += _dropped_casts(model, over)
            first = over
        pieces.append((first, self.forward_end, extra))
        return pieces, extra

    def _backward_pieces(self, extra: Extra) -> list[Piece]:
        """Cut the backward pass there too; pieces overlap in a layer that stands for others."""
        pieces = []
        first = self.forward_end
        for section in reversed(self.model.sections):
            pieces.append((first, section.bottom, extra))
            first = section.top
            extra = (*extra, (section.more, section.top, section.bottom))
            for entry in self.ledger.events[: section.begin]:
                # The first layer lets go of what all of them shared.
                if entry.op == "mask" and section.top <= entry.death < section.bottom:
                    extra += ((-section.more, entry.death, entry.death + 1),)
        pieces.append((first, self.end, extra))
        return pieces

    @cached_property
    def moments(self) -> dict[str, Moment]:
        """Return each phase's highest moment."""
        live = self.live
        moments = {}
        for phase, pieces in self.pieces.items():
            best = -1
            for first, last, extra in pieces:
                # Within a piece the same is added to every event, so the highest event of what is
                # run is the highest with all layers.
                high = max(live[first : last + 1])
                total = high
                for times, begin, end in extra:
                    total += times * (live[end] - live[begin])
                if total > best:
                    best = total
                    moments[phase] = (live.index(high, first), extra)
        return moments

    @cached_property
    def phases(self) -> Splits:
        """Return the splits at the peaks of forward and backward, then at their ends."""
        moments = [*self.moments.values()]
        for pieces in self.pieces.values():
            _, last, extra = pieces[-1]
            moments.append((last, extra))
        return Splits(*self.splits(moments))

    def splits(self, moments: list[Moment]) -> list[Split]:
        """Return the split at each of `moments`, with all layers."""
        wanted = set()
        for event, extra in moments:
            wanted.add(event)
            for _, begin, end in extra:
                wanted.add(begin)
                wanted.add(end)
        at = self._totals(sorted(wanted))
        splits = []
        for event, extra in moments:
            split = dict(at[event])
            split["gradients"] += self.engine.other_gradients
            for times, begin, end in extra:
                before = at[begin]
                after = at[end]
                for category in IN_LEDGER:
                    split[category] += times * (after[category] - before[category])
            # A layer's output that only the last one does not keep counts as one less of each
            # other.
            missing = min(split["activations"], 0)
            split["activations"] -= missing
            split["temporaries"] = max(split["temporaries"] + missing, 0)
            splits.append(split)
        return splits

    def _totals(self, stops: list[int]) -> dict[int, Split]:
        """Return the ledger's bytes by category before each event of `stops`, in one walk."""
        events = self.ledger.events
        totals = dict.fromkeys(IN_LEDGER, 0)
        at = {}
        begin = 0
        for stop in stops:
            # A block that is born and freed between two stops meets neither condition and drops
            # out.
            for entry in events[begin:stop]:
                if entry.death >= stop:  # born since `begin`, and still there
                    totals[entry.category] += entry.size
                elif entry.birth < begin:  # dead since
                    totals[entry.category] -= entry.size
            begin = stop
            split = dict(totals)
            # What blocks hold beyond their sizes is in `live` alone.
            split["workspace"] += self.live[stop] - sum(totals.values())
            at[stop] = split
        return at

    def cause(self, phase: str) -> tuple[str, str, Entry] | None:
        """Return (direction, module, block) of what was allocated last before a phase's peak.

        A layer that stands for others has "*" for its number. None where the peak is at the
        phase's begin, or where a block was freed last.
        """
        event, _ = self.moments[phase]
        if event == 0:
            return None
        entry = self.ledger.events[event - 1]
        if entry.birth != event - 1 or (phase == "backward" and event <= self.forward_end):
            return None
        direction = phase
        for first, end in self.ledger.recomputed:
            if first <= entry.birth < end:
                direction = "recomputation"
        where = entry.where
        for section in self.model.sections:
            forward = section.begin <= entry.birth < section.end
            if section.more and (forward or section.top <= entry.birth < section.bottom):
                name, _, _ = where.rpartition(".")
                where = f"{name}.*"
        return direction, where, entry

    def alive(self, phase: str) -> Groups | None:
        """Group the blocks alive at the peak of forward or backward, with all layers; else None."""
        if phase not in self.moments or phase in self.at_peaks:
            return self.at_peaks.get(phase)
        event, extra = self.moments[phase]
        events = self.ledger.events
        times = {entry: 1 for entry in events[:event] if entry.death >= event}
        for count, begin, end in extra:
            for entry in events[begin:end]:
                survives = entry.death >= end
                if entry.birth < begin or survives:  # it dies or is born there, and not both
                    change = count if survives else -count
                    times[entry] = times.get(entry, 0) + change
        # What each layer that is not run frees comes to less than nothing.
        alive = [entry for entry, count in times.items() if count > 0]
        groups: Groups = {}
        for entry in sorted(alive, key=attrgetter("birth")):
            key = (entry.size, entry.category, entry.shape, entry.width, entry.op)
            group = groups.setdefault(key, [0, entry.where])
            group[0] += times[entry]
        self.at_peaks[phase] = groups
        return groups

    def calls(self) -> int:
        """Return the calls of the host for the micro-batch, with all layers (`calls.py`)."""
        total = 0
        models = [self.model]
        models += [model for model, _ in self.passes]
        for model in models:
            total += model.ledger.calls
            for section in model.sections:
                total += section.more * section.calls
        return total

    def births(self) -> Iterator[tuple[int, Entry]]:
        """List (how many, entry) of all blocks of the micro-batch, with all layers."""
        models = [self.model]
        models += [model for model, _ in self.passes]
        sections = [section for model in models for section in model.sections]
        for entry in dict.fromkeys(self.ledger.events):
            times = 1
            # A block of a layer that stands for others is born in each of them.
            for section in sections:
                forward = section.begin <= entry.birth < section.end
                backward = section.top <= entry.birth < section.bottom
                if forward or backward:
                    times += section.more
            for begin, end, more in self.ledger.repeats:
                if begin <= entry.birth < end:
                    times += more
            yield times, entry


def _number(events: list[Entry]) -> list[int]:
    """Give each entry its birth and death; return `Account.live`."""
    live = 0
    after = [0]
    for event, entry in enumerate(events):
        if entry.birth == NEVER:
            entry.birth = event
            live += entry.allocated
        else:
            entry.death = event
            live -= entry.allocated
        after.append(live)
    return after


def _dropped_casts(model: Model, over: int) -> Extra:
    """Take off autocast's copies that nothing kept when its context ended at `over`."""
    dropped: Extra = ()
    for section in model.sections:
        for entry in model.ledger.cast_entries:
            if section.begin <= entry.birth < section.end and entry.death < over:
                dropped += ((-section.more, entry.birth, entry.birth + 1),)
    return dropped


def kept_account(recipe: Recipe, chip: Chip) -> Account:
    """Return the account from a cache of the last few.

    Recipes that differ only in optimizer or rank share one.
    """
    sharding = recipe.sharding
    if sharding and sharding.engine == "ddp":
        sharding = None
    changes = {"sharding": sharding and unchecked(sharding, rank=0)}  # all ranks compute alike
    # Forward and backward do not ask for the optimizer unless it updates in backward, so all
    # others share an account.
    if not recipe.loop.optimizer_in_backward:
        changes["optim"] = "sgd"
        changes["optim_args"] = None
    # The second micro-batch of a step adds to the first one's gradients, and so do all that follow.
    steps = min(recipe.gradient_accumulation_steps, 2)
    settings = Settings(recipe, gradient_accumulation_steps=steps, **changes)
    return cached_account(settings, chip, torch_release())


@lru_cache(maxsize=32)
def cached_account(settings: Settings, chip: Chip, release: tuple[int, int]) -> Account:
    """Make the account of `settings.recipe` under the rules of torch's `release`."""
    return Account(settings.recipe, chip)
