"""Training runs on real GPUs that other projects measured and published.

They are in `data/published_runs.json`.

`as_run.simulate_as_run(run.recipe, run.as_run, run.use_reentrant, gpu=run.gpu)` simulates one.
Nothing in the package is fitted to them: where a prediction was off, the missing mechanism was
found in the library's source and added.
"""

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vramlab.base.data import data_path
from vramlab.interfaces.plot import style
from vramlab.recipe.options import Loop
from vramlab.recipe.recipe import Recipe
from vramlab.report.report import GiB, in_unit


@dataclass(frozen=True)
class Run:
    """One published run.

    Attributes:
        recipe: what was trained; the loop is that of the source's own script.
        allocated: `torch.cuda.max_memory_allocated()` in bytes; `reserved`: the same of segments,
            None if not published.
        loaded: `torch.cuda.memory_allocated()` once the model was loaded, in bytes, None if not
            published.
        loading: the peak until then, None if not published.
        seconds: of one optimizer step, the mean of some after a warm-up; None if not published.
        as_run: what differed from the installed transformers, a name of `as_run.AS_RUN`, or None.
        use_reentrant: what the source's script asks of checkpointing; None: nothing.
        made_with: GPU, torch, transformers, date.
    """

    source: str
    gpu: str
    recipe: Recipe
    allocated: int
    reserved: int | None
    loaded: int | None
    loading: int | None
    seconds: float | None
    as_run: str | None
    use_reentrant: bool | None
    made_with: str


def runs() -> list[Run]:
    """All published runs, in the order of the file."""
    stored = json.loads(data_path("published_runs.json").read_text(encoding="utf-8"))
    # A source's loop is that of its script, so all of its runs share it.
    loops = {name: Loop(**source["loop"]) for name, source in stored["sources"].items()}
    published = []
    for run in stored["runs"]:
        fields = run["recipe"]
        # A model that is no file of ours is written out in the runs' own file.
        model = stored["models"].get(fields["model"], fields["model"])
        published.append(
            Run(
                source=run["source"],
                gpu=run["gpu"],
                recipe=Recipe(**{**fields, "model": model, "loop": loops[run["source"]]}),
                allocated=run["allocated"],
                reserved=run.get("reserved"),
                loaded=run.get("loaded"),
                loading=run.get("loading"),
                seconds=run.get("seconds"),
                as_run=run.get("as_run"),
                use_reentrant=stored["sources"][run["source"]].get("use_reentrant"),
                made_with=f"{run['gpu']}, torch {run['torch']}, transformers "
                f"{run['transformers']}, {run['date']}",
            )
        )
    return published


def timed_on(gpu: str) -> list[Run]:
    """The published runs on a card whose steps were timed, in the order of the file."""
    return [run for run in runs() if run.gpu == gpu and run.seconds]


def results() -> dict:
    """What `benchmarks/published_runs.py --write` stored.

    That is for each run, in their order, bytes of each witness.
    """
    return json.loads(data_path("published_results.json").read_text(encoding="utf-8"))


@style.styled()
def scatter_error(
    pairs: Mapping[str, Sequence[tuple[int, int]]],
    band: float = 0.01,
    title: str = "Predicted against measured",
    names: tuple[str, str] = ("predicted", "measured"),
):
    """Return a figure of each pair's first size over its second, and of the error.

    Sizes are in bytes, and the relative error stands below.

    Each name in `pairs` has a marker. `band` is drawn as good enough: 0.01 is ±1 %. `names` label
    the axes.
    """
    sizes = {}
    errors = {}
    every = []
    off = []
    for name, group in pairs.items():
        sizes[name] = [(a / GiB, b / GiB) for a, b in group]
        errors[name] = []
        for predicted, measured in sizes[name]:
            error = predicted / measured - 1
            errors[name].append(error)
            every += [predicted, measured]
            off.append(abs(error))
    within = sum(error <= band for error in off)
    summary = (
        f"{within} of {len(off)} within ±{band:.0%} · median {statistics.median(off):.2%} "
        f"· worst {max(off):.2%}"
    )

    figure, (above, below) = style.start(
        title,
        summary,
        rows=2,
        sharex=True,
        height_ratios=(3, 2),
    )
    ends = [min(every) / 1.3, max(every) * 1.3]
    # In a logarithmic plot a relative error is a band of one width.
    low = [end * (1 - band) for end in ends]
    high = [end * (1 + band) for end in ends]
    above.fill_between(
        ends,
        low,
        high,
        color="#CCCCCC",
        linewidth=0,
        label=f"±{band:.0%}",
    )
    above.plot(ends, ends, color=style.INK, linewidth=0.8)
    below.axhspan(
        -band * 100,
        band * 100,
        color="#CCCCCC",
        linewidth=0,
    )
    below.axhline(0, color=style.INK, linewidth=0.8)
    # The band is to be seen: what is off by more than five of it stands at the edge.
    reach = 100 * min(5 * band, max(band * 1.5, max(off) * 1.2))
    edge = f", cut at {reach:.0f}" if 100 * max(off) > reach else ""
    rows = [("GiB", *names, "error")]
    for (name, group), (colour, marker, _) in zip(
        sizes.items(),
        itertools.cycle(style.LINES),
        strict=False,
    ):
        look = {
            "marker": marker,
            "linestyle": "",
            "color": colour,
            "markersize": 6,
            "alpha": 0.85,
            "gid": "points",
        }
        y, x = zip(*group, strict=True)
        above.plot(x, y, label=name, **look)
        shown = [min(max(100 * error, -reach), reach) for error in errors[name]]
        below.plot(x, shown, **look, clip_on=False)
        together = zip(pairs[name], errors[name], strict=True)
        for i, (pair, error) in enumerate(together, 1):
            rows.append((f"{name}: {i}", *map(in_unit, pair), f"{error:+.2%}"))
    above.set_xscale("log", base=2)
    above.set_yscale("log", base=2)
    for axis in (above.xaxis, above.yaxis):
        axis.set_major_formatter("{x:,.6g}")  # 0.5, 1, 2, 4 and not powers
    above.set(xlim=ends, ylim=ends, ylabel=f"{names[0]}, GiB")
    below.set(ylim=(-reach, reach), xlabel=f"{names[1]}, GiB", ylabel=f"error, %{edge}")
    span = f"{min(every):.3g} to {max(every):.3g} GiB"
    return style.finish(
        figure,
        rows,
        f"Scatter of {names[0]} over {names[1]} sizes, {span}: {summary}.",
    )
