"""Chapter 08: run a written program within the notebook, and draw recipes by memory and speed."""

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import vramlab
from vramlab.faces.plot import canvas, style
from vramlab.report.report import GiB, Report

Row = tuple[
    float, Sequence[float], vramlab.Recipe
]  # tokens/s; bytes at least, likely, at most; recipe


def run(program: Path, *options: str) -> Report:
    """Run `python program options… --watch` in this process, without its output; return what it saw
    of its memory.
    """
    from IPython.utils.capture import capture_output
    from transformers.utils import logging

    seen = []

    class Kept(vramlab.WatchCallback):
        def __init__(self):
            super().__init__()
            seen.append(self)

    logging.set_verbosity_error()
    os.environ["HF_DATASETS_CACHE"] = str(program.parent / "cache")
    own = sys.argv, vramlab.WatchCallback
    sys.argv, vramlab.WatchCallback = [str(program), *options, "--watch"], Kept
    try:
        with capture_output():
            runpy.run_path(str(program), run_name="__main__")
    finally:
        sys.argv, vramlab.WatchCallback = own
    return seen[0].report


def cloud(rows: Sequence[Row], marked: Mapping[str, Row], usable: int, title: str, subtitle: str):
    """Return a figure of recipes by likely memory and speed, two of them `marked` by name, and a
    card's usable bytes.
    """
    alt = (
        "A cloud of recipes: speed over likely memory, from 8 to over 500 GiB. Few are left of "
        "the card's line; the "
    )
    alt += (
        "lightest is the slowest. Those without checkpointing are faster, and all to the "
        "right of the line."
    )
    with canvas(title, alt, subtitle) as ax:
        for name, mark in (("LoRA", "o"), ("QLoRA", "^")):
            kind = [row for row in rows if bool(row[2].quantization) is (name == "QLoRA")]
            ax.plot(
                [row[1][1] / GiB for row in kind],
                [row[0] for row in kind],
                mark,
                linestyle="",
                label=name,
            )
        for (name, (speed, needs, _)), where in zip(
            marked.items(), ((0, -20), (-16, 10)), strict=True
        ):
            ax.plot(needs[1] / GiB, speed, "o", markersize=15, fillstyle="none", color=style.INK)
            ax.annotate(
                name, (needs[1] / GiB, speed), where, textcoords="offset points", ha="center"
            )
        ax.axvline(
            usable / GiB,
            color=style.ALARM,
            linestyle="--",
            label=f"the card: {usable / GiB:.1f} GiB",
        )
        ax.text(26, 1600, "without checkpointing", va="center")
        ax.text(155, 1000, "with checkpointing", va="center")
        ax.set(xscale="log", xlabel="likely memory of the process, GiB", xlim=(9, 850))
        ax.set(ylim=(790, 1650), ylabel="tokens/s, estimated")
        ax.set_xticks([15, 30, 60, 120, 240, 480], ["15", "30", "60", "120", "240", "480"])
        ax.minorticks_off()
    return ax.figure
