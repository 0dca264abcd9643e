"""Real ranks of small recipes, started by torchrun: what each allocates, computes and sends, written to a folder.

    torchrun --standalone --nproc_per_node 2 tests/real_ranks.py FOLDER NAME NAME …

NAME is a key of RECIPES; the world's size replaces the recipe's. `run` starts it from a test and reads the folder.
"""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from tiny_models import config
from vramlab.history import History
from vramlab.recipe import Loop, LoRA, Recipe, Sharding

SMALL = {"batch_size": 2, "seq_len": 24, "num_layers": 2}
FSDP3, FSDP2 = {"stage": 3, "engine": "fsdp"}, {"stage": 2, "engine": "fsdp"}
DDP, ZERO1 = {"stage": 0, "engine": "ddp"}, {"stage": 1, "engine": "ddp"}
EVERYWHERE = LoRA(r=4, target_modules="all-linear")

# name to (model, what is changed of it, sharding, what else the recipe says)
TABLE: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llama, stage 3": ("llama", {}, FSDP3, {}),
    "llama, stage 2": ("llama", {}, FSDP2, {}),
    "llama, stage 3, plain loop": ("llama", {}, FSDP3, {"loop": "plain"}),
    "llama, one unit": ("llama", {}, {**FSDP3, "wrap": "model"}, {}),
    "gpt2, tied, stage 3": ("gpt2", {}, FSDP3, {}),
    "gpt2, tied, stage 2, plain loop": ("gpt2", {}, FSDP2, {"loop": "plain"}),
    "gpt2, sizes that nothing divides": ("gpt2", {"n_embd": 66, "vocab_size": 1001, "n_positions": 37}, FSDP3, {}),
    "llama, accumulating": ("llama", {}, FSDP3, {"gradient_accumulation_steps": 2}),
    "llama, accumulating, bf16-mixed": (
        "llama",
        {},
        FSDP3,
        {"gradient_accumulation_steps": 2, "precision": "bf16-mixed"},
    ),
    "llama, checkpointing": ("llama", {}, FSDP3, {"gradient_checkpointing": True}),
    "gpt2, checkpointing, stage 2": ("gpt2", {}, FSDP2, {"gradient_checkpointing": True}),
    "llama, bf16-mixed": ("llama", {}, FSDP3, {"precision": "bf16-mixed"}),
    "llama, bf16-true": ("llama", {}, FSDP3, {"precision": "bf16-true"}),
    "llama, LoRA": ("llama", {}, FSDP3, {"lora": EVERYWHERE}),
    "llama, LoRA on bf16": ("llama", {}, FSDP3, {"lora": EVERYWHERE, "precision": "bf16-true"}),
    "llama, foreach": ("llama", {}, FSDP3, {"loop": Loop.named("trainer", foreach=True)}),
    "bert, momentum": ("bert", {}, FSDP3, {"optim": "sgd", "optim_args": "momentum=0.9"}),
    "llama, DDP": ("llama", {}, DDP, {}),
    "gpt2, DDP, plain loop": ("gpt2", {}, DDP, {"loop": "plain"}),
    "gpt2, DDP, accumulating": ("gpt2", {}, DDP, {"gradient_accumulation_steps": 2}),
    "llama, DDP, checkpointing": ("llama", {}, DDP, {"gradient_checkpointing": True}),
    "llama, DDP, LoRA": ("llama", {}, DDP, {"lora": EVERYWHERE}),
    "llama, DDP, bf16-mixed": ("llama", {}, DDP, {"precision": "bf16-mixed"}),
    "gpt2, ZeRO-1, plain loop": ("gpt2", {}, ZERO1, {"loop": "plain"}),
    "llama, ZeRO-1": ("llama", {}, ZERO1, {}),
}


def recipe_of(name: str, world_size: int, rank: int = 0) -> Recipe:
    family, changes, sharding, options = TABLE[name]
    sharding = Sharding(world_size=world_size, rank=rank, **sharding)
    return Recipe(config(family, **changes), sharding=sharding, **{**SMALL, **options})


def births(history: History) -> list[tuple]:
    """Every allocation in order: what it is, and what is alive once it is there (as in test_simulate_cpu.py)."""
    return [
        (size, storage.category, storage.op, storage.shape, storage.dtype, storage.where, tuple(alive))
        for (size, storage, _), alive in zip(history.log, history.splits[1:].tolist(), strict=True)
        if size > 0
    ]


def followed(recipe: Recipe) -> dict[str, Any]:
    """What a tracker sees of two real steps."""
    from vramlab.tracked import run_tracked
    from vramlab.tracker import Tracker
    from vramlab.training import build

    torch.manual_seed(0)
    tracker = run_tracked(build(recipe, "cpu", target="cpu"), Tracker("cpu"), 2, "cpu")
    history = History(tracker.log, tracker.marks)
    return {"births": births(history), "phases": history.phases(), "splits": history.last_step}


def run(folder: Path, names: list[str], world_size: int) -> list[dict[str, dict[str, Any]]]:
    """By rank and name, what `world_size` real processes leave. Raises AssertionError with their last words."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
    done = subprocess.run([*command, __file__, str(folder), *names], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, [l for l in done.stderr.splitlines() if l.startswith("[rank0]")][-12:]
    return [pickle.loads(Path(folder, f"{rank}.pickle").read_bytes()) for rank in range(world_size)]


def main() -> None:
    from vramlab.world import real_rank

    folder, *names = sys.argv[1:]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    found = {}
    with real_rank("cpu"):
        for name in names:
            found[name] = followed(recipe_of(name, world_size, rank))
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main()
