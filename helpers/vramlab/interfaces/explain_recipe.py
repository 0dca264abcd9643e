"""What a recipe holds at its peak, compared with what a message says of it."""

import contextlib
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

from ..base.errors import RecipeError
from ..formulas.predict import predict
from ..hardware.gpu import Gpu, GpuError, find_gpu
from ..planning.changes import DEFAULT_CARD, Change, cheapest, cheapest_pair, supports_liger
from ..planning.counted import counted_as, host_memory
from ..planning.step_time import estimate
from ..planning.work import tell_compiling
from ..recipe.options import TRL, LoRA, Quantization
from ..recipe.recipe import Recipe
from ..report.report import NO_TIER, TIERS, MiB, Report, encode, format_bytes, unit_for
from .explain_message import missing_of, sized
from .messages import Message

# How a bare MODEL may have been trained, what keeps most first: fields by their name.
METHODS: dict[str, dict[str, Any]] = {
    "full training in bf16-mixed": {"precision": "bf16-mixed"},
    "full training of bf16 weights": {"precision": "bf16-true"},
    "LoRA over bf16 weights": {"precision": "bf16-mixed", "dtype": "bfloat16", "lora": LoRA()},
    "QLoRA": {
        "precision": "bf16-mixed",
        "dtype": "bfloat16",
        "lora": LoRA(),
        "quantization": Quantization(),
    },
}
OF_METHOD = ("--precision", "--optim", "--dtype", "--trainer")  # a default's name is an answer
OF_SIZE = ("--batch-size", "--seq-len", "--tokens")
WITHOUT_BF16 = {"bf16-mixed": "fp16-mixed", "bf16-true": "fp16-true", "bfloat16": "float16"}
# The allocator asks CUDA for requests over 10 MiB in multiples of this (kRoundLarge).
ROUNDED = 2 * MiB
LARGE = 64 * MiB  # smaller requests have the size of too many tensors
TOLERANCE = 0.02  # of the predicted peak, and of a card's total, before two figures contradict
TOKENS = 64  # a count of tokens that a message is taken to say is a multiple of it
FORMATS = {4: "fp32", 2: "16 bits"}
SEGMENTS = "PYTORCH_ALLOC_CONF=expandable_segments:True"


class Lacks(NamedTuple):
    """Bytes that are missing: of a message's tensors, and of the process with its allocator's.

    None where nothing says it.
    """

    tensors: int | None
    process: int | None

    @property
    def most(self) -> int | None:
        """Return the greater of both."""
        return max((lack for lack in self if lack is not None), default=None)


class Run:
    """A recipe with the report of its step, on a card and with what the process is `granted`."""

    def __init__(self, recipe: Recipe, card: Gpu | None, granted: dict[str, Any]):
        self.recipe = recipe
        self.card = card
        # The card that a step's seconds are of.
        self.timed = card or find_gpu(DEFAULT_CARD)
        self.granted = granted
        # The formulas where they know the recipe, since changes are tried by the dozen; else the
        # simulation.
        self._source: Callable[..., Report] = predict
        try:
            self.report = self.witness(recipe)
        except RecipeError:
            from ..simulation.simulate import simulate

            self._source = simulate
            self.report = self.witness(recipe)

    def witness(self, recipe: Recipe) -> Report:
        """Return the report of a recipe on the same card, with the same that is granted."""
        if self._source is not predict:
            tell_compiling(recipe)
        return self._source(recipe, gpu=self.card, **self.granted)

    def lines(self) -> list[str]:
        """Return what fills the peak, and whether it fits the card."""
        report = self.report
        lines = [f"{report.source}: {self.recipe}", *parts(report)]
        if self.card and report.usable is not None:
            lines.append(report.answer(self.card.name))
        return lines

    def host_lines(self) -> list[str]:
        """Return what the recipe needs of the machine's memory."""
        need = host_memory(self.recipe)
        return [
            f"all ranks together need {sized(need)} of it for weights while they load and what "
            f"is offloaded"
        ]

    def lacks(self, message: Message | None = None, trusted: bool = True) -> Lacks:
        """Return the bytes that are missing, at most by what is known.

        Where recipe and message agree (`trusted`) it is what the rest of the step lacks, too.
        """
        tensors: list[int] = []
        if message and missing_of(message) is not None:
            found = message.bytes
            tensors.append(missing_of(message) or 0)
            # The message is of one request; the peak may come later in the step and need more.
            if trusted and "allocated" in found:
                tensors.append(self.report.peak.total - found["allocated"] - found.get("free", 0))
        report = self.report
        process = None
        if self.card and trusted and report.process is not None and report.usable is not None:
            # As a number an interval is its likely figure.
            process = max(0, int(report.process) - report.usable)
        return Lacks(max(0, *tensors) if tensors else None, process)

    @cached_property
    def seconds(self) -> float | None:
        """The step's estimated time on the card `timed`; None where it is unknown."""
        try:
            # Parts of a step that wait for each other are added; `estimate` has taken off what
            # overlaps.
            return sum(estimate(counted_as(self.recipe), self.timed).values())
        except (GpuError, RecipeError):
            return None

    def changes(self, lacks: Lacks) -> list[dict[str, Any]]:
        """Return the three cheapest changes, as `Explanation` has them, or a pair too."""
        need = lacks.tensors or 0
        process = lacks.process or 0
        ranked = cheapest(self.recipe, self.timed, need, witness=self.witness, process=process)
        facts = [self._facts(change, lacks) for change in ranked]
        # A pair takes a hundred reports, which formulas give at once.
        # With the same training that is enough alone there is nothing to combine.
        enough = {fact["same"] for fact in facts if fact["enough"]}
        if lacks.most and True not in enough and self._source is predict:
            pairs = self._pairs(lacks)
            # Another training is there already, so only a pair that keeps this one is news.
            facts += [pair for pair in pairs if pair["same"] or not enough]
        return facts

    def _pairs(self, lacks: Lacks) -> Iterator[dict[str, Any]]:
        """Yield the cheapest pair that is enough.

        With expandable segments too where none is without, or none that keeps the training.
        """
        need = lacks.tensors or 0
        pair = cheapest_pair(self.recipe, self.timed, need, self.witness, lacks.process or 0)
        found = {"enough together": pair}
        has_same = pair is not None and pair.same
        # The setting alone is said by `_setting`; here it gives what a pair still lacks.
        if self.card and not has_same and not self.report.expandable_segments:
            with_them = Run(self.recipe, self.card, self.granted | {"expandable_segments": True})
            process = with_them.lacks().process or 0
            other = cheapest_pair(self.recipe, self.timed, need, with_them.witness, process)
            if other and (pair is None or other.same):
                found[f"enough together with {SEGMENTS}"] = other
        for words, each in found.items():
            if each:
                fact = self._facts(each, lacks)
                fact["enough"] = True
                fact["text"] += f", {words}"
                yield fact

    def _facts(self, change: Change, lacks: Lacks) -> dict[str, Any]:
        seconds = None
        if self.seconds and change.time:
            # A change's `time` is a ratio, so it scales this step's seconds.
            seconds = self.seconds * change.time
        text = str(change)
        base = change.fields.get("quantization")
        # TRL's trainers never prepare a base.
        if base and not base.prepare and self.recipe.trainer not in TRL:
            text += ", not prepared (--no-prepare)"
        enough = change.takes(lacks.tensors or 0, lacks.process or 0)
        # Of what it frees in the process the peak is only a part: the allocator's own bytes go with
        # it.
        if enough and change.saves < (lacks.most or 0):
            text += f", −{sized(change.frees)} of the process"
        return {
            "text": text,
            "fields": encode(change.fields),
            "saves": change.saves,
            "enough": enough,
            "seconds": seconds,
            "seconds_before": self.seconds,
            "same": change.same,
        }

    def change_lines(
        self,
        changes: list[dict[str, Any]],
        missing: int | None,
        trusted: bool = True,
    ) -> list[str]:
        """Return the changes as lines under a head that says what is missing.

        What the allocator's setting does to this recipe is no advice where another one ran.
        """
        lack = f", {sized(missing)} being missing" if missing else ""
        # The figure above is of tensors alone.
        if missing and trusted and 0 < self.report.beyond < missing:
            lack += " with what its allocator keeps"
        name = self.timed.name
        if not self.card:
            lack += f" (no --gpu is said: the seconds are estimated on {name})"
        lines = [f"the cheapest changes{lack}:"]
        if trusted:
            lines += self._setting()
        if not supports_liger(self.timed):
            lines.append(
                f"  (none by Liger: Triton, in which it is written, does not support {name})"
            )
        for change in changes:
            text = f"  {change['text']}"
            if change["seconds"]:
                before = change["seconds_before"]
                text += (
                    f" ({change['seconds']:.3g} s a step, {before:.3g} now, estimated on {name})"
                )
            if missing and not change["enough"]:
                text += ", not enough alone"
            lines.append(text)
        if missing and not any(change["enough"] for change in changes):
            lines += self._never()
            if self.card:
                asked = f"{self.recipe.model} --gpu '{self.card.name}' --tokens"
                lines.append(
                    f"  none found is enough: vramlab plan {asked} {self.recipe.seq_len} tries "
                    f"whole recipes"
                )
        return lines if changes else [*lines, "  none takes much off the peak"]

    def _never(self) -> Iterator[str]:
        """Yield that nothing fits the card where weights in the fewest bits alone do not."""
        with contextlib.suppress(RecipeError):
            # What is not quantized, as the embedding, in half precision.
            base = Quantization("nf4", double=True, prepare=False)
            least = self.recipe.replace(**METHODS["QLoRA"] | {"quantization": base})
            weights = predict(least).phases["load"].end.parameters
            if self.card and weights > self.card.total:
                yield (
                    f"  this cannot fit {self.card.name}: its weights in 4 bits alone take "
                    f"{sized(weights)}; more cards or host memory: --world-size, --offload"
                )

    def _setting(self) -> list[str]:
        """Return what expandable segments alone would do where they make it surer that it fits."""
        report = self.report
        if report.expandable_segments or report.otherwise is None or report.usable is None:
            return []
        # From the surest to no fit, so the index orders them.
        tiers = [*TIERS, NO_TIER]
        with_them = report.otherwise.verdict(report.usable)
        if tiers.index(with_them) >= tiers.index(report.verdict):
            return []
        return [f"  {SEGMENTS}: {with_them}, {report.otherwise}, the same training"]

    def contradictions(self, message: Message) -> list[str]:
        """Return what recipe and message say of each other that cannot both be."""
        sizes = message.bytes
        said: list[str] = []
        held = sizes.get("allocated") if message.kind == "card" else None
        if held is not None:
            peak = self.report.peak.total
            # Weights alone: what a run holds at least once its model is there.
            loaded = self.report.phases["load"].end.total
            asked = sizes.get("asked", 0)
            # On a larger card both would have been allocated.
            # The message's run needed more than the recipe ever holds, so another recipe ran.
            if peak < (1 - TOLERANCE) * (held + asked):
                text = (
                    f"the recipe's peak is {sized(peak)}, but {sized(held)} were allocated and "
                    f"{sized(asked)} more asked for: a larger batch, "
                    "longer samples, another precision or older libraries ran, or more than this "
                    "training is in the process"
                )
                said.append(text)
            # The recipe's weights alone are more than the run had, so it cannot have got past
            # loading them.
            elif loaded > (1 + TOLERANCE) * (held + sizes["asked"]):
                text = (
                    f"the recipe's weights take {sized(loaded)}, but {sized(held)} were allocated: "
                    "it died while they were loading, or they are in fewer bits or on several cards"
                )
                said.append(text)
        total = sizes.get("total")
        is_card = message.kind == "card"
        # Cards of one name differ by what the driver keeps for itself, so the tolerance is wider.
        if is_card and total and self.card and abs(self.card.total - total) > 4 * TOLERANCE * total:
            has = sized(self.card.total)
            said.append(f"the message's card has {sized(total)}, {self.card.name} has {has}")
        return said

    def request(self, message: Message) -> str:
        """Return which tensor of the recipe has the size that the message asks for, "" if none."""
        asked = message.bytes.get("asked", 0)
        if message.kind != "card" or asked < LARGE:
            return ""
        # In the order of `tensors`, so the two that fill cards most often are named.
        fitting = [text for text, size in tensors(self.recipe) if is_request(message, size)]
        return f"{sized(asked)} is the size of {' or '.join(fitting[:2])}" if fitting else ""


def is_request(message: Message, size: int) -> bool:
    """Return whether a tensor of `size` bytes makes the request that the message prints."""
    asked = message.bytes["asked"]
    # The request is the tensor rounded up by the allocator, then printed with two digits.
    return asked - ROUNDED - message.precision < size <= asked + message.precision


def tensors(recipe: Recipe) -> Iterator[tuple[str, int]]:
    """Yield the large tensors of a step in words with their bytes, what fills cards most first."""
    shape = recipe.shape
    tokens = recipe.batch_size * recipe.seq_len
    rows = f"{recipe.batch_size} × {recipe.seq_len:,} tokens"
    squared = recipe.batch_size * shape.num_heads * recipe.seq_len**2
    for width, form in FORMATS.items():
        yield (
            f"the logits in {form}, {rows} × {shape.vocab_size:,} words (or their gradient)",
            tokens * shape.vocab_size * width,
        )
    hidden = shape.hidden_size
    inner = shape.intermediate_size
    by_tokens = {"an activation of an MLP": inner, "a hidden state": hidden}
    matrices = {"the embedding or the head": shape.vocab_size, "a matrix of an MLP": inner}
    for width, form in FORMATS.items():
        if recipe.attn_implementation == "eager":
            yield f"one layer's attention scores in {form}, {rows} squared a head", squared * width
        for what, size in by_tokens.items():
            yield f"{what} in {form}, {rows} × {size:,}", tokens * size * width
        for what, size in matrices.items():
            yield f"{what} in {form}, {size:,} × {hidden:,}", size * hidden * width


def says_no_method(recipe: Recipe) -> bool:
    """Return whether a recipe leaves how it trains to the defaults.

    A message may then say it better.
    """
    usual = Recipe(recipe.model)
    # All fields by which a message could be read otherwise; batch and length are judged apart.
    names = {name for fields in METHODS.values() for name in fields}
    names |= {"optim", "sharding", "gradient_checkpointing", "trainer", "loop"}
    return all(getattr(recipe, name) == getattr(usual, name) for name in names)


def taken_from(
    message: Message, recipe: Recipe, card: Gpu | None, said_size: bool = False
) -> tuple[Recipe, str]:
    """Return the recipe trained as the message says, and a sentence on what was taken from it.

    With `said_size` its batch and length stay.
    """
    fields, why = _method(message, recipe)
    if card and not card.supports("bf16-mixed"):
        # as many bytes, in the half precision that it has
        fields = {name: WITHOUT_BF16.get(str(value), value) for name, value in fields.items()}
        why = why.replace("bf16", "fp16")
    recipe = recipe.replace(**fields)
    sized_as = {} if said_size else _tokens(message, recipe)
    said = [why] if why else []
    if sized_as:
        recipe = recipe.replace(**sized_as)
        said.append(
            f"{recipe.batch_size} × {recipe.seq_len:,} tokens (the request is their logits' size)"
        )
        kept = _kept_too_much(message, recipe)
        if kept:
            recipe = recipe.replace(gradient_checkpointing=True)
            said.append(
                f"gradient_checkpointing, without which the layers had kept {sized(kept)} by then"
            )
    if not said:
        return recipe, ""
    rest = "the options, the arguments or the script say it exactly"
    return recipe, f"taken from the message: {'; '.join(said)}; {rest}"


def _method(message: Message, recipe: Recipe) -> tuple[dict[str, Any], str]:
    """Return how it was trained: as the traceback names it, else by the room in the message."""
    named = dict(message.fields)
    # The traceback shows PEFT's classes but neither rank nor format, so PEFT's defaults and the
    # usual format stand.
    if "lora" in named:
        named["lora"] = LoRA()
        named |= {"precision": "bf16-mixed", "dtype": "bfloat16"}
    if "quantization" in named:
        named["quantization"] = Quantization(prepare=named.get("trainer") != "sft")
    if "lora" in named or message.kind != "card" or "allocated" not in message.bytes:
        return named, f"{', '.join(message.says)} in its traceback" if named else ""
    # What was allocated plus the request: at least so much was in use for a moment.
    room = message.bytes["allocated"] + message.bytes["asked"]
    heavier: tuple[str, int] | None = None
    # From the method that keeps most: the first whose weights, gradients and states had room is the
    # likeliest.
    for name, fields in METHODS.items():
        try:
            kept = predict(recipe.replace(**{**fields, **named})).phases["between_steps"].end.total
        except RecipeError:
            continue
        if kept <= room:
            why = f"{name}"
            if heavier:
                why += (
                    f", because {heavier[0]} keeps {sized(heavier[1])} between two steps and "
                    f"{sized(room)} were in play"
                )
            return {**fields, **named}, why
        heavier = name, kept
    return named, ""


def _tokens(message: Message, recipe: Recipe) -> dict[str, int]:
    """Return the batch whose logits the request is, {} where it is of another size."""
    words = recipe.shape.vocab_size
    usual = Recipe(recipe.model)
    said = (recipe.batch_size, recipe.seq_len) != (usual.batch_size, usual.seq_len)
    if (
        # Where a batch or a length was given it is not guessed.
        said
        or message.kind != "card"
        or message.bytes["asked"] < LARGE
        or not words
        or recipe.shape.image_tokens
    ):
        return {}
    # fp32 first, the format in which losses make their copy of the logits.
    for width in FORMATS:
        count = round(message.bytes["asked"] / (words * width) / TOKENS) * TOKENS
        if count and is_request(message, count * words * width):
            # The usual length with another batch is likelier than a length of its own.
            if count % recipe.seq_len == 0:
                return {"batch_size": count // recipe.seq_len}
            # A sample longer than the model has positions for cannot have been.
            longest = recipe.shape.max_positions or count
            return {"batch_size": 1, "seq_len": count} if count <= longest else {}
    return {}


def _kept_too_much(message: Message, recipe: Recipe) -> int:
    """Return the bytes kept by layers until the logits where the message lacks room for them.

    Else 0.
    """
    if recipe.gradient_checkpointing or "allocated" not in message.bytes:
        return 0
    forward = predict(recipe).phases["forward"].peak
    logits = (
        2 * message.bytes["asked"]
    )  # in the model's format too, and what the loss keeps of them
    return forward.activations if forward.activations > message.bytes["allocated"] + logits else 0


def parts(report: Report) -> list[str]:
    """Return what fills the peak: its categories, why it is there, and the largest tensors."""
    peak = report.peak
    unit = unit_for(peak.total)
    # Categories under a hundredth of the peak would only lengthen the line.
    large = [(n, name.replace("_", " ")) for name, n in peak.items() if n > 0.01 * peak.total]
    split = ", ".join(f"{name} {format_bytes(n, unit)}" for n, name in sorted(large, reverse=True))
    head = f"peak in {report.peak_phase}: {format_bytes(peak.total, unit)}; {split}"
    why = [f"why there: {report.why}"] if report.cause else []
    return [head, *why, *(f"  {group}" for group in report.largest[:4])]
