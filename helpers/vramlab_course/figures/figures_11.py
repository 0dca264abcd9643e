"""Drawings of chapter 11: what each card hands on in a ring, and the ways between two cards."""

from collections.abc import Mapping

from vramlab.interfaces.plot import style

from .figures_09 import handed_on

PLACES = {
    "GPU 0": (0, 0),
    "GPU 1": (6, 0),
    "CPU chip": (3, 1.5),
    "RAM": (3, 3),
}
# From GPU 0 to GPU 1, and where the name of a way stands.
WAYS = (
    ((0.7, 0), (5.2, 0)),
    ((0.5, 0.35), (3, 1.3), (5.4, 0.4)),
    ((0, 0.4), (2.8, 1.6), (2.8, 3), (3.2, 3), (3.2, 1.6), (5.9, 0.5)),
)
NAMES = ((3, 0), (1.5, 0.75), (3, 2.25))
# What a card sends in each round: its own piece, or the sum of several cards' pieces.
ROUNDS = {
    "round 1": ": 1 card",
    "round 2": ": 2 cards",
    "round 3": ": 3 cards",
    "round 4": ": all 4",
    "round 5": ": all 4",
    "round 6": ": all 4",
}


def ring(title: str):
    """Return a figure of an all-reduce of four cards: the piece that each sends, round by round."""
    figure = handed_on(
        title,
        "what each card sends: a piece, and how many cards' gradients it adds up",
        ["card 0", "card 1", "card 2", "card 3"],
        "ABCD",
        ROUNDS,
    )
    [ax] = figure.axes
    # Card 3's arrows leave on the right and come in on the left.
    for x in (0.1, 4.1):
        for y in range(-4, 1):
            ax.annotate("", (x, y - 0.25), (x - 0.35, y), arrowprops={"arrowstyle": "->"})
    ax.set_xlim(-0.3, 4.15)
    return figure


@style.styled()
def ways(rates: Mapping[str, str], title: str):
    """Return a figure of three ways from card to card: a name, and how many GB/s it carries."""
    figure, ax = style.start(title, "GB/s in one direction")
    rows = [("way", "GB/s"), *rates.items()]
    drawn = zip(rates.items(), WAYS, NAMES, style.LINES, strict=False)
    for (name, rate), path, place, (colour, _, line) in drawn:
        ax.plot(
            *zip(*path, strict=True),
            line,
            color=colour,
            linewidth=2.5,
            marker=">",
            markersize=10,
            markevery=[-1],
        )
        ax.text(*place, f"{name}: {rate}", color=colour, ha="center", bbox=style.PATCH)
    frame = {"facecolor": style.FAINT, "boxstyle": "round,pad=0.6"}
    for name, place in PLACES.items():
        ax.text(*place, name, ha="center", va="center", bbox=frame)
    ax.margins(0.12)
    ax.axis("off")
    figure.set_figheight(3.6)
    return style.finish(figure, rows, f"Arrows from GPU 0 to GPU 1. {title}.", say_rows=True)
