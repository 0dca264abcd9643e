"""Options of the command line: one for each knob of a recipe, as typer wants them."""

import contextlib
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from inspect import Parameter
from typing import Annotated, Any

import typer

from ..base.errors import RecipeError
from ..base.text import printable
from ..planning.question import Question
from ..recipe import hub_names, lora_modules
from ..recipe.knobs import Knob, options
from ..recipe.recipe import Recipe
from ..recipe.shapes import read_shape
from .configurations import in_words_of, sets_expandable_segments
from .recipe_options import GENERATION, OPTIONS, Options


def option(kind: Any, text: str, *names: str, **rules: Any) -> Any:
    """Return the annotation of a command's option, named as its parameter without `names`."""
    return Annotated[kind, typer.Option(*names, help=text, **rules)]


JSON = option(bool, "Print JSON as `vramlab schema` describes it; bytes and seconds.", "--json")
GpuName = option(str | None, "A card by name, such as T4. Exit status 1: tight or worse.", "--gpu")
OtherMemory = option(
    str | None,
    "Of --gpu's memory what a display or other processes hold: 1GiB, or bytes.",
    "--other-memory",
)
Expandable = option(
    bool,
    "The allocator has PYTORCH_ALLOC_CONF=expandable_segments:True.",
    "--expandable-segments",
)
Target = option(str, "Whose kernels and rounding: cuda or cpu.", "--target")


def number(text: str) -> int | float | str:
    """Return the number that `text` says, or `text` itself, which a later check refuses."""
    # int before float: "8" must stay an integer, and "2e-4" is none.
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


# What people also call an option.
ALSO = {
    "seq_len": ("--seq-len", "--tokens"),
    "liger": ("--liger/--no-liger", "--use-liger-kernel/--no-use-liger-kernel"),
    "attn_implementation": ("--attn-implementation", "--attention"),
}
TRAINERS_PRECISION = {
    "bf16": "bf16-mixed",
    "fp16": "fp16-mixed",
}  # as TrainingArguments' bf16 and fp16


def tokens(text: str | int) -> int | float | str:
    """Return a number of tokens: "8k" is 8,192 of them, as models' names count."""
    plain = re.sub(r"(?<=\d),(?=\d{3}\b)", "", str(text).strip())  # a default is a number
    thousands = re.fullmatch(r"(\d+)[kK]", plain)
    return int(thousands.group(1)) * 1024 if thousands else number(plain)


def precision(text: str) -> str:
    """Return the recipe's precision: "bf16" is autocast, as the Trainer means it."""
    return TRAINERS_PRECISION.get(text, text)


PARSERS = {"seq_len": tokens, "prompt": tokens, "new_tokens": tokens, "precision": precision}


def flag_of(field: str, command: typer.core.TyperCommand) -> str:
    """Return how a command's line says a recipe's field, "" where it does not."""
    if field == "model":
        return "MODEL"
    plain = field.removeprefix("evaluation.").removeprefix("generation.")
    # A field of a part, such as sharding.world_size, has an option whose name is not its path.
    known = OPTIONS | GENERATION
    named = [option for option, (path, _) in known.items() if ".".join(path) == plain]
    # a plan's values to try, such as precisions
    named += [knob.option for path, knob in options(Question) if path == (plain,)]
    for parameter in command.params:
        if parameter.name in (*named, plain) and parameter.opts[0].startswith("--"):
            return parameter.opts[0]
    return ""


def subject_of(error: RecipeError, command: typer.core.TyperCommand) -> str:
    """Return what a command's line or a file says wrongly, "" where neither is known.

    A part that is wrong as a whole, such as how the model is shared, is said by the options that
    make it what it is.
    """
    flag = flag_of(error.field, command)
    if flag:
        return error.about(flag)
    if ": " in error.field:  # a file, and what is in it
        return error.about(error.field)
    if error.field == "script":
        return f"{error.value}: {error.allowed}."
    if not dataclasses.is_dataclass(error.value):
        return ""
    said = []
    for option, (path, knob) in OPTIONS.items():
        if path[0] == error.field and len(path) > 1:
            value = getattr(error.value, path[1])
            if value != knob.default:
                said.append(f"--{option.replace('_', '-')} {value}")
    if not said:  # all are as when left out
        said = [
            f"--{option.replace('_', '-')}"
            for option, (path, _) in OPTIONS.items()
            if path[0] == error.field and len(path) > 1
        ][:1]
    return f"{' '.join(said)}: {error.allowed}." if said else ""


def shared_name(model: str) -> str:
    """Return the note on a model whose architecture is another's; "" for others and errors."""
    try:
        return read_shape(model).shares
    except RecipeError:
        return ""  # the recipe says it


def targets_by_default(made: Any) -> Iterator[str]:
    """Say which modules have adapters in a recipe that names none: its title does not."""
    if isinstance(made, Recipe) and made.lora and made.lora.target_modules is None:
        adapted = lora_modules.adapted(made.shape, made.lora)
        names = sorted({name.rpartition(".")[2] for name, _, _ in adapted})
        default = f"{', '.join(names)} have adapters, PEFT's default for {made.shape.family}"
        yield f"{default}; --lora-target says others (all-linear in what plan answers)"


def takes(
    known: Options,
    make: Callable[[str, dict[str, Any]], Any],
) -> Callable[[Callable], Callable]:
    """Give `command(made, …)` the argument MODEL and the `known` options.

    `make` makes its first argument of them.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(model: str, download: bool = False, **values: Any) -> None:
            if download:
                # Before the shape is read: that takes the config.json which this puts into the
                # hub's local cache.
                hub_names.download(model)
            shared = shared_name(model)
            if shared:
                typer.echo(printable(f"note: {shared}"), err=True)
            # axolotl sets it for the user, so the tier has to be computed with it although no
            # option says so.
            if "expandable_segments" in values and sets_expandable_segments(model):
                values["expandable_segments"] = True
            # The recipe's options are taken out of `values`; what stays are the command's own.
            made = make(model, {name: values.pop(name) for name in known})
            for note in targets_by_default(made):
                typer.echo(printable(f"note: {note}"), err=True)
            with in_words_of(model):
                command(made, **values)

        model = Annotated[
            str,
            typer.Argument(
                help="A name, such as gpt2 or Qwen/Qwen3-8B, or a path to a config.json."
            ),
        ]
        parameters = [Parameter("model", Parameter.KEYWORD_ONLY, annotation=model)]
        fetch = option(
            bool,
            "Read MODEL's config.json from the hub, and no other file.",
            "--download",
        )
        parameters.append(
            Parameter("download", Parameter.KEYWORD_ONLY, annotation=fetch, default=False)
        )
        parameters += [_parameter(name, *known[name]) for name in known]
        # The command's first parameter is what `make` returns, and no option.
        _, *own = inspect.signature(command).parameters.values()
        parameters += [p.replace(kind=Parameter.KEYWORD_ONLY) for p in own]
        signed: Any = run
        # typer reads both in `get_params_from_function` of its `utils.py`: the signature for names
        # and defaults, the annotations for help texts.
        signed.__signature__ = inspect.Signature(parameters)
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _parameter(name: str, path: tuple[str, ...], knob: Knob) -> Parameter:
    """An option as typer wants it; lists and a part's options are None where they are not given."""
    text = ": ".join(
        filter(
            None,
            [knob.help.rstrip("."), ", ".join(c for c in knob.choices if isinstance(c, str))],
        )
    )
    dashed = name.replace("_", "-")
    default: Any
    names: tuple[str, ...]
    if knob.kind is bool:
        default = bool(knob.default)
        # A switch that is on by default needs its --no- form, another would only be noise in
        # --help.
        names = ALSO.get(name, (f"--{dashed}/--no-{dashed}" if default else f"--{dashed}",))
        kind = option(bool, text, *names)
        if default and len(path) > 1:
            # A part that nothing is said of is not made.
            default = None
            kind = option(bool | None, text, *names)
    else:
        # None is what `said_options` takes for "not said", which a part's default would hide.
        unsaid = len(path) > 1 or knob.many or name == "samples"
        default = None if unsaid else knob.default
        kind = list[str] if knob.many else knob.kind if knob.kind in (int, float) else str
        if knob.many:
            text += ". May be repeated"
        names = ALSO.get(name, ())
        rules = {"parser": PARSERS[name]} if name in PARSERS else {}
        if kind in (int, float):
            # typer's own parser would refuse "abc" in its words; ours passes it on to the knob's
            # check, which says what is allowed.
            rules.setdefault("parser", number)
        kind = option(kind if default is not None else kind | None, text, *names, **rules)
    return Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind, default=default)
