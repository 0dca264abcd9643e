"""Commands on this machine and its card: `record`, `card`, `share` and `doctor`."""

import functools
import json
from pathlib import Path
from typing import Annotated

import typer

from .command_options import JSON, option
from .command_output import FAILED, as_text, say


def add_to(app: typer.Typer) -> None:
    """Add these commands, in this order."""
    # `--help` lists commands in the order of these calls.
    app.command(
        help="Measure every recipe on the list, beside what simulate says, and keep the reports "
        "for readers without this GPU.",
    )(record)
    app.command(
        help="All that the project wants from a card, the most worth a second first: records, "
        "contexts, power, a run that dies.",
    )(card)
    app.command(
        help="Show exactly what your records would tell others, without a name or a path, and "
        "where to send it.",
    )(share)
    app.command(
        help="What this machine and environment can do, and what to do about what they cannot."
    )(doctor)


def record(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Lists of recipes; the course's when left out.")
    ] = None,
    minutes: option(float, "From the first run; nothing goes on after that.", min=0) = 8,
    dry_run: option(bool, "Only list what would be measured.", "--dry-run") = False,
    folder: option(Path | None, "Where records lie; the course's when left out.") = None,
    as_json: option(bool, "Print the list of what is missing, for a later run.", "--json") = False,
) -> None:
    from .measure_and_record import record

    # With --json standard output is a list for a machine, so progress goes to stderr.
    progress = functools.partial(say, err=as_json)
    outcome = record(
        paths or None,
        minutes=minutes,
        folder=folder,
        dry_run=dry_run,
        progress=progress,
    )
    # What is missing, in the form that `vramlab record my_list.json` reads on another machine.
    say(
        json.dumps([recipe.to_dict() for recipe, _ in outcome.missing], indent=1)
        if as_json
        else outcome
    )


def card(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Lists of pieces; the project's when left out.")
    ] = None,
    minutes: option(float, "From the first run; nothing goes on after that.", min=0) = 30,
    dry_run: option(bool, "Only say what is left to do.", "--dry-run") = False,
    folder: option(Path, "Where the record file lies.") = Path("my_records"),
    compare: option(
        bool,
        "Print what simulate says beside each report, which takes time.",
        "--compare",
    ) = False,
) -> None:
    from .measure_and_record import run_card

    run = run_card(paths or None, minutes, folder, dry_run, progress=say, compare=compare)
    if dry_run:
        for piece, seconds in run.left:
            say(f"{seconds:6,.0f} s  {piece.title}")
    say(run)


def share(
    source: Annotated[
        Path | None, typer.Argument(help="A record file or folder; the course's when left out.")
    ] = None,
    folder: option(Path, "Where to write what may be sent.") = Path("."),
    browse: option(
        bool,
        "Open the page that takes it. Nothing is sent before you say so there.",
    ) = True,
) -> None:
    from ..measurement.share import share

    for made in share(source, folder):
        # All that would be sent is shown before the page is opened.
        say(str(made))
        if browse and made.page:
            typer.launch(made.page)


def doctor(as_json: JSON = False) -> None:
    from .doctor import doctor

    found = doctor()
    say(as_text(found.to_dict()) if as_json else str(found))
    if not found.ok:
        raise typer.Exit(FAILED)
