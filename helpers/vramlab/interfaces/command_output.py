"""What the commands share: how they print, read a card, and end."""

import json
import math
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import typer

from ..base.errors import RecipeError
from ..base.files import MOST_TEXT, NOT_OURS, is_ours
from ..base.text import printable
from ..formulas.predict import predict
from ..hardware.gpu import Gpu, cards_of, find_gpu, is_also, usable_memory
from ..planning.counted import HOSTS, host_memory
from ..planning.sizes import card_with, size_of
from ..recipe.recipe import Recipe
from ..report.report import NO_TIER, TIERS, GiB, Interval, Report, format_bytes
from .recipe_options import fits_card

# Exit statuses; the docstring of `cli.py` says what each means.
DOES_NOT_FIT = FAILED = 1
ASSUMED_HOST = "Kaggle"  # the larger of the free machines
WRONG = 2
STOPPED = 130


def say(text: Any, err: bool = False) -> None:
    """Print `text` without what a terminal would obey: it may quote a file of others."""
    typer.echo(printable(str(text)), err=err)


class InPlace:
    """Text in a terminal that the next takes the place of; nothing is left of it at the end."""

    def __init__(self) -> None:
        self._rows = 0

    def __enter__(self) -> "InPlace":
        return self

    def __exit__(self, *_: object) -> None:
        self._clear()

    def show(self, text: str) -> None:
        """Print `text` in the place of what was shown before."""
        # The text of before may have more lines than this one, so it is erased whole.
        self._clear()
        say(text)
        width = shutil.get_terminal_size().columns
        # A line wider than the terminal takes several rows, and the cursor has to go up by rows.
        self._rows = sum(max(1, math.ceil(len(line) / width)) for line in text.split("\n"))

    def show_standing(self, found: Any, done: int, count: int) -> None:
        """Show the answers of a Plan as they stand, `done` of `count` of them simulated."""
        rest = "confirmed by simulation, the rest by formula"
        if found.question.get("images"):
            rest = "simulations at most, of sizes of images"
        elif not found.choices:
            return
        answers = [found.table()] if found.choices else []
        self.show("\n\n".join([*answers, f"{bar(done, count)} {rest}"]))

    def _clear(self) -> None:
        if self._rows:
            # ECMA-48: to the start of the line so many rows above, and erase what is below.
            typer.echo(f"\x1b[{self._rows}F\x1b[J", nl=False)
        self._rows = 0


def bar(done: int, count: int, width: int = 20) -> str:
    """Return a bar of how much is done, and how much that is."""
    full = width * done // count
    return f"{'█' * full}{'░' * (width - full)} {done} of {count}"


def as_text(answer: dict[str, Any]) -> str:
    """Return a command's answer as JSON that says the version of its schema."""
    from .schema import versioned

    return json.dumps(versioned(answer), indent=2)


def standard_input() -> str:
    """Return what is piped in, at most MOST_TEXT bytes of it.

    Raises RecipeError where it is closed.
    """
    if sys.stdin is None:
        raise RecipeError(
            "message",
            "-",
            "standard input is closed: pipe a message in, or name a file",
        )
    # A log may hold bytes of any encoding; what is looked for in it is ASCII.
    return typer.get_binary_stream("stdin").read(MOST_TEXT).decode("utf-8", "replace")


def check_written(**files: Path | None) -> None:
    """Raise RecipeError at the first of the options `files` that cannot be written.

    That is before anything is computed, and also where it is there already and not of our making.
    """
    for name, path in files.items():
        # The folder's permission decides, since a file is written beside its target and then
        # renamed.
        if path and (os.path.isdir(path) or not os.access(path.parent, os.W_OK)):
            raise RecipeError(
                name,
                str(path),
                "it must be the name of a file in a folder that can be written to",
            )
        if path and path.exists() and not is_ours(path):
            raise RecipeError(name, str(path), NOT_OURS)


def asked_card(name: str | None, recipe: Recipe) -> Gpu | None:
    """Return the GPU asked for; refuse a precision that it lacks."""
    if name is None:
        return None
    # A size names no card, so `card_of` says which one it took.
    card = card_of(name) if is_size(name) else find_gpu(name)
    _require(card, recipe)
    if not is_size(name):
        _say_family(name, card)
    return card


def _require(card: Gpu, recipe: Recipe) -> None:
    """Raise RecipeError where the card lacks the precision, with options that are known to do."""
    # The card's sentence ends with the format that it has, which becomes the advice.
    why, _, form = card.why_not(recipe.precision).rpartition(": take ")
    if not why:
        return
    _, _, kind = recipe.precision.partition("-")
    fields: dict[str, Any] = {"precision": f"{form}-{kind}" if kind else form}
    # Weights in bf16 on a card without it would leave the same trouble with another option.
    if recipe.dtype == "bfloat16":
        fields["dtype"] = "float16"
    # The advice is tried before it is given.
    try:
        predict(recipe.replace(**fields))
    except RecipeError:
        # TRL's trainers make a quantized base's adapters bf16, which fp16's scaler refuses.
        fields["trainer"] = "transformers"
    options = " ".join(f"--{name} {value}" for name, value in fields.items())
    raise RecipeError("precision", recipe.precision, f"{why}: take {options}")


def is_watched() -> bool:
    """Return whether somebody reads what is printed as it comes.

    That is in a terminal that can erase it.
    """
    is_terminal = bool(sys.stdout and sys.stdout.isatty())
    return is_terminal and os.environ.get("TERM") != "dumb"


def is_size(name: str | None) -> bool:
    """Return whether what was said for a card is a size of memory, such as 24GB."""
    return bool(name and re.fullmatch(r"\d+(\.\d+)? *([kmgt]i?b)", name.strip().lower()))


def card_of(name: str) -> Gpu:
    """Return the card of a name, or the table's least that has a size of memory, and say it."""
    if not is_size(name):
        card = find_gpu(name)
        _say_family(name, card)
        return card
    size = size_of("gpu", name)
    assert size is not None  # it is one
    card = card_with(size)
    why = "the table's least card of that memory"
    # Sizes that are no round number of GiB are what a driver reports of one particular card.
    if size % GiB and card in cards_of(size):
        why = "which reports so much"
    say(f"note: {name} is taken as {card.name}, {why}", err=True)
    return card


def _say_family(name: str, card: Gpu) -> None:
    """Say which card a family's name is taken as."""
    others = ", ".join(is_also(name))
    if others:
        say(f"note: {name} is taken as {card.name}; there is also {others}", err=True)


def granted_to(
    card: Gpu | None,
    other_memory: str | None,
    expandable_segments: bool,
) -> dict[str, Any]:
    """Return what the process is granted. Raises RecipeError for memory of no card."""
    size = size_of("other_memory", other_memory) or 0
    if size and card is None:
        raise RecipeError("other_memory", other_memory, "it is of a card's memory: say --gpu too")
    return {"other_memory": size, "expandable_segments": expandable_segments}


def recorded_on(report: Report) -> str:
    """Return whose figures a record's are: card, versions and date; "" where none was looked up."""
    seen = report.environment
    if report.source != "recorded":
        return ""
    libraries = ("torch", "transformers", "driver")
    parts = [f"{name} {seen[name]}" for name in libraries if seen.get(name)]
    card = seen.get("gpu") or "a CPU"
    return (
        f"recorded on {card}, {', '.join(parts)}, {seen.get('date')}: another machine's "
        f"figures, not this one's"
    )


class Host(NamedTuple):
    """The host's memory by which an answer is judged, and whose it is."""

    size: int
    words: str


def host_of(said: str | None) -> Host:
    """Return the host that was said, or one that is assumed."""
    size = size_of("host_memory", said)
    if size is not None:
        return Host(size, format_bytes(size))
    assumed = int(HOSTS[ASSUMED_HOST] * GiB)
    words = f"{format_bytes(assumed)} (assumed, {ASSUMED_HOST}'s: --host-memory says another)"
    return Host(assumed, words)


def on_host(report: Report) -> int:
    """Return the bytes of host memory that are needed; 0 where nothing is known of it."""
    # A report of somebody's own module has no recipe to count host memory by.
    if not report.recipe:
        return 0
    return host_memory(Recipe(**report.recipe), report.kept_on_host or 0)


def finish(
    report: Report,
    card: Gpu | None,
    as_json: bool,
    whole: Any = None,
    host: Host | None = None,
    then: str = "",
) -> None:
    """Print the report, or the `whole` that it is of, and whether it fits the card and the `host`.

    `then` is what to ask where it does not.

    Exit as both mean: a tight answer is one of which half die (site/accuracy.md), and no fit.

    In JSON the answer is `environment.tier`, in a word, and `environment.fits`: true, false, or
    null where the card lies within the interval.
    """
    fits: bool | None = True
    sentence = ""
    # A report for the CPU has no process on a card, so nothing can be judged.
    if card and report.process is not None:
        # The witness has set it already where other processes hold a part of the card.
        report.usable = usable_memory(card) if report.usable is None else report.usable
        fits = fits_card(report)
        grade = report.grade
        tier = report.verdict
        free = on_host(report)
        rest = ""
        # Below a GiB any host has it, and the sentence stays short.
        if free >= GiB and tier in TIERS:
            rest = f", and {free / GiB:.1f} GiB of host memory are free"
        sentence = report.answer(card.name, rest)
        # A card with room does not help where predictions gathered on the host overflow it.
        if host and free > host.size:
            fits = False
            grade = tier = NO_TIER
            rest = f"{free / GiB:.1f} GiB of host memory are needed, of {host.words}"
            if report.beyond:
                sentence += f"; and {rest}"
            else:
                needs = Interval.of(report.process)
                has = format_bytes(report.usable)
                sentence = f"{tier}: {card.name} has {has}, the process needs {needs}, but {rest}"
        if then and tier == NO_TIER:
            sentence += f". {then}"
        report.environment |= {"gpu": card.name, "fits": fits, "tier": tier, "grade": grade}
        report.environment["host_memory"] = free
        # JSON has one document and no line under it, so the sentence goes among the notes.
        if as_json:
            report.notes += [sentence]
    whose = recorded_on(report)
    if as_json and whose:
        report.notes.insert(0, whose)
    whole = whole or report
    # Whose figures these are comes first: nobody should take another machine's for their own.
    lines = [whose, str(whole), sentence]
    text = as_text(whole.to_dict()) if as_json else "\n".join(filter(None, lines))
    say(text)
    # A failed run, no fit and a tight one all end with 1, so that a script can ask by status alone.
    if report.status != "ok" or fits is False or report.environment.get("tier") == "tight":
        raise typer.Exit(DOES_NOT_FIT)
