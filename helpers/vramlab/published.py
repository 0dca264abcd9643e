"""Training runs on real GPUs that other projects measured and published: a witness that knows nothing of this package.

`data/published_runs.json` holds them as facts, with their sources. `runs()` gives each with its recipe; `as_it_ran(run)`
puts in place what differed from a plain run, for `simulate`. Nothing here is fitted to them: where a prediction was off,
the missing mechanism was looked up in the library's source and added.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

from .data import data_path
from .options import Loop
from .recipe import Recipe


@dataclass(frozen=True)
class Run:
    """One published run.

    Attributes:
        recipe: what was trained; the loop is that of the source's own script.
        allocated: `torch.cuda.max_memory_allocated()` in bytes; `reserved`: the same of segments, None if not published.
        loaded: `torch.cuda.memory_allocated()` once the model was loaded, in bytes, None if not published.
        seconds: of one optimizer step, the mean of some after a warm-up; None if not published.
        as_run: "", or what differed: "repeated keys", "causal mask".
        made_with: GPU, torch, transformers, date.
    """

    source: str
    gpu: str
    recipe: Recipe
    allocated: int
    reserved: int | None
    loaded: int | None
    seconds: float | None
    as_run: str
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
                as_run=run.get("as_run", ""),
                made_with=f"{run['gpu']}, torch {run['torch']}, transformers {run['transformers']}, {run['date']}",
            )
        )
    return found


@contextlib.contextmanager
def as_it_ran(run: Run) -> Iterator[None]:
    """While entered, `simulate(run.recipe)` repeats what the run's script or its older library did differently."""
    if run.as_run == "repeated keys":
        with _repeated_keys():
            yield
    elif run.as_run == "causal mask":
        with _causal_mask():
            yield
    else:
        yield


@contextlib.contextmanager
def _repeated_keys() -> Iterator[None]:
    """Keys and values that query heads share are repeated before the kernel, so that every kernel takes them."""
    from torch.nn import functional as F

    original = F.scaled_dot_product_attention

    def attention(query, key, value, *args, enable_gqa=False, **kwargs):
        groups = query.shape[-3] // key.shape[-3]
        if enable_gqa and groups > 1:
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        return original(query, key, value, *args, **kwargs)

    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


@contextlib.contextmanager
def _causal_mask() -> Iterator[None]:
    """Every layer gets a causal mask, as transformers 4.53 to 4.57 passed one in training without a cache.

    There `masking_utils` looked for packed sequences in the position ids, and did not leave the mask out once it had
    looked. With a mask, shared keys and values are repeated, and the kernel keeps mask and copies for its backward pass.
    """
    import torch

    from . import training

    original = training.make_batch

    def make_batch(recipe, device="cpu"):
        size = recipe.seq_len, recipe.seq_len
        mask = torch.ones(size, dtype=torch.bool, device=device).tril()
        return {**original(recipe, device), "attention_mask": mask.expand(recipe.batch_size, 1, *size)}

    training.make_batch = make_batch
    try:
        yield
    finally:
        training.make_batch = original
