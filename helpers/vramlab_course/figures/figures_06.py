"""The drawing of chapter 06."""

from collections.abc import Mapping, Sequence

from vramlab.interfaces.plot import canvas, style


def by_length(
    lengths: Sequence[int],
    sizes: Mapping[tuple[str, bool], Sequence[float]],
    title: str,
    about: str,
):
    """Draw GiB over the sample's tokens: a colour for each way, dashed without checkpointing.

    `sizes` is by a way's name and whether it checkpoints.
    """
    rows = [("tokens of one sample, GiB", *(f"{length:,}" for length in lengths))]
    for (name, checkpoints), line in sizes.items():
        words = "" if checkpoints else ", no checkpointing"
        rows.append((name + words, *(f"{size:.1f}" for size in line)))
    alt = f"Lines that rise with the length. {title}. " + "; ".join(map(", ".join, rows)) + "."
    names = dict.fromkeys(name for name, _ in sizes)
    # A way has one colour with and without checkpointing.
    looks = dict(zip(names, style.LINES, strict=False))
    with canvas(title, alt, about, rows) as ax:
        for (name, checkpoints), line in sizes.items():
            colour, mark, _ = looks[name]
            dash = "-" if checkpoints else "--"
            label = name if checkpoints else f"_{name}"
            ax.plot(
                lengths,
                line,
                dash,
                marker=mark,
                markersize=5,
                color=colour,
                label=label,
            )
        # An empty line that explains the dashes in the legend.
        ax.plot([], [], "--", color=style.INK, label="dashed: no checkpointing")
        ax.set_xticks(lengths, [f"{length:,}" for length in lengths])
        ax.set(xlabel="tokens of one sample", ylabel="peak, GiB", ylim=(0, None))
    return ax.figure
