"""Drawings of chapter 01. Each function draws a figure and returns it."""

from collections.abc import Mapping
from types import MappingProxyType

from vramlab.interfaces.plot import canvas

from ..number_formats import FORMATS

SKY = "#56B4E9"
PALE = "#CFE8F7"
BLUE = "#0072B2"
RED = "#D55E00"
INK = "#222222"
FLOOR = 0.05  # % more bits per byte, where the logarithmic axis of `costs` begins


def ranges():
    """Draw how far each format reaches, from its smallest positive number to its largest.

    The label is its step at 1.
    """
    rows = [("format", "bits", "smallest", "largest", "step at 1")]
    for f in FORMATS:
        rows.append(
            (
                f.name,
                f"1 + {f.exponent_bits} + {f.fraction_bits}",
                f"{f.smallest:g}" if f.smallest > 0.01 else f"{f.smallest:.1e}",
                f"{f.max:,.0f}" if f.max < 1e6 else f"{f.max:.1e}",
                f"1/{1 / f.epsilon:,.0f}",
            )
        )
    title = "Exponent bits buy range, fraction bits buy precision"
    spans = []
    for name, _, low, high, step in rows[1:]:
        spans.append(f"{name}: {low} to {high}, steps of {step}")
    said = f"Bars on a logarithmic axis. {'; '.join(spans)}."
    about = "derived: positive numbers of each format; the label is its step at 1"
    with canvas(title, said, about, rows) as ax:
        for row, f in enumerate(FORMATS):
            parts = (
                (f.smallest, f.smallest_normal, PALE, "subnormal"),
                (f.smallest_normal, f.max, SKY, "full precision"),
            )
            for low, high, colour, name in parts:
                label = name if row == 0 else None
                ax.barh(
                    row,
                    high - low,
                    0.6,
                    left=low,
                    color=colour,
                    edgecolor=INK,
                    linewidth=0.5,
                    label=label,
                )
            ax.annotate(
                f" {rows[row + 1][4]}",
                (f.max, row),
                (3, 0),
                textcoords="offset points",
                va="center",
            )
        ax.axvline(1, color=INK, linewidth=0.8)
        ax.grid(visible=False)
        ax.set(xscale="log", xlim=(1e-46, 1e52), xlabel="number")
        ax.set_xticks([1e-40, 1e-30, 1e-20, 1e-10, 1, 1e10, 1e20, 1e30, 1e40])
        ax.set_yticks(range(len(FORMATS)), [f.name for f in FORMATS])
        ax.invert_yaxis()
    return ax.figure


def code_shares(tables: Mapping[str, Mapping[float, float]]):
    """Draw by table which share of the numbers each level's code gets."""
    rows = [("codes", "least", "most")]
    reach = []
    for name, shares in tables.items():
        least = min(shares.values())
        most = max(shares.values())
        rows.append((name, f"{least:.1%}", f"{most:.1%}"))
        reach.append(f"{name}'s {100 * least:.0f} to {100 * most:.0f} %")
    title = f"A code's share of the numbers: {', '.join(reach)}"
    said = f"Stems at each level, as high as its share of the numbers. {'; '.join(reach)}."
    about = "measured: layer 0's up_proj of the base model, each block of 64 over its maximum"
    with canvas(title, said, about, rows) as ax:
        for (name, shares), mark, colour in zip(
            tables.items(), ("o", "^"), (BLUE, RED), strict=True
        ):
            levels = list(shares)
            heights = [100 * share for share in shares.values()]
            ax.vlines(levels, 0, heights, colors=colour, linewidth=1)
            ax.plot(levels, heights, mark, linestyle="", color=colour, label=name)
        ax.set(xlabel="number / absolute maximum of its block", ylabel="% of the numbers")
        ax.set_ylim(0, None)
    return ax.figure


def costs(
    stores: Mapping[str, tuple[float, float]],
    title: str,
    against: Mapping[str, str] = MappingProxyType({}),
):
    """Draw what each way to store the base model costs.

    `stores` has (bits a number, % more bits per byte) by name, `against` what some cost more than
    NF4. The axis is logarithmic, so that all can be told apart, and what costs less than FLOOR has
    no bar.
    """
    # The cheapest first.
    ways = sorted(stores.items(), key=lambda way: way[1][1])
    rows = [("matrices in", "bits a number", "more bits per byte", "more than NF4, in %")]
    costs_said = []
    labels = []
    for name, (bits, cost) in ways:
        # Adding 0.0 turns a rounded −0.0 into 0.0.
        percent = f"{round(cost, 1) + 0.0:.1f} %"
        more = against.get(name, "")
        rows.append((name, f"{bits:g}", percent, more))
        costs_said.append(f"{name}: {percent}" + (f", against NF4 {more}" if more else ""))
        labels.append(f"{name}: {bits:g} bits")
    said = f"Bars. {'; '.join(costs_said)}."
    about = "measured: base model, all matrices, 12,000 bytes"
    looks = {"one scale": (RED, "//"), "blocks": (BLUE, ""), "no scale": (INK, "")}
    with canvas(title, said, about, rows) as ax:
        for y, (name, (_, cost)) in enumerate(ways):
            # By a word in the name, which the legend shows.
            kind = next((k for k in looks if k in name), "no scale")
            colour, hatch = looks[kind]
            bar = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
            if cost > FLOOR:
                ax.barh(y, cost - FLOOR, 0.6, FLOOR, label=kind, **bar)
            _, _, percent, more = rows[y + 1]
            label = f"{percent} ({more})" if more else percent
            end = (max(cost, FLOOR), y)
            ax.annotate(label, end, (5, 0), textcoords="offset points", va="center")
        ax.set_yticks(range(len(ways)), labels)
        ax.set(
            xscale="log",
            xlim=(FLOOR, 2 * max(cost for _, cost in stores.values())),
            xlabel="% more bits per byte, logarithmic (in brackets: more than NF4)",
        )
        ax.xaxis.set_major_formatter("{x:g}")
        ax.grid(visible=False)
        ax.set_ylim(len(ways) - 0.5, -0.5)  # the first ones have no bar that makes room
    return ax.figure
