"""A recipe's step in the ledger, read off: bytes by category at every peak, for all layers.

A layer or two of each stack are written out, and one stands for all the others. With L layers, S bytes that one keeps
in the forward pass and D that one adds in the backward pass (its gradients, less what it frees), the bytes at a moment
are those of the ledger plus (L - 2) · S from the second layer on, and plus (L - 2) · (S + D) below it on the way back.
Backward's peak in a layer is at the top of the stack or at the bottom, for between them it is affine.
"""

import dataclasses
from functools import cached_property, lru_cache
from itertools import accumulate

from ..hardware.gpu import DEFAULT_CHIP, Chip
from ..recipe.options import LoRA
from ..recipe.recipe import Recipe
from ..recipe.shapes import Shape
from ..report.report import CATEGORIES
from . import step
from .fsdp import ROOT, OneByOne, Units, at_once, computed, copies_outputs, divides, own_linear
from .ledger import PASS, Entry, Hook, Parameter, Tensor
from .model_states import is_saved, lora_targets, saved_modules, table, written_out
from .nearest import nearest
from .slices import cut, model_of

SHARED = ("zeros", "mask")
# What the layers that are not written out add at a moment: times what one adds between two events.
Extra = tuple[tuple[int, int, int], ...]
Moment = tuple[int, Extra]


class Account:
    """The ledger of one micro-batch, read off.

    Args:
        gradients_exist: from an earlier micro-batch, or because they are zeroed in place: new ones are added to those.

    Attributes:
        approximate: the architecture is not written down; activations are those of a decoder of its matrices.
        live: bytes alive after each event, as written out.
        pieces: phase to (first event, last event, what the layers not written out add there).
        kept: what the loop keeps alive after the step.
    """

    def __init__(self, recipe: Recipe, chip: Chip = DEFAULT_CHIP, gradients_exist: bool = False):
        asked, recipe = recipe, computed(recipe)
        shape, lora = recipe.shape, recipe.lora
        self.approximate = shape.layout is None
        if self.approximate:
            shape = nearest(recipe)
        self.m = m = model_of(recipe)(recipe, shape, parameters(recipe, shape, lora), chip)
        self.units = units = m.units = Units(m, asked, gradients_exist) if divides(recipe) else None
        m.own_linear = own_linear(asked)
        if gradients_exist and not units:
            for parameter in m.parameters.values():
                parameter.gradient = True
        if recipe.loop.optimizer_in_backward:
            m.on_gradient = lambda p, block: m.spend(step.single_temporaries(recipe, p.shape, p.width), "optimizer")
        if at_once(asked):
            m.on_gradient = self.hook = OneByOne(m, asked, gradients_exist)
        loss = self._forward(recipe)
        self.forward_end = len(m.changes)
        if units:
            m.nodes.append(Hook(lambda: units.before_backward(ROOT)))
        m.backward(loss)
        del loss
        if units:
            units.end()
            m.units = units.m = None  # no cycle is left to the garbage collector
        if at_once(asked):
            self.hook.last = None
        m.on_gradient = None  # it knows the model, which need not wait for the garbage collector
        self.end = len(m.changes)
        self.live = list(accumulate(m.changes, initial=0))
        for entry in m.entries:
            if entry.category is None:
                lasts = entry.birth < self.forward_end <= entry.death
                entry.category = "activations" if lasts else "temporaries"
        self.pieces = self._pieces()

    def _forward(self, recipe: Recipe) -> Tensor:
        m = self.m
        hidden = m.hidden_states()
        self.head = len(m.changes)
        logits, loss = m.logits_and_loss(hidden)
        del hidden
        if copies_outputs(recipe):
            logits = m.op("clone", [logits], logits.shape, logits.width, grads=(PASS,))
        m.casts.clear()
        self.autocast_end = len(m.changes)
        logits = m.returned(logits)
        self.kept = [logits, *(m.caches or ())] if recipe.loop.keep_outputs else []
        m.caches = None
        if self.units:
            self.units.end_forward()
        return loss

    def _pieces(self) -> dict[str, list[tuple[int, int, Extra]]]:
        """Inside a layer both the top and the bottom of its stack are candidates, so backward's pieces overlap there."""
        m, forward, backward, first, extra = self.m, [], [], 0, ()
        for section in m.sections:
            forward.append((first, section.begin, extra))
            first, extra = section.begin, (*extra, (section.more, section.begin, section.end))
        forward.append((first, self.autocast_end, extra))
        for section in m.sections:  # autocast's copies that nothing kept when the context ended (under checkpointing)
            for e in m.cast_entries:
                if section.begin <= e.birth < section.end and not e.alive(self.autocast_end):
                    extra += ((-section.more, e.birth, e.birth + 1),)
        forward.append((self.autocast_end, self.forward_end, extra))
        first = self.forward_end
        for section in reversed(m.sections):
            top, bottom = m.passed[section.top], m.passed[section.bottom]
            backward.append((first, bottom, extra))
            first, extra = top, (*extra, (section.more, top, bottom))
            for e in m.lines[top:bottom]:  # the first layer lets go of what all of them shared
                if e.op in SHARED and top <= e.death < bottom and e.birth < section.begin:
                    extra += ((-section.more, e.death, e.death + 1),)
        return {"forward": forward, "backward": [*backward, (first, self.end, extra)]}

    @cached_property
    def moments(self) -> dict[str, Moment]:
        """Each phase's highest moment."""
        return {phase: self.peak(phase) for phase in self.pieces}

    @cached_property
    def phases(self) -> list[dict[str, int]]:
        """Bytes by category at both phases' peaks, then at their ends."""
        return self.splits([*self.moments.values(), *(self.last(phase) for phase in self.pieces)])

    def peak(self, phase: str) -> Moment:
        """The phase's highest moment."""
        return self._highest(self.pieces[phase])

    @cached_property
    def around_layers(self) -> dict[str, list[dict[str, int]]]:
        """Phase to bytes by category at its highest moments: forward's until the head and from there on, backward's until
        the layers, in them, and after them."""
        forward, backward = self.pieces["forward"], self.pieces["backward"]
        cuts = {"forward": [self.head], "backward": []}
        if sections := self.m.sections:
            cuts["backward"] = [self.m.passed[sections[-1].top], self.m.passed[sections[0].bottom]]
        found = {}
        for phase, pieces in (("forward", forward), ("backward", backward)):
            ends = [*cuts[phase], pieces[-1][1]]
            parts, begin = [], pieces[0][0]
            for end in ends:
                inside = [(max(first, begin), min(last, end), extra) for first, last, extra in pieces]
                parts.append([piece for piece in inside if piece[0] <= piece[1]])
                begin = end
            found[phase] = self.splits([self._highest(part) for part in parts])
        return found

    def _highest(self, pieces: list[tuple[int, int, Extra]]) -> Moment:
        best, found = -1, (0, ())
        for first, last, extra in pieces:
            part = self.live[first : last + 1]
            high = max(part)
            total = high + sum(times * (self.live[b] - self.live[a]) for times, a, b in extra)
            if total > best:
                best, found = total, (first + part.index(high), extra)
        return found

    def last(self, phase: str) -> Moment:
        """The phase's last moment."""
        return self.pieces[phase][-1][1:]

    def splits(self, moments: list[Moment]) -> list[dict[str, int]]:
        """Bytes by category at each of `moments`, all layers counted."""
        wanted = {event for event, _ in moments} | {e for _, extra in moments for _, a, b in extra for e in (a, b)}
        totals, at, begin = dict.fromkeys(CATEGORIES, 0), {}, 0
        changes, lines = self.m.changes, self.m.lines
        for stop in sorted(wanted):
            for entry, change in zip(lines[begin:stop], changes[begin:stop], strict=True):
                totals[entry.category] += entry.size if change > 0 else -entry.size
            at[stop], begin = dict(totals), stop
            at[stop]["workspace"] += self.live[stop] - sum(totals.values())  # what blocks hold beyond their sizes
        found = []
        for event, extra in moments:
            split = dict(at[event])
            split["gradients"] += self.units.base if self.units else 0
            for times, a, b in extra:
                before, after = at[a], at[b]
                for category in after:
                    split[category] += times * (after[category] - before[category])
            kept = min(split["activations"], 0)  # a layer's output that only the last one does not keep
            split["activations"] -= kept
            split["temporaries"] = max(split["temporaries"] + kept, 0)
            found.append(split)
        return found

    def alive(self, moment: Moment) -> list[tuple[int, Entry]]:
        """(how many, entry) of the blocks alive at `moment`, those of the layers not written out counted too."""
        event, extra = moment
        times = {entry: 1 for entry in self.m.lines[:event] if entry.death >= event}
        for n, a, b in extra:
            for entry, change in zip(self.m.lines[a:b], self.m.changes[a:b], strict=True):
                times[entry] = times.get(entry, 0) + (n if change > 0 else -n)
        return sorted(((n, entry) for entry, n in times.items() if n > 0), key=lambda pair: pair[1].birth)


class Asked:
    """What an `Account` is made of, equal to others by the settings that it depends on."""

    def __init__(self, recipe: Recipe, chip: Chip, gradients_exist: bool):
        r, self.arguments = recipe, (recipe, chip, gradients_exist)
        optim = (r.optim, r.optim_args) if r.loop.optimizer_in_backward else None
        sizes = (r.shape, r.batch_size, r.seq_len, r.gradient_checkpointing, r.attn_implementation)
        part = computed(r).precision, copies_outputs(r), own_linear(r)
        if cut(r) or divides(r) or at_once(r):  # ranks compute alike, but for slices of the model itself
            part = (*part, r.sharding if cut(r) else dataclasses.replace(r.sharding, rank=0))
        self.key = (*sizes, r.precision, r.lora, r.quantization, r.loop, optim, chip, gradients_exist, part)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other) -> bool:
        return self.key == other.key


@lru_cache(maxsize=32)
def kept_account(asked: Asked) -> Account:
    """The account of `asked`, one of the last few: recipes that differ in optimizer or rank alone share theirs."""
    return Account(*asked.arguments)


def parameters(recipe: Recipe, shape: Shape, lora: LoRA | None) -> dict[str, Parameter]:
    """The weights that the ledger writes out, by name; a tied head is another name for the embedding."""
    layers = 3 if divides(recipe) else 2
    found = {row[0]: Parameter(*row) for row in _written(shape, recipe.precision, recipe.quantization, lora, layers)}
    head = shape.head
    words = next((name for name, weight in found.items() if weight.shape[0] == shape.vocab_size), None)
    if f"{head}.weight" not in found and words:  # a stage in the middle has neither
        found[f"{head}.weight"] = found[words]
        if "cls.predictions.bias" in found:
            found[f"{head}.bias"] = found["cls.predictions.bias"]
    return found


@lru_cache(maxsize=512)
def _written(shape: Shape, precision: str, quantization, lora: LoRA | None, layers: int) -> list[tuple]:
    """(name, shape, width, trained, quantized) of the weights outside the layers and of those in the first layers."""
    rows = {(row.name, row.shape): row for row in table(shape, precision, quantization, lora, "sgd", None, False)}
    saved, found = saved_modules(shape, lora), []
    for name, role, size in written_out(shape, layers):
        row, copied = rows[role, size], bool(saved) and is_saved(name, saved)
        found.append((name, size, row.width, row.trained or copied, None if copied else row.quantized))
    names = {row[0] for row in found}
    for name, inside, out in lora_targets(shape, lora) if lora else ():
        if f"{name}.weight" in names or name == shape.head:
            width = next(row.width for row in rows.values() if row.kind == "lora")
            found.append((f"{name}.lora_A", (lora.r, inside), width, True, None))
            found.append((f"{name}.lora_B", (out, lora.r), width, True, None))
    return found
