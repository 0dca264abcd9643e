"""Two steps of a module for real on this CPU, watched."""

from vramlab import watch
from vramlab.training.training import call, needs_closure


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
            if needs_closure(optimizer):
                optimizer.step(evaluate)
            else:
                evaluate()
                optimizer.step()
    return seen.report()
