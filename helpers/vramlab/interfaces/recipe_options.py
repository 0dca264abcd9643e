"""What the command line and the calculator share.

Options read from knobs, and whether a report fits a card.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..base.errors import RecipeError, needing
from ..base.files import read_text, strict_json
from ..recipe.argument_classes import CONFIGS, TRAINERS, class_of, undeclared
from ..recipe.arguments import CLASSIFIED, arguments_class
from ..recipe.configuration import reason
from ..recipe.generation import Generation, as_generating
from ..recipe.knobs import Knob, options
from ..recipe.options import STAGES, TRL
from ..recipe.recipe import Recipe
from ..recipe.shapes import read_shape
from ..report.report import NO_TIER, Report

MOST_DATA = 2 * 1024**3  # bytes of a data set's JSONL
ANSWERS = ("completion", "chosen", "rejected")
LENGTHS = (
    "length",
    "input_ids",
)  # `TrainingArguments.length_column_name`, and what the Trainer counts without it

# Two names of one argument, of which transformers would take the second without a word
SAME = tuple(
    (f"gradient_{name}", f"activation_{name}") for name in ("checkpointing", "checkpointing_kwargs")
)

# Option to the field of `Recipe` or of its part, ("lora", "r"), and what the recipe says of it.
Options = dict[str, tuple[tuple[str, ...], Knob]]
OPTIONS: Options = {knob.option: (path, knob) for path, knob in options(Recipe)}
GENERATION: Options = {knob.option: (path, knob) for path, knob in options(Generation)}
# Fields of a recipe, or of its part, that its generation depends on too.
OF_MODEL = ("dtype", "task", "num_layers", "attn_implementation", "lora", "quantization")
GENERATES = ("batch_size", "precision", *OF_MODEL)


def fields_of(known: Options, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields, those of a part in a dictionary.

    Leave out options that are None, empty, or an unset switch.
    """
    fields: dict[str, Any] = {}
    for option, value in given.items():
        # A field of the recipe has one name, one of its part has the part's before it.
        (*part, name), knob = known[option]
        if name == "target_modules" and value not in (None, "all-linear"):
            # A list of modules comes as one word with commas, and an empty one means PEFT's
            # default.
            value = tuple(word.strip() for word in value.split(",") if word.strip()) or None
        # False of a switch that is off by default is what was not said; of one that is on, it was
        # said.
        if value is not None and value != [] and (value is not False or knob.default):
            (fields.setdefault(part[0], {}) if part else fields)[name] = value
    return fields


def said_options(known: Options, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that count before what a file says: those at no default.

    A part's option is None where it is not said, so what it has counts, its default too.
    """
    said = {}
    for name, value in given.items():
        place, knob = known[name]
        if len(place) > 1 or value != knob.default:
            said[name] = value
    return said


def recipe_of(model: str, given: Mapping[str, Any]) -> Recipe:
    """Return the recipe of `given` options. Raises RecipeError."""
    fields = fields_of(OPTIONS, given)
    sharding = fields.get("sharding", {})
    if 3 not in STAGES.get(
        sharding.get("engine"),
        (3,),
    ):  # the default stage is none of this engine's
        sharding.setdefault("stage", 0)
    if fields.get("trainer", "transformers") != "transformers" and "quantization" in fields:
        fields["quantization"].setdefault("prepare", False)  # TRL's trainers do not call it
    return Recipe(model, **fields)


def generating_options() -> Options:
    """Return the options of a generation and of the recipe's fields that it depends on."""
    known: Options = {}
    for name, (path, knob) in OPTIONS.items():
        if path[0] in GENERATES:
            # the published weights say it
            unsaid = dataclasses.replace(knob, default=None) if name == "precision" else knob
            known[name] = (path, unsaid)
    return GENERATION | known


def generation_of(model: str, given: Mapping[str, Any]) -> tuple[Recipe, Generation]:
    """Return the recipe and the generation of `given` options. Raises RecipeError."""
    asked = {name: value for name, value in given.items() if name in GENERATION}
    # Both have options of their own, and each class refuses the other's.
    others = {name: value for name, value in given.items() if name not in GENERATION}
    fields = fields_of(OPTIONS, others)
    return as_generating(model, **fields), Generation(**fields_of(GENERATION, asked))


def recipe_of_arguments(
    model: str,
    given: Mapping[str, Any],
    values: Mapping[str, Any],
    kind: str | None = None,
    **fields: Any,
) -> tuple[Recipe, list[str]]:
    """Return the recipe of arguments in JSON, and those of their names that no field has.

    Args:
        given: options, which count where they are no default (a part's: not None).
        kind: the class of the arguments; None: the one that their names tell.
        fields: others of the recipe.
    Raises:
        RecipeError: arguments of a trainer that no recipe models, or values that their class or
            recipe refuses.
    """
    fields |= fields_of(OPTIONS, said_options(OPTIONS, given))
    # A JSON file of arguments does not name its class, but only some classes have a field such as
    # `beta`.
    kind = kind or class_of(values, fields.get("trainer"))
    trainer = fields.setdefault("trainer", TRAINERS[kind])
    # Of SFTTrainer alone another class is taken: of a plain TrainingArguments it makes an
    # SFTConfig.
    if trainer not in (TRAINERS[kind], "sft"):
        raise RecipeError(
            "trainer",
            trainer,
            f"{TRL[trainer]} takes no {kind}: say a {CONFIGS[trainer]}",
        )
    for one, other in SAME:
        # False and None both leave the switch off, so they do not contradict each other.
        if one in values and other in values and (values[one] or None) != (values[other] or None):
            raise RecipeError(
                one,
                values[one],
                f"{other}, which is the same, is {values[other]!r}: say one of them",
            )
    foreign = undeclared(values, kind)
    with needing(kind):
        arguments = _made(
            TRAINERS[kind],
            {name: n for name, n in values.items() if name not in foreign},
        )
        if TRAINERS[kind] != trainer == "sft":  # SFTTrainer makes an SFTConfig of them
            arguments = _made(trainer, arguments.to_dict())
    return Recipe.from_training_arguments(arguments, model, **fields), foreign


def _made(trainer: str, values: Mapping[str, Any]) -> Any:
    """Return the arguments of `trainer` with those of `values` that memory depends on.

    Raises RecipeError.
    """
    import torch

    asked: Any = SimpleNamespace(trainer=trainer)  # a recipe, as far as that is read
    kind = arguments_class(asked)
    usual = {field.name: field.default for field in dataclasses.fields(kind)}
    said = {}
    for name, value in values.items():
        # None of a field whose default is another value was said; None of a default None was not.
        if name not in CLASSIFIED["neutral"] and (value is not None or usual.get(name) is not None):
            said[name] = value
    # transformers 5 warns of the old names, which mirror the new ones afterwards.
    for old, new in SAME:
        if new in usual and said.get(old) is not None and new not in said:
            said[new] = said.pop(old)
    # It is said by the steps too, and the class takes one of them
    if values.get("steps_per_generation") is None and values.get("generation_batch_size"):
        said["generation_batch_size"] = values["generation_batch_size"]
    # The class refuses tf32 without a GPU that has it
    tf32 = said.pop("tf32", None)
    try:
        # Without an accelerator the class refuses bf16 unless it is told to use the CPU.
        arguments = kind(**said, use_cpu=not torch.accelerator.is_available())
    except ModuleNotFoundError:
        raise
    except Exception as error:  # whatever their checks come upon
        raise RecipeError(
            "training_arguments",
            said,
            f"{kind.__name__} refuses it: {reason(error)}",
        ) from error
    arguments.tf32 = tf32
    return arguments


def read_lengths(path: Path, tokens: Callable[[list[dict]], list[int]] | None = None) -> list[int]:
    """Return the tokens of each sample of a JSONL file.

    A number, a list of ids, or an object with one of LENGTHS a line; of other objects what `tokens`
    says of them. Raises RecipeError for a file that does not say them.
    """
    try:
        lines = read_text(path, MOST_DATA).split(
            "\n"
        )  # and not at the other ends of lines, which a text may have
        rows = [strict_json(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise RecipeError(
            "lengths",
            str(path),
            f"it must be a JSONL file ({str(error).rstrip('.')})",
        ) from error
    values = [
        # A row that says its length or ids is counted as it is; any other is kept whole, as text.
        next((row[name] for name in LENGTHS if name in row), row) if isinstance(row, dict) else row
        for row in rows
    ]
    texts = [value for value in values if isinstance(value, dict)]
    if texts and tokens is None:
        raise RecipeError(
            "lengths",
            ", ".join(texts[0]),
            "each sample must say its " + " or ".join(LENGTHS),
        )
    # All texts go to the tokenizer together and come back in their order.
    counted = iter(tokens(texts) if tokens and texts else ())
    sizes: list[Any] = [next(counted) if isinstance(value, dict) else value for value in values]
    # A list is of ids, a number is a length already.
    return [len(value) if isinstance(value, list) else value for value in sizes]


def tokens_of(model: str, pretrained: bool, rows: list[dict]) -> list[int]:
    """Count the tokens of samples as programs of `plan` train on them, with the model's tokenizer.

    From its folder or the hub's local cache, from the hub if `pretrained`. A pair of answers has
    its longer one. Raises RecipeError.
    """
    with needing("text in --dataset"):
        from transformers import AutoTokenizer
    # A short name such as gpt2-xl is ours; the hub's cache has files under the published one.
    name = read_shape(model).hub_id or model
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=not pretrained)
    except (OSError, ValueError) as error:
        rest = (
            f"no tokenizer of {model} is here to count it: take a folder that has one as MODEL, "
            "--pretrained to download it, or say each sample's length"
        )
        raise RecipeError("dataset", ", ".join(rows[0]), rest) from error

    def count(row: dict) -> int:
        if "messages" in row:
            # The template adds the end of turn itself, so no EOS is counted on top.
            return len(tokenizer.apply_chat_template(row["messages"], return_dict=False))
        answers = [row[name] for name in ANSWERS if name in row]
        # Of chosen and rejected both are rows of the batch, which is as wide as the longer one.
        texts = [row.get("prompt", "") + answer for answer in answers] or [row["text"]]
        return max(len(ids) for ids in tokenizer(texts)["input_ids"]) + 1  # and the last, an EOS

    try:
        return [count(row) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        rest = f"a sample has a text, messages, or a prompt with {', '.join(ANSWERS)} ({error!r})"
        raise RecipeError("dataset", ", ".join(rows[0]), rest) from error


def fits_card(report: Report) -> bool | None:
    """Return whether the process of `report` fits its card; None within the interval."""
    # Likely and tight lie within the interval, where nobody can promise either.
    return {"safe": True, NO_TIER: False}.get(report.verdict)
