"""The sharded recipes on which `predict` is held against `simulate`: engines, stages, worlds,
precisions, spread out.

Drawn once with a fixed seed and not chosen by how well they fit; those that `predict` refuses are
left out. Run as a script it simulates them all, which takes many minutes, and writes
`formulas/sharded_grid.jsonl`.
"""

import random

from predict_grid import Deck, store
from vramlab import Recipe
from vramlab.formulas.shards import is_known
from vramlab.recipe.options import Sharding

DRAWN = 84
# (engine, stage, what else)
ENGINES = (
    *(("ddp", 0, {}), ("ddp", 1, {})),
    *(
        ("fsdp", 2, {}),
        ("fsdp", 2, {}),
        ("fsdp", 3, {}),
        ("fsdp", 3, {}),
        ("fsdp", 3, {"wrap": "model"}),
    ),
    ("fsdp", 3, {"offload": "parameters"}),
    *(("deepspeed", stage, {}) for stage in (0, 1, 2, 3)),
    *(("deepspeed", 2, {"offload": "optimizer"}), ("deepspeed", 3, {"offload": "parameters"})),
)
MODELS = (("llama-3.2-1b", 4), ("gpt2", 5), ("pythia-160m", 4), ("llama-3.1-8b", 3))
SIZES = ((1, 128), (2, 512), (4, 256), (8, 512))


def grid() -> list[Recipe]:
    """The recipes."""
    draw = random.Random(20261121)
    values = {
        "engine": ENGINES,
        "model": MODELS,
        "size": SIZES,
        "world_size": (2, 8, 64, 1024),
        "precision": ("fp32", "bf16-true", "bf16-mixed"),
        "gradient_checkpointing": (False, True),
        "loop": ("plain", "trainer"),
        "gradient_accumulation_steps": (1, 1, 1, 1, 1, 2),
        "rank": ("first", "first", "last"),
        "optim": ("adamw_torch", "adamw_torch", "adamw_torch", "sgd"),
    }
    decks = {key: Deck(options, draw) for key, options in values.items()}
    drawn = [_recipe(**{key: deck.deal() for key, deck in decks.items()}) for _ in range(DRAWN)]
    return [*{recipe.key: recipe for recipe in drawn if is_known(recipe.sharding)}.values()]


def _recipe(engine, model, size, world_size, rank, **settings) -> Recipe:
    (kind, stage, more), (name, layers), (batch, tokens) = engine, model, size
    place = world_size - 1 if rank == "last" else 0
    sharding = Sharding(stage, world_size, kind, rank=place, **more)
    return Recipe(
        name, batch_size=batch, seq_len=tokens, num_layers=layers, sharding=sharding, **settings
    )


def simulated(recipe: Recipe) -> dict:
    """What `simulate` says of a recipe: each phase's bytes by category at its peak and end."""
    from vramlab.simulation.simulate import simulate

    report = simulate(recipe)
    phases = {
        name: [dict(phase.peak.items()), dict(phase.end.items())]
        for name, phase in report.phases.items()
    }
    return {"peak": report.peak.total, "phase": report.peak_phase, "phases": phases}


if __name__ == "__main__":
    store("sharded_grid.jsonl", grid(), simulated)
