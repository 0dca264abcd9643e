"""Training runs on real GPUs that other projects measured and published.

They are in `data/published_runs.json`. What `benchmarks/published_runs.py --write` stored is in
`data/published_results.json`: for each run, in their order, bytes of each witness.

`as_run.simulate_as_run(run.recipe, run.as_run, run.use_reentrant, gpu=run.gpu)` simulates one.
Nothing in the package is fitted to them: where a prediction was off, the missing mechanism was
found in the library's source and added.
"""

import json
from dataclasses import dataclass

from vramlab.base.data import data_path
from vramlab.recipe.options import Loop
from vramlab.recipe.recipe import Recipe


def json_of(name: str):
    """What a file of `data/` holds, named without its ending."""
    return json.loads(data_path(f"{name}.json").read_text("utf-8"))


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
    stored = json_of("published_runs")
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
