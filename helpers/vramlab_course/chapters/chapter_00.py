"""Chapter 00: what recipes take of a card, and what an out-of-memory message says."""

import json
from collections.abc import Mapping

from vramlab import LoRA, Quantization, measure, predict, step_time
from vramlab.hardware.gpu import Device, Gpu
from vramlab.interfaces.messages import read_message
from vramlab.recipe.recipe import Recipe
from vramlab.report.report import GiB, text_table

from ..base_model import finetuning_texts
from ..published import json_of

# A run that died on a card which other programs used too: its "message", and "then" the lines of
# the same samples in pieces, which fitted.
H200: dict = json_of("program_runs")["died"]


def three_ways(model: str, gpu: Gpu, seq_len: int) -> dict[str, Recipe]:
    """Return recipes of one sample: all weights, LoRA, and LoRA on weights of 4 bits."""
    precision, dtype = "fp16-mixed", "float16"
    if gpu.supports("bf16"):
        precision, dtype = "bf16-mixed", "bfloat16"
    full = Recipe(
        model,
        batch_size=1,
        seq_len=seq_len,
        precision=precision,
        optim="adamw_torch_fused",
        gradient_checkpointing=True,
    )
    lora = full.replace(lora=LoRA(r=16), dtype=dtype)
    in_4_bits = lora.replace(quantization=Quantization())
    return {"all weights": full, "LoRA": lora, "LoRA on 4 bits": in_4_bits}


def budget(ways: Mapping[str, Recipe], gpu: Gpu, expandable_segments: bool = True) -> str:
    """Return a table: the GiB of each recipe's process, whether it fits, and seconds a step."""
    rows = [(f"on {gpu.name}", "likely, GiB", "at most", "verdict", "s a step")]
    for name, recipe in ways.items():
        need = predict(recipe, gpu=gpu, expandable_segments=expandable_segments).process
        verdict = need.verdict(gpu.total)
        seconds = "–"
        if verdict != "does not fit":
            step = step_time(recipe, gpu)
            seconds = f"{step.low:.1f} – {step.high:.1f}"
        rows.append((name, need.value / GiB, need.high / GiB, verdict, seconds))
    return text_table(rows, ".1f")


def sizes(message: str) -> dict[str, float]:
    """Return the GiB that PyTorch's message gives: asked, total, free, process, allocated, cached.

    Where it doesn't say what the process has, that is all that isn't free.
    """
    said = read_message(message).bytes
    said.setdefault("process", said["total"] - said["free"])
    said["cached"] = said.get("unallocated", 0)
    names = ["asked", "total", "free", "process", "allocated", "cached"]
    return {name: said[name] / GiB for name in names}


def outcome(recipe: Recipe, device: Device) -> str:
    """Run a recipe on this GPU: return its title, and why it died or its peak and speed."""
    run = measure(recipe, recorded=False)
    said = run.message.partition(" GPU 0")[0]
    if run.speed:
        predicted = predict(recipe, gpu=device.gpu).peak.total / GiB
        said = f"peak {run.peak.total / GiB:.2f} GiB, predicted {predicted:.2f}\n"
        said += f"{run.speed.tokens_per_second:,.0f} tokens a second"
    return f"{run.title}\n{said}"


def write_samples(path: str, characters: int = 0) -> None:
    """Write the course's prose to `path`, one JSON object with its text a line.

    With `characters`, all texts are joined and cut into samples of that many.
    """
    texts = finetuning_texts()
    if characters:
        prose = "".join(texts)
        texts = [prose[i : i + characters] for i in range(0, len(prose), characters)]
    with open(path, "w") as file:
        for text in texts:
            print(json.dumps({"text": text}), file=file)
