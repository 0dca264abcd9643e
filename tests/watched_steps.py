"""Two steps of a module for real on this CPU, watched."""

from vramlab import watch
from vramlab.training.training import call


def measured(model, batch, loss, optimizer):
    """Two steps of the loop "plain", for real, on this CPU."""
    kept = {}

    def evaluate():
        optimizer.zero_grad()
        kept["outputs"] = call(model, batch)
        value = loss(kept["outputs"], batch)
        kept["loss"] = None
        value.backward()
        kept["loss"] = value.detach()
        return value

    with watch(model, batch=batch) as seen:
        for _ in range(2):
            evaluate()
            optimizer.step()
    return seen.report()
