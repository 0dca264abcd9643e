"""Chapter 00: what recipes take of a card, and what an out-of-memory message says."""

import json
from collections.abc import Mapping

from vramlab import predict, step_time
from vramlab.hardware.gpu import Gpu
from vramlab.interfaces.messages import read_message
from vramlab.recipe.recipe import Recipe
from vramlab.report.report import GiB, text_table

from ..base_model import finetuning_texts

# The message of qwen3-0.6b, 128 samples of 512 tokens, fp16-mixed, adamw_torch_fused, on an NVIDIA
# H200 that other programs used too (torch 2.11, driver 580.159.04).
H200_DIED = (
    "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 139.80 GiB "
    "of which 378.75 MiB is free. Process 1559 has 1024.00 MiB memory in use. Process 1589 has "
    "892.00 MiB memory in use. Process 1556 has 732.00 MiB memory in use. Process 1823 has 15.84 "
    "GiB memory in use. Including non-PyTorch memory, this process has 120.98 GiB memory in use. "
    "Of the allocated memory 119.80 GiB is allocated by PyTorch, and 518.47 MiB is reserved by "
    "PyTorch but unallocated."
)


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
