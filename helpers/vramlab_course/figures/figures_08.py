"""Drawings of chapter 08. Each function draws a figure and returns it."""

import itertools
from collections.abc import Mapping, Sequence

from vramlab import Recipe
from vramlab.interfaces.plot import canvas, style
from vramlab.report.report import GiB

from ..chapters.chapter_07 import recorded_8b
from ..step_times import held_out

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
    alt = (
        f"{len(shown)} recipes as dots, speed over likely memory, and a line along the fastest at "
        f"each size. Marked: {'; '.join(said)}. The card's line stands at {usable / GiB:.1f} GiB."
    )
    beyond = len(points) - len(shown)
    subtitle = f"{subtitle} · {beyond} of {len(points)} need more than {WIDEST} GiB"
    with canvas(title, alt, subtitle) as ax:
        ax.scatter(
            sizes,
            speeds,
            s=14,
            color="#BBBBBB",
            linewidths=0,
            label="a recipe",
        )
        colour = style.LINES[0][0]
        best = list(itertools.accumulate(speeds, max))
        ax.step(
            sizes,
            best,
            where="post",
            color=colour,
            label="the fastest up to this size",
        )
        for name, row in marked.items():
            place = row[1][1] / GiB, row[0]
            ax.plot(*place, "o", color=style.INK)
            look = {"ha": "center", "bbox": style.PATCH}
            up = 10 if row[0] in best else -20  # a label on the line would hide it
            ax.annotate(name, place, (0, up), textcoords="offset points", **look)
        label = f"the card: {usable / GiB:.1f} GiB"
        ax.axvline(
            usable / GiB,
            color=style.ALARM,
            linestyle=":",
            linewidth=2,
            label=label,
        )
        ax.set(xlabel="likely memory of the process, GiB", ylabel="tokens/s, estimated")
        ax.set(xlim=(sizes[0] - 3, WIDEST), ylim=(0, 1.25 * best[-1]))
    return ax.figure


def timed() -> dict[str, list[tuple[Recipe, float, float]]]:
    """By card: recipe, estimated and measured seconds of a step.

    The T4's are published ones by others, the H200's the course's records of the 8B. All are
    estimated by a fit to their card's runs of other models.
    """
    eight = [recipe for recipe, _ in recorded_8b("H200")]
    by_card = {}
    for card in ("T4", "H200"):
        steps = by_card.setdefault(card, [])
        for run, ratio in held_out(card):
            if card == "T4" or run.recipe in eight:
                steps.append((run.recipe, run.seconds / ratio, run.seconds))
    return by_card


def _tokens(recipe: Recipe) -> int:
    """The tokens of an update."""
    return recipe.batch_size * recipe.gradient_accumulation_steps * recipe.seq_len


def two_plans(steps: Sequence[tuple[Recipe, float, float]]) -> list[tuple[str | float, ...]]:
    """Tokens/s of the 8B's two plans among `timed` steps, estimated and recorded, as a table.

    Of LoRA's four passes of an update its record has one.
    """
    rows: list[tuple[str | float, ...]] = [("H200, tokens/s", "estimated", "recorded")]
    for recipe, estimated, took in steps:
        is_lora = not recipe.quantization and recipe.gradient_checkpointing
        if recipe.use_liger_kernel and (recipe.quantization or is_lora):
            tokens = _tokens(recipe)
            rows.append(("lora" if is_lora else "qlora", tokens / estimated, tokens / took))
    return rows
