"""A hundred linear layers on real ranks: one FSDP unit for all against one for each (chapter 04).

    torchrun --standalone --nproc_per_node 2 -m vramlab.chapters.wrap_units

Each rank is a CPU process over gloo. Prints one line of JSON.
"""

import argparse
import json
import os


def experiment(layers: int = 100, width: int = 256) -> dict[str, int]:
    """Trains two steps of each wrapping. Needs a process group; returns what this rank saw, in bytes.

    `all` are the weights, `shards` the rank's own; `one_unit` and `unit_each` the most that was gathered, or in buffers
    on its way, at any moment (workspace); and the same with `_peak`, of everything at once.
    """
    import torch

    from ..engines.fsdp import Unit, shard
    from ..history import INDEX, History
    from ..tracked import run_tracked
    from ..tracker import Tracker
    from ..training import Training

    found = {"all": layers * width * width * 4}
    for name in ("one_unit", "unit_each"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
        parts = [Unit((layer,)) for layer in model] if name == "unit_each" else []
        shard(model, [*parts, Unit((model,))])
        training = Training(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
            batch=torch.randn(4, width),
            device=torch.device("cpu"),
            multi_tensor=False,
            loss_of=lambda outputs, batch: outputs.square().mean(),
        )
        tracker = run_tracked(training, Tracker("cpu"), 2, "cpu")
        history = History(tracker.log, tracker.marks)
        found["shards"] = int(history.splits[:, INDEX["parameters"]].max())
        found[name] = int(history.splits[:, INDEX["workspace"]].max())
        found[name + "_peak"] = int(history.live.max())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--width", type=int, default=256, help="inputs and outputs of each layer")
    given = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --standalone --nproc_per_node 2 -m vramlab.chapters.wrap_units")
    from ..world import real_rank

    with real_rank("cpu") as rank:
        found = experiment(given.layers, given.width)
        if rank == 0:
            print(json.dumps(found))


if __name__ == "__main__":
    main()
