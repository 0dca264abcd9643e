"""Reads the configuration of a program that trains, a YAML or ms-swift's shell script.

The programs are axolotl, LLaMA-Factory, TRL's command line and ms-swift.
Each of its settings is taken, refused in a sentence, said to be not modelled, or known to move no
memory; `data/configurations.json` has them all, from the programs' own sources. What these
programs make of the settings that are taken stands in `axolotl_file`, `trl_file` and `swift_file`.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..base.errors import RecipeError, needing
from ..base.files import read_text
from ..recipe import lora_modules
from ..recipe.argument_classes import DECLARED
from ..recipe.configuration import read_json_file
from ..recipe.evaluation import Evaluation
from ..recipe.images import reader_of
from ..recipe.knobs import options, rebuild
from ..recipe.recipe import Recipe
from .axolotl_file import OLD_ATTENTION, read_axolotl
from .command_output import say
from .configuration_file import Configuration, known_settings
from .recipe_options import (
    OPTIONS,
    Options,
    fields_of,
    recipe_of,
    recipe_of_arguments,
    said_options,
)
from .swift_file import read_script, read_swift
from .trl_file import OF_TRL, read_llama_factory, read_trl

AXOLOTL = "axolotl"
LLAMA_FACTORY = "LLaMA-Factory"
MS_SWIFT = "ms-swift"
OF_SWIFT = {"command", "tuner_type", "train_type"}  # what no other program's file has
SHELL = ".sh"
# what transformers takes by itself (`get_correct_experts_implementation`)
EXPERTS = "grouped_mm"
WITHOUT_IMAGES = (
    "its model reads images, of which no file says how many and how large: these figures "
    "are of text alone, --images and --image-size add them"
)
EVALUATION: Options = {knob.option: (path, knob) for path, knob in options(Evaluation)}
SUFFIXES = (".yaml", ".yml", SHELL)
# The kernel that a card may lack, by the settings of all programs that take it
KERNELS = OLD_ATTENTION | dict.fromkeys(
    ("attn_implementation", "flash_attn", "attn_impl"),
    "flash_attention_2",
)


def is_configuration(model: Any) -> bool:
    """Tell whether `model` is the path of a YAML or shell script that is there."""
    return isinstance(model, str) and model.lower().endswith(SUFFIXES) and Path(model).is_file()


def sets_expandable_segments(path: Any) -> bool:
    """Tell whether a YAML's program sets its allocator so by itself.

    axolotl does, before it trains (`set_pytorch_cuda_alloc_conf` of its utils).
    """
    return is_configuration(path) and _program(Path(path), _read(Path(path))) == AXOLOTL


@contextlib.contextmanager
def in_words_of(*words: str) -> Iterator[None]:
    """Raise an error about the attention's kernel with the name that it has in a file of `words`.

    What a card lacks is known only when its recipe has been made.
    """
    try:
        yield
    except RecipeError as error:
        path = next(filter(is_configuration, words), None)
        if error.field != "attn_implementation" or path is None:
            raise
        values = _read(Path(path))
        for name, kernel in KERNELS.items():
            if values.get(name) and kernel == error.value:
                rest = f"{error.allowed}, or `vramlab plan {path}` with --gpu chooses"
                raise Configuration("", Path(path), values).refuse(name, rest) from error
        raise


def read_configuration(path: str, given: Mapping[str, Any]) -> tuple[Recipe, list[str]]:
    """Return the recipe of a program's YAML, and what is to be said with it.

    Args:
        path: the file.
        given: options by their name, which count where they are no default.
    Raises:
        RecipeError: it is no such file, or has a setting that a recipe cannot have.
    """
    values = _read(Path(path))
    program = _program(Path(path), values)
    own = said_options(OPTIONS, given)
    configuration = Configuration(
        program, Path(path), values, own.get("trainer"), own.get("seq_len")
    )
    # Before the reader, so that a setting which cannot be taken is refused by its own name.
    _check(configuration)
    READERS[program](configuration)
    fields = configuration.fields
    # It stands for the engine only if an option says of how many ranks; else it is taken out again
    # below.
    if "sharding" not in fields and "engine" not in own:
        fields["sharding"] = {"engine": "ddp", "stage": 0}  # what a launcher on many GPUs makes
    for name, value in fields_of(OPTIONS, own).items():
        before = fields.get(name)
        # An option such as --lora-r replaces one value of the file's `lora`, not all of it.
        both = isinstance(value, dict) and isinstance(before, dict)
        fields[name] = before | value if both else value
    # Nobody said how many ranks there are, so it is one process.
    if fields.get("sharding") == {"engine": "ddp", "stage": 0}:
        fields.pop("sharding")
    if "sharding" in fields and "world_size" not in fields["sharding"]:
        rest = "the file divides the training among ranks and does not say among how many: say "
        raise RecipeError("sharding.world_size", None, rest + "--world-size")
    # A reader that leaves no arguments, such as axolotl's, has made all of the recipe's fields
    # itself.
    model = configuration.model
    if configuration.arguments is None:
        recipe = Recipe(model, **fields)
    else:
        kind = configuration.kind
        recipe, foreign = recipe_of_arguments(model, {}, configuration.arguments, kind, **fields)
        configuration.notes += [f"no setting of {program}: {name}" for name in foreign]
    if not reader_of(recipe.shape):
        return recipe, configuration.notes
    if not recipe.images:
        configuration.notes.append(WITHOUT_IMAGES)
    lora = recipe.lora
    if configuration.adapts_language_alone and lora and lora.target_modules == "all-linear":
        targets = lora_modules.of_language(recipe.shape)
        recipe = recipe.replace(lora=dataclasses.replace(lora, target_modules=targets))
    return recipe, configuration.notes


def recipe_in(path: Any) -> tuple[dict[str, Any], str] | None:
    """Return the fields of a recipe that a JSON file holds, and what else it holds.

    It is a recipe's own file, a report, or what `plan --json` prints, of which the first answer
    counts. None of another file, as of a model's config.json. Raises RecipeError.
    """
    if not (isinstance(path, str) and path.endswith(".json") and Path(path).is_file()):
        return None
    content = read_json_file("model", path)
    # `model_type` is what a model's config.json has, which is a model and no recipe.
    if not isinstance(content, dict) or "model_type" in content:
        return None
    if "choices" in content:
        if not content["choices"]:
            raise RecipeError("model", path, "it is a plan without an answer: nothing fits there")
        count = len(content["choices"])
        rest = f"{path}: the first of {count} answers of a plan; each `choices[…].recipe` alone "
        return content["choices"][0]["recipe"], rest + "is taken too"
    if isinstance(content.get("recipe"), dict):
        return content["recipe"], f"{path}: the recipe of a report"
    return (content, "") if "model" in content else None


def recipe_or_configuration(model: str, given: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a model with options, or of a file, whose notes go to stderr.

    The file is a program's YAML, or has a recipe in JSON; options that are given count before it.
    """
    found = recipe_in(model)
    if found:
        fields, note = found
        for name, value in fields_of(OPTIONS, said_options(OPTIONS, given)).items():
            before = fields.get(name)
            both = isinstance(value, dict) and isinstance(before, dict)
            fields[name] = before | value if both else value
        recipe = rebuild(Recipe, "recipe", fields)
        # The recipe that was read is shown, so that a forgotten setting of the file is noticed.
        for line in filter(None, (note, str(recipe))):
            say(f"note: {line}", err=True)
        return recipe
    if not is_configuration(model):
        recipe = recipe_of(model, given)
        for note in loaded_otherwise(recipe):
            say(f"note: {note}", err=True)
        return recipe
    recipe, notes = read_configuration(model, given)
    for note in [str(recipe), *notes]:
        say(f"note: {note}", err=True)
    return recipe


def loaded_otherwise(recipe: Recipe) -> Iterator[str]:
    """Say which dtype of weights is counted, where from_pretrained loads another by itself.

    Since transformers 5 that is the published one (`dtype="auto"`).
    """
    published = recipe.shape.published_dtype
    if recipe.quantization or recipe.dtype or published in (None, recipe.weights_dtype):
        return
    try:
        recipe.replace(dtype=published)
    except RecipeError:  # no training takes weights of that kind, as fp16 without adapters
        return
    what = "base" if recipe.adapters else "weights"
    yield (
        f"{recipe.weights_dtype} {what} counted; transformers 5 loads the published {published} "
        f"where no dtype is said: --dtype {published}"
    )


def recipe_and_evaluation(model: str, given: dict[str, Any]) -> tuple[Recipe, Evaluation]:
    """Return both of a model with options; raise RecipeError where samples are to be said."""
    # Taken out of `given`, so that the recipe's reader is not given options that no recipe has.
    said = {name: given.pop(name) for name in EVALUATION}
    if said["compute_metrics"] and said["samples"] is None:
        rest = (
            "with compute_metrics all of them keep their predictions on the card: say how "
            "many the evaluation set has"
        )
        raise RecipeError("evaluation.samples", None, rest)
    evaluation = Evaluation(**fields_of(EVALUATION, said))
    return recipe_or_configuration(model, given), evaluation


def question_of(path: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `plan` is asked by a YAML; fields that are `given` count before it."""
    # The YAML says no number of ranks, so the question's number of cards is needed before it can be
    # read.
    sharding = {"world_size": given["gpus"]} if "gpus" in given else {}
    recipe = recipe_or_configuration(path, sharding)
    ranks = recipe.group.world_size
    if recipe.group.parallelism:
        own = "plan tries no meshes of ranks: each GPU of its answers has samples of its own"
        say(f"note: {own}; vramlab simulate {path} says what the file's take", err=True)
    method = "full"
    if recipe.lora:
        method = "qlora" if recipe.quantization else "lora"
    asked = {
        "model": recipe.model,
        "seq_len": recipe.seq_len,
        "global_batch": recipe.batch_size * recipe.gradient_accumulation_steps * ranks,
        "method": method,
        "task": recipe.task,
        "trainer": recipe.trainer,
        "gpus": ranks,
    }
    asked |= given
    if recipe.lora:
        asked["lora"] = dataclasses.replace(recipe.lora, **given.get("lora", {}))
    return asked


def _read(path: Path) -> dict[str, Any]:
    with needing("a YAML"):
        import yaml
    if path.suffix.lower() == SHELL:
        return read_script(path)
    try:
        values = yaml.safe_load(read_text(path))
    except (OSError, ValueError, yaml.YAMLError) as error:
        # yaml's messages have several lines, ours have one.
        why = " ".join(str(error).split())
        raise RecipeError("model", str(path), f"it is no YAML that can be read ({why})") from error
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise RecipeError("model", str(path), "it must be settings with their names")
    return values


def _program(path: Path, values: Mapping[str, Any]) -> str:
    """Return whose configuration it is; RecipeError if that is nobody's that is known."""
    if "base_model" in values:
        return AXOLOTL
    if "model" in values and values.keys() & OF_SWIFT:
        return MS_SWIFT
    if "compute_environment" in values or "distributed_type" in values:
        rest = "it is accelerate's file and says how many processes train, not what: give a model "
        raise RecipeError("model", str(path), rest + "and its settings as options")
    # torchtune names the class of each part of a recipe so.
    if any(isinstance(value, dict) and "_component_" in value for value in values.values()):
        rest = "torchtune trains classes of its own, which no recipe models: run it, vramlab run "
        raise RecipeError("model", str(path), rest + "--gpu CARD -- tune run RECIPE --config FILE")
    if "model_name_or_path" in values:
        own = known_settings()[LLAMA_FACTORY]
        # LLaMA-Factory's settings contain TRL's and transformers'; one that neither has tells them
        # apart.
        theirs = {*own["mapped"], *own["neutral"]} - {*DECLARED, *OF_TRL}
        return LLAMA_FACTORY if theirs & values.keys() else "TRL"
    rest = (
        "a YAML must be axolotl's (base_model), LLaMA-Factory's or TRL's (model_name_or_path), "
        "or ms-swift's (model, tuner_type): "
    )
    raise RecipeError("model", str(path), rest + "give a model and its settings as options")


def _check(configuration: Configuration) -> None:
    """Refuse settings that no recipe has, and note those that are not modelled."""
    known = known_settings().get(configuration.program)
    if known is None:
        return
    for rest, names in known["refused"].items():
        for name in names:
            value = configuration.get(name)
            # Sizes and degrees of parallelism are 1 where a program does not divide anything.
            is_off = not value or (value == 1 and name.endswith(("_size", "_degree")))
            if not is_off and value != EXPERTS:
                raise configuration.refuse(name, rest)
    for words, names in known["unmodelled"].items():
        said = sorted(name for name in names if configuration.get(name))
        if said:
            configuration.notes.append(f"not modelled: {words} ({', '.join(said)})")


READERS = {
    AXOLOTL: read_axolotl,
    LLAMA_FACTORY: read_llama_factory,
    MS_SWIFT: read_swift,
    "TRL": read_trl,
}
