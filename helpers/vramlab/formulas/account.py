"""Bytes by category at the peak and end of forward and backward, from a ledger with one or two layers of each stack.

One of the layers that are run stands for all others like it. With L layers, S bytes that one saves in the forward pass
and D that one adds in the backward pass, the bytes at a moment are those of the ledger plus (L - 2) · S from the second
layer on, and plus (L - 2) · (S + D) below it on the way back. Between top and bottom of a stack backward is affine.
"""

from collections.abc import Iterator
from functools import cached_property, lru_cache
from operator import attrgetter

from ..hardware.gpu import DEFAULT_CHIP, Chip
from ..hardware.overhead import torch_release
from ..recipe import lora_modules
from ..recipe.knobs import unchecked
from ..recipe.options import REPEATED, LoRA
from ..recipe.recipe import Recipe
from ..recipe.shapes import Shape
from ..report.errors import RecipeError
from . import model_states
from .deepspeed import DeepSpeedModel
from .fsdp import FsdpModel
from .fused_head import reference_recipe
from .ledger import Entry, Parameter, Tensor
from .model import ROOT, Model
from .model_states import Settings
from .repeated_keys import repeating

ENGINES = {"fsdp": FsdpModel, "deepspeed": DeepSpeedModel}  # whose ledger is another; DDP's ranks have the plain one
Extra = tuple[tuple[int, int, int], ...]  # what layers that are not run add: (how many, between event, and event)
Moment = tuple[int, Extra]  # an event, and what is added there
Split = dict[str, int]  # category to bytes
IN_LEDGER = ("gradients", "activations", "temporaries", "workspace")  # categories of its blocks
Groups = dict[tuple, list]  # equal blocks: (bytes, category, shape, width, operator) to [how many, where the first is]


class Account:
    """The forward and backward pass of one micro-batch; attributes that end in "end" are events.

    gradients_exist: new gradients are added to those of an earlier micro-batch, or zeroed in place.
    """

    def __init__(self, recipe: Recipe, chip: Chip = DEFAULT_CHIP):
        self.gradients_exist = recipe.gradient_accumulation_steps > 1 or not recipe.loop.set_to_none
        asked, recipe = recipe, model_states.compute_recipe(recipe)
        if recipe.shape.layout is None:
            raise RecipeError("model", recipe.name, f"predict does not know {recipe.shape.family}: ask simulate")
        kind = ENGINES.get(recipe.sharding and recipe.sharding.engine, Model)
        kind = repeating(kind) if recipe.attn_implementation == REPEATED else kind
        self.m = m = kind(recipe, _parameters(recipe), chip)
        m.shard(asked, self.gradients_exist)
        loss = self._forward()
        refers = recipe.trainer in ("dpo", "kto") and not recipe.precompute_ref_log_probs
        self.passes = [self._without_gradients(recipe, chip)] if refers else []
        self.forward_end = len(m.events)
        for entry in m.events:
            if entry.category == "temporaries" and entry() is not None:
                entry.category = "activations"
        m.backward(loss)
        del loss
        if not recipe.loop.keep_outputs:
            m.leaves.clear()
        m.finish()
        self.end = len(m.events)
        live, after = 0, [0]
        for event, entry in enumerate(m.events):
            if entry.birth is None:
                entry.birth = event
                live += entry.allocated
            else:
                entry.death = event
                live -= entry.allocated
            after.append(live)
        self.live = after  # bytes before the first event, and after each
        self.at_peaks: dict[str, Groups] = {}
        self.pieces = self._pieces()  # phase to (first event, last event, what layers that are not run add there)

    def _forward(self) -> Tensor:
        m = self.m
        logits, loss = m.logits_and_loss(m.hidden_states())
        m.casts.clear()
        self.autocast_end = len(m.events)
        logits = m.returned(logits)
        self.kept = [logits, *(m.caches or ())] if m.recipe.loop.keep_outputs else []
        m.caches = None
        m.leave(ROOT)
        return loss

    def _without_gradients(self, recipe: Recipe, chip: Chip) -> tuple[Model, int]:
        """Run the reference model while what the policy saved is there; return (model, event at which it is over)."""
        frozen = reference_recipe(recipe)
        kind = repeating(Model) if recipe.attn_implementation == REPEATED else Model
        model = kind(frozen, _parameters(frozen), chip)
        for parameter in model.parameters.values():
            parameter.needs = recipe.has_reference  # nobody freezes it: autocast keeps copies of its weights
        model.events, model.no_grad = self.m.events, True
        model.logits_and_loss(model.hidden_states())
        model.casts.clear()
        model.nodes.clear()  # which refer to the model
        model.table = None
        return model, len(model.events)

    def _pieces(self) -> dict[str, list[tuple[int, int, Extra]]]:
        """Cut each phase where a layer that stands for others begins or ends; backward's pieces overlap in that layer."""
        m, forward, backward, first, extra = self.m, [], [], 0, ()
        for model, over in ((m, self.autocast_end), *self.passes):
            for section in model.sections:
                forward.append((first, section.begin, extra))
                first, extra = section.begin, (*extra, (section.more, section.begin, section.end))
            forward.append((first, over, extra))
            for section in model.sections:  # autocast's copies that nothing kept when the context ended (checkpointing)
                for e in model.cast_entries:
                    if section.begin <= e.birth < section.end and e.death < over:
                        extra += ((-section.more, e.birth, e.birth + 1),)
            first = over
        forward.append((first, self.forward_end, extra))
        first = self.forward_end
        for section in reversed(m.sections):
            top, bottom = section.top, section.bottom
            backward.append((first, bottom, extra))
            first, extra = top, (*extra, (section.more, top, bottom))
            for e in m.events[: section.begin]:  # the first layer lets go of what all of them shared
                if e.op == "mask" and top <= e.death < bottom:
                    extra += ((-section.more, e.death, e.death + 1),)
        return {"forward": forward, "backward": [*backward, (first, self.end, extra)]}

    @cached_property
    def moments(self) -> dict[str, Moment]:
        """Return each phase's highest moment."""
        found, live = {}, self.live
        for phase, pieces in self.pieces.items():
            best = -1
            for first, last, extra in pieces:
                high = total = max(live[first : last + 1])
                for times, a, b in extra:
                    total += times * (live[b] - live[a])
                if total > best:
                    best, found[phase] = total, (live.index(high, first), extra)
        return found

    @cached_property
    def phases(self) -> list[Split]:
        """Return the splits at the peaks of forward and backward, then at their ends."""
        return self.splits([*self.moments.values(), *(pieces[-1][1:] for pieces in self.pieces.values())])

    def splits(self, moments: list[Moment]) -> list[Split]:
        """Return the split at each of `moments`, with all layers."""
        wanted = {event for event, _ in moments} | {e for _, extra in moments for _, a, b in extra for e in (a, b)}
        totals, at, begin, events = dict.fromkeys(IN_LEDGER, 0), {}, 0, self.m.events
        for stop in sorted(wanted):
            for entry in events[begin:stop]:
                if entry.death >= stop:
                    totals[entry.category] += entry.size
                elif entry.birth < begin:
                    totals[entry.category] -= entry.size
            at[stop], begin = dict(totals), stop
            at[stop]["workspace"] += self.live[stop] - sum(totals.values())  # what blocks hold beyond their sizes
        found = []
        for event, extra in moments:
            split = dict(at[event])
            split["gradients"] += self.m.other_gradients
            for times, a, b in extra:
                before, after = at[a], at[b]
                for category in IN_LEDGER:
                    split[category] += times * (after[category] - before[category])
            excess = min(split["activations"], 0)  # a layer's output that only the last one does not keep
            split["activations"] -= excess
            split["temporaries"] = max(split["temporaries"] + excess, 0)
            found.append(split)
        return found

    def alive(self, phase: str) -> Groups | None:
        """Group the blocks alive at the phase's peak, with all layers; None but for forward and backward."""
        if phase not in self.moments or phase in self.at_peaks:
            return self.at_peaks.get(phase)
        (event, extra), events = self.moments[phase], self.m.events
        times = {entry: 1 for entry in events[:event] if entry.death >= event}
        for n, a, b in extra:
            for entry in events[a:b]:
                if entry.birth < a or entry.death >= b:  # it dies or is born there, and not both
                    times[entry] = times.get(entry, 0) + (n if entry.death >= b else -n)
        found = self.at_peaks[phase] = {}
        for e in sorted((entry for entry, n in times.items() if n > 0), key=attrgetter("birth")):
            found.setdefault((e.size, e.category, e.shape, e.width, e.op), [0, e.where])[0] += times[e]
        return found

    def births(self) -> Iterator[tuple[int, Entry]]:
        """List (how many, entry) of all blocks of the micro-batch, with all layers."""
        sections = [s for model in (self.m, *(model for model, _ in self.passes)) for s in model.sections]
        for e in dict.fromkeys(self.m.events):
            inside = (s for s in sections if s.begin <= e.birth < s.end or s.top <= e.birth < s.bottom)
            times = 1 + sum(section.more for section in inside)
            yield times + sum(more for begin, end, more in self.m.repeats if begin <= e.birth < end), e


def kept_account(recipe: Recipe, chip: Chip) -> Account:
    """Return the account from a cache of the last few: recipes that differ only in optimizer or rank share one."""
    sharding = recipe.sharding if recipe.sharding and recipe.sharding.engine != "ddp" else None
    changes = {"sharding": sharding and unchecked(sharding, rank=0)}  # all ranks compute alike
    if not recipe.loop.optimizer_in_backward:
        changes |= {"optim": "sgd", "optim_args": None}
    steps = min(recipe.gradient_accumulation_steps, 2)
    return cached_account(Settings(recipe, gradient_accumulation_steps=steps, **changes), chip, torch_release())


@lru_cache(maxsize=32)
def cached_account(settings: Settings, chip: Chip, release: tuple[int, int]) -> Account:
    """Make the account of `settings.recipe` under the rules of torch's `release`, the one that holds now."""
    return Account(settings.recipe, chip)


def _parameters(recipe: Recipe) -> dict[str, Parameter]:
    """Make the parameters that the ledger needs, by name; a tied head is another name for the embedding."""
    shape, layers = recipe.shape, 3 if recipe.sharding and recipe.sharding.engine == "fsdp" else 2
    rows = _parameter_settings(shape, recipe.weights_dtype, recipe.quantization, recipe.lora, layers)
    found, head = {row[0]: Parameter(*row) for row in rows}, shape.head
    words = next((name for name, weight in found.items() if weight.shape[0] == shape.vocab_size), None)
    if f"{head}.weight" not in found and words:
        saved, table = model_states.trained_whole(shape, recipe.lora), found[words]
        trained = model_states.is_tied_head_copied(shape, saved)
        if trained or model_states.is_trained_whole(words, saved):  # a copy of one of them unties them
            table = Parameter(f"{head}.weight", table.shape, table.width, trained)
        found[f"{head}.weight"] = table
        if bias := found.get("cls.predictions.bias"):
            found[f"{head}.bias"] = bias
    return found


@lru_cache(maxsize=512)
def _parameter_settings(shape: Shape, dtype: str, quantization, lora: LoRA | None, layers: int) -> list[tuple]:
    """List (name, shape, width, trained, quantized) of the weights outside the layers and in the first layers."""
    table = model_states.cached_table(shape, (dtype, quantization, lora, "sgd", None, False))
    rows, whole, found = {(row.name, row.shape): row for row in table}, model_states.trained_whole(shape, lora), []
    for name, role, size in model_states.first_layers(shape, layers):
        row, copied = rows[role, size], bool(whole) and model_states.is_trained_whole(name, whole)
        found.append((name, size, row.width, row.trained or copied, None if copied else row.quantized))
    names = {row[0] for row in found}
    width = next((row.width for row in table if row.kind == "lora"), 0)
    for name, inside, out in lora_modules.adapted(shape, lora):
        if f"{name}.weight" in names or name == shape.head:
            for part, size in (("A", (lora.r, inside)), ("B", (out, lora.r))):
                found.append((f"{name}.lora_{part}", size, width, True, None))
    return found
