"""Judges of chapter 07's exercises: what readers' functions do, over several inputs."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..answers import NOT_ANSWERED, Feedback, kind_of

SPLITS = [
    (12, 1, 1),
    (12, 1, 2),
    (13, 2, 1),
    (13, 2, 3),
    (3, 2, 2),
    (100, 4, 3),
]  # samples, ranks, workers


def judged(judge: Callable[[Any], str], right: str) -> Callable[[Any], Feedback]:
    """A judge of functions: `judge` says what is wrong with one, or ""."""

    def feedback(answer: Any) -> Feedback:
        if not callable(answer):
            return Feedback(False, f"A function was expected, not {kind_of(answer)}.")
        try:
            wrong = judge(answer)
        except Exception as error:
            return Feedback(False, f"Your function fails with {type(error).__name__}: {error}.")
        return NOT_ANSWERED if wrong is None else Feedback(not wrong, wrong or f"Right: {right}")

    return feedback


def _parts(answer: Callable) -> str | None:
    for count, ranks, workers in SPLITS:
        samples = list(range(count))
        parts = [
            answer(list(samples), rank, ranks, worker, workers)
            for rank in range(ranks)
            for worker in range(workers)
        ]
        if parts[0] is None or parts[0] is ...:
            return None
        parts = [list(part) for part in parts]
        given = [sample for part in parts for sample in part]
        where = f"with {count} samples, {ranks} ranks and {workers} workers each"
        twice = [sample for sample in samples if given.count(sample) > 1]
        if twice:
            return f"Sample {twice[0]} comes {given.count(twice[0])} times {where}."
        missing = set(samples) - set(given)
        if missing:
            return f"Sample {min(missing)} never comes {where}."
        # A training step waits for the slowest process, so shares may differ by one sample only.
        if max(map(len, parts)) - min(map(len, parts)) > 1:
            return (
                f"One process gets {max(map(len, parts))} samples and another "
                f"{min(map(len, parts))} {where}."
            )
    return ""


class _Meter(TorchDispatchMode):
    """Bytes in storages made inside: now, and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        # By storage: a view of an argument makes nothing new.
        old = {
            t.untyped_storage()._cdata
            for t in tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in old:
                storage = tensor.untyped_storage()
                old.add(storage._cdata)
                self._add(storage.nbytes())
                # Runs when the last tensor of the storage is gone.
                weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)


def trained(
    model: torch.nn.Module,
    optimizer: Any,
    batches: Sequence[torch.Tensor],
) -> tuple[list[float], float]:
    """What exercise 07.1's loop has to do: keeps numbers only."""
    history = []
    for batch in batches:
        output = model(batch)
        loss = (output - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(loss.item())
    return history, output.mean().item()


def leaky(
    model: torch.nn.Module,
    optimizer: Any,
    batches: Sequence[torch.Tensor],
) -> tuple[list, Any]:
    """Exercise 07.1's loop as it is given."""
    history = []
    last = []
    for batch in batches:
        output = model(batch)
        loss = (output - batch).square().mean()
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        # One of the faults to be found: each output holds its step's graph.
        last.append(output)
        history.append(loss)
    return history, last[-1].mean()


def half_repaired(
    model: torch.nn.Module,
    optimizer: Any,
    batches: Sequence[torch.Tensor],
) -> tuple[list, float]:
    """Numbers come back, and the outputs of all steps are still kept while it runs."""
    history, last = leaky(model, optimizer, batches)
    return [loss.item() for loss in history], last.item()


def _measured(loop: Callable, count: int) -> tuple[Any, list[torch.Tensor], _Meter]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 256),
        torch.nn.GELU(),
        torch.nn.Linear(256, 32),
    )
    batches = list(torch.randn(count, 64, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter = _Meter()
    with meter:
        result = loop(model, optimizer, batches)
    return result, [p.detach() for p in model.parameters()], meter


def _repaired(answer: Callable) -> str | None:
    meters = []
    # Two lengths, because what is kept grows with the steps.
    for count in (2, 6):
        returned, weights, meter = _measured(answer, count)
        if returned is None or returned is ...:
            return None
        wanted, reference, _ = _measured(trained, count)
        history, last = returned
        numbers = [torch.as_tensor(number).detach() for number in (*history, last)]
        losses, mean = wanted
        if not torch.allclose(torch.stack(numbers), torch.tensor([*losses, mean])):
            return (
                "It returns other numbers than before: the losses of all steps, and the mean "
                "of the last output."
            )
        both = zip(weights, reference, strict=True)
        if not all(torch.allclose(a, b, atol=1e-6) for a, b in both):
            return "The weights after training are others than before."
        # The model and the batches were made before, so whatever is left belongs to the loop.
        if meter.now:
            return (
                f"After {count} steps {meter.now:,} bytes of tensors are still alive, held by "
                f"what you return."
            )
        meters.append(meter)
    # A few numbers more may be kept, no tensors.
    if meters[1].most > 1.05 * meters[0].most:
        return (
            f"Six steps take {meters[1].most / meters[0].most:.1f} times the memory of two: "
            f"something is kept."
        )
    return ""


parts_judged = judged(_parts, "every sample once, whatever the number of processes.")
repair_judged = judged(_repaired, "the same training, and nothing stays.")
