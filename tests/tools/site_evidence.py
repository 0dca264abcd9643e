"""The site's pages of evidence, made of the data.

They say how exact the witnesses are on others' runs, and show our own records.
"""

import importlib.util
import json
import statistics
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

import settings
from site_pages import plain
from vramlab import GiB, VramLabError, format_bytes, predict
from vramlab.interfaces.plot import style
from vramlab.measurement.records import load
from vramlab.recipe.knobs import rebuild
from vramlab.recipe.recipe import Recipe
from vramlab.report.report import Report
from vramlab_course.published import Run, json_of, runs

BAND = 0.01  # what the picture marks as good enough


def pairs() -> list[tuple[Run, dict]]:
    """Every published run with what each witness says of it."""
    # Both files are in one order, and strict finds a run without a result.
    return list(zip(runs(), json_of("published_results")["runs"], strict=True))


def figures(errors: Iterable[float]) -> str:
    """Mean, median and worst of relative errors, in words."""
    sizes = [abs(error) for error in errors]
    mean, median, worst = (_percent(f(sizes)) for f in (statistics.mean, statistics.median, max))
    return f"mean **{mean}**, median {median}, worst {worst}"


def _percent(error: float) -> str:
    return (
        f"{error:.2%}".replace("%", "\u00a0%")
        if abs(error) < 0.1
        else f"{error:.0%}".replace("%", "\u00a0%")
    )


def summary() -> str:
    """A table of the witnesses' errors on the published runs.

    It also says with which versions they were made.
    """
    found = pairs()
    # `as_run` marks runs whose script or older library did something that no formula knows.
    plain_runs = [(run, said) for run, said in found if not run.as_run]
    reserved = [(run, said) for run, said in found if run.reserved]
    # What counts is whether the upper end was enough.
    under = sum(said["reserved"][2] >= run.reserved for run, said in reserved)
    rows = [
        (
            f"simulate: the peak of {len(found)} runs, {len(found) - len(plain_runs)} of them "
            f"with `as_run`, which puts in "
            "place what their script or their older library did differently",
            figures(said["simulated"] / run.allocated - 1 for run, said in found),
        ),
        (
            f"simulate: the same {len(found)}, called plainly, as the installed transformers "
            f"would run them",
            figures(said["plainly"] / run.allocated - 1 for run, said in found),
        ),
        (
            f"predict: the {len(plain_runs)} runs that were plain",
            figures(said["predicted"] / run.allocated - 1 for run, said in plain_runs),
        ),
        (
            f"simulate: what the allocator reserved, in the {len(reserved)} runs that say it",
            figures(said["reserved"][1] / run.reserved - 1 for run, said in reserved)
            + f"; {under} lie under the interval's upper end",
        ),
    ]
    versions = ", ".join(
        f"{name} {number}" for name, number in json_of("published_results")["made_with"].items()
    )
    table = "\n".join(f"| {what} | {said} |" for what, said in rows)
    return (
        f"| witness, and what it is held against | error |\n|---|---|\n{table}\n\nMade with "
        f"{versions}.\n"
    )


def runs_table() -> str:
    """Every published run: what was measured, and how far each witness is off."""
    lines = [
        "| run | simulate | predict | plainly | measured, GiB | GPU | reserved, GiB | simulated "
        "interval |"
    ]
    lines.append("|---|--:|--:|--:|--:|---|--:|--:|")
    for run, said in pairs():
        off = [
            f"{said[name] / run.allocated - 1:+.2%}"
            for name in ("simulated", "predicted", "plainly")
        ]
        if run.as_run:
            # A run by other rules than the installed library's is not what predict answers for.
            off[1] = "–"
        low, _, high = said["reserved"]
        held = (
            (f"{run.reserved / GiB:.2f}", f"{low / GiB:.2f} to {high / GiB:.2f}")
            if run.reserved
            else ("–", "–")
        )
        about = (
            f"{plain(str(run.recipe))}<br><small>{plain(run.source)}, "
            f"{plain(run.made_with.partition(', ')[2])}"
        )
        if run.as_run:
            about += f"; as_run: {run.as_run}"
        about += "</small>"
        cells = (about, *off, f"{run.allocated / GiB:.3f}", run.gpu, *held)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


# --- seconds


@cache
def step_times() -> ModuleType:
    """`benchmarks/step_times.py`, which fits the constants and holds each model out in turn."""
    spec = importlib.util.spec_from_file_location(
        "step_times", settings.ROOT / "benchmarks" / "step_times.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def speed_page(path: Path, link: str) -> str:
    """Draw measured against estimated seconds into `path`.

    Return the figure under `link`, and what it shows in words.
    """
    bench = step_times()
    found = {card: bench.held_out(card) for card in bench.CARDS}
    speed_figure(found, path)
    rows = [
        "| card | runs | off on average | at worst | nine tenths measured |",
        "|---|--:|--:|--:|--:|",
    ]
    for card, pairs_of in found.items():
        # Held out: the constants come from runs of other models.
        rows.append(_speed_row(card, [ratio for _, ratio in pairs_of]))
    rows.append(_speed_row("T4 and H100, each by the other's constants", bench.elsewhere()))
    count = sum(map(len, found.values()))
    alt = (
        f"Measured against estimated seconds of {count} training steps on "
        f"{', '.join(found)}, by constants fitted "
    )
    alt += (
        "without the step's own model: the points lie about the diagonal over two orders of "
        "magnitude."
    )
    return f"![{alt}]({link})\n\n" + "\n".join(rows) + "\n"


def _speed_row(name: str, ratios: Sequence[float]) -> str:
    # Ratios are measured over estimated, and the error is the estimate's.
    off = [abs(1 / ratio - 1) for ratio in ratios]
    least, most = step_times().spread(ratios)
    spread = f"{least:.2f} to {most:.2f} times the estimate"
    return f"| {name} | {len(off)} | **{statistics.mean(off):.1%}** | {max(off):.0%} | {spread} |"


def speed_figure(found: dict[str, Sequence[tuple]], path: Path) -> None:
    """Draw measured against estimated seconds, both logarithmic, a marker for each card."""
    import matplotlib.pyplot as plt

    with style.styled():
        figure, axes = plt.subplots(figsize=style.SIZE, dpi=style.DPI)
        reach = []
        for (colour, marker, _), (card, pairs_of) in zip(style.LINES, found.items(), strict=False):
            measured = [run.seconds for run, _ in pairs_of]
            estimated = [run.seconds / ratio for run, ratio in pairs_of]
            label = f"{card}, {len(measured)} runs"
            axes.plot(
                estimated,
                measured,
                linestyle="",
                marker=marker,
                color=colour,
                alpha=0.7,
                label=label,
            )
            reach += measured + estimated
        ends = [min(reach), max(reach)]
        axes.plot(ends, ends, color=style.INK, linewidth=0.8, zorder=0)
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:,.6g}")
        axes.set_xlabel("estimated, seconds a step")
        axes.set_ylabel("measured, seconds a step")
        axes.set_title("A step's time, of models that the fit has not seen")
        axes.legend()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        plt.close(figure)


# --- our own records


def records_page(folder: Path, wanted: int) -> str:
    """What lies in the folder of records, a table for each file; says so where there is none.

    `wanted` is the number of recipes that the course asks records of.
    """
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not files:
        return (
            f"**There is no record yet.** No GPU could be had so far, so none of the {wanted} "
            f"groups of recipes that the "
            "chapters ask for is recorded, and every figure of the course that a GPU would "
            "measure says that it is "
            "predicted or simulated.\n"
        )
    parts = []
    # A file is one card's, so its first report says the versions of all.
    for path in files:
        reports = list(load(path).values())
        about = reports[0].environment if reports else {}
        versions = ", ".join(
            f"{name} {about[name]}"
            for name in ("driver", "torch", "transformers")
            if about.get(name)
        )
        parts.append(
            f"## {plain(str(about.get('gpu', path.stem)))}\n\n{plain(versions)}; {len(reports)} "
            f"recipes, in "
            f"[`{path.name}`]({settings.repository_url()}/blob/main/data/measurements/{path.name}).\n\n"
            + records_table(reports)
        )
    return "\n\n".join(parts) + "\n"


def records_table(reports: Sequence[Report]) -> str:
    """One row a record.

    It has the measured peak, what predict says of the same recipe, what was reserved, and a step's
    time.
    """
    lines = ["| recipe | measured peak | predict | reserved | whole process | a step | date |"]
    lines.append("|---|--:|--:|--:|--:|--:|---|")
    for report in sorted(reports, key=lambda report: report.title):
        date = plain(str(report.environment.get("date", "–"))[:10])
        if report.status == "oom":
            lines.append(
                f"| {plain(report.title)} | out of memory | {_predicted(report)} | – | – | – | "
                f"{date} |"
            )
            continue
        measured = report.allocated or report.peak.total
        sizes = [
            format_bytes(size) if isinstance(size, int) else "–"
            for size in (report.reserved, report.process)
        ]
        step = f"{report.speed.median:.3g} s" if report.speed else "–"
        sharding = report.recipe["sharding"]
        alone = (
            " (rank 0 alone, without communication)"
            if sharding and sharding["world_size"] > 1
            else ""
        )
        cells = (
            plain(report.title) + alone,
            format_bytes(measured),
            _predicted(report, measured),
            *sizes,
            step,
            date,
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _predicted(report: Report, measured: int | None = None) -> str:
    try:
        total = predict(
            rebuild(Recipe, "recipe", report.recipe), gpu=report.environment.get("gpu")
        ).peak.total
    except VramLabError:
        return "not known"
    return f"{total / measured - 1:+.2%}" if measured else format_bytes(total)


# --- the picture that others show of a link


def open_graph(path: Path) -> None:
    """Draw the picture that others show of a link, 1,200 × 630 pixels.

    It has the question, and simulated over measured peaks of the published runs.
    """
    import matplotlib.pyplot as plt
    from PIL import Image

    found = pairs()
    errors = [said["simulated"] / run.allocated - 1 for run, said in found]
    with style.styled():
        figure = plt.figure(figsize=(12, 6.3), dpi=100, facecolor="white")
        figure.text(0.05, 0.84, "VRAM Lab", fontsize=22, color="#444444")
        figure.text(
            0.05, 0.62, "Does my\ntraining fit?", fontsize=46, fontweight="bold", linespacing=1.1
        )
        median = f"{statistics.median(map(abs, errors)):.2%}".replace("%", " %")
        within = sum(abs(error) <= BAND for error in errors)
        said = f"Every byte predicted, simulated,\nmeasured. {len(errors)} runs of others:\n"
        said += f"median error {median}, {within} within 1 %."
        figure.text(0.05, 0.28, said, fontsize=22, linespacing=1.5)
        axes = figure.add_axes((0.58, 0.16, 0.38, 0.72))
        for (colour, marker, _), gpu in zip(
            style.LINES, sorted({run.gpu for run, _ in found}), strict=False
        ):
            x, y = zip(
                *((r.allocated / GiB, s["simulated"] / GiB) for r, s in found if r.gpu == gpu),
                strict=True,
            )
            axes.plot(
                x, y, linestyle="", marker=marker, color=colour, markersize=9, alpha=0.85, label=gpu
            )
        axes.plot([0.8, 40], [0.8, 40], color=style.INK, linewidth=0.8, zorder=0)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:,.6g}")
        axes.tick_params(labelsize=15)
        axes.set_xlabel("measured, GiB", fontsize=17)
        axes.set_ylabel("simulated, GiB", fontsize=17)
        axes.legend(fontsize=15, loc="upper left")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=100)
        plt.close(figure)
    # A palette of 128 colours is enough for a chart, and keeps the preview of a link small.
    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)


def wanted() -> int:
    """How many groups of recipes the course asks records of."""
    return len(json.loads((settings.ROOT / "data" / "wanted.json").read_text(encoding="utf-8")))
