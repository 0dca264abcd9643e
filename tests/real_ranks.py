"""Real ranks of small recipes, started by torchrun: what each allocates, computes and sends, written to a folder.

    torchrun --standalone --nproc_per_node 2 tests/real_ranks.py FOLDER NAME NAME …

NAME is a key of RECIPES; the world's size replaces the recipe's. `run` starts it from a test and reads the folder.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Iterable
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
    "llama, offloaded": ("llama", {}, {**FSDP3, "offload": "parameters"}, {"gradient_accumulation_steps": 2}),
    "gpt2, offloaded, plain loop, bf16-mixed": (
        "gpt2",
        {},
        {**FSDP3, "offload": "parameters"},
        {"loop": "plain", "precision": "bf16-mixed"},
    ),
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


# those whose losses and gradients are held against one process's
LEARNED = (
    "llama, stage 3",
    "gpt2, tied, stage 2, plain loop",
    "gpt2, sizes that nothing divides",
    "llama, accumulating",
    "llama, checkpointing",
    "llama, LoRA",
    "llama, offloaded",
    "llama, DDP",
    "gpt2, DDP, accumulating",
    "gpt2, ZeRO-1, plain loop",
    "llama, bf16-mixed",
)


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


def learned(recipe: Recipe, steps: int = 3) -> dict[str, Any]:
    """Losses of the global batch and full gradients, step by step, of a rank or of one process with all its batches.

    Everybody begins with equal weights, and rank r has the r-th part of each micro-batch.
    """
    from torch.distributed.tensor import DTensor
    from vramlab.training import build, make_batch, train_step

    sharding, alone = recipe.sharding, dist_rank() is None
    world_size = sharding.world_size
    whole = recipe.replace(batch_size=recipe.batch_size * world_size, sharding=None)
    torch.manual_seed(0)
    training = build(whole if alone else recipe, "cpu", target="cpu")
    for module in training.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # ranks would drop other channels than one process
    torch.manual_seed(1)
    own = slice(None) if alone else slice(dist_rank() * recipe.batch_size, (dist_rank() + 1) * recipe.batch_size)

    def batch() -> dict[str, torch.Tensor]:
        return {name: values[own] for name, values in make_batch(whole, "cpu").items()}

    def full(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()

    losses, gradients = [], []

    def on_phase(name: str) -> None:
        if name == "step":
            named = ((n.removeprefix("module."), p) for n, p in training.model.named_parameters())
            gradients.append({n: full(p.grad) for n, p in named if p.grad is not None})

    for _ in range(steps):
        training.batch, training.further = batch(), [batch() for _ in training.further]
        losses.append(float(train_step(training, on_phase)) * training.accumulation)
    weights = {n.removeprefix("module."): full(p) for n, p in training.model.named_parameters()}
    return {"losses": losses, "gradients": gradients, "weights": weights}


# those that the allocator itself is asked about; a first step that makes DDP's buckets anew has no steady second one
WITNESSED = ("llama, stage 3", "llama, one unit", "llama, DDP")


def witnesses(recipe: Recipe) -> dict[str, Any]:
    """Peak and end of each phase by the allocator's own events, and by the tracker's (`test_simulate_witness.py`).

    The profiler does not see what gloo's thread frees, so in each of FSDP's transfers that thread is waited for before
    the transfer's end: it does one thing after the other, and has let go of the last when another is done.
    """
    import torch.distributed as dist
    from pytest import MonkeyPatch
    from test_simulate_witness import tracked, witnessed

    another = torch.zeros(1)

    def waiting(transfer):
        def transferred(*args, **options):
            work = transfer(*args, **{**options, "async_op": True})
            dist.all_reduce(another)
            work.wait()

        return transferred

    with MonkeyPatch.context() as patch:
        for name in ("all_gather_single", "reduce_scatter_single"):
            patch.setattr(dist, name, waiting(getattr(dist, name)))
        seen = witnessed(recipe)
    return {"witnessed": seen, "tracked": tracked(recipe)}


def hundred_layers() -> dict[str, dict[str, Any]]:
    """By wrapping, what a rank has of a hundred layers: all one unit, or each its own."""
    from vramlab.chapters.units_04 import wrapped

    return {wrapping: wrapped(wrapping, layers=100, width=32, rows=4) for wrapping in ("one unit", "a unit each")}


def dist_rank() -> int | None:
    return int(os.environ["RANK"]) if "RANK" in os.environ else None


def run(
    folder: Path, names: Iterable[str], world_size: int, script: str = __file__, timeout: float = 600
) -> list[dict[str, dict[str, Any]]]:
    """By rank and name, what `world_size` real processes of `script` leave. Raises AssertionError with their last words."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
    done = subprocess.run([*command, script, str(folder), *names], capture_output=True, text=True, timeout=timeout)
    said = [line for line in done.stderr.splitlines() if line.startswith("[rank0]")]
    assert done.returncode == 0, said[-12:]
    return [pickle.loads(Path(folder, f"{rank}.pickle").read_bytes()) for rank in range(world_size)]


def main() -> None:
    from vramlab.world import real_rank

    folder, *names = sys.argv[1:]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    found = {}
    with real_rank("cpu"):
        for name in names:
            recipe = recipe_of(name, world_size, rank)
            found[name] = followed(recipe) | (learned(recipe) if name in LEARNED else {})
            found[name] |= witnesses(recipe) if name in WITNESSED else {}
        found["units"] = hundred_layers()
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main()
