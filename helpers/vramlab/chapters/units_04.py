"""Source D's hundred linear layers under FSDP: wrapped as one unit, and each as a unit of its own (chapter 04)."""

from typing import Any

WRAPPINGS = ("one unit", "a unit each", "a unit each, kept")


def hundred(wrapping: str, layers: int = 100, width: int = 256, rows: int = 8) -> dict[str, Any]:
    """One rank's side of a real step of `layers` linear layers of `width` × `width` in fp32; for `sharding.launch`.

    `wrapping` is one of WRAPPINGS; "kept" is `reshard_after_forward=False`. Returns calls and bytes of each kind of
    collective in a steady step, the most bytes that were gathered at a time, the peak of forward and backward, and the loss.
    """
    import torch
    from torch import nn

    from ..collectives import Collectives
    from ..engines.fsdp import Unit, shard
    from ..history import History
    from ..recipe import Loop
    from ..report import CATEGORIES
    from ..tracked import run_tracked
    from ..tracker import Tracker
    from ..training import Training, train_step
    from ..world import real_rank

    with real_rank("cpu") as rank:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        for layer in model:
            nn.init.orthogonal_(layer.weight)  # what comes out of a hundred layers is as large as what went in
        parts = [Unit((layer,)) for layer in model] if wrapping != WRAPPINGS[0] else []
        shard(model, [*parts, Unit((model,))], reshard_after_forward=wrapping != WRAPPINGS[2])
        torch.manual_seed(rank)
        training = Training(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), foreach=False),
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
    gathered = history.splits[:, CATEGORIES.index("workspace")]
    return {
        "collectives": {kind: seen[:2] for kind, seen in counting.seen.items()},
        "gathered": int(gathered.max()),
        "peak": max(history.phases()[phase].peak.total for phase in ("forward", "backward")),
        "loss": loss,
    }
