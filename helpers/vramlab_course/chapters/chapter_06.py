"""Chapter 06: what a 4-bit model stores, and its steps' peaks and speeds as tables."""

from collections.abc import Mapping
from statistics import mean, stdev
from typing import Any

from vramlab import GiB, Recipe, measure, predict
from vramlab.hardware.gpu import Gpu
from vramlab.report.report import text_table


def predicted_and_recorded(cases: Mapping[str, Recipe], card: Gpu) -> str:
    """A table of the peak that is predicted for a card, and of what the course's H200 did."""
    rows: list[tuple] = [("GiB", "parameters", "predicted peak", "recorded peak", "tokens/s")]
    for name, recipe in cases.items():
        said = predict(recipe, gpu=card).peak
        seen = measure(recipe, recorded=True)
        sizes = said.parameters / GiB, said.total / GiB, seen.peak.total / GiB
        rows.append((name, *sizes, round(seen.speed.tokens_per_second)))
    return text_table(rows, ".2f")


def stored_numbers(recipe: Recipe) -> tuple[int, int, int]:
    """How many numbers of QLoRA's model are stored in 4 bits, in 16 bits, and as adapters.

    bitsandbytes quantizes the linear layers but the output head.
    """
    shape = recipe.shape
    head = f"{shape.head}.weight"
    coded = sum(w.size for w in shape.weights() if w.kind == "linear" and w.name != head)
    pairs = shape.lora_targets(recipe.lora.target_modules)
    adapters = sum(recipe.lora.r * (inputs + outputs) for _, inputs, outputs in pairs)
    return coded, shape.num_parameters - coded, adapters


def seed_by_seed(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The mean difference of two of `recorded_quality`'s runs, ± its deviation over the seeds."""
    pairs = zip(one["seeds"], other["seeds"], strict=True)
    differences = [bits - bits_of_other for bits, bits_of_other in pairs]
    return f"{mean(differences):+.4f} ± {stdev(differences):.4f} bits"
