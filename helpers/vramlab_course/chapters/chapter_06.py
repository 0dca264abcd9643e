"""Chapter 06: steps with a frozen base, in 16 bits and in 4, that were timed."""

from itertools import permutations

from vramlab import Recipe, Report
from vramlab.measurement.records import load, measurements_folder

from .. import published


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


def slower_on_t4() -> list[float]:
    """Seconds of a QLoRA step over those of LoRA, of each pair that others timed on a T4.

    The two runs of a pair differ in the base alone.
    """
    timed = [run for run in published.runs() if run.gpu == "T4" and run.seconds]
    ratios = []
    for quantized, other in permutations(timed, 2):
        if not quantized.recipe.quantization or quantized.as_run or other.as_run:
            continue
        if quantized.recipe.replace(quantization=None) == other.recipe:
            ratios.append(quantized.seconds / other.seconds)
    return ratios
