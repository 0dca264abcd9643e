"""Whose arguments a dictionary holds: classes of transformers and TRL, told apart by the fields that each declares.

The fields are in `data/argument_classes.json`, so neither library is asked.
"""

import json
from collections.abc import Iterable

from ..report.data import data_path
from ..report.errors import RecipeError
from .options import TRL

CONFIGS = {trainer: name.replace("Trainer", "Config") for trainer, name in TRL.items()}
_TABLE = json.loads(data_path("argument_classes.json").read_text(encoding="utf-8"))
COMMON = frozenset(_TABLE["common"])
OWN = {"TrainingArguments": frozenset()} | {name: frozenset(fields) for name, fields in _TABLE["own"].items()}
DECLARED = COMMON.union(*OWN.values())
# What a recipe is made of, by class: the trainer.
TRAINERS = dict.fromkeys(("TrainingArguments", "Seq2SeqTrainingArguments"), "transformers")
TRAINERS |= {config: trainer for trainer, config in CONFIGS.items()}


def class_of(names: Iterable[str], trainer: str | None = None) -> str:
    """Return the class of arguments that have the fields `names`: the one that declares most of them and no other fields.

    Where several do, such as DPOConfig and KTOConfig for `beta` alone, `trainer` decides. Raises RecipeError where it
    does not, and for classes of trainers that no recipe models.
    """
    said = DECLARED.intersection(names) - COMMON
    most = max(len(said & own) for own in OWN.values())
    able = [name for name, own in OWN.items() if len(said & own) == most]
    exact = [name for name in able if OWN[name] == said]
    least = [name for name in able if all(OWN[name] <= OWN[other] for other in able)]
    found = exact or least or able
    if trainer is not None:
        found = [name for name in able if TRAINERS.get(name) == trainer][:1] or found
    if not any(name in TRAINERS for name in found):
        raise RecipeError("args", " or ".join(found), unmodelled())
    if len(found) > 1:
        marks = ", ".join(sorted(said))
        rest = f"the fields {marks} do not say which: say --trainer, or write all fields as to_json_string() does"
        raise RecipeError("args", " or ".join(found), rest)
    if trainer not in (None, TRAINERS[found[0]]):
        raise RecipeError("trainer", trainer, f"the arguments are {found[0]}'s: leave it out")
    return found[0]


def unmodelled() -> str:
    """Say whose arguments are modelled, and what to do with others."""
    allowed = f"only transformers' own TrainingArguments and TRL's {', '.join(CONFIGS.values())} are modelled: another "
    return allowed + "Trainer's loss, second model or batch moves the peak, so measure that Trainer with WatchCallback"


def undeclared(names: Iterable[str], kind: str) -> list[str]:
    """Return those of `names` that are no field of the class `kind`."""
    return [name for name in names if name not in COMMON and name not in OWN[kind]]
