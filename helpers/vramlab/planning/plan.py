"""My model, my GPU: what do I do? Every recipe that fits, fastest first, and why the next faster one does not.

    from vramlab import plan
    found = plan("llama-3.1-8b", "T4", seq_len=1024)
    print(found)
    print(found.best.code())

A recipe fits when the upper end of its predicted `process` interval is no more than the card's usable memory. Memory is
`predict`'s, seconds are `step_time`'s; `vramlab.planning.search` says how the space is searched.
"""

import json
import textwrap
from dataclasses import dataclass, field
from typing import Any

from ..hardware.gpu import Gpu
from ..recipe.options import LoRA
from ..recipe.recipe import ATTENTION, Recipe
from ..report.errors import RecipeError
from ..report.report import Report, format_bytes, text_table
from .search import Choice, Miss, Search, order, upper
from .search_space import ENGINES, OPTIMS, RANK, Question, described, method_of
from .step_time import StepTime

WIDTH = 100  # characters of a line, as many as a notebook shows


@dataclass(frozen=True)
class Plan:
    """The answer.

    Attributes:
        question: what was asked. `usable`: bytes that one card's process can have.
        choices: what fits, fastest first, each family with its largest micro-batch that fits.
        misses: for each method with a choice, what is faster than its best and does not fit: the next faster one, and
            the one that lacks least.
        lightest: the recipe that needs least, when nothing fits.
        advice: what would make something fit, one computed sentence each, when nothing does.
        considered, predicted: recipes in the space, and how many of them `predict` was asked about.
    """

    question: dict[str, Any]
    usable: int
    choices: tuple[Choice, ...]
    misses: tuple[Miss, ...]
    lightest: Miss | None = None
    advice: tuple[str, ...] = ()
    considered: int = 0
    predicted: int = 0
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def best(self) -> Choice:
        """The fastest recipe that fits. Raises RecipeError, with the first advice, when none does."""
        if self.choices:
            return self.choices[0]
        why = self.advice[0] if self.advice else "nothing in the space fits"
        raise RecipeError("gpu", self.question["gpu"], f"no recipe fits {self.question['model']} there; {why}")

    def best_of(self, method: str) -> Choice | None:
        """The fastest recipe of a method ("full", "lora", "qlora"); None when none fits."""
        return next((choice for choice in self.choices if choice.method == method), None)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary; sizes in bytes, times in seconds."""
        return _encode(self)

    def to_json(self, indent: int | None = None) -> str:
        """The plan as JSON text; `Plan.from_json` reads it back."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The plan that `to_json` wrote."""
        d = json.loads(text)
        for name, kind in (("choices", Choice), ("misses", Miss)):
            d[name] = tuple(_decode(kind, entry) for entry in d[name])
        d["lightest"] = d["lightest"] and _decode(Miss, d["lightest"])
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in d.items()})

    def table(self, top: int = 10) -> str:
        """The fastest `top` choices as text: a line of figures each, and the recipe under it."""
        rows = [("", "method", "tokens/s", "from", "to", "peak", f"{self.question['tier']} at most")]
        for i, choice in enumerate(self.choices[:top]):
            time = choice.time
            rates = (f"{time.tokens / seconds:,.0f}" for seconds in (time.seconds, time.high, time.low))
            needs = upper(choice.report, self.question["tier"])
            sizes = (format_bytes(size, digits=2) for size in (choice.report.peak.total, needs))
            rows.append((str(i + 1), choice.method, *rates, *sizes))
        head, rule, *lines = text_table(rows).split("\n")
        recipes = (_wrapped("    " + _short(choice.recipe)) for choice in self.choices[:top])
        return "\n".join([head, rule, *(f"{line}\n{recipe}" for line, recipe in zip(lines, recipes, strict=True))])

    def __str__(self) -> str:
        q, room = self.question, format_bytes(self.usable, digits=2)
        cards = f"{q['gpus']} × {q['gpu']}" if q["gpus"] > 1 else q["gpu"]
        head = f"{q['model']} on {cards} ({room} usable each): global batch {q['global_batch']}, {q['seq_len']} tokens"
        lines = [head, ""]
        if self.choices:
            lines += [self.table(), ""]
            lines += [f"faster ({method_of(miss.recipe)}): {miss}" for miss in self.misses]
            lines += [f"note: {note}" for note in (*self.choices[0].notes, *self.notes)]
            lines.append(f"speed is {self.choices[0].time.basis}")
        else:
            lines.append("Nothing fits.")
            if lightest := self.lightest:
                lines[-1] += (
                    f" The lightest recipe is {described(lightest.recipe)}, {format_bytes(lightest.over, digits=2)} over."
                )
            lines += [f"- {advice}" for advice in self.advice]
        lines.append(f"fits means: the upper end of the predicted {q['tier']} interval is within the usable memory")
        lines.append(f"{self.considered:,} recipes considered, {self.predicted:,} predicted")
        return "\n".join(line if "\n" in line else _wrapped(line) for line in lines)


def plan(
    model: object,
    gpu: str | Gpu,
    gpus: int = 1,
    *,
    global_batch: int = 16,
    seq_len: int | None = None,
    method: str = "any",
    precisions: tuple[str, ...] | None = None,
    optims: tuple[str, ...] = OPTIMS,
    attention: tuple[str, ...] = ATTENTION,
    checkpointing: tuple[bool, ...] = (False, True),
    engines: tuple[str, ...] = ENGINES,
    offload: bool = True,
    lora: LoRA = RANK,
    task: str | None = None,
    num_layers: int | None = None,
    memory: int | None = None,
    host_memory: int | None = None,
    tier: str = "process",
    link: float | None = None,
    top: int = 5,
) -> Plan:
    """Which recipes train `model` on `gpus` cards of the kind `gpu`, fastest first.

    Args:
        model, seq_len, task, num_layers: as in `Recipe`.
        gpu: a name of the GPU table or a `Gpu`.
        global_batch: samples of one optimizer step over all GPUs, kept exactly: micro-batch × accumulation × GPUs.
        method: "any", "full", "lora" or "qlora".
        precisions, optims, attention, checkpointing, engines, offload: what may be used. None for precisions takes
            those that the card computes in and that are safe to train in.
        lora: rank and targets of adapters.
        memory: usable bytes of one card, in place of the table's.
        host_memory: bytes of the host that offloaded and paged parts of all ranks may take; None does not ask.
        tier: which predicted figure has to fit: "process" (what the driver sees), "reserved" or "allocated".
        link: bytes a second between the GPUs, in place of the table's.
        top: how many recipes of each method to rank.
    Raises:
        RecipeError, GpuError: one sentence that says which argument was wrong.
    """
    question = Question(
        model, gpu, gpus, global_batch, seq_len, method, precisions, optims, attention, checkpointing, engines, offload,
        lora, task, num_layers, memory, host_memory, tier, link,
    )  # fmt: skip
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise RecipeError("top", top, "it must be a whole number of at least 1")
    search = Search(question)
    choices: list[Choice] = []
    misses: list[Miss] = []
    for name in question.methods:
        found, faster = search.ranked(name, top)
        choices += found
        misses += faster
    choices.sort(key=lambda choice: order(choice.time.seconds, choice.recipe))  # stable: as found within a method
    lightest, advice = None, ()
    if not choices:
        from .plan_advice import advise

        lightest, advice = search.lightest(), tuple(advise(question))
    asked = {
        "model": question.plain.name, "gpu": question.gpu.name, "gpus": gpus, "global_batch": global_batch,
        "seq_len": question.plain.seq_len, "method": method, "tier": tier,
    }  # fmt: skip
    notes = () if memory or question.gpu.total_known else (_nominal(question),)
    return Plan(
        asked,
        question.usable,
        tuple(choices),
        tuple(misses),
        lightest,
        advice,
        search.considered,
        len(search.reports),
        notes,
    )


def _wrapped(line: str) -> str:
    """The line in pieces of WIDTH characters; what follows the first is indented."""
    return textwrap.fill(line, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _short(recipe: Recipe) -> str:
    """The recipe without what the plan's first line says."""
    return described(recipe).replace(f"{recipe.name} · ", "", 1).replace(f"{recipe.seq_len} tokens · ", "", 1)


def _nominal(question: Question) -> str:
    said = format_bytes(question.usable, digits=2)
    return f"what {question.gpu.name} reports is not known: {said} is the least part of its box that any card reports"


def _encode(value: Any) -> Any:
    if isinstance(value, Recipe | Report):
        return value.to_dict()
    if isinstance(value, Plan | Choice | Miss | StepTime):
        return {name: _encode(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, tuple | list):
        return [_encode(item) for item in value]
    return value


def _decode(kind: type, d: dict[str, Any]) -> Any:
    d = {**d, "recipe": Recipe(**d["recipe"]), "report": Report.from_dict(d["report"]), "time": StepTime(**d["time"])}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in d.items()})
