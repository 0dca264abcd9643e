"""The lists of the command line: the models and the cards that have a name."""

import shutil
import textwrap
from typing import Any

from ..hardware.gpu import find_gpu, gpu_names, usable_memory
from ..recipe.hub_names import KNOWN
from ..recipe.shapes import catalogue, model_names
from ..report.report import GiB, text_table

NONE = "none has that in its name; without it all are listed"
UNITS = "bf16, fp16: dense TFLOP/s; NVLink: GB/s; compute: compute capability"


def models(filtered: str = "") -> list[dict[str, Any]]:
    """Return the models with `filtered` in a name or the architecture; sizes are bytes."""
    facts = []
    for name in model_names():
        entry = catalogue()[name]
        # Hub names whose config.json has the entry's architecture with a few keys of its own.
        others = [other for other, said in KNOWN["names"].items() if said["entry"] == name]
        names = [name, entry["hub_id"], *entry.get("aliases", ()), *others]
        if any(filtered.lower() in each.lower() for each in names):
            fact = {
                "name": name,
                "hub_id": entry["hub_id"],
                "also": names[2:],
                "task": entry["task"],
                "parameters": entry["parameters"],
                "bytes_in_16_bits": 2 * entry["parameters"],
            }
            facts.append(fact)
    return facts


def models_table(found: list[dict[str, Any]]) -> str:
    """Return the models as a table, with their other names under each, in the terminal's width."""
    if not found:
        return NONE
    rows = [("model", "parameters", "GiB in 16 bits", "task")]
    for one in found:
        size = f"{one['bytes_in_16_bits'] / GiB:,.2f}"
        rows.append((one["name"], f"{one['parameters']:,}", size, one["task"]))
    head, rule, *lines = text_table(rows).split("\n")
    # COLUMNS says it where there is no terminal.
    width = shutil.get_terminal_size().columns
    table = [head, rule]
    for line, one in zip(lines, found, strict=True):
        table.append(line)
        also = ", ".join(other.rpartition("/")[2] for other in one["also"])
        if also:
            table.append(textwrap.indent(textwrap.fill(f"also {also}", width - 4), 4 * " "))
    return "\n".join(table)


def gpus(filtered: str = "") -> list[dict[str, Any]]:
    """Return the cards whose name has `filtered` in it: memory in bytes, rates a second."""
    facts = []
    for name in gpu_names():
        if filtered.lower() not in name.lower():
            continue
        card = find_gpu(name)
        # `total_known` is False where only the datasheet's round number is known, and no driver's
        # report.
        fact = {
            "name": name,
            "total": card.total,
            "total_known": card.total_known,
            "usable": usable_memory(card),
            "bandwidth": card.bandwidth,
            "flops": card.peak,
            "nvlink": card.nvlink,
            "watts": card.tdp,
            "compute_capability": ".".join(map(str, card.compute_capability)),
        }
        facts.append(fact)
    return facts


def gpus_table(found: list[dict[str, Any]]) -> str:
    """Return the cards as a table: the memory that a process may have, and dense rates."""
    if not found:
        return NONE
    rows = [("card", "usable", "of GiB", "GB/s", "bf16", "fp16", "NVLink", "compute")]
    for one in found:
        bandwidth = f"{one['bandwidth'] / 1e9:,.0f}" if one["bandwidth"] else "?"
        rates = [
            f"{one['flops'][form] / 1e12:,.0f}" if form in one["flops"] else "–"
            for form in ("bf16", "fp16")
        ]
        nvlink = f"{one['nvlink'] / 1e9:,.0f}" if one["nvlink"] else "–"
        total = f"{one['total'] / GiB:,.2f}" + ("" if one["total_known"] else " nominal")
        usable = f"{one['usable'] / GiB:,.2f}"
        rows.append(
            (one["name"], usable, total, bandwidth, *rates, nvlink, one["compute_capability"])
        )
    return f"{text_table(rows)}\n{UNITS}"
