"""What the calculator's page shows of runs that no formula knows, GRPO's and those with pictures.

They are simulated and stored in `site/simulated.json`, since a page cannot simulate.

    python tests/tools/simulated_tables.py          # simulates all of it again: ten minutes
    python tests/tools/simulated_tables.py images   # one table of it
"""

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from settings import ROOT
from vramlab import (
    GiB,
    LoRA,
    Quantization,
    Recipe,
    RecipeError,
    Rollouts,
    find_gpu,
    plan,
    simulate,
)
from vramlab.hardware.gpu import usable_memory
from vramlab.recipe import images
from vramlab.report.report import Interval, Report, installed

STORED = ROOT / "site" / "simulated.json"
LIBRARIES = ("torch", "transformers", "trl", "peft", "bitsandbytes")
SHARED: dict[str, Any] = {
    "precision": "bf16-mixed",
    "optim": "adamw_torch_fused",
    "dtype": "bfloat16",
    "gradient_checkpointing": True,
    "lora": LoRA(r=16, target_modules="all-linear"),
}


class Row(NamedTuple):
    """A row: what it is called, one word a column, and its recipe."""

    words: tuple[str, ...]
    recipe: Recipe


class Table(NamedTuple):
    """A table: the columns before the cards, its rows, made when they are asked for, its cards.

    `ask` gives what is stored of a recipe and a card, `cell` what the page shows of that.
    """

    columns: tuple[str, ...]
    rows: Callable[[], Iterator[Row]]
    cards: tuple[str, ...]
    ask: Callable[[Recipe, str], list[Any] | str]
    cell: Callable[[list[Any], str], str]


# What samples, and the fields of `Rollouts` that say so.
ENGINES: dict[str, dict[str, Any]] = {
    "transformers": {},
    "vLLM on the card, asleep": {
        "use_vllm": True,
        "vllm_gpu_memory_utilization": 0.5,
        "vllm_enable_sleep_mode": True,
    },
    "vLLM on a server": {"use_vllm": True, "vllm_mode": "server"},
}
PHOTO = "4032x3024"  # of a telephone's camera, 12 million pixels
LIMITS = (500_000, 1_000_000, 3_000_000)  # of a picture, in pixels: `max_pixels`


def grpo_rows() -> Iterator[Row]:
    """Yield GRPO with LoRA: one group of 8 completions in a step, by what samples them."""
    for model in ("qwen3-0.6b", "qwen3-4b", "llama-3.1-8b"):
        for engine, fields in ENGINES.items():
            # A group of 8, prompts of 512 tokens and completions of 1,024.
            rollouts = Rollouts(8, 512, 1024, **fields)
            recipe = Recipe(model, 8, trainer="grpo", rollouts=rollouts, **SHARED)
            yield Row((model, engine), recipe)


def image_rows() -> Iterator[Row]:
    """Yield TRL's SFT with LoRA on one photo a sample, by the limit of its pixels."""
    methods = {"LoRA": None, "QLoRA": Quantization(prepare=False)}
    for model in ("qwen2.5-vl-3b", "qwen2.5-vl-7b"):
        for method, quantization in methods.items():
            for limit in LIMITS:
                recipe = Recipe(
                    model,
                    trainer="sft",
                    images=1,
                    image_size=PHOTO,
                    max_pixels=limit,
                    quantization=quantization,
                    **SHARED,
                )
                yield Row((model, method, f"{limit:,}", f"{recipe.seq_len:,}"), recipe)


def largest_rows() -> Iterator[Row]:
    """Yield the models and methods of which the largest photo is looked for."""
    for model in ("qwen3-vl-4b", "qwen2.5-vl-3b"):
        for method, quantization in (("LoRA", None), ("QLoRA", Quantization(prepare=False))):
            recipe = Recipe(model, images=1, image_size=PHOTO, quantization=quantization, **SHARED)
            yield Row((model, method), recipe)


def largest(recipe: Recipe, card: str) -> list[Any] | str:
    """Return what plan says of the largest photo: its pixels, its tokens, the process's bytes."""
    method = "qlora" if recipe.quantization else "lora"
    found = plan(recipe.name, card, method=method, images=1, image_size=PHOTO)
    if found.best is None:
        return "none"
    best = found.best.recipe
    need = found.best.needs
    ((height, width),) = images.sides(best)
    limit = min(height * width, best.max_pixels or images.most_pixels(best))
    return [limit, max(images.tokens(best)), need.low, need.value, need.high]


def _largest_cell(answer: list[Any], card: str) -> str:
    limit, tokens, *process = answer
    need = Interval(*process)
    tier = need.tier(usable_memory(find_gpu(card)))
    return f"{limit:,} pixels, {tokens:,} tokens: {need.value / GiB:.1f} {tier}"


def asked(recipe: Recipe, card: str) -> Report | str:
    """Return the simulation, or why the recipe does not start on that card."""
    try:
        return simulate(recipe, gpu=card)
    except RecipeError as error:
        return error.allowed


def simulated_answer(recipe: Recipe, card: str) -> list[Any] | str:
    """Return what is stored of a recipe's simulation."""
    return answer_of(asked(recipe, card))


def answer_of(report: Report | str) -> list[Any] | str:
    """Return what is stored of an answer: the phase of the peak, its bytes, the process's."""
    if isinstance(report, str):
        return report
    need = report.process
    # Numbers and not words, so that the tier can be worked out anew when a card's table changes.
    return [report.peak_phase, report.peak.total, need.low, need.value, need.high]


def stored() -> dict[str, Any]:
    """Return the versions that gave the answers, and the answers by table, row and card."""
    return json.loads(STORED.read_text(encoding="utf-8"))


def answers(name: str) -> str:
    """Return the stored answers of a table as Markdown, each with its tier."""
    table = TABLES[name]
    found = stored()[name]
    heads = [*table.columns, *table.cards]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in found["rows"]:
        cells = []
        for card in table.cards:
            answer = row["answers"][card]
            cells.append(answer if isinstance(answer, str) else table.cell(answer, card))
        lines.append(f"| {' | '.join([*row['words'], *cells])} |")
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return "\n".join(lines) + f"\n\nSimulated with {versions}.\n"


def _cell(answer: list[Any], card: str) -> str:
    phase, _, *process = answer
    need = Interval(*process)
    tier = need.verdict(usable_memory(find_gpu(card)))
    return f"{need.value / GiB:.1f} {tier} ({phase})"


def simulated(table: Table) -> dict[str, Any]:
    """Return a table's answers, simulated now, with the versions that give them."""
    rows = []
    for words, recipe in table.rows():
        found = {card: table.ask(recipe, card) for card in table.cards}
        print(*words, found, flush=True)
        rows.append({"words": words, "answers": found})
    versions = {name: (installed(name) or "").partition("+")[0] for name in LIBRARIES}
    return {"versions": versions, "rows": rows}


TABLES = {
    "grpo": Table(
        ("model", "sampled by"), grpo_rows, ("RTX 4090", "H100 SXM"), simulated_answer, _cell
    ),
    "images": Table(
        ("model", "method", "`max_pixels`", "tokens"),
        image_rows,
        ("RTX 4090", "H100 SXM"),
        simulated_answer,
        _cell,
    ),
    "largest": Table(
        ("model", "method"), largest_rows, ("RTX 3060 12GB", "RTX 4090"), largest, _largest_cell
    ),
}


def main() -> None:
    """Simulate the tables that are named, or all, and store them."""
    found = stored()
    for name in sys.argv[1:] or TABLES:
        found[name] = simulated(TABLES[name])
        # After each table, since the next one takes minutes.
        STORED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
