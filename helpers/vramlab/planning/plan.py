"""Which recipes train a model on given GPUs: the best full, LoRA and QLoRA answer, and how sure.

    from vramlab import plan
    found = plan("llama-3.1-8b", "T4", seq_len=1024)
    print(found)
    found.write("train.py")

An answer is *safe* if the upper end of the interval of its process is within the card's usable
memory, *likely* if the likely figure is, *tight* if only the lower end is. Memory is `predict`'s,
then `simulate`'s. What fits whole on each of several GPUs is divided only to save 5 % of the time.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..base import __version__, html
from ..base.errors import RecipeError
from ..base.files import NOT_OURS, is_ours, write_files
from ..hardware.gpu import Gpu
from ..report.report import GiB, encode, format_bytes, text_table
from .alternatives import Alternative, alternatives
from .candidate import Candidate, Choice, best_first
from .changes import advise
from .image_search import ImageSearch
from .plan_lines import alternative_to, costs_of, figures_of, host_memory_of, short_words, wrapped
from .plan_notes import BY_DEFAULT, notes_on_question, with_reference_first
from .plan_script import scripts, words
from .question import Question
from .search import Search
from .search_space import to_install, warned
from .vllm_share import asleep, may_fit_asleep, search_of
from .workers import loaded_early

COLUMNS = "peak: GiB of tensors; process: with CUDA's own; at most: upper end, which fits if safe"
MEANING = {
    "safe": "fits at the highest figures seen of allocator and context",
    "likely": "fits at the usual ones",
    "tight": "fits at the lowest only",
}
_UNPREPARED = "without PEFT's prepare_model_for_kbit_training"
_SHORTER = "one sample of the micro-batch is shorter, which takes a mask"
WORDS = {
    "not prepared": f"{_UNPREPARED}, which makes norms, embeddings and head fp32",
    "padded": f"{_SHORTER}: more here than rows of one length",
    "DPOTrainer": "a sample is a pair, and tokens are prompt and answer of each of its two",
}


@dataclass(frozen=True)
class Plan:
    """The answer.

    Attributes:
        question: what was asked.
        usable: bytes that one card's process can have.
        choices: the best recipe of each method that fits, by `candidate.WAYS`.
        alternatives: by method the answer with one switch turned each, by formula.
        better: of each method, what is faster and at most 2 GiB short, or else the lightest.
        advice: when nothing fits, what would: one computed sentence each.
        refused: by method without any recipe: the rules.
        considered: recipes in the space.
        predicted: how many of them were predicted.
        notes: what to know about the question itself.
    """

    question: dict[str, Any]
    usable: int
    choices: tuple[Choice, ...]
    alternatives: dict[str, tuple[Alternative, ...]] = field(default_factory=dict)
    better: tuple[Choice, ...] = ()
    advice: tuple[str, ...] = ()
    refused: dict[str, tuple[str, ...]] = field(default_factory=dict)
    considered: int = 0
    predicted: int = 0
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Choice:
        """The first choice. Raises RecipeError, with what would fit, when none does."""
        if not self.choices:
            reasons = [f"no recipe fits {self.question['model']} there", *self.advice[:1]]
            raise RecipeError("gpu", self.question["gpu"], "; ".join(reasons))
        return self.choices[0]

    @property
    def not_simulated(self) -> dict[str, str]:
        """By method why the formulas answer where a simulation was asked for."""
        return {choice.method: choice.unsimulated for choice in self.choices if choice.unsimulated}

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary; sizes in bytes, times in seconds."""
        return {"not_simulated": self.not_simulated, **encode(vars(self))}

    def to_json(self, indent: int | None = None) -> str:
        """Return the plan as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def write(
        self,
        path: str | Path,
        choice: Choice | None = None,
    ) -> list[Path]:
        """Write `choice`, or the best, as a program that trains so, and what it takes along.

        For several GPUs that is a configuration and a Slurm script. Return the files. Raises
        RecipeError where there is no such program, or a file of that name that vramlab did not
        write; FileError where one cannot be written: all are then as before.
        """
        path = Path(path)
        choice = choice or self.best
        texts = scripts(
            choice.recipe,
            path.name,
            self._planned(choice),
        )
        files = {path.with_name(name): text for name, text in texts.items()}
        if not is_ours(path):
            # A program of ours is replaced with all that it takes along; anything else is kept.
            for taken in filter(os.path.exists, files):
                raise RecipeError("write", str(taken), NOT_OURS)
        write_files(files)
        return list(files)

    def _planned(self, choice: Choice) -> dict[str, Any]:
        """Return what the head of a program says of the plan."""
        return {
            "version": __version__,
            "source": choice.report.source,
            "tier": choice.tier,
            "cards": self._cards,
            "peak": format_bytes(choice.report.peak.total, digits=2),
            "process": format_bytes(choice.needs.value, digits=2),
            "usable": format_bytes(self.usable, digits=2),
            "packing": self.question["packing"],
            "expandable_segments": self.question["expandable_segments"],
        }

    @property
    def _cards(self) -> str:
        count = self.question["gpus"]
        name = self.question["gpu"]
        return f"{count} × {name}" if count > 1 else name

    def table(self) -> str:
        """Return a line of figures for each choice, and its recipe under it."""
        header = "method", "tier", "peak", "process", "at most", "tokens/s", "from – to", "epoch"
        rows = [header, *map(figures_of, self.choices)]
        # No speed is known with images, times of an epoch only where the data's lengths are.
        if not any(choice.time for choice in self.choices):
            rows = [row[:-3] for row in rows]
        elif not any(choice.epoch for choice in self.choices):
            rows = [row[:-1] for row in rows]
        head, rule, *lines = text_table(rows).split("\n")
        table = [head, rule]
        indent = 7 * " "
        # A recipe is too long for a column.
        for line, choice in zip(lines, self.choices, strict=True):
            table.append(line)
            table.append(wrapped(indent + short_words(choice.recipe), indent))
        return "\n".join(table)

    def _repr_html_(self) -> str:
        """Return the plan as a notebook shows it: a row for each choice, and what to know."""
        if not self.choices:
            return html.table((), [(line,) for line in str(self).split("\n")])
        head = ("method", "tier", "peak, GiB", "process, at most, GiB", "tokens/s", "recipe")
        rows = []
        for choice in self.choices:
            sizes = [f"{size / GiB:.2f}" for size in (choice.report.peak.total, choice.needs.high)]
            speed = figures_of(choice)[5]
            rows.append((choice.method, choice.tier, *sizes, speed, short_words(choice.recipe)))
        q = self.question
        room = format_bytes(self.usable, digits=2)
        title = (
            f"{q['model']}, {q['seq_len']:,} tokens, global batch {q['global_batch']}, "
            f"on {self._cards}, {room}"
        )
        # What leaving a switch out costs stands below, as in the text.
        costs = [costs_of(choice) for choice in self.choices if choice.without]
        by_default = [self._by_default()] if self.question["expandable_segments"] else []
        return html.table(head, rows, title, [*by_default, *self.notes, *costs])

    def __str__(self) -> str:
        lines = [*self._warnings(), self._asked()]
        if self.choices:
            lines += ["", self.table(), ""]
        elif self.question["tier"]:
            lines.append(f"Nothing {self.question['tier']} fits.")
        else:
            lines.append("Nothing fits.")
        lines += [self._lacking(better) for better in self.better]
        for method, rules in self.refused.items():
            lines.append(f"{method}: no recipe, because {'; '.join(rules)}")
        lines += [f"- {advice}" for advice in self.advice]
        lines += [costs_of(choice) for choice in self.choices if choice.without]
        for choice in self.choices:
            others = self.alternatives.get(choice.method, ())
            lines += [alternative_to(choice, other) for other in others]
        if self.choices and self.question["expandable_segments"]:
            lines.append(self._by_default())
        lines += [host_memory_of(choice) for choice in self.choices if choice.host >= GiB]
        for choice in self.choices:
            lines += [f"{choice.method}: {note}" for note in choice.notes]
        lines += [f"note: {note}" for note in self.notes]
        if self.choices:
            lines += self._explained()
        # A table has its own line breaks.
        return "\n".join(line if "\n" in line else wrapped(line) for line in lines)

    def _asked(self) -> str:
        """Return the line that says what was asked, and how much memory there is."""
        asked = self.question
        room = format_bytes(self.usable, digits=2)
        if asked["gpus"] > 1:
            room += " each"
        if asked["other_memory"]:
            room += f" beside {format_bytes(asked['other_memory'], digits=2)} of others"
        rows = f"{asked['seq_len']:,} tokens"
        if asked["images"]:
            rows = f"{asked['images']} × {', '.join(asked['image_size'])} a sample"
        if asked["video_frames"]:
            rows += f", a video of {asked['video_frames']} frames of {asked['video_size']}"
        batch = f"{rows}, global batch {asked['global_batch']}"
        return f"{asked['model']}, {batch}, on {self._cards}, {room}"

    def _explained(self) -> Iterator[str]:
        """Yield what the words above mean, what to install and what the figures rest on."""
        yield COLUMNS
        for tier in dict.fromkeys(choice.tier for choice in self.choices):
            yield f"{tier}: {MEANING[tier]}"
        recipes = " ".join(words(choice.recipe) for choice in self.choices)
        for word, meaning in WORDS.items():
            if word in recipes:
                yield f"{word}: {meaning}"
        # What the words do not tell is one question's: the same in all.
        adapted = [choice.recipe for choice in self.choices if choice.recipe.lora]
        adapters = adapted[0].lora if adapted else None
        if adapters and adapters.target_modules:
            targets = adapters.target_modules
            names = [targets] if isinstance(targets, str) else targets
            options = " ".join(f"--lora-target {name}" for name in names)
            # A quantized base implies what the others have to say.
            said = (each.dtype for each in adapted if each.dtype not in (None, each.implied_dtype))
            options += "".join(f" --dtype {dtype}" for dtype in dict.fromkeys(said))
            yield f"{adapters.words()}: {options}, which predict and simulate have to be told"
        # In the order in which they are first needed, each once.
        packages: dict[str, None] = {}
        for choice in self.choices:
            packages |= dict.fromkeys(to_install(choice.recipe))
        if packages:
            yield f"to install: {', '.join(packages)}"
        time = self.choices[0].time
        speed = time.basis.split(":")[0] if time else "unknown: no formula knows the model"
        yield f"{self._sources()}; speed {speed}"

    def _warnings(self) -> Iterator[str]:
        """Yield what is said first: whose memory is not simulated, and why, each reason once."""
        for why, methods in _grouped(self.not_simulated.items()).items():
            yield f"NOT SIMULATED ({', '.join(methods)}), formulas only: {why}"

    def _sources(self) -> str:
        """Return where the figures of memory are from."""
        pairs = ((choice.method, choice.report.source) for choice in self.choices)
        sources = []
        for source, methods in _grouped(pairs).items():
            sources.append(f"{source} ({', '.join(methods)})")
        setting = ""
        if self.question["expandable_segments"]:
            setting = ", expandable_segments:True"
        return "memory " + ", ".join(sources) + setting

    def _by_default(self) -> str:
        """Return what counts for one's own script, whose allocator has its default settings."""
        verdicts = []
        for choice in self.choices:
            needs = choice.by_default
            verdict = needs.verdict(self.usable)
            verdicts.append(f"{choice.method} {verdict}, at most {needs.high / GiB:.2f}")
        return f"{BY_DEFAULT}: {'; '.join(verdicts)} GiB"

    def _lacking(self, better: Choice) -> str:
        """Return what a better recipe lacks of the tier that its method's answer has."""
        # Without an answer of its method it is the nearest to fitting, whose speed says nothing.
        answers = (choice for choice in self.choices if choice.method == better.method)
        answer = next(answers, None)
        lacks = f"lacks {format_bytes(better.over, digits=2)}"
        loading = better.report.loading
        # Each rank may load what it shards afterwards.
        if loading and loading.total > better.report.peak.total:
            lacks += " while it loads"
        if answer:
            lacks += f" to be {answer.tier}"
        if better.tier:
            lacks += f" ({better.tier} as it is)"
        if answer is None:
            nearest = f"{short_words(better.recipe)}{warned(better.recipe)}"
            return f"{better.method}: the nearest {lacks}: {nearest}"
        assert better.time  # of a model that formulas know
        rate = f"{better.time.tokens_per_second:,.0f} tokens/s"
        return f"{better.method} at {rate} {lacks}: {short_words(better.recipe)}"


Standing = Callable[[Plan, int, int], None]


def plan(
    model: object,
    gpu: str | Gpu | None = None,
    gpus: int = 1,
    *,
    confirm: bool = True,
    standing: Standing | None = None,
    **asked: Any,
) -> Plan:
    """Return the best full, LoRA and QLoRA recipe for `model` on `gpus` cards of the kind `gpu`.

    Args:
        model, gpu, gpus: as in `Recipe`; a name of the GPU table or a `Gpu`, None for this
            machine's or that with `memory`; how many of them.
        confirm: whether to simulate each answer, up to a minute; one that does not fit then is
            none. Without the libraries that `simulate` needs, formulas answer, and the first line
            says so.
        standing: called with the plan as it stands, how many of its answers are simulated, and how
            many there are: first by formula alone, then after each simulation. Where images are
            read, with how many simulations of sizes are done, and of how many at most.
        asked: what is wanted and what may be used, the other fields of
            `vramlab.planning.question.Question`: global_batch, seq_len, method, precisions, optims,
            attention, checkpointing, engines, offload, lora, task, num_layers, trainer, memory,
            host_memory, other_memory, tier, expandable_segments, lengths, packing, link.
    Raises:
        RecipeError, GpuError: one sentence that says which argument was wrong.
    """
    question = Question(model, gpu, gpus, **asked)
    if question.reads_images:
        return _with_images(question, confirm, standing)

    # Each standing is a plan of its own: an answer that did not fit has given way by then.
    def tell(done: int, count: int) -> None:
        if standing is not None:
            standing(_found(search, search.answers(False), False), done, count)

    with loaded_early() if confirm else nullcontext():
        search = search_of(question)
        answers = search.answers(confirm, tell)
        if question.may_sleep and not _has_any(answers) and may_fit_asleep(question):
            awake = search, answers
            search = search_of(asleep(question))
            answers = search.answers(confirm, tell)
            if not _has_any(answers):
                search, answers = awake
        return _found(search, answers, True)


def _has_any(answers: dict[str, tuple[Candidate | None, str]]) -> bool:
    return any(answer for answer, _ in answers.values())


def _found(search: Search, answers: dict[str, tuple[Candidate | None, str]], is_last: bool) -> Plan:
    """Return the plan that has these answers by method, each with its tier.

    Alternatives, and what would fit where nothing does, are looked for only if it `is_last`.
    """
    question = search.question
    choices = best_first([answer.choice() for answer, _ in answers.values() if answer])
    others = {}
    for method, (answer, _) in answers.items():
        if answer and is_last:
            others[method] = tuple(alternatives(answer))
    better = []
    notes = list(notes_on_question(question, choices))
    for method, (answer, tier) in answers.items():
        # What is faster by much and lacks little is worth knowing, for a card can be emptied.
        nearly = search.better(method, tier, answer)
        if nearly:
            better.append(nearly.choice(tier))
            if is_last and answer is None:
                notes += with_reference_first(nearly, search.offloads)
    return Plan(
        question=_said(question),
        usable=question.usable,
        choices=tuple(choices),
        alternatives=others,
        better=tuple(better),
        advice=() if choices or not is_last else tuple(advise(question, search.offloads)),
        refused=_refused(search),
        considered=len(search.candidates),
        predicted=search.predicted,
        notes=tuple(notes),
    )


def _with_images(question: Question, confirm: bool, standing: Standing | None) -> Plan:
    """Return the plan of a model that reads images, whose answers are all simulated."""
    if not confirm:
        rest = f"no formula knows {question.plain.name}, so its answers are simulated: leave it out"
        raise RecipeError("confirm", False, rest)

    def tell(search: ImageSearch, done: int, count: int) -> None:
        if standing is not None:
            standing(_of_images(search, search.found), done, count)

    search = ImageSearch(question, tell)
    return _of_images(search, search.choices())


def _of_images(search: ImageSearch, choices: list[Choice]) -> Plan:
    """Return the plan with the answers of a search for images."""
    return Plan(
        question=_said(search.question),
        usable=search.question.usable,
        choices=tuple(choices),
        advice=() if choices else tuple(search.lacks.values()),
        refused=search.refused,
        considered=len(search.reports),
    )


def _said(question: Question) -> dict[str, Any]:
    """Return what was asked, as a plan repeats it."""
    said = {
        "model": question.plain.name,
        "gpu": question.gpu.name,
        "seq_len": question.plain.seq_len,
    }
    names = ("gpus", "global_batch", "method", "tier", "expandable_segments", "packing")
    of_samples = ("images", "image_size", "video_frames", "video_size")
    for name in (*names, "other_memory", *of_samples):
        said[name] = getattr(question, name)
    return said


def _refused(search: Search) -> dict[str, tuple[str, ...]]:
    """Return by method without any recipe the rules that left nothing to try."""
    tried = {candidate.method for candidate in search.candidates}
    refused = {}
    for method, sentences in search.refused.items():
        # A method that has recipes needs no rule to explain why others are missing.
        if method not in tried:
            refused[method] = _rules(sentences)
    return refused


def _rules(refused: list[str]) -> tuple[str, ...]:
    """Return each rule once, but for those that a variant of the same recipe keeps.

    What formulas do not know counts only where no library's rule is in the way.
    """
    rules = dict.fromkeys(rule for rule in refused if not rule.startswith("--prepare"))
    of_libraries = [rule for rule in rules if not rule.endswith("ask simulate")]
    return tuple(of_libraries or rules)


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return by the second of each pair, in order, the first of all pairs that have it."""
    groups: dict[str, list[str]] = {}
    for name, reason in pairs:
        groups.setdefault(reason, []).append(name)
    return groups
