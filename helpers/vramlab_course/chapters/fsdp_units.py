"""Chapter 04 on real ranks: a hundred linear layers, and the bytes sent in each phase.

The layers are source D's.
"""

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vramlab.training.engine import Training

WRAPPINGS = ("no sharding", "one unit", "a unit each")
LAYERS = 100
WIDTH = 256
ROWS = 8


def hundred(wrapping: str, layers: int = LAYERS) -> dict[str, Any]:
    """Train linear layers of WIDTH × WIDTH by FSDP, on a CPU rank by torchrun's environment.

    They are in fp32, the optimizer is AdamW. For `launch`.

    `wrapping` is one of WRAPPINGS. Returns, of a steady step: the most bytes gathered at a time,
    and the peak of forward and backward.
    """
    from vramlab.training.process_group import real_rank

    # Entered before torch builds anything: it makes the process group that FSDP shards over.
    with real_rank("cpu") as rank:
        return _steady_step(_built(wrapping, layers, rank))


def _steady_step(training: "Training") -> dict[str, Any]:
    from vramlab.tracking.history import INDEX, History
    from vramlab.tracking.tracked import run_tracked
    from vramlab.tracking.tracker import Tracker
    from vramlab.training.training import train_step

    # it makes the optimizer's states, so that the next one is a steady step
    train_step(training)
    tracker = run_tracked(training, Tracker("cpu"), 1, "cpu")
    history = History(tracker.log, tracker.marks)
    phases = history.phases()
    return {
        # FSDP's gathered parameters are counted as workspace: they are nobody's weights, gradients
        # or states.
        "gathered": int(history.splits[:, INDEX["workspace"]].max()),
        "peak": max(phases[phase].peak.total for phase in ("forward", "backward")),
    }


def _built(wrapping: str, layers: int, rank: int) -> "Training":
    import torch
    from torch import nn
    from vramlab.recipe.recipe import Loop
    from vramlab.training.engine import Training
    from vramlab.training.engines.fsdp import Unit, shard

    torch.manual_seed(0)
    # Equal layers without biases, so that a unit is a known part of the whole.
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    for layer in model:
        nn.init.orthogonal_(layer.weight)  # activations keep their size over a hundred layers
    if wrapping != "no sharding":
        units = []
        if wrapping == "a unit each":
            units = [Unit((layer,)) for layer in model]
        # inner units first: the outermost one has what no other has
        shard(model, [*units, Unit((model,))])
    # Each rank has rows of its own, as in data parallel training.
    torch.manual_seed(rank)
    return Training(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), foreach=False),
        batch=torch.randn(ROWS, WIDTH),
        device=torch.device("cpu"),
        multi_tensor=False,
        loop=Loop.named("plain"),
        # There is no model output with a `loss`, so it is said how to make one.
        loss_of=lambda outputs, batch: outputs.square().mean(),
    )


def preload(recipe: dict[str, Any] | None = None, **others: Any) -> None:
    """Import what `hundred`, or a step of `recipe`, needs before ranks are forked.

    For `launch`.
    """
    from vramlab.measurement import worker
    from vramlab.recipe.recipe import Recipe
    from vramlab.recipe.sharding import Sharding

    fields = recipe or {"model": "gpt2", "sharding": Sharding(3, 2)}
    worker.preload(Recipe(**fields))


def by_phase(recipe: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Run one rank of a steady step of `recipe`; returns phase to bytes of each kind of collective.

    For `launch`.
    """
    from vramlab.measurement.worker import on_rank
    from vramlab.recipe.recipe import Recipe
    from vramlab.training.process_group import real_rank
    from vramlab.training.training import train_step

    from vramlab_course.collectives import Collectives

    from ..training_on_rank import build_on_rank

    with real_rank("cpu") as rank:
        whole = Recipe(**recipe)
        training = build_on_rank(on_rank(whole, rank), "cpu")
        # The first step makes states, and DDP rebuilds its buckets after it.
        train_step(training)
        counting = Collectives()
        begun: list[tuple[str, Counter]] = []

        def so_far() -> Counter:
            return Counter({kind: seen.bytes for kind, seen in counting.seen.items()})

        with counting:
            train_step(training, lambda phase: begun.append((phase, so_far())))
        del training  # DDP's reducer has to go before the process group (pytorch issue 56297)
        sent: dict[str, Counter] = {}
        # a phase ends where the next one begins
        following = [*begun[1:], ("", so_far())]
        # With accumulation a phase begins several times, and its stretches are added.
        for (phase, before), (_, after) in zip(begun, following, strict=True):
            sent[phase] = sent.get(phase, Counter()) + (after - before)
    return sent
