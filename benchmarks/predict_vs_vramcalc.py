"""predict against vramcalc (PyPI): seconds a recipe and error against simulate, on the same models, in one run.

    python benchmarks/predict_vs_vramcalc.py

vramcalc knows decoders of the Llama kind, full and LoRA training with AdamW. Its training loop is fixed, so ours is set
to the nearest: a plain loop with no cache and no kept outputs. Both are given the configuration as a dictionary; ours is
timed twice, for a recipe already built (what a sweep costs) and with the recipe's own checks, and forgets it each time.
"""

import statistics
import time
from collections.abc import Callable

from vramlab import Loop, LoRA, Recipe, Report, predict, simulate
from vramlab.formulas.account import cached_account
from vramlab.report.report import GiB, text_table

try:
    import vramcalc
except ImportError:
    raise SystemExit("This benchmark compares with vramcalc: pip install vramcalc") from None

MODELS = ("llama-3.2-1b", "qwen2.5-0.5b", "qwen2.5-7b", "tinyllama-1.1b", "mistral-7b", "llama-3.1-8b", "gemma-2-2b")
LOOP = Loop.named("plain", keep_outputs=False, use_cache=False)
RANK = 16
SETTINGS = {
    "full, bf16": dict(precision="bf16-true"),
    "full, bf16 autocast": dict(precision="bf16-mixed"),
    "full, bf16, checkpointing": dict(precision="bf16-true", gradient_checkpointing=True),
    "LoRA, bf16": dict(precision="bf16-true", lora=LoRA(r=RANK)),
    "full, fp32, written-out attention": dict(precision="fp32", attn_implementation="eager"),
}
SIZES = ((2, 1024),)  # batch, tokens; each is simulated twice, which is what takes the time
REPEATS = 7


def ours(name: str, batch: int, tokens: int, **settings) -> Recipe:
    """The recipe."""
    if name.startswith("gemma-2"):
        settings["attn_implementation"] = "eager"
    return Recipe(name, batch_size=batch, seq_len=tokens, loop=LOOP, **settings)


def afresh(recipe: Recipe) -> Report:
    """What predict says without remembering the recipe."""
    cached_account.cache_clear()
    return predict(recipe)


def theirs(recipe: Recipe) -> Callable[[], int]:
    """A call of vramcalc for the same run, which returns its peak in bytes."""
    config = recipe.shape.config
    arguments = dict(
        mode="train",
        dtype="fp32" if recipe.precision == "fp32" else "bf16",
        precision="amp" if recipe.precision.endswith("mixed") else "pure",
        batch=recipe.batch_size,
        seq_len=recipe.seq_len,
        grad_checkpoint=recipe.gradient_checkpointing,
        attn_impl=recipe.attn_implementation,
        lora_rank=recipe.lora.r if recipe.lora else None,
        optimizer="adamw",
    )
    return lambda: vramcalc.estimate(config, **arguments).total


def seconds(call: Callable[[], object], loops: int = 100) -> float:
    """The best mean of REPEATS runs of `loops` calls, in seconds of processor time a call."""
    call()
    means = []
    for _ in range(REPEATS):
        start = time.process_time()
        for _ in range(loops):
            call()
        means.append((time.process_time() - start) / loops)
    return min(means)


def main() -> None:
    """Print the error table, then the times and their ratio."""
    rows = [("recipe", "simulated GiB", "predict", "vramcalc")]
    errors: tuple[list[float], list[float]] = ([], [])
    times: tuple[list[float], list[float], list[float]] = ([], [], [])
    for name in MODELS:
        for label, settings in SETTINGS.items():
            for batch, tokens in SIZES:
                recipe = ours(name, batch, tokens, **settings)
                other = theirs(recipe)
                truth = simulate(recipe).peak.total
                pair = predict(recipe).peak.total / truth - 1, other() / truth - 1
                for kept, error in zip(errors, pair, strict=True):
                    kept.append(abs(error))
                cells = [f"{100 * error:+.2f} %" for error in pair]
                rows.append((f"{name}, {label}, {batch} × {tokens}", f"{truth / GiB:.3f}", *cells))
        recipe = ours(name, 1, 512, **SETTINGS["full, bf16"])
        calls = (lambda r=recipe: afresh(r), lambda r=recipe: afresh(r.replace()), theirs(recipe))
        for kept, call in zip(times, calls, strict=True):
            kept.append(seconds(call))
    print(text_table(rows))
    for label, found in zip(("predict", "vramcalc"), errors, strict=True):
        print(f"{label}: mean error {100 * statistics.mean(found):.2f} %, worst {100 * max(found):.2f} %")
    built, checked, other = (statistics.median(found) for found in times)
    print(f"seconds a recipe (median of {len(MODELS)} models): predict {built:.6f}, with a new recipe {checked:.6f}, ")
    print(f"vramcalc {other:.6f}; ratio {built / other:.1f} (every operator of a layer against a dozen products)")


if __name__ == "__main__":
    main()
