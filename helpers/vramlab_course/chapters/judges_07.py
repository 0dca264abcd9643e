"""Judges of chapter 07's exercises: what readers' functions do, over several inputs."""

import copy
import random
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from vramlab.hardware.allocator import Allocator
from vramlab.report.report import MiB

from ..answers import NOT_ANSWERED, Feedback, kind_of

SPLITS = [(12, 1, 1), (12, 1, 2), (13, 2, 1), (13, 2, 3), (3, 2, 2), (100, 4, 3)]  # samples, ranks, workers
MOST_PADDING = 1.2  # tokens computed for each real one


def covered(intervals: Sequence[tuple[float, float]]) -> float:
    """Length of the union of intervals (start, end)."""
    total, done = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0, end - max(start, done))
        done = max(done, end)
    return total


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
            answer(list(samples), rank, ranks, worker, workers) for rank in range(ranks) for worker in range(workers)
        ]
        if parts[0] is None or parts[0] is ...:
            return None
        parts = [list(part) for part in parts]
        given, where = (
            [sample for part in parts for sample in part],
            f"with {count} samples, {ranks} ranks and {workers} workers each",
        )
        if twice := [sample for sample in samples if given.count(sample) > 1]:
            return f"Sample {twice[0]} comes {given.count(twice[0])} times {where}."
        if missing := set(samples) - set(given):
            return f"Sample {min(missing)} never comes {where}."
        if max(map(len, parts)) - min(map(len, parts)) > 1:
            return f"One process gets {max(map(len, parts))} samples and another {min(map(len, parts))} {where}."
    return ""


class _Meter(TorchDispatchMode):
    """Bytes in storages made inside: now, and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        old = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in old:
                storage = tensor.untyped_storage()
                old.add(storage._cdata)
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)


def trained(model: torch.nn.Module, optimizer: Any, batches: Sequence[torch.Tensor]) -> tuple[list[float], float]:
    """What exercise 07.3's loop has to do: keeps numbers only."""
    history = []
    for batch in batches:
        output = model(batch)
        loss = (output - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(loss.item())
    return history, output.mean().item()


def leaky(model: torch.nn.Module, optimizer: Any, batches: Sequence[torch.Tensor]) -> tuple[list, Any]:
    """Exercise 07.3's loop as it is given."""
    history, last = [], []
    for batch in batches:
        output = model(batch)
        loss = (output - batch).square().mean()
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        last.append(output)
        history.append(loss)
    return history, last[-1].mean()


def half_repaired(model: torch.nn.Module, optimizer: Any, batches: Sequence[torch.Tensor]) -> tuple[list, float]:
    """Numbers come back, and the outputs of all steps are still kept while it runs."""
    history, last = leaky(model, optimizer, batches)
    return [loss.item() for loss in history], last.item()


def _measured(loop: Callable, count: int) -> tuple[Any, list[torch.Tensor], _Meter]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 32))
    batches, optimizer = list(torch.randn(count, 64, 32)), torch.optim.SGD(model.parameters(), lr=0.1)
    meter = _Meter()
    with meter:
        result = loop(model, optimizer, batches)
    return result, [p.detach() for p in model.parameters()], meter


def _repaired(answer: Callable) -> str | None:
    meters = []
    for count in (2, 6):
        found, weights, meter = _measured(answer, count)
        if found is None or found is ...:
            return None
        wanted, reference, _ = _measured(trained, count)
        history, last = found
        numbers = torch.stack([torch.as_tensor(n).detach() for n in [*history, last]])
        if not torch.allclose(numbers, torch.tensor([*wanted[0], wanted[1]])):
            return "It returns other numbers than before: the losses of all steps, and the mean of the last output."
        if not all(torch.allclose(a, b, atol=1e-6) for a, b in zip(weights, reference, strict=True)):
            return "The weights after training are others than before."
        if meter.now:
            return f"After {count} steps {meter.now:,} bytes of tensors are still alive, held by what you return."
        meters.append(meter)
    if meters[1].most > 1.05 * meters[0].most:
        return f"Six steps take {meters[1].most / meters[0].most:.1f} times the memory of two: something is kept."
    return ""


def _networks() -> list[tuple[torch.nn.Module, torch.Tensor]]:
    torch.manual_seed(0)
    linear = torch.nn.Linear
    small, deep = (
        torch.nn.Sequential(linear(16, 8), linear(8, 1)),
        torch.nn.Sequential(*(linear(12, 12) for _ in range(5))),
    )
    looked_up = torch.nn.Sequential(torch.nn.Embedding(50, 16), linear(16, 64), torch.nn.GELU(), linear(64, 50))
    return [(small, torch.randn(32, 16)), (deep, torch.randn(7, 12)), (looked_up, torch.randint(50, (3, 9)))]


def utilisation(
    model: torch.nn.Module, batch: torch.Tensor, seconds: float, peak: float, forward: bool = False
) -> float:
    """The operations of a step, or of its forward pass, over what the card could do in these seconds."""
    with FlopCounterMode(display=False) as counter:
        loss = model(batch).mean()
        if not forward:
            loss.backward()
    return counter.get_total_flops() / seconds / peak


def _utilised(answer: Callable) -> str | None:
    for network, batch in _networks():
        found = answer(copy.deepcopy(network), batch, 0.5, 1e9)
        if found is None or found is ...:
            return None
        both, one = (utilisation(network, batch, 0.5, 1e9, only) for only in (False, True))
        weights = sum(p.numel() for p in network.parameters() if p.dim() == 2)
        tokens = batch.numel() if batch.dtype == torch.int64 else len(batch)
        known = {
            both: "",
            100 * both: "A fraction was expected, not percent.",
            one: "That is the forward pass alone.",
            6 * weights * tokens / 0.5e9: "Not every weight takes part in three products: let PyTorch count.",
        }
        said = (text for right, text in known.items() if abs(float(found) - right) < 1e-6 * right)
        if wrong := next(
            said, f"Not right for {len(network)} layers: it is {float(found) / both:.3g} times the share."
        ):
            return wrong
    return ""


def _texts(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [max(16, min(1024, round(draw.lognormvariate(5.5, 0.7)))) for _ in range(count)]


def _reserved(lengths: Sequence[int], order: Sequence[Sequence[int]]) -> list[int]:
    """Bytes reserved after each step: three tensors that grow with the padded tokens."""
    allocator, reserved = Allocator(), []
    for batch in order:
        tokens = len(batch) * max(lengths[i] for i in batch)
        for block in [allocator.malloc(tokens * MiB // share) for share in (2, 4, 8)]:
            allocator.free(block)
        reserved.append(allocator.reserved)
    return reserved


def _calm(answer: Callable) -> str | None:
    for seed, count, size in ((0, 96, 8), (1, 210, 6), (2, 64, 4)):
        lengths = _texts(seed, count)
        orders = [answer(list(lengths), size, draw) for draw in (5, 5, 6)]
        if orders[0] is None or orders[0] is ...:
            return None
        first, again, other = ([list(batch) for batch in order] for order in orders)
        if sorted(i for batch in first for i in batch) != list(range(count)):
            return "Each text has to come once: the batches hold positions in `lengths`."
        if sorted(map(len, first))[1:] != [size] * (len(first) - 1):
            return f"Batches of {size} texts were expected; only one may have fewer."
        if first != again or first == other:
            return "The same seed has to give the same batches, another seed others."
        padded = sum(len(batch) * max(lengths[i] for i in batch) for batch in first) / sum(lengths)
        if padded > MOST_PADDING:
            return f"{padded:.2f} tokens are computed for each real one, and {MOST_PADDING} are allowed."
        longest = [max(lengths[i] for i in batch) for batch in first[1:]]
        rises = sum(a < b for a, b in pairwise(longest)) / (len(longest) - 1)
        if not 0.2 < rises < 0.8:
            return "Long and short batches have to come in a mixed order, or the model learns from one kind at a time."
        reserved = _reserved(lengths, first)
        if reserved[-1] != reserved[0]:
            return f"Reserved grows by {(reserved[-1] - reserved[0]) / MiB:,.0f} MiB after the first step."
    return ""


parts_judged = judged(_parts, "every sample once, whatever the number of processes.")
repair_judged = judged(_repaired, "the same training, and nothing stays.")
mfu_judged = judged(_utilised, "the first layer needs no gradient of its input, which 6 N overlooks.")
batches_judged = judged(_calm, "little padding, mixed lengths, and reserved stays where the first step put it.")
