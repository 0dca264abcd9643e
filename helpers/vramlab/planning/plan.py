"""Which recipes train a model on given GPUs: the best full, LoRA and QLoRA answer, and how sure it is that each fits.

    from vramlab import plan
    found = plan("llama-3.1-8b", "T4", seq_len=1024)
    print(found)
    found.write("train.py")

An answer is *safe* if the upper end of the interval of its process is within the card's usable memory, *likely* if the
likely figure is, *tight* if only the lower end is: `hardware.contexts` says what is assumed of the context. Memory is
`predict`'s, then `simulate`'s; seconds are `step_time`'s.
"""

import dataclasses
import json
import os
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..hardware.gpu import Gpu
from ..recipe.knobs import unchecked
from ..recipe.options import REPEATED
from ..recipe.recipe import Recipe
from ..report import __version__, html
from ..report.errors import RecipeError
from ..report.files import NOT_OURS, is_ours, write_files
from ..report.report import GiB, encode, format_bytes, text_table
from .changes import advise
from .plan_script import scripts, words
from .question import Question
from .search import Choice, Search, best_first, epoch_of, is_as_fast
from .search_space import to_install
from .step_time import walk

WIDTH = 80  # characters of a line in a terminal
LEAST_SAVED = 0.9  # packing is worth naming where an epoch takes at most so much of its time
COLUMNS = "peak: GiB of all tensors; process: with CUDA's own; at most: its upper end"
MEANING = {
    "safe": "fits at the highest figures seen of allocator and context",
    "likely": "fits at the usual ones",
    "tight": "fits at the lowest only",
}
HOSTS = {"free Colab": 12.7, "Kaggle": 30}  # GiB of host memory, as their machines show it
WORDS = {
    "not prepared": "without PEFT's prepare_model_for_kbit_training, which makes norms, embeddings and head fp32",
    "padded": "one sample of the micro-batch is shorter, which takes a mask: more here than rows of one length",
}


@dataclass(frozen=True)
class Plan:
    """The answer."""

    question: dict[str, Any]  # what was asked
    usable: int  # bytes that one card's process can have
    choices: tuple[Choice, ...]  # the best recipe of each method that fits, the best of them first (`search.WAYS`)
    better: tuple[Choice, ...] = ()  # of each method, what is faster and at most 2 GiB short, or else the lightest
    advice: tuple[str, ...] = ()  # when nothing fits, what would: one computed sentence each
    refused: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by method without any recipe: the rules
    considered: int = 0  # recipes in the space
    predicted: int = 0  # how many of them were predicted
    notes: tuple[str, ...] = ()  # what to know about the question itself

    @property
    def best(self) -> Choice:
        """The first choice. Raises RecipeError, with what would fit, when none does."""
        if not self.choices:
            why = "; ".join([f"no recipe fits {self.question['model']} there", *self.advice[:1]])
            raise RecipeError("gpu", self.question["gpu"], why)
        return self.choices[0]

    @property
    def not_simulated(self) -> dict[str, str]:
        """By method why the formulas answer where a simulation was asked for."""
        return {choice.method: choice.unsimulated for choice in self.choices if choice.unsimulated}

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary; sizes in bytes, times in seconds."""
        return {"not_simulated": self.not_simulated, **encode(vars(self))}

    def to_json(self, indent: int | None = None) -> str:
        """The plan as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def write(self, path: str | Path, choice: Choice | None = None) -> list[Path]:
        """Write `choice`, or the best, as a program that trains so, and what it takes along; return the files.

        For several GPUs that is a configuration and a Slurm script. Raises RecipeError where there is no such program, or
        a file of that name that vramlab did not write; FileError where one cannot be written: all are then as before.
        """
        path, choice, q = Path(path), choice or self.best, self.question
        sizes = {"peak": choice.report.peak.total, "process": choice.needs.value, "usable": self.usable}
        said = {name: format_bytes(size, digits=2) for name, size in sizes.items()}  # in the program's head
        said |= {"version": __version__, "source": choice.report.source, "tier": choice.tier, "cards": self._cards}
        texts = scripts(choice.recipe, path.name, said | {name: q[name] for name in ("packing", "expandable_segments")})
        files = {path.with_name(name): text for name, text in texts.items()}
        if not is_ours(path):
            for taken in filter(os.path.exists, files):
                raise RecipeError("write", str(taken), NOT_OURS)
        write_files(files)
        return [*files]

    @property
    def _cards(self) -> str:
        count, name = self.question["gpus"], self.question["gpu"]
        return f"{count} × {name}" if count > 1 else name

    def table(self) -> str:
        """A line of figures for each choice, and its recipe under it."""
        rows = [("method", "tier", "peak", "process", "at most", "tokens/s", "from – to", "epoch")]
        for choice in self.choices:
            time, needs = choice.time, choice.needs
            sizes = (f"{size / 2**30:.2f}" for size in (choice.report.peak.total, needs.value, needs.high))
            likely, low, high = (f"{time.tokens / seconds:,.0f}" for seconds in (time.seconds, time.high, time.low))
            epoch = f"{choice.epoch / 3600:,.1f} h" if choice.epoch else ""
            rows.append((choice.method, choice.tier, *sizes, likely, f"{low} – {high}", epoch))
        shown = None if any(choice.epoch for choice in self.choices) else -1
        head, rule, *lines = text_table([row[:shown] for row in rows]).split("\n")
        recipes = (_wrapped("       " + _short(choice.recipe), "       ") for choice in self.choices)
        return "\n".join([head, rule, *(f"{line}\n{recipe}" for line, recipe in zip(lines, recipes, strict=True))])

    def _repr_html_(self) -> str:
        """Return the plan as a notebook shows it: a row for each choice, with its recipe, and what to know."""
        if not self.choices:
            return html.table((), [(line,) for line in str(self).split("\n")])
        head = ("method", "tier", "peak, GiB", "process, at most, GiB", "tokens/s", "recipe")
        rows = []
        for choice in self.choices:
            sizes = [f"{size / GiB:.2f}" for size in (choice.report.peak.total, choice.needs.high)]
            speed = f"{choice.time.tokens / choice.time.seconds:,.0f}"
            rows.append((choice.method, choice.tier, *sizes, speed, _short(choice.recipe)))
        q = self.question
        room = format_bytes(self.usable, digits=2)
        title = f"{q['model']}, {q['seq_len']:,} tokens, global batch {q['global_batch']}, on {self._cards}, {room}"
        return html.table(head, rows, title, [*self.notes, *(_costs(one) for one in self.choices if one.without)])

    def __str__(self) -> str:
        q, room = self.question, format_bytes(self.usable, digits=2)
        room += " each" if q["gpus"] > 1 else ""
        room += f" beside {format_bytes(q['other_memory'], digits=2)} of others" if q["other_memory"] else ""
        lines = self._warnings()
        lines += [f"{q['model']}, {q['seq_len']:,} tokens, global batch {q['global_batch']}, on {self._cards}, {room}"]
        lines += ["", self.table(), ""] if self.choices else [f"Nothing {q['tier'] or ''} fits.".replace("  ", " ")]
        lines += [self._lacking(better) for better in self.better]
        lines += [f"{method}: no recipe, because {'; '.join(rules)}" for method, rules in self.refused.items()]
        lines += [f"- {advice}" for advice in self.advice]
        lines += [_costs(choice) for choice in self.choices if choice.without]
        lines += [self._by_default()] if self.choices and q["expandable_segments"] else []
        lines += [_host(choice) for choice in self.choices if choice.host >= GiB]
        noted = [(choice.method, note) for choice in self.choices for note in choice.notes]
        lines += [f"{method}: {note}" for method, note in noted] + [f"note: {note}" for note in self.notes]
        if self.choices:
            lines.append(COLUMNS)
            lines += [f"{tier}: {MEANING[tier]}" for tier in dict.fromkeys(choice.tier for choice in self.choices)]
            said = " ".join(words(choice.recipe) for choice in self.choices)
            lines += [f"{word}: {meaning}" for word, meaning in WORDS.items() if word in said]
            packages = dict.fromkeys(name for choice in self.choices for name in to_install(choice.recipe))
            lines += [f"to install: {', '.join(packages)}"] if packages else []
            lines.append(f"{self._sources()}; speed {self.choices[0].time.basis.split(':')[0]}")
        return "\n".join(line if "\n" in line else _wrapped(line) for line in lines)

    def _warnings(self) -> list[str]:
        """What is said first: whose memory is not simulated, and why, each reason once."""
        found = self.not_simulated
        by = {why: [method for method, reason in found.items() if reason == why] for why in found.values()}
        return [f"NOT SIMULATED ({', '.join(methods)}), formulas only: {why}" for why, methods in by.items()]

    def _sources(self) -> str:
        sources = dict.fromkeys(choice.report.source for choice in self.choices)
        by = {source: [c.method for c in self.choices if c.report.source == source] for source in sources}
        told = ", expandable_segments:True" if self.question["expandable_segments"] else ""
        return "memory " + ", ".join(f"{source} ({', '.join(methods)})" for source, methods in by.items()) + told

    def _by_default(self) -> str:
        """What counts for a script of one's own, whose allocator has its default settings."""
        said = []
        for choice in self.choices:
            needs = choice.by_default
            said.append(f"{choice.method} {needs.verdict(self.usable)}, at most {needs.high / GiB:.2f}")
        return f"without expandable segments: {'; '.join(said)} GiB"

    def _lacking(self, better: Choice) -> str:
        now = next((choice for choice in self.choices if choice.method == better.method), None)
        said = (f" to be {now.tier}" if now else "") + (f" ({better.tier} as it is)" if better.tier else "")
        rate, lacks = f"{better.time.tokens_per_second:,.0f} tokens/s", format_bytes(better.over, digits=2)
        if now is None:
            return f"{better.method}: the nearest lacks {lacks}{said}: {_short(better.recipe)}"
        return f"{better.method} at {rate} lacks {lacks}{said}: {_short(better.recipe)}"


def plan(model: object, gpu: str | Gpu | None = None, gpus: int = 1, *, confirm: bool = True, **asked: Any) -> Plan:
    """The best full, LoRA and QLoRA recipe that trains `model` on `gpus` cards of the kind `gpu`.

    Args:
        model, gpu, gpus: as in `Recipe`; a name of the GPU table or a `Gpu`, None for this machine's or that with
            `memory`; how many of them.
        confirm: whether to simulate each answer, some seconds each; one that does not fit then is none. Without the
            libraries that `simulate` needs, formulas answer, and the first line says so.
        asked: what is wanted and what may be used, the other fields of `vramlab.planning.question.Question`:
            global_batch, seq_len, method, precisions, optims, attention, checkpointing, engines, offload, lora, task,
            num_layers, trainer, memory, host_memory, other_memory, tier, expandable_segments, lengths, packing, link.
    Raises:
        RecipeError, GpuError: one sentence that says which argument was wrong.
    """
    question = Question(model, gpu, gpus, **asked)
    search = Search(question)
    answers = search.answers(confirm)
    choices = best_first([found.choice() for found, _ in answers.values() if found])
    tried = {candidate.method for candidate in search.candidates}
    refused = {method: _rules(found) for method, found in search.refused.items() if method not in tried}
    better = [(search.better(method, tier, found), tier) for method, (found, tier) in answers.items()]
    asked = {"model": question.plain.name, "gpu": question.gpu.name, "seq_len": question.plain.seq_len}
    same = ("gpus", "global_batch", "method", "tier", "expandable_segments", "packing", "other_memory")
    return Plan(
        question=asked | {name: getattr(question, name) for name in same},
        usable=question.usable,
        choices=tuple(choices),
        better=tuple(found.choice(tier) for found, tier in better if found),
        advice=() if choices else tuple(advise(question)),
        refused=refused,
        considered=len(search.candidates),
        predicted=search.predicted,
        notes=tuple(_notes(question, choices)),
    )


def _rules(refused: list[str]) -> tuple[str, ...]:
    """Each rule that left nothing to try once, but for those that a variant of the same recipe keeps; what formulas do
    not know only where no library's rule is in the way."""
    rules = dict.fromkeys(rule for rule in refused if not rule.startswith("quantization.prepare"))
    of_libraries = [rule for rule in rules if not rule.endswith("ask simulate")]
    return tuple(of_libraries or rules)


def _packed(choice: Choice, question: Question) -> str:
    """What an epoch of `choice` would take with packed rows, where padding is a tenth of them or more; else ""."""
    if question.packing:
        return ""
    recipe = unchecked(choice.recipe, padding_free=False, packing=choice.recipe.trainer == "sft")
    seconds = epoch_of(dataclasses.replace(question, packing=True), recipe, choice.time.parts)
    if seconds > LEAST_SAVED * choice.epoch:
        return ""
    return f"packing (--packing) would make an epoch of {choice.method} {choice.epoch / seconds:.1f} times as fast"


def _as_fast(choices: Sequence[Choice]) -> Iterator[str]:
    """Which choices are about as fast as the first: their times differ by no more than the error of an estimate."""
    fastest = min(choices, key=lambda choice: choice.seconds, default=None)
    alike = [choice.method for choice in choices if is_as_fast(choice, fastest)]
    if len(alike) > 1:
        yield f"{' and '.join(alike)}: about as fast, within the error of the estimate; the simpler first"


def _notes(question: Question, choices: list[Choice]) -> Iterator[str]:
    yield from _as_fast(choices)
    if question.assumed:
        yield f"no card is named: speed and kernels are {question.gpu.name}'s, the table's least with so much memory"
    if not (question.memory or question.gpu.total_known):
        said = format_bytes(question.usable, digits=2)
        yield f"what {question.gpu.name} reports is not known: {said} is the least part of its box that any card reports"
    eager = [choice.recipe for choice in choices if choice.recipe.attn_implementation == "eager"]
    eager = [recipe for recipe in eager if recipe.shape.attention != "eager"]  # others have no sdpa
    if any(not walk(unchecked(recipe, attn_implementation="sdpa"), question.gpu.chip).fused for recipe in eager):
        yield f"eager: for rows of one length sdpa has no fused kernel for this model on {question.gpu.name}"
    if any(choice.recipe.attn_implementation == REPEATED for choice in choices):
        yield f"{REPEATED}: repeat_shared_keys() of vramlab, or {question.gpu.name} has no fused kernel for shared keys"
    if lengths := question.lengths:
        cut, middle = sum(length > question.plain.seq_len for length in lengths), lengths[len(lengths) // 2]
        rest = f"; {cut:,} are cut to {question.plain.seq_len:,}" if cut else ""
        yield f"data: {len(lengths):,} samples of {lengths[0]:,} to {lengths[-1]:,} tokens, median {middle:,}{rest}"
        if choices and question.plain.trainer in ("transformers", "sft") and (better := _packed(choices[0], question)):
            yield better


def _wrapped(line: str, indent: str = "    ") -> str:
    """The line in pieces of at most WIDTH characters, all but the first indented."""
    return textwrap.fill(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _host(choice: Choice) -> str:
    """How much host memory the tier supposes, and where there is not so much."""
    fewer = [f"{name} has {size:g}" for name, size in HOSTS.items() if size * GiB < choice.host]
    rest = f" ({', '.join(fewer)})" if fewer else ""
    return f"{choice.method}: {choice.tier} with {choice.host / GiB:.1f} GiB of host memory free{rest}"


def _costs(choice: Choice) -> str:
    """What leaving out each switch of a choice would add to its peak."""
    added = [f"{name} {size / GiB:+.2f}" for name, size in choice.without.items()]
    return f"{choice.method} without: {', '.join(added)} GiB"


def _short(recipe: Recipe) -> str:
    """The recipe without what the plan's first line says."""
    return words(recipe).replace(f"{recipe.seq_len} tokens · ", "", 1)
