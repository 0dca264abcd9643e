"""Drawings of chapter 08. Each function draws a figure and returns it."""

import itertools
from collections.abc import Mapping, Sequence

from vramlab import Recipe
from vramlab.interfaces.plot import canvas, style
from vramlab.report.report import GiB

from ..chapters.chapter_07 import recorded_8b
from ..step_times import Timed, held_out

# tokens/s; bytes at least, likely, at most; recipe
Row = tuple[float, Sequence[float], Recipe]
WIDEST = 32  # GiB: what a cloud shows


def cloud(
    rows: Sequence[Row],
    marked: Mapping[str, Row],
    usable: int,
    title: str,
    subtitle: str,
):
    """Draw recipes by likely memory and speed, up to `WIDEST` GiB, and a line along the fastest.

    `marked` are rows by name; `usable` is what the card gives, in bytes.
    """
    # A row is (tokens/s, (least, likely, most), recipe).
    points = sorted((row[1][1] / GiB, row[0]) for row in rows)
    shown = [point for point in points if point[0] <= WIDEST]
    sizes, speeds = zip(*shown, strict=True)
    said = [f"{name}, {row[1][1] / GiB:.1f} GiB" for name, row in marked.items()]
    card = f"the card: {usable / GiB:.1f} GiB"
    alt = (
        f"{len(shown)} recipes as dots, speed over likely memory, and a line along the fastest at "
        f"each size. Marked: {'; '.join(said)}. A line at {card}."
    )
    subtitle += f" · {len(points) - len(shown)} of {len(points)} need more than {WIDEST} GiB"
    with canvas(title, alt, subtitle) as ax:
        ax.scatter(
            sizes,
            speeds,
            s=14,
            color="#BBBBBB",
            linewidths=0,
            label="a recipe",
        )
        best = list(itertools.accumulate(speeds, max))
        ax.step(
            sizes,
            best,
            where="post",
            label="the fastest up to this size",
        )
        for name, row in marked.items():
            place = row[1][1] / GiB, row[0]
            ax.plot(*place, "o", color=style.INK)
            up = 10 if row[0] in best else -22  # a label on the line would hide it
            ax.annotate(
                name,
                place,
                (0, up),
                textcoords="offset points",
                ha="center",
            )
        ax.axvline(
            usable / GiB,
            color=style.ALARM,
            linestyle=":",
            linewidth=2,
            label=card,
        )
        ax.set(
            xlabel="likely memory of the process, GiB",
            ylabel="tokens/s, estimated",
            xlim=(sizes[0] - 3, WIDEST),
            ylim=(0, 1.25 * best[-1]),
        )
    return ax.figure


def timed() -> dict[str, list[tuple[Timed, float]]]:
    """By card: runs, and how many times as long as estimated each took.

    The T4's are published ones by others, the H200's the course's records of the 8B. All are
    estimated by a fit to their card's runs of other models.
    """
    eight = [recipe for recipe, _ in recorded_8b("H200")]
    of_eight = [pair for pair in held_out("H200") if pair[0].recipe in eight]
    return {"T4": list(held_out("T4")), "H200": of_eight}


def errors(by_card: Mapping[str, Sequence[tuple[Timed, float]]], title: str):
    """Draw `timed` runs by how many times as long as estimated they took, the two plans filled."""
    about = "a mark: a step's recorded seconds over its estimated ones"
    cards = " and ".join(by_card)
    alt = f"{title}. In lines by card and method, {about}."
    with canvas(title, alt, f"{cards} · {about}") as ax:
        ax.axvspan(0.8, 1.2, color=style.FAINT, label="within a fifth of the estimate")
        ax.axvline(1, color=style.INK)
        for card, runs in by_card.items():
            # QLoRA's first: a line of the figure stands where its first dot comes
            for run, ratio in sorted(runs, key=lambda pair: not pair[0].recipe.quantization):
                recipe = run.recipe
                method, line = ("QLoRA", 0) if recipe.quantization else ("LoRA", 1)
                colour, marker, _ = style.LINES[line]
                place = ratio, f"{card}, {method}"
                # of LoRA's two runs with Liger's kernels the plan is that with checkpointing
                is_plan = recipe.use_liger_kernel and (line == 0 or recipe.gradient_checkpointing)
                ax.plot(*place, marker, color=colour, fillstyle="full" if is_plan else "none")
                if is_plan:
                    ax.annotate("our plan", place, (0, 10), textcoords="offset points")
        ax.margins(y=0.15)
        ax.invert_yaxis()
    return ax.figure
