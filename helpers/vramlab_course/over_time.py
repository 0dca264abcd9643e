"""Figure of a profiler's trace over time."""

from collections.abc import Mapping, Sequence

from vramlab.faces.plot import style

from .trace import LOADING, Trace


@style.styled()
def trace(traces: Mapping[str, Trace], regions: Sequence[str], title: str = "Where the time goes", subtitle: str = ""):
    """Draw labelled regions of traces above their work, on one axis of time; returns the figure.

    Args:
        regions: the labels to draw, in the order of the legend; the wait for a DataLoader is always drawn.
    """
    figure, axes = style.start(title, subtitle, rows=len(traces), sharex=True)
    axes = axes if len(traces) > 1 else [axes]
    looks = style.look(["waiting", *regions])
    looks["waiting"] = {"facecolor": "#D55E00", "hatch": "xx", "edgecolor": style.INK, "linewidth": 0.5}
    rows = [("seconds", "waiting", *regions, "nothing computed")]
    for ax, (name, found) in zip(axes, traces.items(), strict=True):
        spans = {label: [] for label in ("waiting", *regions)}
        for event in found.labelled:
            label = "waiting" if event.name.startswith(LOADING) else event.name
            spans.get(label, []).append((event.start, event.seconds))
        for label, passages in spans.items():
            ax.broken_barh(passages, (1.1, 0.8), label=label, **looks[label])
        busy = [(start, end - start) for start, end in found.busy]
        ax.broken_barh(busy, (0.1, 0.8), facecolor="#777777", label="computing")
        ax.set_yticks([0.5, 1.5], ["computing", "region"])
        ax.set_title(name if len(traces) > 1 else subtitle, loc="left", color="#444444")
        ax.grid(axis="y", visible=False)
        sums = (f"{sum(n for _, n in passages):.3f}" for passages in spans.values())
        rows.append((name, *sums, f"{found.idle:.0%}"))
    axes[-1].set_xlabel("seconds")
    idle = "; ".join(f"{name}: nothing computed for {found.idle:.0%} of the time" for name, found in traces.items())
    return style.finish(figure, rows, f"{title}. Labelled regions above the computing below them. {idle}.")
