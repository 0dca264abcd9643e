"""Training runs on real GPUs that other projects measured and published, from `data/published_runs.json`.

`simulate(run.recipe, gpu=run.gpu, as_run=run.as_run)` simulates one. Nothing in the package is fitted to them: where a
prediction was off, the missing mechanism was found in the library's source and added.
"""

import json
from dataclasses import dataclass

from vramlab.recipe.options import Loop
from vramlab.recipe.recipe import Recipe
from vramlab.report.data import data_path


@dataclass(frozen=True)
class Run:
    """One published run.

    Attributes:
        recipe: what was trained; the loop is that of the source's own script.
        allocated: `torch.cuda.max_memory_allocated()` in bytes; `reserved`: the same of segments, None if not published.
        loaded: `torch.cuda.memory_allocated()` once the model was loaded, in bytes, None if not published.
        seconds: of one optimizer step, the mean of some after a warm-up; None if not published.
        as_run: what differed from the installed transformers, a name of `as_run.AS_RUN`, or None.
        made_with: GPU, torch, transformers, date.
    """

    source: str
    gpu: str
    recipe: Recipe
    allocated: int
    reserved: int | None
    loaded: int | None
    seconds: float | None
    as_run: str | None
    made_with: str


def runs() -> list[Run]:
    """All published runs, in the order of the file."""
    stored = json.loads(data_path("published_runs.json").read_text(encoding="utf-8"))
    loops = {name: Loop(**source["loop"]) for name, source in stored["sources"].items()}
    found = []
    for run in stored["runs"]:
        fields = run["recipe"]
        model = stored["models"].get(fields["model"], fields["model"])
        found.append(
            Run(
                source=run["source"],
                gpu=run["gpu"],
                recipe=Recipe(**{**fields, "model": model, "loop": loops[run["source"]]}),
                allocated=run["allocated"],
                reserved=run.get("reserved"),
                loaded=run.get("loaded"),
                seconds=run.get("seconds"),
                as_run=run.get("as_run"),
                made_with=f"{run['gpu']}, torch {run['torch']}, transformers {run['transformers']}, {run['date']}",
            )
        )
    return found
