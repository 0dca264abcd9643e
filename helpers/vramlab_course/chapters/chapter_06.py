"""Chapter 06: what a 4-bit model stores, and steps with a frozen base that were timed."""

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


def qlora_on_t4(model: str) -> published.Run:
    """Another project's timed run of QLoRA on a T4: one sample of 1,024 tokens, fused attention.

    Raises LookupError if there is none of that model.
    """
    for run in published.timed_on("T4"):
        asked = run.recipe
        is_alike = (asked.name, asked.batch_size, asked.seq_len) == (model, 1, 1024)
        is_fused = asked.attn_implementation == "sdpa"
        is_four_bits = bool(asked.quantization) and asked.lora.r == 16
        if is_alike and is_fused and is_four_bits:
            return run
    raise LookupError(f"no such run of {model} is stored")


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
