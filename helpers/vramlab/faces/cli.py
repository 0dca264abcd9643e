"""The command line: a thin face over `predict`, `simulate`, `measure`, records and doctor.

Exit status: 0 done, 1 the run failed, the recipe does not fit --gpu, or doctor misses what the course needs, 2 a wrong
request (one sentence on stderr), 3 out of memory (the report says how much, or that no plan fits), 130 stopped with Ctrl-C.
"""

import contextlib
import functools
import inspect
import json
import os
import shlex
from collections.abc import Callable
from dataclasses import asdict
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..hardware.gpu import Gpu, find_gpu
from ..planning.question import Question
from ..recipe.configuration import read_json
from ..recipe.evaluation import Evaluation
from ..recipe.knobs import Knob, options
from ..recipe.recipe import Recipe
from ..report.errors import RecipeError, VramLabError, needing
from ..report.report import Interval, Report, format_bytes
from ..training.quiet import no_collection
from .options import OPTIONS, Options, fields_of, fits_card, read_lengths, recipe_of, recipe_of_arguments, tokens_of
from .script import instead, read_script

FAILED, WRONG, OUT_OF_MEMORY, STOPPED = 1, 2, 3, 130


class Commands(TyperGroup):
    """Turns the package's own errors and Ctrl-C into a sentence and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with needing(lambda: ctx.invoked_subcommand):
                return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("Stopped.", err=True)
            raise typer.Exit(STOPPED) from None
        except Exception as error:
            why = str(error) if isinstance(error, VramLabError) else instead(error, ctx.invoked_subcommand)
            if not why:
                raise
            typer.echo(why, err=True)
            raise typer.Exit(WRONG) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Predict, simulate and measure the GPU memory of training.",
)


def option(kind: Any, text: str, *names: str, **rules: Any) -> Any:
    """Return the annotation of an option of a command, named as its parameter unless there are `names`."""
    return Annotated[kind, typer.Option(*names, help=text, **rules)]


def number(text: str) -> int | float | str:
    """Return the number that `text` says, or `text` itself for the check that says what is allowed."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


Json = option(bool, "Print JSON; sizes are bytes, times seconds.", "--json")
DIFFERING = "A recipe's or report's JSON file, or in quotes what predict takes: 'gpt2 --batch-size 8'."
EXPLAINED = "An out-of-memory message (its words, a file, or -) or a memory snapshot's .pickle; then or alone MODEL "
EXPLAINED += "with options, the JSON file of a recipe or of a TrainingArguments, or the script that trains."
GpuName = option(str | None, "A card by name, such as T4. Exit status 1: does not fit.", "--gpu")
Target = option(str, "Whose kernels and rounding: cuda or cpu.", "--target")


def takes(known: Options, make: Callable[[str, dict[str, Any]], Any]) -> Callable[[Callable], Callable]:
    """Give `command(made, …)` the argument MODEL and the `known` options, of which `make` makes its first argument."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(model: str, **values: Any) -> None:
            command(make(model, {name: values.pop(name) for name in known}), **values)

        model = Annotated[str, typer.Argument(help="A name, such as gpt2, or a path to a config.json.")]
        parameters = [Parameter("model", Parameter.KEYWORD_ONLY, annotation=model)]
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


takes_recipe = takes(OPTIONS, recipe_of)
PLAN_OPTIONS: Options = {knob.option: (path, knob) for path, knob in options(Question)}
EVALUATION: Options = {knob.option: (path, knob) for path, knob in options(Evaluation)}


def _recipe_and_evaluation(model: str, given: dict[str, Any]) -> tuple[Recipe, Evaluation]:
    evaluation = Evaluation(**fields_of(EVALUATION, {name: given.pop(name) for name in EVALUATION}))
    return recipe_of(model, given), evaluation


@app.callback(invoke_without_command=True)
def _version(version: option(bool, "Print the version.", "--version") = False) -> None:
    if version:
        typer.echo(f"vramlab {__version__}")
        raise typer.Exit()


@app.command()
@takes_recipe
def predict(
    recipe: Recipe,
    lengths: option(Path | None, "JSONL with each sample's length or input_ids: a whole run.") = None,
    train_sampling_strategy: option(str, "With --lengths, as in TrainingArguments.") = "random",
    gpu: GpuName = None,
    as_json: Json = False,
) -> None:
    """Memory by formula: about a millisecond, no torch; with --lengths over a run."""
    from ..formulas.predict import predict
    from ..formulas.run import predict_run

    card = _card(gpu, recipe)
    if lengths is None:
        _finish(predict(recipe, gpu=card), card, as_json)
        return
    run = predict_run(recipe, read_lengths(lengths), train_sampling_strategy, gpu=card)
    _finish(run.largest, card, as_json, run)


@app.command()
@takes_recipe
def simulate(recipe: Recipe, target: Target = "cuda", gpu: GpuName = None, as_json: Json = False) -> None:
    """Memory of the real training step on fake tensors: seconds, no GPU."""
    with no_collection(before=False):
        from ..simulation.simulate import simulate

    card = _card(gpu, recipe)
    _finish(simulate(recipe, target=target, gpu=card), card, as_json)


@app.command()
@takes(EVALUATION | OPTIONS, _recipe_and_evaluation)
def evaluate(
    asked: tuple[Recipe, Evaluation], target: Target = "cuda", gpu: GpuName = None, as_json: Json = False
) -> None:
    """Memory of the Trainer's evaluation between two steps of training, on fake tensors."""
    with no_collection(before=False):
        from ..simulation.simulate import simulate_evaluation

    card = _card(gpu, asked[0])
    _finish(simulate_evaluation(*asked, target=target, gpu=card), card, as_json)


@app.command()
@takes_recipe
def measure(
    recipe: Recipe, repeats: option(int, "Timed steps after warm-up.", parser=number) = 5, as_json: Json = False
) -> None:
    """Memory and time of the real training step on this machine, in a fresh process."""
    from .measure import measure

    _finish(measure(recipe, repeats=repeats), None, as_json)


@app.command()
@takes(PLAN_OPTIONS, lambda model, given: {"model": model, **fields_of(PLAN_OPTIONS, given)})
def plan(
    asked: dict[str, Any],
    gpu: option(str | None, "A card by name, such as T4; this machine's.", "--gpu") = None,
    dataset: option(Path | None, "JSONL with each sample's length, input_ids or text.") = None,
    pretrained: option(bool, "Download the model's tokenizer for the text of --dataset.", "--pretrained") = False,
    confirm: option(bool, "Simulate each answer.", "--confirm/--no-confirm") = True,
    write: option(Path | None, "Write the best recipe as a program, such as train.py.") = None,
    as_json: Json = False,
) -> None:
    """The best full, LoRA and QLoRA recipe for a GPU, and how sure it is that each fits. Exit status 3: none does."""
    from ..planning.plan import plan

    _check_written(write=write)
    if dataset:
        asked["lengths"] = read_lengths(dataset, functools.partial(tokens_of, asked["model"], pretrained))
    found = plan(gpu=gpu, confirm=confirm, **asked)
    typer.echo(found.to_json(indent=2) if as_json else str(found))
    if write and found.choices:
        files = ", ".join(map(str, found.write(write)))
        more = "; --method takes another" if len(found.choices) > 1 else ""
        typer.echo(f"wrote {files}: {found.best.method}{more}", err=True)
    if not found.choices:
        raise typer.Exit(OUT_OF_MEMORY)


@app.command()
def record(
    paths: Annotated[list[Path] | None, typer.Argument(help="Lists of recipes; the course's when left out.")] = None,
    minutes: option(float, "From the first run; nothing goes on after that.", min=0) = 8,
    dry_run: option(bool, "Only list what would be measured.", "--dry-run") = False,
    folder: option(Path | None, "Where records lie; the course's when left out.") = None,
    as_json: option(bool, "Print the list of what is missing, for a later run.", "--json") = False,
) -> None:
    """Measure every recipe on the list, beside what simulate says, and keep the reports for readers without this GPU."""
    from .measure import record

    progress = functools.partial(typer.echo, err=as_json)
    outcome = record(paths or None, minutes=minutes, folder=folder, dry_run=dry_run, progress=progress)
    typer.echo(json.dumps([recipe.to_dict() for recipe, _ in outcome.missing], indent=1) if as_json else str(outcome))


@app.command()
def share(
    source: Annotated[Path | None, typer.Argument(help="A record file or folder; the course's when left out.")] = None,
    folder: option(Path, "Where to write what may be sent.") = Path("."),
    browse: option(bool, "Open the page that takes it. Nothing is sent before you say so there.") = True,
) -> None:
    """Show exactly what your records would tell others, without your name, your machine's or a path, and where to send it."""
    from ..measurement.share import share

    for made in share(source, folder):
        typer.echo(str(made))
        if browse and made.page:
            typer.launch(made.page)


@app.command()
def doctor(as_json: Json = False) -> None:
    """What this machine and environment can do, and what to do about what they cannot."""
    from .doctor import doctor

    found = doctor()
    typer.echo(json.dumps(found.to_dict(), indent=2) if as_json else str(found))
    if not found.ok:
        raise typer.Exit(FAILED)


@app.command(context_settings={"ignore_unknown_options": True})
def explain(
    words: Annotated[list[str] | None, typer.Argument(metavar="[MESSAGE|SNAPSHOT] [RECIPE]", help=EXPLAINED)] = None,
    gpu: option(str | None, "A card by name, such as T4.", "--gpu") = None,
    as_json: Json = False,
) -> None:
    """What filled, or would fill, the card, and the three cheapest changes."""
    from .explain import explain

    first, *rest = words or ["-"]
    if first == "-":
        what = typer.get_text_stream("stdin").read()
    elif first.endswith((".pickle", ".pkl")):
        what = Path(first)
    elif "out of memory" in first:
        what = first
    elif os.path.isfile(first) and not first.endswith((".json", ".py")):
        what = Path(first).read_text(encoding="utf-8", errors="replace")
    else:
        what, rest = _said(words), []
    found = explain(what, _said(rest) if rest else None, gpu)
    typer.echo(json.dumps(vars(found), indent=2) if as_json else str(found))


@app.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run_script(
    gpu: option(str, "The card to be, by name, such as T4.", "--gpu"),
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND…", help="Such as python train.py.")],
    gpus: option(int, "How many such cards there are.", min=1) = 1,
    report: option(Path | None, "Write the report of the process that held most, as JSON.") = None,
    snapshot: option(Path | None, "Write its memory history, for pytorch.org/memory_viz.") = None,
) -> None:
    """Any script on any GPU without the GPU: what it holds there (Linux, experimental). Exit status: the script's."""
    from .run import run

    _check_written(report=report, snapshot=snapshot)
    found = run(command, find_gpu(gpu), gpus, snapshot)
    typer.echo(str(found))
    if report and found.reports:
        report.write_text(max(found.reports, key=lambda one: one.allocated).to_json(indent=2), encoding="utf-8")
    raise typer.Exit(found.status)


@app.command()
def diff(
    a: Annotated[str, typer.Argument(help=DIFFERING)],
    b: Annotated[str, typer.Argument(help="Likewise; differences are B − A.")],
    target: Target = "cuda",
    as_json: Json = False,
) -> None:
    """Which bytes and tensors came and went: two recipes, or reports of two commits or environments."""
    from ..report.compare import diff
    from .explain import report_of

    said = (_said([text] if Path(text).is_file() else shlex.split(text)) for text in (a, b))
    found = diff(*(report_of(each, target=target) for each in said))
    typer.echo(json.dumps(asdict(found), indent=2) if as_json else str(found))


def _said(words: list[str]) -> Recipe | Report:
    """Return what words say: the JSON file of a report or a recipe, or MODEL and options as of `predict`, among them the
    JSON file of a TrainingArguments or a Python script, which may name the model."""
    rest, model, arguments, fields = list(words), None, None, {}
    for word in (word for word in words if word.endswith(".py") or Path(word).is_file()):
        if word.endswith(".py"):
            model, arguments, fields, unread = read_script(Path(word))
            rest.remove(word)
            typer.echo(unread, err=True) if unread else None
        elif word.endswith(".json"):
            text = Path(word).read_text("utf-8")
            found = read_json("file", text, word)
            if len(words) == 1 and "phases" in found:
                return Report.from_dict(found)
            if len(words) == 1 and "model" in found:
                return Recipe.from_json(text)
            if "per_device_train_batch_size" in found:
                rest.remove(word)
                arguments = found
    if arguments is not None and (not rest or rest[0].startswith("-")):
        rest.insert(0, model or "")
    given = typer.main.get_command(app).commands["predict"].make_context("vramlab predict", rest).params
    known = {name: given[name] for name in OPTIONS}
    if arguments is None:
        return recipe_of(given["model"], known)
    return recipe_of_arguments(given["model"], known, arguments, **fields)


def _check_written(**files: Path | None) -> None:
    """Raise RecipeError, before anything is computed, at the first of the options `files` that cannot be written."""
    for name, path in files.items():
        if path and (path.is_dir() or not os.access(path.parent, os.W_OK)):
            raise RecipeError(name, str(path), "it must be the name of a file in a folder that can be written to")


def _card(name: str | None, recipe: Recipe) -> Gpu | None:
    """Return the GPU asked for; refuse a precision that it lacks."""
    card = find_gpu(name) if name is not None else None
    if card:
        card.require(recipe.precision)
    return card


def _finish(report: Report, card: Gpu | None, as_json: bool, whole: Any = None) -> None:
    """Print the report, or the `whole` that it is of, and whether it fits the card; exit with what its status and that mean.

    In JSON the answer is `environment.fits`: true, false, or null where the card lies within the interval.
    """
    fits, sentence = True, ""
    if card and report.process is not None:
        fits, answer = fits_card(report, card)
        has, needs = format_bytes(card.total), Interval.of(report.process)
        sentence = f"{answer}: {card.name} has {has}, the process needs {needs}"
        report.environment |= {"gpu": card.name, "fits": fits}
        report.notes += [sentence] if as_json else []
    whole = whole or report
    text = json.dumps(whole.to_dict(), indent=2) if as_json else "\n".join(filter(None, [str(whole), sentence]))
    typer.echo(text)
    if report.status != "ok" or fits is False:
        raise typer.Exit(OUT_OF_MEMORY if report.status == "oom" else FAILED)
