"""Read the exercises of `data/exercises/NN.toml`: prose, and answers as Python expressions.

A file has a table for each exercise and, before them, `[names]` for what its expressions share
(name to expression, evaluated when first used) and `[imports]` (module to names). vramlab's public
names are always there. Prose may quote a name as `{name}`. Each exercise has `question`,
`difficulty`, `minutes`, `hints` and `kind`. The rest depends on `kind`:

    number      answer; unit, tolerance, right; mistakes: pairs of a wrong answer and what to say
                to it
    table       the same with a table as answer; a mistake may leave out the entries that are right
    function    the same with expressions over the arguments; cases: tables of arguments
    choice      answer; options: each option and why it is right or wrong
    conditions  conditions: pairs of an expression over `answer` and what to say where it is false
                or fails; right; accepts, rejects: answers that test the check; names: more names,
                which may depend on `answer`
    recipe      conditions on a Recipe for a `gpu`, with RECIPE_NAMES; solution: a Recipe for
                accepts and rejects
    tensors     as function, for functions of tensors that return one; cases: tables of arguments;
                together: what to say where it makes one tensor of a list of them
    judge       judge: name of a function from the answer to its Feedback; accepts, rejects, or
                neither where a test of the chapter tries it

Python evaluates the expressions. The files are part of the package, like its code.
"""

import ast
import importlib
import re
import tomllib
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import vramlab

from .answers import (
    BrokenPiece,
    Check,
    Choice,
    Feedback,
    Function,
    Judge,
    Mistake,
    Number,
    Table,
)
from .judges.common import same_tensor

# What expressions may use without naming it in [imports].
IMPORTS = {"vramlab": vramlab.__all__, "math": ["ceil", "floor", "log2", "sqrt"]}
# Evaluated when a condition or sentence first uses them, each from those before.
RECIPE_NAMES = {
    "kind": "type(answer).__name__",
    "card": "find_gpu(gpu)",
    "sequences": "answer.batch_size * answer.gradient_accumulation_steps",
    "unsupported": "card.why_not(answer.precision)",
    "report": "predict(answer, gpu=card)",
    "fits": "report.process.value <= card.total",
    "process": "format_bytes(report.process.value)",
    "total": "format_bytes(card.total)",
    "needs": "f'The process is likely to take {process}, the card has {total}'",
    "largest": "max(report.peak.items(), key=lambda part: part[1])",
    "category": "largest[0].replace('_', ' ')",
    "most": "f'most of the peak, in {report.peak_phase}, is {category}: "
    "{format_bytes(largest[1])}'",
}
IS_RECIPE = ("isinstance(answer, Recipe)", "A Recipe was expected, not a {kind}.")


class UnknownName(NameError):
    """A name that is neither defined nor imported."""


class Names(dict):
    """Values by name.

    They are given `values`, `definitions` that are evaluated when first used, and what `outer` has.
    """

    def __init__(
        self,
        definitions: Mapping[str, Any],
        outer: Mapping[str, Any],
        values: Mapping[str, Any] = {},
    ):
        super().__init__(values)
        self.definitions = definitions
        self.outer = outer

    def __missing__(self, name: str) -> Any:
        if name not in self.definitions:
            return self.outer[name]
        self[name] = self.evaluate(self.definitions[name])
        return self[name]

    def evaluate(self, thing: Any) -> Any:
        """The value of an expression or of a table of expressions.

        Anything else is a value already.
        """
        if isinstance(thing, Mapping):
            return {name: self.evaluate(part) for name, part in thing.items()}
        if not isinstance(thing, str):
            return thing
        thing, scope = thing.strip(), {}
        for node in ast.walk(ast.parse(thing, mode="eval")):
            if isinstance(node, ast.Name):
                with suppress(UnknownName):  # a built-in, or a variable of the expression
                    scope[node.id] = self[node.id]
        return eval(thing, scope)

    def function(self, expression: str) -> Callable[..., Any]:
        """A function of keyword arguments that computes `expression`."""
        # The arguments come first, then the file's names.
        return lambda **arguments: Names({}, self, arguments).evaluate(expression)


class Imports(dict):
    """Names of modules, imported when first used."""

    def __init__(self, modules: Mapping[str, list[str]]):
        super().__init__()
        # From module to names, turned round.
        self.modules = {name: module for module, names in modules.items() for name in names}

    def __missing__(self, name: str) -> Any:
        if name not in self.modules:
            raise UnknownName(name)
        return getattr(importlib.import_module(self.modules[name]), name)


def read_exercises(path: Path) -> dict[str, dict[str, Any]]:
    """The entries of a file by name.

    Their text has names filled in, and `check` is made of what their kind needs.
    """
    stored = tomllib.loads(path.read_text(encoding="utf-8"))
    stored.pop("blanks", None)
    names = _shared_names(stored)
    return {
        name: {
            "question": entry["question"].format_map(names),
            "hints": tuple(entry["hints"]),
            "difficulty": entry["difficulty"],
            "minutes": entry["minutes"],
            "check": KINDS[entry["kind"]](entry, names),
        }
        for name, entry in stored.items()
    }


def read_blanks(path: Path) -> dict[str, dict[str, Any]]:
    """The blanks of a file by name.

    Each has `solution`, `hints`, `own` (makes the course's piece), `check` and `mistakes`.

    `mistakes` are pairs of a maker of a wrong piece and the condition whose sentence it has to be
    told.
    """
    stored = tomllib.loads(path.read_text(encoding="utf-8"))
    blanks = stored.pop("blanks", {})
    names = _shared_names(stored)
    return {name: _blank(name, entry, names) for name, entry in blanks.items()}


def _shared_names(stored: dict[str, Any]) -> Names:
    """The names of a file; takes `[imports]` and `[names]` out of it."""
    imports = Imports({**IMPORTS, **stored.pop("imports", {})})
    return Names(stored.pop("names", {}), imports)


def _blank(
    name: str,
    entry: Mapping[str, Any],
    names: Names,
) -> dict[str, Any]:
    def make(source: str) -> Any:
        written: dict[str, Any] = {}
        # `needs` are imports and helpers that the solution stands on in the notebook.
        exec(entry.get("needs", "") + "\n" + source, written)
        return written[name]

    solution = entry["solution"].strip("\n")
    mistakes = []
    for condition in entry["conditions"]:
        # A mistake is the solution with a piece of its text replaced.
        for old, new in condition["mistakes"]:
            if old not in solution:
                raise ValueError(
                    f"blank {name}: its solution has no text {old!r} to make a mistake of."
                )
            # Made when it is tried: some pieces train a network.
            mistakes.append((partial(make, solution.replace(old, new)), condition["says"]))
    conditions = [(condition["must"], condition["says"]) for condition in entry["conditions"]]
    return {
        "solution": solution,
        "hints": tuple(entry["hints"]),
        "own": partial(make, solution),
        "check": _conditions({**entry, "conditions": conditions}, names),
        "mistakes": mistakes,
    }


def _options(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: entry[name] for name in ("unit", "tolerance", "right") if name in entry}


def _number(entry: Mapping[str, Any], names: Names, check: type[Number] = Number) -> Number:
    mistakes = []
    for wrong, text in entry["mistakes"]:
        mistakes.append(Mistake(partial(names.evaluate, wrong), text))
    answer = partial(names.evaluate, entry["answer"])
    return check(answer, mistakes=mistakes, **_options(entry))


def _function(entry: Mapping[str, Any], names: Names) -> Function:
    mistakes = [Mistake(names.function(wrong), text) for wrong, text in entry["mistakes"]]
    cases = [names.evaluate(case) for case in entry["cases"]]
    return Function(
        names.function(entry["answer"]),
        cases=cases,
        mistakes=mistakes,
        **_options(entry),
    )


def _choice(entry: Mapping[str, Any], names: Names) -> Choice:
    return Choice(partial(names.evaluate, entry["answer"]), entry["options"])


def _judge(entry: Mapping[str, Any], names: Names) -> Judge:
    return Judge(names[entry["judge"]], *_tried(entry, names))


def _tensors(entry: Mapping[str, Any], names: Names) -> Judge:
    parameters = list(entry["cases"][0])  # in the order of the question's signature

    def function(expression: str) -> Callable[..., Any]:
        by_name = names.function(expression)
        # The reader's function may be called by position or by name, and so is the reference.
        return lambda *given, **named: by_name(
            **dict(zip(parameters, given, strict=False)),
            **named,
        )

    reference = function(entry["answer"])
    mistakes = [(function(wrong), text) for wrong, text in entry["mistakes"]]
    told = {
        # A function, because making tensors takes torch, which reading the questions does not need.
        "cases": lambda: map(names.evaluate, entry["cases"]),
        "mistakes": mistakes,
        "right": entry["right"],
        "together": entry.get("together"),
    }
    judge = partial(same_tensor, reference=reference, **told)
    return Judge(
        judge,
        [reference],
        [wrong for wrong, _ in mistakes],
        [text for _, text in mistakes],
    )


def _tried(
    entry: Mapping[str, Any],
    names: Names,
) -> tuple[Callable[[], list[Any]], Callable[[], list[Any]]]:
    """Makers of the answers that a check must accept, and of those it must reject."""
    return tuple(
        # The default binds the word now: without it both functions would use the last one.
        lambda kind=kind: list(map(names.evaluate, entry.get(kind, [])))
        for kind in ("accepts", "rejects")
    )


def _conditions(entry: Mapping[str, Any], names: Names) -> Judge:
    def judge(answer: Any) -> Feedback:
        known = Names(entry.get("names", {}), names, {"answer": answer})
        for condition, otherwise in entry["conditions"]:
            if not _holds(condition, known):
                return Feedback(False, otherwise.format_map(known))
        return Feedback(True, entry["right"].format_map(known))

    reasons = []
    for _, text in entry["conditions"]:
        # Of a sentence with names filled in, the longest piece between them is looked for.
        between = re.split(r"{.*?}", text)
        reasons.append(max(between, key=len))
    return Judge(judge, *_tried(entry, names), reasons)


def _holds(condition: str, known: Names) -> bool:
    """Whether a condition is true; where the answer makes it fail, it is not."""
    try:
        return bool(known.evaluate(condition))
    except BrokenPiece:
        # The reader's own error has a sentence of its own.
        raise
    except Exception as error:
        # A function is guarded before it is checked. A class fails inside of a method.
        answer = known["answer"]
        method = _failing_method(answer, error) if isinstance(answer, type) else ""
        if method:
            raise BrokenPiece(
                f"Your {method} fails with {type(error).__name__}: {error}."
            ) from None
        return False


def _failing_method(answer: type, error: Exception) -> str:
    """The innermost method of a class in the traceback, or "" where its caller raised `error`."""
    methods = {}
    for name, part in vars(answer).items():
        # staticmethod and classmethod wrap the function in __func__.
        code = getattr(getattr(part, "__func__", part), "__code__", None)
        methods[code] = name
    failing = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        failing = methods.get(frame.f_code, failing)
    return failing


def _recipe(entry: Mapping[str, Any], names: Names) -> Judge:
    outer = Names({"solution": entry["solution"]}, names, {"gpu": entry["gpu"]})
    whole = {
        **entry,
        # Asked first: all later ones read the answer's fields.
        "conditions": [IS_RECIPE, *entry["conditions"]],
        "names": {**RECIPE_NAMES, **entry.get("names", {})},
    }
    return _conditions(whole, outer)


KINDS: dict[str, Callable[[Mapping[str, Any], Names], Check]] = {
    "number": _number,
    "table": partial(_number, check=Table),
    "function": _function,
    "choice": _choice,
    "conditions": _conditions,
    "recipe": _recipe,
    "tensors": _tensors,
    "judge": _judge,
}
