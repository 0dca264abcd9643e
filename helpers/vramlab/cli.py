"""The command line: a thin face over `predict`, `simulate`, `measure`, `compare`, records and doctor.

Exit status: 0 done, 1 the run failed or doctor misses what the course needs, 2 a wrong request (one sentence on
stderr), 3 out of memory (the report says how much), 130 stopped with Ctrl-C.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from . import __version__
from .cli_recipe import takes_recipe
from .errors import VramLabError
from .gpu import Gpu, find_gpu, gpu_names
from .recipe import Recipe
from .report import Interval, Report, format_bytes, text_table

FAILED, WRONG, OUT_OF_MEMORY, STOPPED = 1, 2, 3, 130


class Commands(TyperGroup):
    """Turns the package's own errors and Ctrl-C into a sentence and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except VramLabError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(WRONG) from None
        except KeyboardInterrupt:
            typer.echo("Stopped.", err=True)
            raise typer.Exit(STOPPED) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Predict, simulate and measure the GPU memory of training.",
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON; sizes are bytes, times seconds.")]
GpuName = Annotated[str | None, typer.Option("--gpu", help="A card that `vramlab gpus` lists, such as T4.")]
Target = Annotated[str, typer.Option(help="Whose kernels and rounding: cuda or cpu.")]


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(f"vramlab {__version__}")
        raise typer.Exit()


@app.command()
@takes_recipe
def predict(recipe: Recipe, gpu: GpuName = None, as_json: Json = False) -> None:
    """Memory by formula: microseconds, no torch."""
    from .predict import predict

    card = _card(gpu, recipe)
    _finish([predict(recipe, gpu=card.name if card else None)], card, as_json)


@app.command()
@takes_recipe
def simulate(recipe: Recipe, target: Target = "cuda", gpu: GpuName = None, as_json: Json = False) -> None:
    """Memory of the real training step on fake tensors: seconds, no GPU."""
    from .simulate import simulate

    card = _card(gpu, recipe)
    _finish([simulate(recipe, target=target, gpu=card.name if card else None)], card, as_json)


@app.command()
@takes_recipe
def measure(
    recipe: Recipe,
    repeats: Annotated[int, typer.Option(min=1, help="Timed steps after warm-up.")] = 5,
    as_json: Json = False,
) -> None:
    """Memory and time of the real training step on this machine, in a fresh process."""
    from .measure import measure

    _finish([measure(recipe, repeats=repeats)], None, as_json)


@app.command()
@takes_recipe
def compare(
    recipe: Recipe,
    measure: Annotated[bool, typer.Option("--measure", help="Run it here too; its device is the target.")] = False,
    target: Target = "cuda",
    gpu: GpuName = None,
    as_json: Json = False,
) -> None:
    """Predicted beside simulated, and measured with --measure: every category and the difference."""
    from .compare import compare
    from .measure import measure as run_here
    from .predict import predict
    from .simulate import simulate

    card = _card(gpu, recipe)
    name = card.name if card else None
    measured = [run_here(recipe)] if measure else []
    target = measured[0].target if measured else target
    reports = [predict(recipe, gpu=name), simulate(recipe, target=target, gpu=name), *measured]
    _finish(reports, card, as_json, compare(*reports))


@app.command()
def record(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Notebooks and JSON lists of recipes; the course's when left out.")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0, help="Stop before this much time is spent.")] = 8,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be measured.")] = False,
    folder: Annotated[Path | None, typer.Option(help="Where record files lie; the course's when left out.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the list of what is missing, for a later run.")
    ] = False,
) -> None:
    """Measure every recipe that the notebooks ask for and keep the reports for readers without this GPU."""
    from .record import record

    outcome = record(paths or None, minutes=minutes, folder=folder, dry_run=dry_run, progress=not as_json)
    typer.echo(json.dumps([recipe.to_dict() for recipe, _ in outcome.missing], indent=1) if as_json else str(outcome))


@app.command()
def doctor(as_json: Json = False) -> None:
    """What this machine and environment can do, and what to do about what they cannot."""
    from .doctor import doctor

    found = doctor()
    typer.echo(json.dumps(found.to_dict(), indent=2) if as_json else str(found))
    if not found.ok:
        raise typer.Exit(FAILED)


@app.command()
def models(as_json: Json = False) -> None:
    """The models that are known by name."""
    from .catalogue import catalogue

    entries = catalogue().values()
    if as_json:
        facts = [{"name": e.name, "hub_id": e.hub_id, "task": e.task, "parameters": e.parameters} for e in entries]
        typer.echo(json.dumps(facts, indent=2))
    else:
        rows = [(e.name, f"{e.parameters:,}", e.task, e.hub_id) for e in entries]
        typer.echo(text_table([("model", "parameters", "task", "hub"), *rows]))


@app.command()
def gpus(as_json: Json = False) -> None:
    """The GPUs that are known by name; an asterisk marks memory as on the box, for want of a reading."""
    cards = [find_gpu(name) for name in gpu_names()]
    if as_json:
        typer.echo(json.dumps([card.to_dict() for card in cards], indent=2))
        return
    head = ("GPU", "memory", "GB/s", "fp32", "fp16", "bf16 TFLOP/s", "compute", "watts")
    rows = [
        (
            card.name,
            format_bytes(card.total, digits=2) + ("" if card.total_known else "*"),
            f"{card.bandwidth / 1e9:,.0f}",
            *(f"{card.peak[form] / 1e12:,.1f}" if form in card.peak else "–" for form in ("fp32", "fp16", "bf16")),
            ".".join(map(str, card.compute_capability)),
            str(card.tdp),
        )
        for card in cards
    ]
    typer.echo(text_table([head, *rows]))


def _card(name: str | None, recipe: Recipe) -> Gpu | None:
    """The GPU asked for; refuses a precision that it lacks."""
    if name is None:
        return None
    card = find_gpu(name)
    card.require(recipe.precision)
    return card


def _finish(reports: list[Report], card: Gpu | None, as_json: bool, shown: Any = None) -> None:
    """Prints the one report, or `shown`, and exits with what the reports' status means."""
    if as_json:
        typer.echo(reports[0].to_json(indent=2) if shown is None else json.dumps(shown.to_dict(), indent=2))
    else:
        typer.echo(str(reports[0] if shown is None else shown))
        if card and reports[-1].status == "ok":
            typer.echo(_verdict(reports[-1], card))
    states = {report.status for report in reports}
    if "oom" in states:
        raise typer.Exit(OUT_OF_MEMORY)
    if states != {"ok"}:
        raise typer.Exit(FAILED)


def _verdict(report: Report, card: Gpu) -> str:
    """One line: whether what the process needs is on the card; where the report does not say, its allocator's
    segments (or peak) plus what a context takes."""
    needs = report.process
    if needs is None:
        inside = _interval(report.peak.total if report.reserved is None else report.reserved)
        outside = card.context_interval
        needs = Interval(inside.low + outside.low, inside.value + outside.value, inside.high + outside.high)
    low, high = _interval(needs).low, _interval(needs).high
    answer = "fits" if high <= card.total else "does not fit" if low > card.total else "may not fit"
    needs = needs if isinstance(needs, Interval) else format_bytes(needs)
    return f"{answer}: {card.name} has {format_bytes(card.total)}, the process needs {needs}"


def _interval(size: int | Interval) -> Interval:
    return size if isinstance(size, Interval) else Interval(size, size, size)


def main() -> None:
    """The program `vramlab`."""
    app(prog_name="vramlab")


if __name__ == "__main__":
    main()
