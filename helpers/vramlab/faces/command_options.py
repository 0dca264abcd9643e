"""Options of the command line: one for each knob of a recipe, as typer wants them."""

import contextlib
import functools
import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Annotated, Any

import typer

from ..recipe import hub_names
from ..recipe.knobs import Knob
from ..recipe.shapes import read_shape
from ..report.errors import RecipeError
from ..report.text import printable
from .options import Options


def option(kind: Any, text: str, *names: str, **rules: Any) -> Any:
    """Return the annotation of an option of a command, named as its parameter unless there are `names`."""
    return Annotated[kind, typer.Option(*names, help=text, **rules)]


def number(text: str) -> int | float | str:
    """Return the number that `text` says, or `text` itself for the check that says what is allowed."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def shared_name(model: str) -> str:
    """Return the note on a model's name whose architecture was taken from elsewhere, "" for others and for errors."""
    try:
        return read_shape(model).shares
    except RecipeError:
        return ""  # the recipe says it


def takes(known: Options, make: Callable[[str, dict[str, Any]], Any]) -> Callable[[Callable], Callable]:
    """Give `command(made, …)` the argument MODEL and the `known` options, of which `make` makes its first argument."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(model: str, download: bool = False, **values: Any) -> None:
            if download:
                hub_names.download(model)
            if shared := shared_name(model):
                typer.echo(printable(f"note: {shared}"), err=True)
            command(make(model, {name: values.pop(name) for name in known}), **values)

        model = Annotated[
            str, typer.Argument(help="A name, such as gpt2 or Qwen/Qwen3-8B, or a path to a config.json.")
        ]
        parameters = [Parameter("model", Parameter.KEYWORD_ONLY, annotation=model)]
        fetch = option(bool, "Read MODEL's config.json from the hub, and no other file.", "--download")
        parameters.append(Parameter("download", Parameter.KEYWORD_ONLY, annotation=fetch, default=False))
        parameters += [_parameter(name, *known[name]) for name in known]
        _, *own = inspect.signature(command).parameters.values()
        parameters += [p.replace(kind=Parameter.KEYWORD_ONLY) for p in own]
        run.__signature__ = inspect.Signature(parameters)
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _parameter(name: str, path: tuple[str, ...], knob: Knob) -> Parameter:
    """An option as typer wants it; lists and a part's options are None where they are not given."""
    text = ": ".join(filter(None, [knob.help.rstrip("."), ", ".join(c for c in knob.choices if isinstance(c, str))]))
    dashed = name.replace("_", "-")
    if knob.kind is bool:
        default = bool(knob.default)
        kind = option(bool, text, f"--{dashed}/--no-{dashed}" if default else f"--{dashed}")
    else:
        default = None if len(path) > 1 or knob.many else knob.default
        kind = list[str] if knob.many else knob.kind if knob.kind in (int, float) else str
        text += ". May be repeated" if knob.many else ""
        names = ("--seq-len", "--tokens") if name == "seq_len" else ()
        rules = {"parser": number} if kind in (int, float) else {}
        kind = option(kind if default is not None else kind | None, text, *names, **rules)
    return Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind, default=default)
