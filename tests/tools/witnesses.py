"""The table that ends `make course`: a few recipes as predicted, simulated and measured, on this machine."""

from collections.abc import Callable, Sequence

from vramlab import LoRA, Recipe, compare, measure, predict, simulate
from vramlab.report import Report, format_bytes, text_table

# Small enough for any machine, and each with its peak made of something else.
RECIPES = (
    Recipe("gpt2", batch_size=2, seq_len=128, precision="fp32"),
    Recipe("gpt2", batch_size=4, seq_len=256, precision="fp32", optim="sgd"),
    Recipe("gpt2", batch_size=4, seq_len=256, precision="fp32", gradient_checkpointing=True, optim="sgd"),
    Recipe("gpt2", batch_size=4, seq_len=256, precision="fp32", lora=LoRA(r=8)),
)
HEAD = ("peak of allocated memory", "predicted", "simulated", "measured", "predicted is", "simulated is", "")


def table(recipes: Sequence[Recipe] = RECIPES, run: Callable[[Recipe], Report] = measure) -> str:
    """One line a recipe: its peak by each witness, and how far the first two are from the last."""
    return text_table([HEAD, *(_row(recipe, run(recipe)) for recipe in recipes)])


def _row(recipe: Recipe, measured: Report) -> tuple[str, ...]:
    weaker = predict(recipe), simulate(recipe, target=measured.target)
    if measured.status != "ok":  # out of memory is an answer too
        return (str(recipe), *(format_bytes(r.peak.total) for r in weaker), measured.status, "", "", "")
    peaks = compare(*weaker, measured).row("peak total").values
    apart = (f"{peak / peaks[-1] - 1:+.2%}" for peak in peaks[:-1])
    return (str(recipe), *map(format_bytes, peaks), *apart, f"{measured.source} on {measured.target}")


if __name__ == "__main__":
    print(table())
