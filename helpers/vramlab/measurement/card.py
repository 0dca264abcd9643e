"""Everything that the project wants from a card, in one go.

Recipes to record and facts to find, dearest answers first.

`data/card.json` says what is wanted and what an answer is worth: the seconds of a card that one
would give for it. So what comes first is worth most a second. Each piece is saved as it ends, and
one that fails loses only itself.
"""

import contextlib
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ..hardware.gpu import Device, Gpu, current_device, source_of
from ..hardware.nvml import nvml_snapshot
from ..recipe.recipe import Recipe
from ..report.data import data_path
from ..report.errors import MeasurementError, RecipeError, RecordError
from ..report.files import read_text, strict_json
from ..report.report import Report, environment, format_bytes
from .facts import ASKED, Fact
from .launch import Launcher
from .measure import cannot, run_here
from .record import START, each_choice, read_list, recipes_of, seconds_for
from .records import RecordFile, add, file_name, measurements_folder, read_records, save

CARD_LIST = data_path("card.json")
WORK = "vramlab.measurement.card_work:find"
FOLDER = Path("my_records")
# What else a kind takes, in seconds: batches that grow, a file that is written and read, sensors
# that are watched.
EXTRA = {"out_of_memory": 30.0, "loading": 60.0, "steps": 5.0}
COMPILING = 60.0
SEEN = 0.1  # of its worth that an answer keeps which the project has of such a card
NEEDS_AMPERE = (
    "flash attention",
    "cuDNN attention",
)  # `context`'s, as `flash_attention_2` in `gpu.NEEDS`
ALLOCATOR = "PYTORCH_ALLOC_CONF"
LINES = 24  # characters of the bar
MOST_FAILURES = 5  # of a kind, one after the other: what is wrong then is not the piece
IDLE_CORES = 8  # from so many on, loading libraries leaves a step its own


@dataclass(frozen=True)
class Piece:
    """One thing to do on a card. `kind`: "recipe", or a kind of fact."""

    kind: str
    worth: float
    recipe: Recipe | None = None
    repeats: int = 3
    asked: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def key(self) -> str:
        """Return the key of its report or fact in a record file."""
        if self.kind == "recipe" and self.recipe:
            return self.recipe.key
        return Fact(self.kind, self.asked).key

    @property
    def title(self) -> str:
        return str(self.recipe) if self.kind == "recipe" else Fact(self.kind, self.asked).title

    def seconds(self, card: Gpu | None) -> float:
        """Estimate how long it takes, rather too long than too short."""
        base = seconds_for(self.recipe, card) if self.recipe else START
        compiling = COMPILING if self.recipe and self.recipe.torch_compile else 0.0
        return base + compiling + EXTRA.get(self.kind, 0.0)

    def cannot(self, card: Gpu) -> str:
        """Reason why `card` cannot do it, or ''."""
        if self.asked.get("loaded") in NEEDS_AMPERE:
            return card.why_not("flash_attention_2")
        if self.recipe is None:
            return ""
        return cannot(self.recipe, "cuda") or card.why_not(self.recipe.precision)

    def start(self) -> Launcher:
        """Start a process that will run it, and loads its libraries meanwhile."""
        settings = {"PYTHONFAULTHANDLER": "1"}  # where it was when a signal ends it
        settings["HF_HUB_OFFLINE"] = (
            "1"  # models come from shapes, and a request would wait for its time to be over
        )
        if "expandable" in self.asked:
            settings[ALLOCATOR] = f"expandable_segments:{self.asked['expandable']}"
        with patch.dict(os.environ, settings):
            return Launcher().start()

    def run(self, launcher: Launcher, timeout: float) -> Report | Fact:
        """Return what the card says, by the process that was started for it.

        Raises MeasurementError or RecipeError.
        """
        if self.kind == "recipe":
            step = {"recipe": self.recipe, "repeats": self.repeats, "warmup": 2, "device": "cuda"}
            return run_here(step, timeout, launcher)
        # what a process that is killed had written is removed here
        with launcher as child, tempfile.TemporaryDirectory(prefix="vramlab-") as scratch:
            order = {"kind": self.kind, "asked": self.asked, "scratch": scratch}
            return child.run(WORK, order, 1, "cuda", timeout)[0]


@dataclass
class CardRun:
    """What `run_card` did and what is left.

    Pieces, with seconds or with the reason that they were not done.
    """

    file: Path
    before: int = 0
    done: list[tuple[Piece, str]] = field(default_factory=list)
    failed: list[tuple[Piece, str]] = field(default_factory=list)
    left: list[tuple[Piece, float]] = field(default_factory=list)
    not_here: list[tuple[Piece, str]] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{len(self.done)} pieces done now, {self.before} before, in {self.file}"]
        lines += [f"failed: {piece.title}: {why.splitlines()[0]}" for piece, why in self.failed]
        if self.not_here:
            lines.append(
                f"{len(self.not_here)} that this card cannot do, the first: {self.not_here[0][1]}"
            )
        if self.left:
            minutes = sum(seconds for _, seconds in self.left) / 60
            lines.append(
                f"{len(self.left)} left, about {minutes:,.0f} minutes at most: run it again to "
                f"go on, first"
            )
            lines += [f"{seconds:6,.0f} s  {piece.title}" for piece, seconds in self.left[:5]]
        else:
            lines.append("nothing is left to do here")
        return "\n".join(lines)


def run_card(
    paths: Iterable[str | os.PathLike] | None = None,
    minutes: float = 30,
    folder: str | os.PathLike | None = None,
    dry_run: bool = False,
    progress: Callable[[str], None] = print,
    estimate: Callable[[Recipe], int] | None = None,
    beside: Callable[[Report], str] | None = None,
) -> CardRun:
    """Do on this card what the project still wants from such a one, and save each result at once.

    Args:
        paths: lists of pieces (`read_pieces`); None takes CARD_LIST.
        minutes: from now; what is not expected to end in this time is not started.
        folder: where the record file is; None is FOLDER.
        dry_run: do nothing, only say what is left; without a card as an unknown one would have it.
        progress: takes a line for each piece.
        estimate: gives a recipe's peak in bytes, so that what is larger than the card is left out.
        beside: gives what to print after each report that has figures.
    Returns:
        What was done and what is left. On a stand-in for a GPU all is done, into a file that no
        record can be made of.
    Raises:
        RecordError: a list or the record file cannot be read, or there is no GPU.
    """
    deadline = time.monotonic() + 60 * minutes
    here = current_device()
    if here.kind != "cuda" and not dry_run:
        raise RecordError(
            "there is no CUDA device here: `vramlab doctor` says why; --dry-run lists what would "
            "be done."
        )
    folder = Path(folder or FOLDER)
    source = source_of(here.kind) if here.kind == "cuda" else "measured"
    name = file_name(environment(gpu=here.name if here.kind == "cuda" else None))
    run = CardRun(folder / (name if source == "measured" else f"{source}-{name}"))
    known = read_records(run.file, missing_ok=True, source=source)
    _sort(run, pieces_of(paths), here, known, estimate)
    if not dry_run:
        progress(f"{here.name}: {_free()} · {_versions()}")
        _do_all(run, deadline, progress, beside or (lambda report: ""))
    return run


def pieces_of(paths: Iterable[str | os.PathLike] | None) -> list[Piece]:
    """Return the pieces of some lists, each once, with the highest worth that a list gives it."""
    found: dict[str, Piece] = {}
    for path in paths or [CARD_LIST]:
        for piece in read_pieces(Path(path)):
            other = found.get(piece.key)
            if other is None or piece.worth > other.worth:
                found[piece.key] = piece
    return list(found.values())


def read_pieces(path: Path) -> list[Piece]:
    """Return the pieces of a JSON list of objects.

    RecordError, which names the entry, if it is none.

    Each has `worth`, `why` and `kind`: "recipe" with a `recipe` and `repeats`, "list" with the
    `file` of a list of recipes beside it, or a kind of fact with what it is asked (`facts.ASKED`).
    A list as a field takes each of its values.
    """
    try:
        entries = strict_json(read_text(path))
        if not isinstance(entries, list):
            raise ValueError("it is not a list")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise RecordError(f"{path.name} is no list of pieces: {why}.") from error
    pieces: list[Piece] = []
    for number, entry in enumerate(entries, 1):
        try:
            pieces += _pieces(entry, path)
        except (RecipeError, KeyError, TypeError) as error:
            raise RecordError(f"{path.name}, entry {number}: {error}") from error
    return pieces


def _pieces(entry: dict[str, Any], path: Path) -> Iterator[Piece]:
    asked = dict(entry)
    worth = asked.pop("worth")
    asked.pop("why")
    kind = asked.pop("kind")
    if kind == "list":
        for listed in read_list(path.with_name(asked["file"])):
            yield Piece("recipe", worth, listed)
        return
    recipes: list[Recipe | None] = [None]
    if "recipe" in asked:
        recipes = [*recipes_of(asked.pop("recipe"))]
    for recipe in recipes:
        for chosen in each_choice(asked):
            if kind == "recipe":
                yield Piece(kind, worth, recipe, chosen.get("repeats", 3))
                continue
            if recipe:
                chosen |= {"recipe": recipe.to_dict()}
            if kind not in ASKED or chosen.keys() != ASKED[kind].keys():
                raise RecipeError(
                    "kind",
                    kind,
                    f"a {kind} has other fields, or kinds are recipe, list, {', '.join(ASKED)}",
                )
            yield Piece(kind, worth, recipe, asked=chosen)


def _sort(
    run: CardRun, pieces: list[Piece], here: Device, known: RecordFile, estimate: Callable | None
) -> None:
    """Sort `pieces` into those done, impossible on this card, and left.

    Of those left the most worth a second comes first.
    """
    seen = _seen_of(here.name) if here.kind == "cuda" else RecordFile()
    value = {}
    for piece in pieces:
        if _is_in(known, piece):
            run.before += 1
            continue
        reason = piece.cannot(here.gpu) if here.gpu else ""
        if (
            not reason
            and here.gpu
            and piece.kind == "recipe"
            and estimate
            and estimate(piece.recipe) > here.gpu.total
        ):
            reason = f"{piece.recipe} is larger than {here.name}"
        if reason:
            run.not_here.append((piece, reason))
            continue
        seconds = piece.seconds(here.gpu)
        value[piece.key] = piece.worth * (SEEN if _is_in(seen, piece) else 1.0) / seconds
        run.left.append((piece, seconds))
    run.left.sort(key=lambda item: -value[item[0].key])


def _is_in(records: RecordFile, piece: Piece) -> bool:
    """Whether a record file has what `piece` would find, with as many repeats."""
    if piece.kind != "recipe":
        return piece.key in records.facts
    report = records.reports.get(piece.key)
    return report is not None and (report.speed is None or report.speed.repeats >= piece.repeats)


def _seen_of(card: str) -> RecordFile:
    """Return all that the project's records say of cards of that name."""
    found = RecordFile()
    for path in sorted(measurements_folder().glob("*.json")):
        records = read_records(path)
        found.reports |= {
            key: report
            for key, report in records.reports.items()
            if report.environment["gpu"] == card
        }
        found.facts |= {
            key: fact for key, fact in records.facts.items() if fact.environment["gpu"] == card
        }
    return found


def _do_all(run: CardRun, deadline: float, progress: Callable, beside: Callable) -> None:
    """Do what is left in its order, as far as the time goes.

    Where cores are idle, the next process loads meanwhile.
    """
    start = time.monotonic()
    pieces = list(run.left)
    with contextlib.ExitStack() as stack:
        ready: dict[str, Launcher] = {}
        failures: Counter[str] = Counter()
        for number, (piece, seconds) in enumerate(pieces, 1):
            begun = time.monotonic()
            if seconds > deadline - begun or failures[piece.kind] == MOST_FAILURES:
                continue  # what follows may be shorter, or of another kind
            launcher = ready.pop(piece.key, None)
            if number < len(pieces) and (os.cpu_count() or 1) >= IDLE_CORES:
                following = pieces[number][0]
                with contextlib.suppress(
                    OSError
                ):  # a full disk: it is tried again when its turn has come
                    ready[following.key] = stack.enter_context(following.start())
            done, said = _do(piece, launcher, run.file, deadline - begun, beside)
            run.left.remove((piece, seconds))
            (run.done if done else run.failed).append((piece, said))
            failures[piece.kind] = 0 if done else failures[piece.kind] + 1
            now = time.monotonic()
            bar = ("█" * (number * LINES // len(pieces))).ljust(LINES, "░")
            clock = f"{(now - start) / 60:.1f} of {(deadline - start) / 60:.0f} min"
            line = (
                f"{bar} {number}/{len(pieces)} · {clock} · {now - begun:5.1f} s · "
                f"{said.splitlines()[0]} · {piece.title}"
            )
            progress(line)
            with (
                contextlib.suppress(OSError),
                open(run.file.with_name("card.log"), "a", encoding="utf-8") as log,
            ):
                log.write(f"{line}\n" + ("" if done else f"{said}\n"))


def _do(
    piece: Piece, launcher: Launcher | None, file: Path, timeout: float, beside: Callable
) -> tuple[bool, str]:
    """Do one piece and save what it says.

    Return whether that went well, and the result or the reason in words.
    """
    try:
        result = piece.run(launcher or piece.start(), timeout)
        if result.source == "measured" and isinstance(result, Report):
            save(result, file.parent)
        else:
            add(result, file)
    except (MeasurementError, RecipeError, RecordError, OSError) as error:
        return False, str(error).strip() or type(error).__name__
    if isinstance(result, Fact):
        return True, result.words
    if result.status != "ok":
        return True, result.status
    allocated = result.allocated or 0  # a run that ended well has it
    return True, format_bytes(allocated) + beside(result)


def _free() -> str:
    """Say how much of the card is free."""
    seen = nvml_snapshot()
    if not seen.available or seen.free is None:
        return "NVML does not say how much is free"
    words = f"{format_bytes(seen.free)} of {format_bytes(seen.total)} free"
    return (
        words
        if seen.free > 0.9 * seen.total
        else f"{words}: other processes hold the rest, so end them first"
    )


def _versions() -> str:
    seen = environment()
    names = ("torch", "transformers", "peft", "bitsandbytes", "accelerate")
    return ", ".join(f"{name} {seen[name]}" for name in names if seen[name])
