"""Chapter 05: published runs, two runs' parts as a table, and the reader's adapters in PEFT."""

from collections.abc import Mapping
from types import SimpleNamespace

from torch import nn
from vramlab import GiB, Recipe, predict
from vramlab.base.text import text_table

from vramlab_course.finetuning import fresh
from vramlab_course.published import json_of


def published() -> list[SimpleNamespace]:
    """Runs of a 3B that PEFT's authors published (`data/elsewhere/peft_metamath.json`).

    A run has no `recipe` where its optimizer is none of ours. `solved` is per cent of the test.
    """
    stored = json_of("elsewhere/peft_metamath")
    runs = []
    for run in stored["runs"]:
        if run["optimizer"] == "AdamW":
            run["recipe"] = Recipe(**stored["recipe"], lora=run["lora"])
        run["solved"] = 100 * run["right"] / stored["questions"]
        runs.append(SimpleNamespace(**run))
    return runs


def compared(runs: Mapping[str, Recipe], tokens: int) -> tuple[str, float]:
    """Both runs' peaks on an H100 as a table, predicted, and the share that the second saves."""
    rows: list[tuple] = [
        (f"{tokens:,} tokens, GiB", "weights", "states", "activations", "others", "sum")
    ]
    for name, recipe in runs.items():
        peak = predict(recipe.replace(seq_len=tokens), gpu="H100").peak
        named = [peak.parameters, peak.optimizer_states, peak.activations]
        sizes = [*named, peak.total - sum(named), peak.total]
        rows.append((name, *(size / GiB for size in sizes)))
    return text_table(rows), 1 - rows[2][-1] / rows[1][-1]


def merged_by_peft(model: nn.Module):
    """The base model with the A and B of rank 8 and α = 16 of `model`, merged by PEFT."""
    theirs = fresh(8, "all-linear", lora_alpha=16)
    for name, part in model.named_modules():
        if hasattr(part, "B"):
            its = theirs.get_submodule(f"base_model.model.{name}")
            its.lora_A["default"].weight = part.A
            its.lora_B["default"].weight = part.B
    return theirs.merge_and_unload()
