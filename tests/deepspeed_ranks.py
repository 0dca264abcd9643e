"""Real ranks under DeepSpeed, started by torchrun: what each allocates, learns and sends, written to a folder.

    torchrun --standalone --nproc_per_node 2 tests/deepspeed_ranks.py FOLDER NAME NAME …

NAME is a key of TABLE.
"""

import os
import pickle
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import real_ranks
import torch
from real_ranks import followed
from tiny_models import config
from vramlab.recipe import LoRA, Recipe, Sharding
from vramlab.training import build, make_batch, train_step

ODD = {"n_embd": 66, "vocab_size": 1001, "n_positions": 37}  # nothing divides it
ACCUMULATING, HALF = {"gradient_accumulation_steps": 2}, {"precision": "bf16-mixed"}
EVERYWHERE = LoRA(r=4, target_modules="all-linear")
# name to (model, what is changed of it, stage, what is offloaded, what else the recipe says)
TABLE: dict[str, tuple[str, dict[str, Any], int, str | None, dict[str, Any]]] = {
    "stage 0": ("llama", {}, 0, None, {}),
    "stage 0, bf16-mixed": ("llama", {}, 0, None, HALF),
    "stage 1, accumulating": ("gpt2", {}, 1, None, ACCUMULATING),
    "stage 1, odd sizes, plain loop": ("gpt2", ODD, 1, None, {"loop": "plain"}),
    "stage 1, bf16-mixed, offloaded": ("llama", {}, 1, "optimizer", HALF),
    "stage 2": ("llama", {}, 2, None, {}),
    "stage 2, odd sizes, bf16-mixed": ("gpt2", ODD, 2, None, HALF),
    "stage 2, LoRA, checkpointing": (
        "llama",
        {},
        2,
        None,
        {"lora": EVERYWHERE, "gradient_checkpointing": True, **HALF},
    ),
    "stage 3": ("llama", {}, 3, None, {}),
    "stage 3, odd sizes, bf16-mixed": ("gpt2", ODD, 3, None, HALF),
    "stage 3, accumulating, offloaded": ("llama", {}, 3, "optimizer", ACCUMULATING),
    "stage 3, offloaded parameters, checkpointing": ("llama", {}, 3, "parameters", {"gradient_checkpointing": True}),
    "stage 3, bf16-true": ("llama", {}, 3, None, {"precision": "bf16-true"}),
}


def recipe_of(name: str, world_size: int, rank: int = 0) -> Recipe:
    family, changes, stage, offload, options = TABLE[name]
    sharding = Sharding(stage, world_size, "deepspeed", offload=offload, rank=rank)
    return Recipe(config(family, **changes), 2, 24, num_layers=2, sharding=sharding, **options)


def learned(recipe: Recipe, alone: bool = False, steps: int = 3) -> dict[str, Any]:
    """Losses and whole gradients of `steps` steps on the same global batches, of a rank or of one process with them all."""
    rank, world_size = recipe.sharding.rank, recipe.sharding.world_size
    whole = recipe.replace(batch_size=recipe.batch_size * world_size, sharding=None)
    torch.manual_seed(0)
    training = build(whole if alone else recipe, "cpu", target="cpu")
    for module in training.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # ranks would drop other channels than one process
    torch.manual_seed(1)
    own = slice(None) if alone else slice(rank * recipe.batch_size, (rank + 1) * recipe.batch_size)

    def batch() -> dict[str, torch.Tensor]:
        return {name: values[own] for name, values in make_batch(whole, "cpu").items()}

    losses, gradients = [], []

    def on_phase(name: str) -> None:
        if name == "step":
            gradients.append({n: g.detach().float().clone() for n, g in training.engine.gradients(training)})

    for _ in range(steps):
        training.batch, training.further = batch(), [batch() for _ in training.further]
        losses.append(float(train_step(training, on_phase)) * training.accumulation)
    return {"losses": losses, "gradients": gradients, "training": training}


def sent(training: Any) -> dict[str, tuple[int, int]]:
    """Kind of collective to (calls, bytes) of one steady step."""
    from vramlab.collectives import Collectives

    with Collectives() as counting:
        train_step(training)
    return {kind: (seen.calls, seen.bytes) for kind, seen in counting.seen.items()}


def run(folder: Path, names: Iterable[str], world_size: int) -> list[dict[str, dict[str, Any]]]:
    """`real_ranks.run` of this script; DeepSpeed takes its time."""
    return real_ranks.run(folder, names, world_size, __file__, timeout=900)


def main() -> None:
    from vramlab.world import real_rank

    folder, *names = sys.argv[1:]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    found = {}
    with real_rank("cpu"):
        for name in names:
            recipe = recipe_of(name, world_size, rank)
            found[name] = followed(recipe) | learned(recipe)
            found[name]["sent"] = sent(found[name].pop("training"))
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main()
