"""Programs that a plan can write train on tiny models: every pair of their options, on a CPU."""

import json
from pathlib import Path
from typing import Any

import pytest
from pairwise import every_value, pairwise
from quick import params
from test_plan_script import CHAT, TOKENS, WORDS, base  # noqa: F401
from vramlab import Recipe
from vramlab.base.errors import RecipeError
from vramlab.planning.plan_script import scripts
from written_options import CUT, METHODS, PLANNED
from written_scripts import run_script, state

FACTORS = {
    "trainer": ("transformers", "sft", "dpo", "kto", "reward"),
    "method": tuple(name for name in METHODS if name != CUT),
    "data": ("text", "messages", "prompt"),
    "packs": (False, True),
    "gradient_checkpointing": (False, True),
    "attn_implementation": ("sdpa", "sdpa_repeated", "eager"),
    "optim": ("adamw_torch", "adamw_torch_fused"),
    "gradient_accumulation_steps": (1, 2),
}
DATA = {  # by trainer what its samples may be
    "transformers": ("text", "messages"),
    "sft": ("text", "messages", "prompt"),
}


def recipe_of(row: dict[str, Any], model: str) -> Recipe:
    """Return the recipe of a row. Raises RecipeError where there is none."""
    fields = {"precision": "bf16-mixed", **row} | METHODS[row["method"]]
    del fields["method"], fields["data"]
    packs = fields.pop("packs")
    if row["trainer"] == "sft":
        fields["packing"] = packs
    return Recipe(model, 2, seq_len=TOKENS, **fields)


def is_written(row: dict[str, Any]) -> bool:
    """Tell whether a plan can write the row's program."""
    if row["data"] not in DATA.get(row["trainer"], ("prompt",)):
        return False
    if row["packs"] and row["trainer"] not in ("transformers", "sft"):
        return False
    try:
        recipe_of(row, "llama-3.2-1b")
    except RecipeError:
        return False
    return True


ROWS, _ = pairwise(FACTORS, is_written)
IN_INT8 = [row for row in ROWS if row["method"] == "int8"]
QUICK = [*every_value(ROWS, 1)[:2], IN_INT8[0]]


def named(row: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in row.items())


def sample(row: dict[str, Any], number: int) -> dict[str, Any]:
    """Return one of many samples of several lengths."""
    words = " ".join(WORDS[number % 7 :][: 3 + number % 9])
    if row["trainer"] == "kto":
        return {"prompt": "if ", "completion": words, "label": number % 2 == 0}
    if row["trainer"] in ("dpo", "reward"):
        return {"prompt": "if ", "chosen": words, "rejected": words[::-1]}
    if row["data"] == "prompt":
        return {"prompt": "if ", "completion": words}
    if row["data"] == "text":
        return {"text": words}
    question = {"role": "user", "content": "if"}
    return {"messages": [question, {"role": "assistant", "content": words}]}


@pytest.fixture(scope="module")
def chatting(base) -> str:  # noqa: F811
    """The tiny model's folder, with a chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(base)
    return base


def use(shown: str, recipe: Recipe, folder: Path) -> None:
    """Run the lines that a program ends with: load what it trained, then merge it."""
    lines = [line for line in shown.split("\n") if not line.endswith(":")]
    *load, merge = [line.replace('"out', f'"{folder}/out') for line in lines if line]
    again = []
    if recipe.quantization:
        load, again = load[:-2], load[-2:]  # in 16 bits
    names: dict[str, Any] = {}
    exec("\n".join(load), names)
    assert bool(getattr(names["model"], "is_quantized", False)) is bool(recipe.quantization)
    exec("\n".join([*again, merge]), names)
    assert (folder / "out-merged" / "model.safetensors").exists()


@pytest.mark.parametrize("name", params(list(map(named, ROWS)), list(map(named, QUICK))))
def test_a_written_program_trains(name: str, chatting: str, tmp_path: Path, capsys) -> None:
    row = next(row for row in ROWS if named(row) == name)
    recipe = recipe_of(row, chatting)
    planned = PLANNED | {"packing": row["packs"], "expandable_segments": True}
    for path, text in scripts(recipe, "train.py", planned).items():
        (tmp_path / path).write_text(text)
    samples = [json.dumps(sample(row, number)) for number in range(40)]
    (tmp_path / "train.jsonl").write_text("\n".join(samples))
    run_script(tmp_path, steps=(2,))
    log = state(tmp_path, 2)["log_history"]
    losses = [line["eval_loss"] for line in log if "eval_loss" in line]
    assert losses and all(0 < loss < 100 for loss in losses)
    shown = capsys.readouterr().out
    assert "To use it" in shown
    if recipe.lora and row["trainer"] != "reward":
        use(shown.partition("To use it")[2], recipe, tmp_path)
    is_quantized = recipe.quantization is not None
    answers = 0 if row["trainer"] == "reward" or is_quantized else 3
    assert shown.count("\nafter:  ") == answers
