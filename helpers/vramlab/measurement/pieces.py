"""What can be done on a card: a recipe to record, or a fact to find; and lists of such pieces."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from ..base.data import data_path
from ..base.errors import RecipeError, RecordError
from ..base.files import read_text, strict_json
from ..hardware.gpu import Gpu
from ..recipe.knobs import rebuild
from ..recipe.recipe import Recipe
from ..report.report import Report
from .facts import ASKED, Fact
from .launch import Launcher
from .measure import CPU_FLOPS, cannot, operations, run_here

COURSE_LIST = data_path(
    "wanted.json"
)  # what the notebooks look up, and what is measured for comparison
CARD_LIST = data_path("card.json")
WORK = "vramlab.measurement.card_work:find"
REPEATS = 3  # timed steps, where an entry does not say
STEPS = 7  # warm-up, repeats and tracked steps of one measurement
START = 15.0  # seconds for a process to load its libraries and make CUDA's context
EFFICIENCY = 0.3  # of the card's peak rate: cautious, small models stay under it
UNKNOWN_FLOPS = 6e12  # of a card that the table does not know
# What else a kind takes, in seconds: batches that grow, a file that is written and read, sensors
# that are watched.
EXTRA = {"out_of_memory": 30.0, "loading": 60.0, "steps": 5.0}
COMPILING = 60.0
TOKEN = 0.05  # of each that is sampled: an H200 took 13.3 s for 256 of them and a step of GRPO
# `context`'s, as `flash_attention_2` in `gpu.NEEDS`
NEEDS_AMPERE = ("flash attention", "cuDNN attention")
ALLOCATOR = "PYTORCH_ALLOC_CONF"
# Of every process: where it was when a signal ends it; and models come from shapes, while a request
# would wait for its time to be over.
SETTINGS = {"PYTHONFAULTHANDLER": "1", "HF_HUB_OFFLINE": "1"}
# Kinds that ask for the process itself: what it has loaded, or the allocator it started with.
FRESH = ("context", "steps")


@dataclass(frozen=True)
class Piece:
    """One thing to do on a card.

    Attributes:
        kind: "recipe", or a kind of fact.
        worth: seconds of a card that one would give for it.
        why: the question that it helps to answer.
        asked: of a fact.
    """

    kind: str
    worth: float = 1.0
    recipe: Recipe | None = None
    repeats: int = REPEATS
    asked: dict[str, Any] = field(default_factory=dict, hash=False)
    why: str = ""

    @property
    def key(self) -> str:
        """Return the key of its report or fact in a record file."""
        if self.kind == "recipe" and self.recipe:
            return self.recipe.key
        return Fact(self.kind, self.asked).key

    @property
    def title(self) -> str:
        """Return the recipe or what is asked, in words."""
        return str(self.recipe) if self.kind == "recipe" else Fact(self.kind, self.asked).title

    def seconds(self, card: Gpu | None, device: str = "cuda") -> float:
        """Estimate how long it takes, rather too long than too short."""
        seconds = EXTRA.get(self.kind, 0.0)
        if self.recipe is None:
            return seconds + START
        if self.recipe.torch_compile:
            seconds += COMPILING
        if self.recipe.rollouts:
            seconds += STEPS * self.recipe.rollouts.max_completion_length * TOKEN
        seconds += self.asked.get("new_tokens", 0) * TOKEN
        return seconds + seconds_for(self.recipe, card, device)

    def cannot(self, card: Gpu | None, device: str = "cuda") -> str:
        """Return why `device`, a `card` if it is known, cannot do it at all, or ""."""
        if card and self.asked.get("loaded") in NEEDS_AMPERE:
            # Both kernels need what flash-attn does, so its rule is asked.
            return card.why_not("flash_attention_2")
        if self.recipe is None:
            return ""
        reason = cannot(self.recipe, device)
        if not reason and card:
            reason = card.why_not(self.recipe.precision)
        return reason

    def can_fork(self, device: str = "cuda") -> bool:
        """Tell whether it may run in a process forked from one that has loaded the libraries.

        On a CPU the process's resident set is part of the answer.
        """
        if self.kind in FRESH or device != "cuda" or sys.platform != "linux":
            return False
        # Inductor's worker processes would stay, and ranks are not forked on CUDA.
        return self.recipe is None or not (self.recipe.torch_compile or self.recipe.sharding)

    def start(self) -> Launcher:
        """Start a process that will run it, and loads its libraries meanwhile."""
        settings = dict(SETTINGS)
        if "expandable" in self.asked:
            settings[ALLOCATOR] = f"expandable_segments:{self.asked['expandable']}"
        return Launcher(settings).start()

    def run(self, launcher: Launcher, timeout: float, device: str = "cuda") -> Report | Fact:
        """Return what `device` says, by a process of `launcher`, which ends unless it forks.

        Raises MeasurementError or RecipeError.
        """
        order: dict[str, Any]
        with contextlib.ExitStack() as stack:
            if not launcher.forks:
                stack.enter_context(launcher)
            if self.kind == "recipe":
                order = {
                    "recipe": self.recipe,
                    "repeats": self.repeats,
                    "warmup": 2,
                    "device": device,
                }
                return run_here(order, timeout, launcher)
            # what a process that is killed had written is removed here
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="vramlab-"))
            order = {"kind": self.kind, "asked": self.asked, "scratch": scratch}
            return launcher.run(WORK, order, 1, "cuda", timeout)[0]


def seconds_for(
    recipe: Recipe,
    card: Gpu | None = None,
    device: str = "cuda",
) -> float:
    """Estimate how long a measurement takes, rather too long than too short."""
    rate = UNKNOWN_FLOPS
    if device == "cpu":
        rate = CPU_FLOPS
    elif card:
        # A card without the format computes in fp32, or refuses before this matters.
        peak = card.flops(recipe.precision) or card.flops("fp32")
        if peak:
            rate = EFFICIENCY * peak
    return START + STEPS * operations(recipe) / rate


def pieces_of(paths: Iterable[str | os.PathLike] | None) -> list[Piece]:
    """Return the pieces of some lists, each once, with the highest worth that a list gives it."""
    pieces: dict[str, Piece] = {}
    for path in paths or [CARD_LIST]:
        for piece in read_pieces(Path(path)):
            other = pieces.get(piece.key)
            if other is None or piece.worth > other.worth:
                pieces[piece.key] = piece
    return list(pieces.values())


def read_pieces(path: Path) -> list[Piece]:
    """Return the pieces of a JSON list of objects; RecordError, which names the entry, if none.

    Each has `worth`, `why` and `kind`: "recipe" with a `recipe` and `repeats`, "list" with the
    `file` of a list of recipes beside it, or a kind of fact with what it is asked (`facts.ASKED`).
    A list as a field takes each of its values.
    """
    return _read(path, "pieces", partial(_pieces, path))


def read_list(path: Path) -> list[Recipe]:
    """Return the recipes of a JSON list of objects with the fields of `Recipe`.

    A list as a field takes each of its values: `{"model": "gpt2", "batch_size": [4, 8]}` stands for
    two recipes. Raises RecordError, which names the entry, if it is none.
    """
    return _read(path, "recipes", recipes_of)


def _read(path: Path, what: str, read: Callable[[Any], list]) -> list:
    """Return all that `read` makes of the entries of a JSON list; RecordError if it is none."""
    try:
        entries = strict_json(read_text(path))
        if not isinstance(entries, list):
            raise ValueError("it is not a list")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise RecordError(f"{path.name} is no list of {what}: {why}.") from error
    pieces = []
    for number, entry in enumerate(entries, 1):
        try:
            pieces += read(entry)
        except (RecipeError, KeyError, TypeError, ValueError) as error:
            raise RecordError(f"{path.name}, entry {number}: {error}") from error
    return pieces


def _pieces(path: Path, entry: Any) -> list[Piece]:
    """Return the pieces that an entry of the list at `path` stands for."""
    asked = dict(entry)
    worth = asked.pop("worth")
    why = asked.pop("why")
    kind = asked.pop("kind")
    pieces = []
    if kind == "list":
        for recipe in read_list(path.with_name(asked["file"])):
            pieces.append(Piece("recipe", worth, recipe, why=why))
        return pieces
    recipes: list[Recipe | None] = [None]
    if "recipe" in asked:
        recipes = [*recipes_of(asked.pop("recipe"))]
    # Each recipe with each combination of what else is asked.
    for recipe, chosen in product(recipes, list(each_choice(asked))):
        if kind == "recipe":
            pieces.append(Piece(kind, worth, recipe, chosen.get("repeats", REPEATS), why=why))
        else:
            pieces.append(
                Piece(kind, worth, recipe, asked=_question(kind, recipe, chosen), why=why)
            )
    return pieces


def _question(kind: str, recipe: Recipe | None, chosen: dict[str, Any]) -> dict[str, Any]:
    """Return what a fact of `kind` is asked; RecipeError unless it is just that."""
    asked = dict(chosen)
    if recipe:
        asked["recipe"] = recipe.to_dict()
    if kind not in ASKED or asked.keys() != ASKED[kind].keys():
        kinds = f"kinds are recipe, list, {', '.join(ASKED)}"
        raise RecipeError("kind", kind, f"a {kind} has other fields, or {kinds}")
    return asked


def recipes_of(entry: Any) -> list[Recipe]:
    """Return the recipes that an entry of a list stands for. Raises RecipeError."""
    if not isinstance(entry, dict) or "model" not in entry:
        allowed = "it must be an object with a model and the fields of Recipe"
        raise RecipeError("recipe", entry, allowed)
    return [rebuild(Recipe, "recipe", chosen) for chosen in each_choice(entry)]


def each_choice(entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield an object for each combination of the values that lists in `entry` give a field."""
    # A field that is no list has one choice.
    choices = [value if isinstance(value, list) else [value] for value in entry.values()]
    for chosen in product(*choices):
        yield dict(zip(entry, chosen, strict=True))
