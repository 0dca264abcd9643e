"""Real ranks of models that are cut by tensors or by layers: what each computes, sends and allocates.

`launch("cut_ranks:work", …)` runs `work` on every rank. `alone` computes the same in one process.
"""

import dataclasses
import os
from typing import Any

import torch
from tiny_models import config
from vramlab.history import History
from vramlab.recipe import Recipe, Sharding

EIGHT_HEADS = {"hidden_size": 128, "num_attention_heads": 8}
WHOLE = {"gpt_neox": {}, "phi": {"num_key_value_heads": 8, "resid_pdrop": 0.0}}  # families without grouped heads

Row = tuple[
    str, dict[str, Any], dict[str, Any], dict[str, Any]
]  # family, its changes, sharding, the rest of the recipe
TENSOR: dict[str, Row] = {
    "grouped key and value heads": ("llama", {}, {}, {}),
    "one matrix for queries, keys and values": ("gpt_neox", {}, {}, {}),
    "tied, plain loop, accumulating": ("qwen2", {}, {}, {"loop": "plain", "gradient_accumulation_steps": 2}),
    "norms of heads, checkpointing": ("qwen3", {}, {}, {"gradient_checkpointing": True}),
    "a vocabulary that nothing divides, momentum": (
        "mistral",
        {"vocab_size": 1001},
        {},
        {"optim": "sgd", "optim_args": "momentum=0.9"},
    ),
    "biases, eager": ("phi", {}, {}, {"attn_implementation": "eager", "optim": "rmsprop"}),
    "soft caps": ("gemma2", {}, {}, {"optim": "adagrad"}),
}
PIPELINE: dict[str, Row] = {
    "1F1B": ("llama", {}, {"micro_batches": 4}, {}),
    "GPipe, tied": ("qwen2", {}, {"micro_batches": 4, "schedule": "gpipe"}, {}),
    "plain loop, accumulating": (
        "gpt_neox",
        {},
        {"micro_batches": 4},
        {"loop": "plain", "gradient_accumulation_steps": 2},
    ),
    "checkpointing, layers that do not divide": (
        "qwen3",
        {},
        {"micro_batches": 4},
        {"gradient_checkpointing": True, "num_layers": 5},
    ),
    "one micro-batch, layers of two kinds": ("gemma2", {}, {"schedule": "gpipe"}, {"optim": "sgd"}),
}
TABLES = {"tensor": TENSOR, "pipeline": PIPELINE}
ON_FOUR = {  # what four ranks run; two run everything
    "tensor": ["grouped key and value heads", "tied, plain loop, accumulating", "norms of heads, checkpointing"],
    "pipeline": ["1F1B", "GPipe, tied", "checkpointing, layers that do not divide"],
}


def recipe_of(engine: str, name: str, world_size: int, rank: int = 0, **changes: Any) -> Recipe:
    family, sizes, sharding, rest = TABLES[engine][name]
    sizes = {**EIGHT_HEADS, "num_key_value_heads": 4, **WHOLE.get(family, {}), **sizes}
    if family == "gpt_neox":
        sizes.pop("num_key_value_heads")
    cut = Sharding(0, world_size, engine, rank=rank, **sharding)
    layers = 4 if engine == "pipeline" else 2
    given = {"batch_size": 4, "seq_len": 24, "num_layers": layers, **rest, "sharding": cut, **changes}
    return Recipe(config(family, **sizes), **given)


def alone(recipe: Recipe) -> Recipe:
    return recipe.replace(sharding=None)


# --- what is computed -----------------------------------------------------------------------------------------------


def values(recipe: Recipe, steps: int = 3) -> dict[str, Any]:
    """Losses of `steps` steps, and the gradients before the last update, by name, whole; and what was sent in it."""
    from vramlab.collectives import Collectives
    from vramlab.training import build, train_step

    torch.manual_seed(0)
    training, losses, gradients, counting = build(recipe, "cpu"), [], {}, Collectives()

    def on_phase(name: str) -> None:
        if name == "step" and len(losses) == steps - 1:
            for parameter_name, parameter in training.model.named_parameters():
                gradients[parameter_name] = parameter.grad.detach().clone()

    for _ in range(steps):
        counting.sizes.clear()
        with counting:
            loss = train_step(training, on_phase)
        losses.append(None if loss is None else float(loss))
    whole = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in gradients.items()}
    return {"losses": losses, "gradients": whole, "sizes": dict(counting.sizes)}


# --- what is allocated ----------------------------------------------------------------------------------------------


def events(history: History) -> list[list[Any]]:
    """Every allocation in order: size, category, operator, shape, dtype, module, what is alive then by category."""
    return [
        [size, s.category, s.op, list(s.shape), s.dtype, s.where, alive]
        for (size, s, _), alive in zip(history.log, history.splits[1:].tolist(), strict=True)
        if size > 0
    ]


def followed(recipe: Recipe) -> list[list[Any]]:
    """The events of two real steps."""
    from vramlab.tracked import run_tracked
    from vramlab.tracker import Tracker
    from vramlab.training import build

    torch.manual_seed(0)
    tracker = run_tracked(build(recipe, "cpu", target="cpu"), Tracker("cpu"), 2, "cpu")
    return events(History(tracker.log, tracker.marks))


def work(engine: str, names: list[str], folder: str) -> dict[str, Any]:
    """What this rank finds of each recipe; gradients go to a file in `folder`."""
    from vramlab.world import real_rank

    torch.set_num_threads(1)
    world_size, found, gradients = int(os.environ["WORLD_SIZE"]), {}, {}
    with real_rank("cpu") as rank:
        for name in names:
            recipe = recipe_of(engine, name, world_size, rank)
            seen = values(recipe)
            gradients[name] = seen.pop("gradients")
            found[name] = {**seen, "events": followed(recipe)}
    torch.save(gradients, os.path.join(folder, f"{rank}.pt"))
    return found


def on_rank(recipe: Recipe, rank: int) -> Recipe:
    return recipe.replace(sharding=dataclasses.replace(recipe.sharding, rank=rank))
