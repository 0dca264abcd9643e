"""Chapter 04's small experiments on real ranks: source D's hundred linear layers, and who sends what when."""

from typing import Any

WRAPPINGS = ("one unit", "a unit each", "a unit each, kept")


def hundred(wrapping: str, layers: int = 100, width: int = 256, rows: int = 8) -> dict[str, Any]:
    """`wrapped` on one of real CPU ranks; for `sharding.launch`."""
    from vramlab.training.process_group import real_rank

    with real_rank("cpu"):
        return wrapped(wrapping, layers, width, rows)


def wrapped(wrapping: str, layers: int, width: int, rows: int) -> dict[str, Any]:
    """One rank's side of a real step of `layers` linear layers of `width` × `width` in fp32. Needs a process group.

    `wrapping` is one of WRAPPINGS; "kept" is `reshard_after_forward=False`. Returns calls and bytes of each kind of
    collective in a steady step, the bytes of the rank's own shards, the most that was gathered at a time, the peak of
    forward and backward, and the loss.
    """
    import torch
    from torch import nn
    from vramlab.recipe.recipe import Loop
    from vramlab.tracking.collectives import Collectives
    from vramlab.tracking.history import INDEX, History
    from vramlab.tracking.tracked import run_tracked
    from vramlab.tracking.tracker import Tracker
    from vramlab.training.engine import Training
    from vramlab.training.engines.fsdp import Unit, shard
    from vramlab.training.process_group import rank
    from vramlab.training.training import train_step

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    for layer in model:
        nn.init.orthogonal_(layer.weight)  # what comes out of a hundred layers is as large as what went in
    parts = [Unit((layer,)) for layer in model] if wrapping != WRAPPINGS[0] else []
    shard(model, [*parts, Unit((model,))], reshard_after_forward=wrapping != WRAPPINGS[2])
    torch.manual_seed(rank())
    training = Training(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), foreach=False),
        batch=torch.randn(rows, width),
        device=torch.device("cpu"),
        multi_tensor=False,
        loop=Loop.named("plain"),
        loss_of=lambda outputs, batch: outputs.square().mean(),
    )
    train_step(training)
    counting = Collectives()
    with counting:
        loss = float(train_step(training))
    tracker = run_tracked(training, Tracker("cpu"), 1, "cpu")
    history = History(tracker.log, tracker.marks)
    phases = history.phases()
    return {
        "collectives": {kind: seen[:2] for kind, seen in counting.seen.items()},
        "shards": int(history.splits[:, INDEX["parameters"]].max()),
        "gathered": int(history.splits[:, INDEX["workspace"]].max()),
        "peak": max(phases[phase].peak.total for phase in ("forward", "backward")),
        "loss": loss,
    }


def by_phase(recipe: dict[str, Any]) -> dict[str, dict[str, int]]:
    """One rank's side of a steady step of `recipe`: phase to the bytes of each kind of collective; for `launch`."""
    from vramlab.measurement.worker import on_rank
    from vramlab.recipe.recipe import Recipe
    from vramlab.tracking.collectives import Collectives
    from vramlab.training.process_group import real_rank
    from vramlab.training.training import train_step

    from ..ranks import build_on_rank

    with real_rank("cpu") as rank:
        whole = Recipe(**recipe)
        training = build_on_rank(on_rank(whole, rank), "cpu")
        train_step(training)
        counting = Collectives()
        begun: list[tuple[str, dict[str, int]]] = []

        def so_far() -> dict[str, int]:
            return {kind: seen.bytes for kind, seen in counting.seen.items()}

        with counting:
            train_step(training, lambda name: begun.append((name, so_far())))
        del training  # DDP's reducer has to go before the process group (pytorch issue 56297)
        found: dict[str, dict[str, int]] = {}
        for (name, before), (_, after) in zip(begun, [*begun[1:], ("", so_far())], strict=True):
            phase = found.setdefault(name, {})
            for kind, size in after.items():
                if size > before.get(kind, 0):
                    phase[kind] = phase.get(kind, 0) + size - before.get(kind, 0)
    return found
