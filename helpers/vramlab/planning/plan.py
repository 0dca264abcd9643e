"""Which recipes train a model on given GPUs, fastest first, and why the next faster one does not fit.

    from vramlab import plan
    found = plan("llama-3.1-8b", "T4", seq_len=1024)
    print(found)
    print(found.best.code())

A recipe fits when the upper end of its predicted `process` interval is within the card's usable memory. Memory is
`predict`'s, seconds are `step_time`'s; `vramlab.planning.search` explains the search.
"""

import json
import textwrap
from dataclasses import dataclass
from typing import Any

from ..hardware.gpu import Gpu
from ..recipe.knobs import Knob
from ..recipe.recipe import Recipe
from ..report.errors import RecipeError
from ..report.report import Report, format_bytes, text_table
from .plan_advice import advise
from .question import Question
from .search import Choice, Miss, Search, order, upper
from .search_space import method_of
from .step_time import StepTime

WIDTH = 100  # characters of a line in a notebook


@dataclass(frozen=True)
class Plan:
    """The answer.

    Attributes:
        question: what was asked.
        usable: bytes that one card's process can have.
        choices: what fits, fastest first, each family with its largest micro-batch that fits.
        misses: for each method with a choice, of what is faster than its best and does not fit: the next faster one,
            and the one that lacks least.
        lightest: the recipe that needs least, when nothing fits.
        advice: when nothing fits, what would: one computed sentence each.
        considered, predicted: recipes in the space, and how many of them were predicted.
    """

    question: dict[str, Any]
    usable: int
    choices: tuple[Choice, ...]
    misses: tuple[Miss, ...]
    lightest: Miss | None = None
    advice: tuple[str, ...] = ()
    considered: int = 0
    predicted: int = 0
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Choice:
        """The fastest recipe that fits. Raises RecipeError, with the first advice, when none does."""
        if self.choices:
            return self.choices[0]
        why = self.advice[0] if self.advice else "nothing in the space fits"
        raise RecipeError("gpu", self.question["gpu"], f"no recipe fits {self.question['model']} there; {why}")

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary; sizes in bytes, times in seconds."""
        return _encode(self)

    def to_json(self, indent: int | None = None) -> str:
        """The plan as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def table(self, top: int = 10) -> str:
        """The fastest `top` choices as text: a line of figures each, and the recipe under it."""
        rows = [("", "method", "tokens/s", "from", "to", "peak", f"{self.question['tier']} at most")]
        for i, choice in enumerate(self.choices[:top], 1):
            time = choice.time
            rates = (f"{time.tokens / seconds:,.0f}" for seconds in (time.seconds, time.high, time.low))
            needs = upper(choice.report, self.question["tier"])
            sizes = (format_bytes(size, digits=2) for size in (choice.report.peak.total, needs))
            rows.append((str(i), choice.method, *rates, *sizes))
        head, rule, *lines = text_table(rows).split("\n")
        recipes = (_wrapped("    " + _short(choice.recipe)) for choice in self.choices[:top])
        return "\n".join([head, rule, *(f"{line}\n{recipe}" for line, recipe in zip(lines, recipes, strict=True))])

    def __str__(self) -> str:
        q, room = self.question, format_bytes(self.usable, digits=2)
        cards = f"{q['gpus']} × {q['gpu']}" if q["gpus"] > 1 else q["gpu"]
        lines = [
            f"{q['model']} on {cards} ({room} usable each): global batch {q['global_batch']}, {q['seq_len']} tokens",
            "",
        ]
        if self.choices:
            lines += [self.table(), ""]
            lines += [f"faster ({method_of(miss.recipe)}): {miss}" for miss in self.misses]
            lines += [f"note: {note}" for note in (*self.choices[0].notes, *self.notes)]
            lines.append(f"speed is {self.choices[0].time.basis}")
        else:
            nothing = "Nothing fits."
            if miss := self.lightest:
                over = format_bytes(miss.over, digits=2)
                nothing += f" The lightest recipe is {miss.recipe}, {over} over."
            lines += [nothing, *(f"- {advice}" for advice in self.advice)]
        lines.append(f"fits means: the upper end of the predicted {q['tier']} interval is within the usable memory")
        lines.append(f"{self.considered:,} recipes considered, {self.predicted:,} predicted")
        return "\n".join(line if "\n" in line else _wrapped(line) for line in lines)


def plan(model: object, gpu: str | Gpu, gpus: int = 1, *, top: int = 5, **asked: Any) -> Plan:
    """Which recipes train `model` on `gpus` cards of the kind `gpu`, fastest first.

    Args:
        model, gpu, gpus: as in `Recipe`; a name of the GPU table or a `Gpu`; how many of them.
        top: how many recipes of each method to rank.
        asked: what is wanted and what may be used, the other fields of `vramlab.planning.question.Question`:
            global_batch, seq_len, method, precisions, optims, attention, checkpointing, engines, offload, lora, task,
            num_layers, trainer, memory, host_memory, tier, link.
    Raises:
        RecipeError, GpuError: one sentence that says which argument was wrong.
    """
    Knob(kind=int).check("top", top)
    question = Question(model, gpu, gpus, **asked)
    search = Search(question)
    found = [search.ranked(method, top) for method in question.methods]
    choices = [choice for of_method, _ in found for choice in of_method]
    choices.sort(key=lambda choice: order(choice.time.seconds, choice.recipe))  # stable
    return Plan(
        question={
            "model": question.plain.name,
            "gpu": question.gpu.name,
            "gpus": gpus,
            "global_batch": question.global_batch,
            "seq_len": question.plain.seq_len,
            "method": question.method,
            "tier": question.tier,
        },
        usable=question.usable,
        choices=tuple(choices),
        misses=tuple(miss for _, of_method in found for miss in of_method),
        lightest=None if choices else search.lightest(),
        advice=() if choices else tuple(advise(question)),
        considered=len(search.candidates),
        predicted=search.predicted,
        notes=() if question.memory or question.gpu.total_known else (_total_unknown(question),),
    )


def _wrapped(line: str) -> str:
    """The line in pieces of at most WIDTH characters, all but the first indented."""
    return textwrap.fill(line, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _short(recipe: Recipe) -> str:
    """The recipe without what the plan's first line says."""
    return str(recipe).replace(f"{recipe.name} · ", "", 1).replace(f"{recipe.seq_len} tokens · ", "", 1)


def _total_unknown(question: Question) -> str:
    said = format_bytes(question.usable, digits=2)
    return f"what {question.gpu.name} reports is not known: {said} is the least part of its box that any card reports"


def _encode(value: Any) -> Any:
    if isinstance(value, Recipe | Report):
        return value.to_dict()
    if isinstance(value, Plan | Choice | Miss | StepTime):
        return {name: _encode(getattr(value, name)) for name in value.__dataclass_fields__}
    return [_encode(item) for item in value] if isinstance(value, tuple) else value
