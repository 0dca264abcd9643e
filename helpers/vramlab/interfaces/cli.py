"""The command line: a thin face over `predict`, `simulate`, `measure`, records and doctor.

Exit status, the same everywhere (`vramlab schema` says it too): 0 answered, and where a card was
named it fits, safe or likely (explain: answered); 1 it does not fit or is only tight, of which half
die, no plan fits, the run failed, or doctor misses what the package needs; 2 asked wrongly (one
sentence on stderr); 130 stopped with Ctrl-C. `run` passes on the script's own.
"""

import functools
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import __version__
from ..base.data import data_path
from ..base.errors import RecipeError
from ..base.files import read_text, write_atomically
from ..hardware.gpu import find_gpu
from ..planning.question import Question
from ..planning.work import tell_compiling, told_of_work
from ..recipe.evaluation import Evaluation
from ..recipe.generation import Generation
from ..recipe.knobs import options
from ..recipe.recipe import Recipe
from ..training.quiet import no_collection
from . import cli_of_diffusion, cli_of_machines
from .command_group import Commands
from .command_options import (
    JSON,
    Expandable,
    GpuName,
    OtherMemory,
    Target,
    number,
    option,
    takes,
)
from .command_output import (
    DOES_NOT_FIT,
    InPlace,
    as_text,
    asked_card,
    card_of,
    check_written,
    finish,
    granted_to,
    host_of,
    is_size,
    is_watched,
    say,
    standard_input,
)
from .configurations import (
    EVALUATION,
    SUFFIXES,
    in_words_of,
    is_configuration,
    question_of,
    recipe_and_evaluation,
    recipe_in,
    recipe_or_configuration,
)
from .recipe_options import (
    OPTIONS,
    Options,
    fields_of,
    generating_options,
    generation_of,
    read_lengths,
    said_options,
    tokens_of,
)
from .words import DIFFERING, EXPLAINED, said, sets_segments, words_of

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Predict, simulate and measure the GPU memory of training.",
)

Release = option(
    str | None,
    "An older version whose ways are known, such as 4.48.",
    "--transformers",
)
LENGTHS = "JSONL with each sample's length, input_ids, text or messages"
telling = functools.partial(told_of_work, functools.partial(say, err=True))
CONFIRM = "Simulate each answer; with --no-confirm only what no formula knows, as GRPO's sampling."
EXPLAIN = "Next: `vramlab explain` with the same words, for the three cheapest changes"
Pretrained = option(
    bool,
    "Download the model's tokenizer for the text of --dataset.",
    "--pretrained",
)
takes_recipe = takes(OPTIONS, recipe_or_configuration)
# plan's options come from the knobs of a `Question`, as the others' from those of a `Recipe`.
PLAN_OPTIONS: Options = {knob.option: (path, knob) for path, knob in options(Question)}


def _asked(model: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return what `plan` is asked: of a model's name, or of a YAML that a program trains by."""
    if not is_configuration(model) and recipe_in(model) is None:
        return {"model": model, **fields_of(PLAN_OPTIONS, given)}
    # Only options that were really said may overrule the file, so defaults are left out.
    return question_of(model, fields_of(PLAN_OPTIONS, said_options(PLAN_OPTIONS, given)))


@app.callback(invoke_without_command=True)
def _version(version: option(bool, "Print the version.", "--version") = False) -> None:
    if version:
        say(f"vramlab {__version__}")
        raise typer.Exit()


@app.command(help="Memory by formula: about a millisecond, no torch; with --lengths over a run.")
@takes_recipe
def predict(
    recipe: Recipe,
    lengths: option(Path | None, LENGTHS + ": a whole run.", "--lengths", "--dataset") = None,
    pretrained: Pretrained = False,
    train_sampling_strategy: option(
        str | None,
        "With --lengths, as in TrainingArguments: random if left out.",
    ) = None,
    gpu: GpuName = None,
    other_memory: OtherMemory = None,
    expandable_segments: Expandable = False,
    as_json: JSON = False,
) -> None:
    # Each command imports its own: `predict` answers without the second that torch takes to load.
    from ..formulas.predict import predict
    from ..formulas.whole_run import predict_run

    card = asked_card(gpu, recipe)
    granted = granted_to(card, other_memory, expandable_segments)
    if lengths is None:
        if train_sampling_strategy is not None:
            rest = "it orders the samples of --lengths: name their file too, or leave it out"
            raise RecipeError("train_sampling_strategy", train_sampling_strategy, rest)
        finish(predict(recipe, gpu=card, **granted), card, as_json, then=EXPLAIN)
        return
    # A tokenizer is loaded only where a sample is text: lengths and input_ids need none.
    counted = read_lengths(lengths, functools.partial(tokens_of, recipe.model, pretrained))
    run = predict_run(recipe, counted, train_sampling_strategy or "random", gpu=card, **granted)
    # The run's heaviest micro-batch decides whether it fits; `run` is what is printed.
    finish(run.largest, card, as_json, run)


@app.command(help="Memory of the real training step on fake tensors: seconds, no GPU.")
@takes_recipe
def simulate(
    recipe: Recipe,
    target: Target = "cuda",
    gpu: GpuName = None,
    other_memory: OtherMemory = None,
    expandable_segments: Expandable = False,
    transformers: Release = None,
    as_json: JSON = False,
) -> None:
    # Libraries load a fifth faster without Python's cycle collector.
    with no_collection(before=False):
        from ..simulation.simulate import simulate

    if transformers is not None:
        from ..simulation.as_run import of_release, simulate_as_run

        simulate = functools.partial(simulate_as_run, as_run=of_release(transformers))
    card = asked_card(gpu, recipe)
    granted = granted_to(card, other_memory, expandable_segments)
    with telling():
        tell_compiling(recipe)
    finish(simulate(recipe, target=target, gpu=card, **granted), card, as_json, then=EXPLAIN)


@app.command(
    help="Memory of the Trainer's evaluation between two steps of training, on fake tensors."
)
@takes(EVALUATION | OPTIONS, recipe_and_evaluation)
def evaluate(
    asked: tuple[Recipe, Evaluation],
    target: Target = "cuda",
    gpu: GpuName = None,
    host_memory: option(
        str | None,
        "Memory of the host, where predictions may end: 64GiB, or bytes.",
        "--host-memory",
    ) = None,
    as_json: JSON = False,
) -> None:
    with no_collection(before=False):
        from ..planning.evaluation_cures import cures
        from ..simulation.simulate import simulate_evaluation

    card = asked_card(gpu, asked[0])
    host = host_of(host_memory)
    with telling():
        tell_compiling(asked[0])
        found = simulate_evaluation(*asked, target=target, gpu=card)
        # Each cure is simulated and judged by the card's room, so without a card none is looked
        # for.
        if card and target == "cuda":
            found.notes += cures(*asked, found, card, host.size)
    finish(found, card, as_json, host=host)


@app.command(
    help="Memory of the model's own generate on fake tensors: weights, KV cache, both phases."
)
@takes(generating_options(), generation_of)
def generate(
    asked: tuple[Recipe, Generation],
    target: Target = "cuda",
    gpu: GpuName = None,
    other_memory: OtherMemory = None,
    expandable_segments: Expandable = False,
    as_json: JSON = False,
) -> None:
    with no_collection(before=False):
        from ..simulation.simulate_generation import simulate_generation

    recipe, generation = asked
    card = asked_card(gpu, recipe)
    granted = granted_to(card, other_memory, expandable_segments)
    found = simulate_generation(recipe, **vars(generation), target=target, gpu=card, **granted)
    finish(found, card, as_json)


cli_of_diffusion.add_to(app)


@app.command(help="Memory and time of the real training step on this machine, in a fresh process.")
@takes_recipe
def measure(
    recipe: Recipe,
    repeats: option(int, "Timed steps after warm-up.", parser=number) = 5,
    as_json: JSON = False,
) -> None:
    # This `measure` takes predict's peak as its estimate, which `measurement` may not import.
    from .measure_and_record import measure

    finish(measure(recipe, repeats=repeats), None, as_json)


@app.command(
    help="The best full, LoRA and QLoRA recipe for a GPU, and how sure it is that each fits. "
    "Exit status 1: none does.",
)
@takes(PLAN_OPTIONS, _asked)
def plan(
    asked: dict[str, Any],
    gpu: option(str | None, "A card by name, such as T4; this machine's.", "--gpu") = None,
    dataset: option(Path | None, LENGTHS + ".", "--dataset", "--lengths") = None,
    pretrained: Pretrained = False,
    confirm: option(bool, CONFIRM, "--confirm/--no-confirm") = True,
    write: option(Path | None, "Write the best recipe as a program, such as train.py.") = None,
    as_json: JSON = False,
) -> None:
    from ..planning.plan import plan
    from ..planning.plan_script import check_question

    check_written(write=write)
    # `--gpu 24GB` is what people write who know their memory and not the table's names.
    if is_size(gpu):
        if asked.get("memory") is not None:
            rest = "it is a size, and --memory says one too: name a card, or leave it out"
            raise RecipeError("gpu", gpu, rest)
        asked["memory"] = gpu
        gpu = None
    if dataset:
        asked["lengths"] = read_lengths(
            dataset,
            functools.partial(tokens_of, asked["model"], pretrained),
        )
    if write:
        check_question(Question(gpu=gpu, **asked))
    # Standings are for eyes only: they must never get between the lines of `--json`.
    with InPlace() as place, telling():
        standing = place.show_standing if is_watched() and not as_json else None
        planned = plan(gpu=gpu, confirm=confirm, standing=standing, **asked)
    say(as_text(planned.to_dict()) if as_json else str(planned))
    if write and planned.choices:
        there = write.exists()
        # For several cards a configuration and a Slurm script are written with it.
        files = ", ".join(map(str, planned.write(write)))
        more = "; --method takes another" if len(planned.choices) > 1 else ""
        say(f"{'replaced' if there else 'wrote'} {files}: {planned.best.method}{more}", err=True)
    if not planned.choices:
        raise typer.Exit(DOES_NOT_FIT)


cli_of_machines.add_to(app)


@app.command(
    context_settings={"ignore_unknown_options": True},
    help="What filled, or would fill, the card, and the three cheapest changes.",
)
def explain(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[MESSAGE|SNAPSHOT] [RECIPE]", help=EXPLAINED)
    ] = None,
    gpu: option(str | None, "A card by name, such as T4.", "--gpu") = None,
    other_memory: OtherMemory = None,
    expandable_segments: Expandable = False,
    as_json: JSON = False,
) -> None:
    from .explain import explain
    from .explain_recipe import OF_METHOD, OF_SIZE, says_no_method

    # Without words the message is piped in, as in `python train.py 2>&1 | vramlab explain`.
    first, *rest = words or ["-"]
    notes: list[str] = []
    what: Any
    if first == "-":
        what = standard_input()
    elif first.endswith((".pickle", ".pkl")):
        what = Path(first)
    # Words with blanks that name no file are a message that was pasted.
    elif "out of memory" in first or (" " in first.strip() and not os.path.isfile(first)):
        what = first
    elif os.path.isfile(first) and not first.endswith((".json", ".py", *SUFFIXES)):
        what = read_text(first, errors="replace")
    else:
        # What is left is a model with predict's options, or a file that says a recipe.
        what, notes = said(words or [], _predict_options)
        rest = []
    recipe: Any = None
    assumed = False
    # An option that names the default says it, too.
    options = {word.partition("=")[0] for word in rest}
    if rest:
        recipe, notes = said(rest, _predict_options)
        read_from_file = any(word.endswith((".py", ".json", *SUFFIXES)) for word in rest)
        # A message plus a bare model says nothing of LoRA or precision, so the answer has to call
        # its recipe assumed.
        said_method = read_from_file or not options.isdisjoint(OF_METHOD)
        assumed = not said_method and says_no_method(recipe)
    card = card_of(gpu) if gpu is not None else None
    # A message is often pasted with the command, and the setting stands in front of that.
    segments = expandable_segments or any(map(sets_segments, words or []))
    granted = granted_to(card, other_memory, segments)
    with telling(), in_words_of(*words or []):
        found = explain(what, recipe, card, assumed, not options.isdisjoint(OF_SIZE), **granted)
    found.notes += notes
    say(as_text(vars(found)) if as_json else str(found))


@app.command(
    "run",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    help="Any script on any GPU without the GPU: what it holds there (Linux, experimental). Exit "
    "status: the script's.",
)
def run_script(
    gpu: option(str, "The card to be, by name, such as T4.", "--gpu"),
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND…", help="Such as python train.py.")
    ],
    gpus: option(int, "How many such cards there are.", min=1) = 1,
    steps: option(
        int | None,
        "End each process after so many optimizer steps; 3 show all phases.",
        min=1,
    ) = None,
    report: option(Path | None, "Write the report of the process that held most, as JSON.") = None,
    snapshot: option(Path | None, "Write its memory history, for pytorch.org/memory_viz.") = None,
) -> None:
    from .run_command import run

    check_written(report=report, snapshot=snapshot)
    seen = run(command, find_gpu(gpu), gpus, snapshot, steps)
    say(str(seen))
    if report and seen.reports:
        write_atomically(
            report,
            # One process may start others; the one that held most is the one that would die.
            max(seen.reports, key=lambda one: one.allocated or 0).to_json(indent=2),
        )
    # A script's own status passes through, so that `run` can stand in a pipeline in place of
    # `python`.
    raise typer.Exit(seen.status)


@app.command(
    help="Which bytes and tensors came and went: two recipes, or reports of two commits or "
    "environments."
)
def diff(
    a: Annotated[str, typer.Argument(help=DIFFERING)],
    b: Annotated[str, typer.Argument(help="Likewise; differences are B − A.")],
    target: Target = "cuda",
    as_json: JSON = False,
) -> None:
    from ..report.compare import diff
    from .explain import report_of

    # Both are read before either is computed: a mistake in the second must not cost the first one's
    # seconds.
    both = [said(words_of(text), _predict_options) for text in (a, b)]
    for text, (_, notes) in zip((a, b), both, strict=True):
        for note in notes:
            say(f"{text}: {note}", err=True)
    with telling():
        found = diff(*(report_of(each, target=target) for each, _ in both))
    say(as_text(asdict(found)) if as_json else str(found))


@app.command(
    help="The models that have a name, their sizes, and the hub's names that share their "
    "architecture."
)
def models(
    filtered: Annotated[str, typer.Argument(metavar="FILTER")] = "",
    as_json: JSON = False,
) -> None:
    from . import lists

    found = lists.models(filtered)
    say(as_text({"models": found}) if as_json else lists.models_table(found))


@app.command(help="The cards that have a name: memory and rates.")
def gpus(
    filtered: Annotated[str, typer.Argument(metavar="FILTER")] = "",
    as_json: JSON = False,
) -> None:
    from . import lists

    found = lists.gpus(filtered)
    say(as_text({"gpus": found}) if as_json else lists.gpus_table(found))


@app.command(
    help="What --json prints, as JSON Schema: of one command, or of all with what exit codes mean."
)
def schema(command: Annotated[str | None, typer.Argument(metavar="COMMAND")] = None) -> None:
    from .schema import schema_of, schemas

    known = schemas()["commands"]
    if command is not None and command not in known:
        raise RecipeError("command", command, f"with --json there are {', '.join(known)}")
    say(json.dumps(schemas() if command is None else schema_of(command), indent=2))


@app.command(
    help="What an agent is told about this tool: a SKILL.md, to put where yours reads them."
)
def skill() -> None:
    typer.echo(read_text(data_path("SKILL.md")), nl=False)


@app.command(
    "mcp",
    help="plan, predict, simulate, explain, diff, models and gpus as tools of the Model Context "
    "Protocol, over standard streams: what an agent starts.",
)
def serve_tools() -> None:
    from .mcp_server import serve

    # The tools are derived from the commands themselves, so a new option is a tool's argument too.
    commands: Any = typer.main.get_command(app)
    serve(commands.commands)


def _predict_options(rest: list[str]) -> dict[str, Any]:
    """Return what `predict` would be told by the words `rest`."""
    commands: Any = typer.main.get_command(app)
    # click parses the words; nothing is invoked.
    return commands.commands["predict"].make_context("vramlab predict", rest).params
