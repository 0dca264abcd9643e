"""Whose arguments a dictionary holds: classes of transformers and TRL.

They are told apart by the fields that each declares, which are in `data/argument_classes.json`, so
neither library is asked.
"""

import json
from collections.abc import Iterable

from ..base.data import data_path
from ..base.errors import RecipeError
from .options import TRL

CONFIGS = {trainer: name.replace("Trainer", "Config") for trainer, name in TRL.items()}
_TABLE = json.loads(data_path("argument_classes.json").read_text(encoding="utf-8"))
COMMON = frozenset(_TABLE["common"])
# Fields that a class has besides the common ones.
OWN: dict[str, frozenset[str]] = {"TrainingArguments": frozenset()}
OWN |= {name: frozenset(fields) for name, fields in _TABLE["own"].items()}
DECLARED = COMMON.union(*OWN.values())
# What a recipe is made of, by class: the trainer.
TRAINERS = {
    "TrainingArguments": "transformers",
    "Seq2SeqTrainingArguments": "transformers",
    **{config: trainer for trainer, config in CONFIGS.items()},
}


def class_of(names: Iterable[str], trainer: str | None = None) -> str:
    """Return the class of arguments that have the fields `names`.

    It is the one that declares most of them and no other fields. Where several do, such as
    DPOConfig and KTOConfig for `beta` alone, `trainer` decides. Raises RecipeError where it does
    not, and for classes of trainers that no recipe models.
    """
    # Fields that all classes have tell nothing; only those that a class adds do.
    said = DECLARED.intersection(names) - COMMON
    able = _declaring_most(said)
    candidates = _fitting(able, said)
    if trainer is not None:
        of_trainer = [name for name in able if TRAINERS.get(name) == trainer]
        candidates = of_trainer[:1] or candidates
    if not any(name in TRAINERS for name in candidates):
        raise RecipeError("args", " or ".join(candidates), unmodelled())
    # an experimental class with the fields of GRPOConfig, GMPOConfig, trains as that does
    candidates = [name for name in candidates if name in TRAINERS]
    classes = " or ".join(candidates)
    if len(candidates) > 1:
        marks = ", ".join(sorted(said))
        rest = f"the fields {marks} do not say which: say --trainer, or write all fields as "
        raise RecipeError("args", classes, rest + "to_json_string() does")
    name = candidates[0]
    if trainer not in (None, TRAINERS[name]):
        raise RecipeError("trainer", trainer, f"the arguments are {name}'s: leave it out")
    return name


def _declaring_most(said: frozenset[str]) -> list[str]:
    """Return the classes that declare most of the fields `said`."""
    counts = {name: len(said & own) for name, own in OWN.items()}
    most = max(counts.values())
    return [name for name, count in counts.items() if count == most]


def _fitting(able: list[str], said: frozenset[str]) -> list[str]:
    """Return those of `able` with exactly the fields `said`, else with the least others."""
    exact = [name for name in able if OWN[name] == said]
    if exact:
        return exact
    in_all = frozenset.intersection(*(OWN[name] for name in able))
    least = [name for name in able if OWN[name] == in_all]
    return least or able


def unmodelled() -> str:
    """Say whose arguments are modelled, and what to do with others."""
    configs = ", ".join(CONFIGS.values())
    return (
        f"only transformers' own TrainingArguments and TRL's {configs} are modelled: another "
        "Trainer's loss, second model or batch moves the peak, so measure that Trainer with "
        "WatchCallback"
    )


def undeclared(names: Iterable[str], kind: str) -> list[str]:
    """Return those of `names` that are no field of the class `kind`."""
    return [name for name in names if name not in COMMON and name not in OWN[kind]]
