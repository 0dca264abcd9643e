"""Drawings of chapter 08. Each function draws a figure and returns it."""

import itertools
from collections.abc import Mapping, Sequence

from vramlab import Recipe
from vramlab.interfaces.plot import canvas, style
from vramlab.report.report import GiB

from ..chapters.chapter_07 import recorded_8b
from ..step_times import CARDS, held_out

# tokens/s; bytes at least, likely, at most; recipe
Row = tuple[float, Sequence[float], Recipe]
WIDEST = 64  # GiB: what a cloud shows
# What two recipes may differ in: the names of their fields, by what a reader calls it
CHANGES = {
    "checkpointing": {"gradient_checkpointing"},
    "base in 4 bits or not": {"quantization"},
    "micro-batch": {"batch_size", "gradient_accumulation_steps"},
    "attention kernel": {"attn_implementation"},
    "precision": {"precision"},
    "optimizer": {"optim"},
}


def cloud(
    rows: Mapping[str, Sequence[Row]],
    marked: Mapping[str, tuple[str, Row]],
    usable: int,
    title: str,
    subtitle: str,
):
    """Draw recipes by likely memory and speed, up to `WIDEST` GiB.

    `rows` are by the base's kind; `marked` are a kind and a row by name; `usable` is what the card
    gives, in bytes.
    """
    every = [row for kind in rows.values() for row in kind]
    beyond = sum(row[1][1] > WIDEST * GiB for row in every)
    said = []
    for name, (_, row) in marked.items():
        likely = row[1][1] / GiB
        said.append(f"{name}, {likely:.1f} GiB")
    alt = (
        f"A cloud of {len(every)} recipes, speed over likely memory, by the base: "
        f"{' and '.join(rows)}. Marked: {'; '.join(said)}. "
        f"The card's line stands at {usable / GiB:.1f} GiB."
    )
    subtitle = f"{subtitle} · {beyond} of {len(every)} need more than {WIDEST} GiB"
    with canvas(title, alt, subtitle) as ax:
        looks = dict(zip(rows, style.LINES, strict=False))
        for kind, (colour, mark, _) in looks.items():
            # A row is (tokens/s, (least, likely, most), recipe).
            points = [(row[1][1] / GiB, row[0]) for row in rows[kind]]
            dots = {"marker": mark, "s": 22, "color": colour, "alpha": 0.6, "linewidths": 0}
            ax.scatter(*zip(*points, strict=True), label=f"base in {kind}", **dots)
        corners = itertools.cycle(((0.05, 0.9), (0.36, 0.13), (0.02, 0.04)))  # where no recipe is
        for name, (kind, row) in marked.items():
            corner = next(corners)
            place = row[1][1] / GiB, row[0]
            ring = {"markersize": 9, "fillstyle": "none", "color": style.INK}
            ax.plot(*place, looks[kind][1], **ring)
            line = {"arrowstyle": "-", "shrinkB": 5, "color": style.INK, "linewidth": 0.8}
            ax.annotate(name, place, corner, textcoords="axes fraction", arrowprops=line)
        label = f"the card: {usable / GiB:.1f} GiB"
        ax.axvline(
            usable / GiB,
            color=style.ALARM,
            linestyle=":",
            linewidth=2,
            label=label,
        )
        least = min(row[1][1] for row in every) / GiB
        ax.set(
            xscale="log",
            xlim=(0.9 * least, WIDEST),
            xlabel="likely memory of the process, GiB",
        )
        speeds = [row[0] for row in every]
        slowest = min(speeds)
        fastest = max(speeds)
        room = 0.4 * (fastest - slowest)
        ax.set(
            ylim=(slowest - room, fastest + room / 4),
            ylabel="tokens/s, estimated",
        )
        ticks = (7.5, 10, 15, 20, 30, 40, 60)
        ax.set_xticks(ticks, [f"{size:g}" for size in ticks])
        ax.minorticks_off()
    return ax.figure


def timed() -> dict[str, list[tuple[Recipe, float, float]]]:
    """By card: recipe, estimated and measured seconds of a step.

    The T4's are published ones by others, the H200's the course's records of the 8B. All are
    estimated by a fit to their card's runs of other models.
    """
    eight = [recipe for recipe, _ in recorded_8b("H200")]
    by_card = {}
    for card in ("T4", "H200"):
        steps = by_card.setdefault(f"{card}, held out", [])
        for run, ratio in held_out(card):
            if card == "T4" or run.recipe in eight:
                steps.append((run.recipe, run.seconds / ratio, run.seconds))
    return by_card


def in_order() -> list[tuple[str | int, ...]]:
    """Of pairs of timed runs that differ in one thing, how many the estimates order, as a table.

    The two are of one model on one card with equal tokens in an update, and one took at least 10 %
    longer. Each is estimated by a fit that has not seen its model.
    """
    right: dict[str, list[bool]] = {name: [] for name in CHANGES}
    models: dict[str, set[str]] = {name: set() for name in CHANGES}
    named = {frozenset(fields): name for name, fields in CHANGES.items()}
    for card in CARDS:
        runs = [(run, ratio, run.recipe.to_dict()) for run, ratio in held_out(card)]
        for (one, mine, fields), (two, other, others) in itertools.combinations(runs, 2):
            if one.recipe.name != two.recipe.name:
                continue
            keys = fields.keys() | others.keys()
            differ = {key for key in keys if fields.get(key) != others.get(key)}
            if "quantization" in differ:
                differ.discard("dtype")  # which a base in 4 bits leaves out
            name = named.get(frozenset(differ))
            took, its = one.seconds, two.seconds
            is_clear = max(took, its) > 1.1 * min(took, its)
            if name and is_clear and _tokens(one.recipe) == _tokens(two.recipe):
                right[name].append((took / mine > its / other) == (took > its))
                models[name].add(one.recipe.name)
    rows = [(name, len(models[name]), len(told), int(sum(told))) for name, told in right.items()]
    return [("what differs", "models", "pairs", "right"), *rows]


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
