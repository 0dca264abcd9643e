"""The command line: a thin face over `predict`, `simulate`, `measure`, records and doctor.

Exit status: 0 done, 1 the run failed, the recipe does not fit --gpu, or doctor misses what the course needs, 2 a wrong
request (one sentence on stderr), 3 out of memory (the report says how much, or that no plan fits), 130 stopped with Ctrl-C.
"""

import functools
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..hardware.gpu import Gpu, find_gpu, usable_memory
from ..planning.question import Question, size_of
from ..planning.search_space import host_memory
from ..recipe.evaluation import Evaluation
from ..recipe.knobs import options
from ..recipe.recipe import Recipe
from ..report.errors import RecipeError, VramLabError, needing
from ..report.files import MOST_TEXT, NOT_OURS, is_ours, read_text, write_atomically
from ..report.report import TIERS, GiB, Interval, Report, format_bytes
from ..report.text import printable
from ..training.quiet import no_collection
from .command_options import number, option, takes
from .options import OPTIONS, Options, fields_of, fits_card, read_lengths, recipe_of, tokens_of
from .script import instead
from .words import said, words_of

FAILED, WRONG, OUT_OF_MEMORY, STOPPED = 1, 2, 3, 130


class Commands(TyperGroup):
    """Turns the package's own errors and Ctrl-C into a sentence and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with needing(lambda: ctx.invoked_subcommand):
                return super().invoke(ctx)
        except KeyboardInterrupt:
            say("Stopped.", err=True)
            raise typer.Exit(STOPPED) from None
        except Exception as error:
            why = str(error) if isinstance(error, VramLabError) else instead(error, ctx.invoked_subcommand)
            if not why:
                raise
            say(why, err=True)
            raise typer.Exit(WRONG) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Predict, simulate and measure the GPU memory of training.",
)


def say(text: Any, err: bool = False) -> None:
    """Print `text` without what a terminal would obey: it may quote a file of others."""
    typer.echo(printable(str(text)), err=err)


Json = option(bool, "Print JSON; sizes are bytes, times seconds.", "--json")
DIFFERING = "A recipe's or report's JSON file, or in quotes what predict takes: 'gpt2 --batch-size 8'."
EXPLAINED = "An out-of-memory message (its words, a file, or -) or a memory snapshot's .pickle; then or alone MODEL "
EXPLAINED += "with options, the JSON file of a recipe or of a TrainingArguments, or the script that trains."
GpuName = option(str | None, "A card by name, such as T4. Exit status 1: does not fit.", "--gpu")
Release = option(str | None, "An older version whose ways are known, such as 4.48.", "--transformers")
OtherMemory = option(
    str | None, "Of --gpu's memory what a display or other processes hold: 1GiB, or bytes.", "--other-memory"
)
Expandable = option(bool, "The allocator has PYTORCH_ALLOC_CONF=expandable_segments:True.", "--expandable-segments")
Target = option(str, "Whose kernels and rounding: cuda or cpu.", "--target")


takes_recipe = takes(OPTIONS, recipe_of)
PLAN_OPTIONS: Options = {knob.option: (path, knob) for path, knob in options(Question)}
EVALUATION: Options = {knob.option: (path, knob) for path, knob in options(Evaluation)}


def _recipe_and_evaluation(model: str, given: dict[str, Any]) -> tuple[Recipe, Evaluation]:
    evaluation = Evaluation(**fields_of(EVALUATION, {name: given.pop(name) for name in EVALUATION}))
    return recipe_of(model, given), evaluation


@app.callback(invoke_without_command=True)
def _version(version: option(bool, "Print the version.", "--version") = False) -> None:
    if version:
        say(f"vramlab {__version__}")
        raise typer.Exit()


@app.command(help="Memory by formula: about a millisecond, no torch; with --lengths over a run.")
@takes_recipe
def predict(
    recipe: Recipe,
    lengths: option(Path | None, "JSONL with each sample's length or input_ids: a whole run.") = None,
    train_sampling_strategy: option(str | None, "With --lengths, as in TrainingArguments: random if left out.") = None,
    gpu: GpuName = None,
    other_memory: OtherMemory = None,
    expandable_segments: Expandable = False,
    as_json: Json = False,
) -> None:
    from ..formulas.predict import predict
    from ..formulas.run import predict_run

    card = _card(gpu, recipe)
    granted = _granted(card, other_memory, expandable_segments)
    if lengths is None:
        if train_sampling_strategy is not None:
            rest = "it orders the samples of --lengths: name their file too, or leave it out"
            raise RecipeError("train_sampling_strategy", train_sampling_strategy, rest)
        _finish(predict(recipe, gpu=card, **granted), card, as_json)
        return
    run = predict_run(recipe, read_lengths(lengths), train_sampling_strategy or "random", gpu=card, **granted)
    _finish(run.largest, card, as_json, run)


@app.command(help="Memory of the real training step on fake tensors: seconds, no GPU.")
@takes_recipe
def simulate(
    recipe: Recipe,
    target: Target = "cuda",
    gpu: GpuName = None,
    other_memory: OtherMemory = None,
    expandable_segments: Expandable = False,
    transformers: Release = None,
    as_json: Json = False,
) -> None:
    with no_collection(before=False):
        from ..simulation.simulate import simulate

    if transformers is not None:
        from ..simulation.as_run import of_release, simulate_as_run

        simulate = functools.partial(simulate_as_run, as_run=of_release(transformers))
    card = _card(gpu, recipe)
    granted = _granted(card, other_memory, expandable_segments)
    _finish(simulate(recipe, target=target, gpu=card, **granted), card, as_json)


@app.command(help="Memory of the Trainer's evaluation between two steps of training, on fake tensors.")
@takes(EVALUATION | OPTIONS, _recipe_and_evaluation)
def evaluate(
    asked: tuple[Recipe, Evaluation], target: Target = "cuda", gpu: GpuName = None, as_json: Json = False
) -> None:
    with no_collection(before=False):
        from ..simulation.simulate import simulate_evaluation

    card = _card(gpu, asked[0])
    _finish(simulate_evaluation(*asked, target=target, gpu=card), card, as_json)


@app.command(help="Memory and time of the real training step on this machine, in a fresh process.")
@takes_recipe
def measure(
    recipe: Recipe, repeats: option(int, "Timed steps after warm-up.", parser=number) = 5, as_json: Json = False
) -> None:
    from .measure import measure

    _finish(measure(recipe, repeats=repeats), None, as_json)


@app.command(
    help="The best full, LoRA and QLoRA recipe for a GPU, and how sure it is that each fits. Exit status 3: none does.",
)
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
    from ..planning.plan import plan

    _check_written(write=write)
    if dataset:
        asked["lengths"] = read_lengths(dataset, functools.partial(tokens_of, asked["model"], pretrained))
    found = plan(gpu=gpu, confirm=confirm, **asked)
    say(found.to_json(indent=2) if as_json else str(found))
    if write and found.choices:
        there = write.exists()
        files = ", ".join(map(str, found.write(write)))
        more = "; --method takes another" if len(found.choices) > 1 else ""
        say(f"{'replaced' if there else 'wrote'} {files}: {found.best.method}{more}", err=True)
    if not found.choices:
        raise typer.Exit(OUT_OF_MEMORY)


@app.command(
    help="Measure every recipe on the list, beside what simulate says, and keep the reports for readers without this GPU.",
)
def record(
    paths: Annotated[list[Path] | None, typer.Argument(help="Lists of recipes; the course's when left out.")] = None,
    minutes: option(float, "From the first run; nothing goes on after that.", min=0) = 8,
    dry_run: option(bool, "Only list what would be measured.", "--dry-run") = False,
    folder: option(Path | None, "Where records lie; the course's when left out.") = None,
    as_json: option(bool, "Print the list of what is missing, for a later run.", "--json") = False,
) -> None:
    from .measure import record

    progress = functools.partial(say, err=as_json)
    outcome = record(paths or None, minutes=minutes, folder=folder, dry_run=dry_run, progress=progress)
    say(json.dumps([recipe.to_dict() for recipe, _ in outcome.missing], indent=1) if as_json else outcome)


@app.command(
    help="All that the project wants from a card, the most worth a second first: records, contexts, power, a run that dies.",
)
def card(
    paths: Annotated[list[Path] | None, typer.Argument(help="Lists of pieces; the project's when left out.")] = None,
    minutes: option(float, "From now; nothing goes on after that.", min=0) = 30,
    dry_run: option(bool, "Only say what is left to do.", "--dry-run") = False,
    folder: option(Path, "Where the record file lies.") = Path("my_records"),
    compare: option(bool, "Print what simulate says beside each report, which takes time.", "--compare") = False,
) -> None:
    from .measure import run_card

    run = run_card(paths or None, minutes, folder, dry_run, progress=say, compare=compare)
    if dry_run:
        for piece, seconds in run.left:
            say(f"{seconds:6,.0f} s  {piece.title}")
    say(run)


@app.command(
    help="Show exactly what your records would tell others, without a name or a path, and where to send it.",
)
def share(
    source: Annotated[Path | None, typer.Argument(help="A record file or folder; the course's when left out.")] = None,
    folder: option(Path, "Where to write what may be sent.") = Path("."),
    browse: option(bool, "Open the page that takes it. Nothing is sent before you say so there.") = True,
) -> None:
    from ..measurement.share import share

    for made in share(source, folder):
        say(str(made))
        if browse and made.page:
            typer.launch(made.page)


@app.command(help="What this machine and environment can do, and what to do about what they cannot.")
def doctor(as_json: Json = False) -> None:
    from .doctor import doctor

    found = doctor()
    say(json.dumps(found.to_dict(), indent=2) if as_json else str(found))
    if not found.ok:
        raise typer.Exit(FAILED)


@app.command(
    context_settings={"ignore_unknown_options": True},
    help="What filled, or would fill, the card, and the three cheapest changes.",
)
def explain(
    words: Annotated[list[str] | None, typer.Argument(metavar="[MESSAGE|SNAPSHOT] [RECIPE]", help=EXPLAINED)] = None,
    gpu: option(str | None, "A card by name, such as T4.", "--gpu") = None,
    other_memory: OtherMemory = None,
    expandable_segments: Expandable = False,
    as_json: Json = False,
) -> None:
    from .explain import explain

    first, *rest = words or ["-"]
    notes: list[str] = []
    if first == "-":
        what = _standard_input()
    elif first.endswith((".pickle", ".pkl")):
        what = Path(first)
    elif "out of memory" in first:
        what = first
    elif os.path.isfile(first) and not first.endswith((".json", ".py")):
        what = read_text(first, errors="replace")
    else:
        (what, notes), rest = said(words, _predict_options), []
    recipe = None
    if rest:
        recipe, notes = said(rest, _predict_options)
    card = find_gpu(gpu) if gpu is not None else None
    found = explain(what, recipe, card, **_granted(card, other_memory, expandable_segments))
    found.notes += notes
    say(json.dumps(vars(found), indent=2) if as_json else str(found))


@app.command(
    "run",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    help="Any script on any GPU without the GPU: what it holds there (Linux, experimental). Exit status: the script's.",
)
def run_script(
    gpu: option(str, "The card to be, by name, such as T4.", "--gpu"),
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND…", help="Such as python train.py.")],
    gpus: option(int, "How many such cards there are.", min=1) = 1,
    report: option(Path | None, "Write the report of the process that held most, as JSON.") = None,
    snapshot: option(Path | None, "Write its memory history, for pytorch.org/memory_viz.") = None,
) -> None:
    from .run import run

    _check_written(report=report, snapshot=snapshot)
    found = run(command, find_gpu(gpu), gpus, snapshot)
    say(str(found))
    if report and found.reports:
        write_atomically(report, max(found.reports, key=lambda one: one.allocated).to_json(indent=2))
    raise typer.Exit(found.status)


@app.command(help="Which bytes and tensors came and went: two recipes, or reports of two commits or environments.")
def diff(
    a: Annotated[str, typer.Argument(help=DIFFERING)],
    b: Annotated[str, typer.Argument(help="Likewise; differences are B − A.")],
    target: Target = "cuda",
    as_json: Json = False,
) -> None:
    from ..report.compare import diff
    from .explain import report_of

    both = [said(words_of(text), _predict_options) for text in (a, b)]
    for text, (_, notes) in zip((a, b), both, strict=True):
        for note in notes:
            say(f"{text}: {note}", err=True)
    found = diff(*(report_of(each, target=target) for each, _ in both))
    say(json.dumps(asdict(found), indent=2) if as_json else str(found))


def _standard_input() -> str:
    """Return what is piped in, at most MOST_TEXT bytes of it. Raises RecipeError where it is closed."""
    if sys.stdin is None:
        raise RecipeError("message", "-", "standard input is closed: pipe a message in, or name a file")
    return typer.get_binary_stream("stdin").read(MOST_TEXT).decode("utf-8", "replace")


def _predict_options(rest: list[str]) -> dict[str, Any]:
    """Return what `predict` would be told by the words `rest`."""
    return typer.main.get_command(app).commands["predict"].make_context("vramlab predict", rest).params


def _check_written(**files: Path | None) -> None:
    """Raise RecipeError, before anything is computed, at the first of the options `files` that cannot be written, or is
    there already and not of our making."""
    for name, path in files.items():
        if path and (os.path.isdir(path) or not os.access(path.parent, os.W_OK)):
            raise RecipeError(name, str(path), "it must be the name of a file in a folder that can be written to")
        if path and path.exists() and not is_ours(path):
            raise RecipeError(name, str(path), NOT_OURS)


def _card(name: str | None, recipe: Recipe) -> Gpu | None:
    """Return the GPU asked for; refuse a precision that it lacks."""
    card = find_gpu(name) if name is not None else None
    if card:
        card.require(recipe.precision)
    return card


def _granted(card: Gpu | None, other_memory: str | None, expandable_segments: bool) -> dict[str, Any]:
    """Return what the process is granted. Raises RecipeError for memory of no card."""
    size = size_of("other_memory", other_memory) or 0
    if size and card is None:
        raise RecipeError("other_memory", other_memory, "it is of a card's memory: say --gpu too")
    return {"other_memory": size, "expandable_segments": expandable_segments}


def _on_host(report: Report) -> str:
    """What the verdict supposes of the host's memory; "" for less than a GiB of it."""
    counts = report.recipe and report.verdict in TIERS
    size = host_memory(Recipe(**report.recipe)) if counts else 0
    return f", and {size / GiB:.1f} GiB of host memory are free" if size >= GiB else ""


def _finish(report: Report, card: Gpu | None, as_json: bool, whole: Any = None) -> None:
    """Print the report, or the `whole` that it is of, and whether it fits the card; exit with what its status and that mean.

    In JSON the answer is `environment.tier`, in a word, and `environment.fits`: true, false, or null where the card lies
    within the interval.
    """
    fits, sentence = True, ""
    if card and report.process is not None:
        report.usable = usable_memory(card) if report.usable is None else report.usable
        fits = fits_card(report)
        has, needs = format_bytes(report.usable), Interval.of(report.process)
        sentence = f"{report.verdict}: {card.name} has {has}, the process needs {needs}{_on_host(report)}"
        report.environment |= {"gpu": card.name, "fits": fits, "tier": report.verdict}
        report.notes += [sentence] if as_json else []
    whole = whole or report
    text = json.dumps(whole.to_dict(), indent=2) if as_json else "\n".join(filter(None, [str(whole), sentence]))
    say(text)
    if report.status != "ok" or fits is False:
        raise typer.Exit(OUT_OF_MEMORY if report.status == "oom" else FAILED)
