"""Chapter 06: what a 4-bit model stores, and steps with a frozen base that were timed."""

from collections.abc import Mapping
from statistics import mean, stdev
from typing import Any

from vramlab import Recipe, Report
from vramlab.measurement.records import load, measurements_folder


def recorded_8b(name: str) -> list[tuple[Recipe, Report]]:
    """Each step of Llama 3.1 8B with adapters that was recorded on a card, "nvidia-h200".

    The fewest samples come first, and of equals the 16-bit base.
    """
    steps = []
    for path in sorted(measurements_folder().glob(f"{name}-*.json")):
        for report in load(path).values():
            recipe = Recipe(**report.recipe)
            # No layers were left out where `num_layers` is None.
            whole = recipe.name == "llama-3.1-8b" and recipe.num_layers is None
            if whole and recipe.lora and report.speed:
                steps.append((recipe, report))
    return sorted(steps, key=lambda step: (step[0].batch_size, bool(step[0].quantization)))


def stored_numbers(recipe: Recipe) -> tuple[int, int, int]:
    """How many numbers of QLoRA's model are stored in 4 bits, in 16 bits, and as adapters.

    bitsandbytes quantizes the linear layers but the output head.
    """
    shape = recipe.shape
    linear = {w.name: w.size for w in shape.weights() if w.kind == "linear"}
    coded = sum(linear.values()) - linear[f"{shape.head}.weight"]
    pairs = shape.lora_targets(recipe.lora.target_modules)
    adapters = sum(recipe.lora.r * (inputs + outputs) for _, inputs, outputs in pairs)
    return coded, shape.num_parameters - coded, adapters


def seed_by_seed(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The mean difference of two of `recorded_quality`'s runs, ± its deviation over the seeds."""
    pairs = zip(one["seeds"], other["seeds"], strict=True)
    differences = [bits - bits_of_other for bits, bits_of_other in pairs]
    return f"{mean(differences):+.4f} ± {stdev(differences):.4f} bits"
