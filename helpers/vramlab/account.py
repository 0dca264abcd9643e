"""A recipe's step in the ledger, read off: bytes by category at every peak, for all layers.

Two layers of each stack are written out, the first and one that stands for all the others. With L layers, S bytes that
one keeps in the forward pass and D that one adds in the backward pass (its gradients, less what it frees), the bytes at a
moment are those of the ledger plus (L - 2) · S from the second layer on, and plus (L - 2) · (S + D) below it on the way
back. Backward's peak in a layer is at the top of the stack or at the bottom, for between them it is affine.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import accumulate

from . import formulas, generic, heads, t5_model, updates
from .blocks import Entry, Tensor
from .forward import WRITTEN, Model, Stack, hidden_states
from .ledger import Parameter
from .operators import FP32, HALF
from .recipe import Recipe

Extra = tuple[tuple[int, int, int], ...]
Piece = tuple[int, int, Extra]
EMBEDDINGS = {
    "gpt2": "transformer.wte",
    "gpt_neox": "gpt_neox.embed_in",
    "falcon": "transformer.word_embeddings",
    "bert": "bert.embeddings.word_embeddings",
    "opt": "model.decoder.embed_tokens",
    "t5": "shared",
}


@dataclass(frozen=True)
class Facts:
    """What the model's functions ask for and no `Shape` says: configuration, embedding's name, widths."""

    config: dict
    embedding: str
    embedding_width: int
    input_width: int


def parameters(recipe: Recipe) -> dict[str, Parameter]:
    """The weights that the ledger writes out, by name."""
    shape, lora = recipe.shape, recipe.lora
    rows = {(row.name, row.shape): row for row in formulas.held(recipe)}
    found = {}
    saved = formulas.saved_modules(shape, lora)
    for name, role, size in formulas.written_out(shape):
        row = rows[role, size]
        copied = bool(saved) and formulas.is_saved(name, saved)
        found[name] = Parameter(name, size, row.width, row.trained or copied, None if copied else row.quantized)
    if lora:
        width = formulas.adapter_width(recipe.precision, recipe.quantization, lora)
        for name, inside, out in formulas.adapted(shape, lora):
            if f"{name}.weight" in found or name == shape.head:
                found[f"{name}.lora_A"] = Parameter(f"{name}.lora_A", (lora.r, inside), width)
                found[f"{name}.lora_B"] = Parameter(f"{name}.lora_B", (out, lora.r), width)
    return found


def model(recipe: Recipe, capability: tuple[int, int], approximate: bool = False) -> Model:
    """The recipe's model with an empty ledger; the generic decoder if its own is not known."""
    shape, lora, quantization = recipe.shape, recipe.lora, recipe.quantization
    config, precision = formulas.config_of(shape), recipe.precision
    facts = Facts(
        config,
        "model.embed.weight" if approximate else EMBEDDINGS.get(shape.family, "model.embed_tokens") + ".weight",
        formulas.weight_width(precision, quantization),
        HALF if precision.endswith("-true") else FP32,
    )
    if approximate:
        rank, packed = lora.r if lora else 0, quantization.quant_type if quantization else None
        weights = generic.parameters(shape, facts.embedding_width, lora is None, packed, rank)
        names = generic.adapted(rank)
    else:
        weights = parameters(recipe)
        names = frozenset(name for name, _, _ in formulas.adapted(shape, lora)) if lora else frozenset()
    m = Model(
        recipe,
        facts,
        weights,
        autocast=HALF if precision.endswith("-mixed") else None,
        compute=formulas.compute_width(precision, quantization) if quantization else HALF,
        nested=bool(quantization and quantization.double),
        adapted=names,
        lora_dropout=lora.lora_dropout if lora else 0.0,
        implementation=recipe.attn_implementation,
        bf16=not precision.startswith("fp16"),
        capability=capability,
    )
    caching = recipe.loop.use_cache if recipe.loop.use_cache is not None else config.get("use_cache", True)
    if shape.num_decoder_layers:  # the decoder has a configuration of its own, which the loop does not touch
        caching = config.get("use_cache", True)
    if caching and not recipe.gradient_checkpointing and shape.family not in ("bert", "vit"):
        m.caches = []
    return m


class Account:
    """The ledger of one micro-batch, read off.

    Args:
        gradients_exist: from an earlier micro-batch, or because they are zeroed in place: new ones are added to those.

    Attributes:
        live: bytes alive after each event, as written out.
        pieces: phase to (first event, last event, what the layers not written out add there), see `added`.
        kept: what the loop keeps alive after the step.
    """

    def __init__(self, recipe: Recipe, capability: tuple[int, int] = (8, 0), gradients_exist: bool = False):
        self.approximate = recipe.shape.family not in WRITTEN
        if not self.approximate:
            try:
                return self._enter(recipe, capability, gradients_exist)
            except KeyError:  # a variant with other weights than the usual
                self.approximate = True
        self._enter(recipe, capability, gradients_exist)

    def _enter(self, recipe: Recipe, capability: tuple[int, int], gradients_exist: bool) -> None:
        self.m = m = model(recipe, capability, self.approximate)
        if gradients_exist:
            for parameter in m.parameters.values():
                parameter.gradient = True
        if recipe.loop.optimizer_in_backward:
            m.on_gradient = lambda p: m.spend(updates.single_temporaries(recipe, p), "optimizer")
        loss = self._forward()
        self.forward_end = len(m.changes)
        m.backward(loss)
        del loss
        self.end = len(m.changes)
        self.live = list(accumulate(m.changes, initial=0))
        for entry in m.entries:
            if entry.category is None:
                lasts = entry.birth < self.forward_end and (entry.death is None or entry.death >= self.forward_end)
                entry.category = "activations" if lasts else "temporaries"
        self.pieces: dict[str, list[Piece]] = {"forward": self._forward_pieces()}
        self.pieces["backward"] = self._backward_pieces()

    def _forward(self) -> Tensor:
        m = self.m
        if self.approximate:
            x = generic.hidden_states(m)
        else:
            x = t5_model.hidden_states(m) if m.shape.family == "t5" else hidden_states(m)
        logits, loss = heads.logits_and_loss(m, x)
        del x
        m.casts.clear()
        self.autocast_end = len(m.changes)
        logits = heads.returned(m, logits)
        m.held.clear()
        self.kept = [logits, *(m.caches or ())] if m.recipe.loop.keep_outputs else []
        m.caches = None
        return loss

    def _forward_pieces(self) -> list[Piece]:
        pieces, first, extra = [], 0, ()
        for stack in self.m.stacks:
            pieces.append((first, stack.begin, extra))
            first, extra = stack.begin, (*extra, (stack.more, stack.begin, stack.end))
        pieces.append((first, self.autocast_end, extra))
        extra += tuple((-stack.more, e.birth, e.birth + 1) for stack in self.m.stacks for e in self._uncast(stack))
        return [*pieces, (self.autocast_end, self.forward_end, extra)]

    def _uncast(self, stack: Stack) -> list[Entry]:
        """Autocast's copies of the layer's weights that nothing kept when the context ended (under checkpointing)."""
        return [
            entry
            for entry in self.m.cast_entries
            if stack.begin <= entry.birth < stack.end and entry.death is not None and entry.death < self.autocast_end
        ]

    def _backward_pieces(self) -> list[Piece]:
        """Inside a layer both the top and the bottom of its stack are candidates, so pieces overlap there."""
        pieces, first, extra = [], self.forward_end, self.pieces["forward"][-1][2]
        for stack in reversed(self.m.stacks):
            top, bottom = self.m.passed[stack.top], self.m.passed[stack.bottom]
            pieces.append((first, bottom, extra))
            first, extra = top, (*extra, (stack.more, top, bottom))
        return [*pieces, (first, self.end, extra)]

    def added(self, extra: Extra) -> int:
        """Bytes that the layers not written out add: times what one adds between two events."""
        return sum(times * (self.live[b] - self.live[a]) for times, a, b in extra)

    def peak(self, phase: str) -> tuple[int, Extra]:
        """The event of the phase's highest moment, and what is added there."""
        best, found = -1, (0, ())
        for first, last, extra in self.pieces[phase]:
            part = self.live[first : last + 1]
            high = max(part)
            if high + self.added(extra) > best:
                best, found = high + self.added(extra), (first + part.index(high), extra)
        return found

    def last(self, phase: str) -> tuple[int, Extra]:
        """The phase's last event."""
        _, event, extra = self.pieces[phase][-1]
        return event, extra

    def splits(self, moments: list[tuple[int, Extra]]) -> list[Counter]:
        """Bytes by category at each of `moments`, all layers counted."""
        wanted = {event for event, _ in moments} | {e for _, extra in moments for _, a, b in extra for e in (a, b)}
        totals, at, begin = Counter(), {}, 0
        changes, lines = self.m.changes, self.m.lines
        for stop in sorted(wanted):
            for i in range(begin, stop):
                entry, change = lines[i], changes[i]
                size = entry.size if change > 0 else -entry.size
                totals[entry.category] += size
                totals["workspace"] += change - size
            begin = stop
            at[stop] = dict(totals)
        found = []
        for event, extra in moments:
            split = Counter(at[event])
            for times, a, b in extra:
                for category in at[b]:
                    split[category] += times * (at[b][category] - at[a].get(category, 0))
            kept = min(split["activations"], 0)  # a layer's output that only the last one does not keep
            split["activations"] -= kept
            split["temporaries"] += kept
            found.append(split)
        return found

    def alive(self, moment: tuple[int, Extra]) -> list[tuple[int, Entry]]:
        """(how many, entry) of the blocks alive at `moment`, those of the layers not written out counted too."""
        event, extra = moment
        found = []
        for entry in self.m.entries:
            times = _alive(entry, event)
            for many, a, b in extra:
                times += many * (_alive(entry, b) - _alive(entry, a))
            if times > 0:
                found.append((times, entry))
        return found


def _alive(entry: Entry, event: int) -> bool:
    return entry.birth < event and (entry.death is None or entry.death >= event)
