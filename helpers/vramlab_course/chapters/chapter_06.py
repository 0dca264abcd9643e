"""Chapter 06: steps of an 8B with a frozen base that were recorded."""

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
    return sorted(steps, key=_order)


def _order(found: tuple[Recipe, Report]) -> tuple[int, bool]:
    recipe, _ = found
    return recipe.batch_size, recipe.quantization is not None
