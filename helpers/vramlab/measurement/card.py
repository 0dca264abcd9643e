"""Everything that the project wants from a card, in one go: recipes to record and facts to find.

`data/card.json` says what is wanted and what an answer is worth: the seconds of a card that one
would give for it. What is worth most a second comes first. Each piece is saved as it ends, and one
that fails loses only itself.
"""

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ..base.errors import MeasurementError, RecipeError, RecordError
from ..hardware.gpu import Device, current_device, source_of
from ..hardware.nvml import nvml_snapshot
from ..recipe.recipe import Recipe
from ..report.report import Report, environment, format_bytes
from .facts import Fact
from .launch import LateError, Launcher, RankError
from .pieces import SETTINGS, Piece, pieces_of
from .records import RecordFile, add, file_name, measurements_folder, read_records, save

FOLDER = Path("my_records")
SEEN = 0.1  # of its worth that an answer keeps which the project has of such a card
LINES = 24  # characters of the bar
MOST_FAILURES = 5  # of a kind, one after the other: what is wrong then is not the piece
PATIENCE = 10  # times its estimate, after which a piece is ended: it hangs, and others wait
IDLE_CORES = 8  # from so many on, loading libraries leaves a step its own

Progress = Callable[[str], None]
Beside = Callable[[Report], str]


@dataclass
class CardRun:
    """What was done and what is left: pieces, with seconds or with the reason that they were not.

    Attributes:
        file: the record file of this machine's device and versions.
        device: "cuda" or "cpu".
        source: of its reports and facts.
        reports: those of `done`.
    """

    file: Path
    device: str = "cuda"
    source: str = "measured"
    before: int = 0
    done: list[tuple[Piece, str]] = field(default_factory=list)
    failed: list[tuple[Piece, str]] = field(default_factory=list)
    left: list[tuple[Piece, float]] = field(default_factory=list)
    not_here: list[tuple[Piece, str]] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{len(self.done)} pieces done now, {self.before} before, in {self.file}"]
        lines += [f"failed: {piece.title}: {why.splitlines()[0]}" for piece, why in self.failed]
        if self.not_here:
            _, first = self.not_here[0]
            lines.append(f"{len(self.not_here)} that this card cannot do, the first: {first}")
        if self.left:
            minutes = sum(seconds for _, seconds in self.left) / 60
            again = "run it again to go on, first"
            lines.append(f"{len(self.left)} left, about {minutes:,.0f} minutes at most: {again}")
            lines += [f"{seconds:6,.0f} s  {piece.title}" for piece, seconds in self.left[:5]]
        else:
            lines.append("nothing is left to do here")
        return "\n".join(lines)

    def plan(
        self,
        pieces: Iterable[Piece],
        here: Device,
        known: RecordFile,
        why_not: Callable[[Piece], str],
        seen: RecordFile | None = None,
    ) -> None:
        """Sort `pieces` into those done before, those that cannot be done here, and those left.

        Args:
            known: the results of runs before.
            why_not: gives the reason why a piece is not done here, or "".
            seen: what the project has of such a card, which comes last.
        """
        answers: Counter[str] = Counter()  # by question
        value: dict[str, float] = {}
        for piece in pieces:
            if _is_in(known, piece):
                self.before += 1
                answers[piece.why] += 1
            elif reason := why_not(piece):
                self.not_here.append((piece, reason))
            else:
                seconds = piece.seconds(here.gpu, self.device)
                self.left.append((piece, seconds))
                value[piece.key] = piece.worth / seconds
                if seen and _is_in(seen, piece):
                    value[piece.key] *= SEEN
        # Sorted twice: first by what each is worth by itself, which numbers the answers to a
        # question.
        self.left.sort(key=lambda item: -value[item[0].key])
        # The nth answer to one question is worth an nth of the first. So no question has to wait
        # until a cheaper one has been asked of thirty models.
        for piece, _ in self.left:
            answers[piece.why] += 1
            value[piece.key] /= answers[piece.why]
        self.left.sort(key=lambda item: -value[item[0].key])

    def do_all(
        self,
        minutes: float,
        progress: Progress,
        beside: Beside | None = None,
        log: Path | None = None,
    ) -> None:
        """Do what is left in its order, as far as the time goes.

        Most pieces are forked from one process that has loaded the libraries. Where cores are idle,
        the process of one that is not (`Piece.can_fork`) loads them while the piece before it runs.
        What the end of the time cuts is still left.
        """
        start = time.monotonic()
        deadline = start + 60 * minutes
        pieces = list(self.left)
        failures: Counter[str] = Counter()
        ahead = self.device == "cuda" and (os.cpu_count() or 1) >= IDLE_CORES
        with contextlib.ExitStack() as stack:
            shared = Launcher(SETTINGS, forks=True)
            stack.push(shared.end)
            ready: dict[str, Launcher] = {}
            for number, (piece, seconds) in enumerate(pieces, 1):
                begun = time.monotonic()
                if seconds > deadline - begun or failures[piece.kind] == MOST_FAILURES:
                    continue  # what follows may be shorter, or of another kind
                launcher = ready.pop(piece.key, None)
                if shared.forks and piece.can_fork(self.device):
                    launcher = shared
                if ahead and number < len(pieces) and not pieces[number][0].can_fork(self.device):
                    following, _ = pieces[number]
                    # a full disk: it is tried again when its turn has come
                    with contextlib.suppress(OSError):
                        ready[following.key] = stack.enter_context(following.start())
                limit = min(deadline - begun, PATIENCE * seconds)
                outcome, said = self._do(piece, launcher, limit, beside)
                now = time.monotonic()
                if outcome == "late" and now >= deadline:
                    outcome = "left"
                    said = "the time was over before it ended: it is still left"
                else:
                    self.left.remove((piece, seconds))
                if outcome == "done":
                    self.done.append((piece, said))
                    failures[piece.kind] = 0
                elif outcome == "no room":
                    self.not_here.append((piece, said))
                elif outcome != "left":
                    self.failed.append((piece, said))
                    failures[piece.kind] += 1
                bar = ("█" * (number * LINES // len(pieces))).ljust(LINES, "░")
                clock = f"{(now - start) / 60:.1f} of {minutes:.0f} min"
                took = f"{now - begun:5.1f} s"
                first, *_ = said.splitlines()
                line = f"{bar} {number}/{len(pieces)} · {clock} · {took} · {first} · {piece.title}"
                progress(line)
                # A terminal may be closed by then: the log keeps what was said.
                if log:
                    _write(log, line if outcome == "done" else f"{line}\n{said}")

    def _do(
        self,
        piece: Piece,
        launcher: Launcher | None,
        timeout: float,
        beside: Beside | None,
    ) -> tuple[str, str]:
        """Do one piece and save what it says.

        Return "done", "late", "no room" (of a fact; a recipe's report says it) or "failed", and the
        result or the reason in words.
        """
        try:
            result = piece.run(launcher or piece.start(), timeout, self.device)
            if result.source == "measured" and isinstance(result, Report):
                save(result, self.file.parent)
            else:
                add(result, self.file)
        except LateError as error:
            return "late", str(error)
        except RankError as error:
            return ("no room", error.oom) if error.oom else ("failed", str(error))
        except (MeasurementError, RecipeError, RecordError, OSError) as error:
            return "failed", str(error).strip() or type(error).__name__
        if isinstance(result, Fact):
            return "done", result.words
        self.reports.append(result)
        if result.status != "ok":
            return "done", result.status
        words = format_bytes(result.allocated or 0)
        if beside:
            words += beside(result)
        return "done", words


def run_card(
    paths: Iterable[str | os.PathLike] | None = None,
    minutes: float = 30,
    folder: str | os.PathLike | None = None,
    dry_run: bool = False,
    progress: Progress = print,
    estimate: Callable[[Recipe], int] | None = None,
    beside: Beside | None = None,
) -> CardRun:
    """Do on this card what the project still wants from such a one, and save each result at once.

    Args:
        paths: lists of pieces (`read_pieces`); None takes CARD_LIST.
        minutes: from the start of the first run; what is not expected to end in this time is not
            started.
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
    here = current_device()
    if here.kind != "cuda" and not dry_run:
        rest = "`vramlab doctor` says why; --dry-run lists what would be done"
        raise RecordError(f"there is no CUDA device here: {rest}.")
    run = run_on(here, Path(folder or FOLDER))

    def why_not(piece: Piece) -> str:
        reason = piece.cannot(here.gpu)
        if run.source != "measured" and piece.recipe and piece.recipe.rollouts:
            # `_calculate_rewards` of TRL then looks for the completion without one
            reason = "a stand-in computes no values, so TRL finds rewards to be missing"
        if run.source != "measured" and piece.recipe and piece.recipe.images:
            reason = "a stand-in computes no values, which say where images are among the tokens"
        if reason or not (here.gpu and estimate and piece.recipe and piece.kind == "recipe"):
            return reason
        is_larger = estimate(piece.recipe) > here.gpu.total
        return f"{piece.recipe} is larger than {here.name}" if is_larger else ""

    known = read_records(run.file, missing_ok=True, source=run.source)
    seen = _seen_of(here.name) if here.kind == "cuda" else None
    run.plan(pieces_of(paths), here, known, why_not, seen)
    if not dry_run:
        progress(f"{here.name}: {_free()} · {_versions()}")
        run.do_all(minutes, progress, beside, run.file.with_name("card.log"))
    return run


def run_on(here: Device, folder: Path) -> CardRun:
    """Return an empty run, whose results go into the file of `here` and the versions in `folder`.

    Raises RecordError where that is no folder.
    """
    if folder.exists() and not folder.is_dir():
        raise RecordError(f"{folder} is no folder, so no record can be kept there.")
    is_cuda = here.kind == "cuda"
    source = source_of(here.kind) if is_cuda else "measured"
    name = file_name(environment(gpu=here.name if is_cuda else None))
    if source != "measured":
        name = f"{source}-{name}"
    return CardRun(folder / name, here.kind, source)


def _is_in(records: RecordFile, piece: Piece) -> bool:
    """Tell whether a record file has what `piece` would find, with as many repeats."""
    if piece.kind != "recipe":
        return piece.key in records.facts
    report = records.reports.get(piece.key)
    return report is not None and (report.speed is None or report.speed.repeats >= piece.repeats)


def _seen_of(card: str) -> RecordFile:
    """Return all that the project's records say of cards of that name."""
    seen = RecordFile()
    for path in sorted(measurements_folder().glob("*.json")):
        records = read_records(path)
        for key, report in records.reports.items():
            if report.environment["gpu"] == card:
                seen.reports[key] = report
        for key, fact in records.facts.items():
            if fact.environment["gpu"] == card:
                seen.facts[key] = fact
    return seen


def _write(log: Path, text: str) -> None:
    """Add `text` to the log, if the disk takes it."""
    with contextlib.suppress(OSError), open(log, "a", encoding="utf-8") as file:
        file.write(f"{text}\n")


def _free() -> str:
    """Say how much of the card is free."""
    seen = nvml_snapshot()
    if not seen.available or seen.free is None or seen.total is None:
        return "NVML does not say how much is free"
    words = f"{format_bytes(seen.free)} of {format_bytes(seen.total)} free"
    if seen.free > 0.9 * seen.total:
        return words
    return f"{words}: other processes hold the rest, so end them first"


def _versions() -> str:
    seen = environment()
    names = ("torch", "transformers", "peft", "bitsandbytes", "accelerate")
    return ", ".join(f"{name} {seen[name]}" for name in names if seen[name])
