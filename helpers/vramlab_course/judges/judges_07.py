"""Judges of chapter 07's exercises: what readers' functions do, over several inputs."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from ..answers import NOT_ANSWERED, Feedback, kind_of

SPLITS = [
    (12, 1, 1),
    (12, 1, 2),
    (13, 2, 1),
    (13, 2, 3),
    (3, 2, 2),
    (100, 4, 3),
]  # samples, ranks, workers


def covered(intervals: Sequence[tuple[float, float]]) -> float:
    """Length of the union of intervals (start, end)."""
    total = 0.0
    done = float("-inf")
    for start, end in sorted(intervals):
        # Only what lies beyond the end so far is new.
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
    """Bytes in storages made inside: now, and at most.

    Beyond `limit` an operator runs out of memory.
    """

    def __init__(self, limit: float = float("inf")) -> None:
        super().__init__()
        self.now = self.most = 0
        self.limit = limit

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
                # Before it is counted, so that what is refused is not held either.
                if self.now + storage.nbytes() > self.limit:
                    raise torch.OutOfMemoryError(f"{storage.nbytes():,} bytes beside {self.now:,}")
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


def leaky(
    model: torch.nn.Module,
    optimizer: Any,
    batches: Sequence[torch.Tensor],
) -> tuple[list, Any]:
    """Exercise 07.3's loop as it is given."""
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


def _llama(checkpointed: bool) -> torch.nn.Module:
    """A Llama of two narrow layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, num_hidden_layers=2, use_cache=False, **sizes)
    ).train()
    if checkpointed:
        # its name since transformers 5.23, and before
        enable = (
            getattr(model, "activation_checkpointing_enable", None)
            or model.gradient_checkpointing_enable
        )
        enable()
    return model


def _state(model: torch.nn.Module) -> tuple[bool, list[bool]]:
    """Whether a model trains, and which of its modules are checkpointed."""
    return model.training, [
        getattr(module, "gradient_checkpointing", False) for module in model.modules()
    ]


def counted(
    model: torch.nn.Module,
    batch: torch.Tensor,
    seconds: float,
    peak: float,
) -> float:
    """Exercise 07.4's function as it is given: what runs, recomputation included."""
    with FlopCounterMode(display=False) as counter:
        model(input_ids=batch, labels=batch).loss.backward()
    return counter.get_total_flops() / seconds / peak


def utilisation(
    model: torch.nn.Module,
    batch: torch.Tensor,
    seconds: float,
    peak: float,
) -> float:
    """The operations that a step needs over what the card could do in these seconds."""
    model.eval()  # in which nothing is checkpointed; the model has no dropout
    found = counted(model, batch, seconds, peak)
    model.train()
    return found


def _utilised(answer: Callable) -> str | None:
    batch = torch.arange(24).reshape(2, 12)
    for checkpointed in (True, False):
        model = _llama(checkpointed)
        before = _state(model)
        returned = answer(model, batch, 0.5, 1e9)
        if returned is None or returned is ...:
            return None
        right = utilisation(_llama(checkpointed), batch, 0.5, 1e9)
        off = float(returned) / right
        how = "with" if checkpointed else "without"
        # Percent would be a hundred times the share.
        if abs(off / 100 - 1) < 1e-6:
            return "A fraction was expected, not percent."
        if checkpointed:
            unchanged = counted(_llama(True), batch, 0.5, 1e9) / right
            # The function as it is given, told before the general sentence.
            if abs(off - unchanged) < 1e-6:
                return (
                    f"With checkpointing it is {off:.2f} times the share: what is computed again "
                    f"still counts."
                )
        if abs(off - 1) > 1e-6:
            return f"Not right {how} checkpointing: it is {off:.3g} times the share."
        # An answer may switch the model to count, but the training goes on with it.
        if _state(model) != before:
            return (
                f"The model came in training, {how} checkpointing, and goes on otherwise: "
                f"leave it as it was."
            )
    return ""


def retried(step: Callable, batch: torch.Tensor) -> list:
    """What exercise 07.5's function has to do: it tries again when the exception is gone."""
    try:
        return [step(batch)]
    except torch.OutOfMemoryError:
        if len(batch) == 1:
            raise
    return [found for half in batch.chunk(2) for found in retried(step, half)]


def retried_inside(step: Callable, batch: torch.Tensor) -> list:
    """Exercise 07.5's function as it is given.

    It tries again while the exception holds the failed step.
    """
    try:
        return [step(batch)]
    except torch.OutOfMemoryError:
        if len(batch) == 1:
            raise
        return [found for half in batch.chunk(2) for found in retried_inside(step, half)]


# Three tensors as large as the batch are alive at once at its end.
def _step(batch: torch.Tensor) -> float:
    first = batch * 2
    second = first + 1
    third = second * first
    return third.sum().item()


def _smaller(answer: Callable) -> str | None:
    row = 1 << 16  # bytes
    for rows, fits in ((8, 8), (8, 4), (12, 3)):  # how many rows a step takes at most
        # Four bytes a number; small whole numbers, so that sums are exact in any order.
        batch = torch.arange(rows * row / 4).reshape(rows, -1) % 5
        with _Meter(limit=3 * fits * row + 8):  # a step keeps three tensors, and a number
            try:
                returned = answer(_step, batch)
            except torch.OutOfMemoryError:
                return (
                    f"{rows} rows, of which {fits} fit: it dies, although halves would fit "
                    f"once the failed step is gone."
                )
        if returned is None or returned is ...:
            return None
        tried = rows
        while tried > fits:
            tried //= 2
        wanted = [_step(part) for part in batch.split(tried)]
        if list(returned) != wanted:
            return (
                f"{rows} rows, of which {fits} fit: {len(wanted)} results of {tried} rows "
                f"each were expected, in order."
            )
    try:
        with _Meter(limit=1000):
            answer(_step, batch[:1])
    except torch.OutOfMemoryError:
        return ""
    return (
        "A single row that does not fit has to raise the OutOfMemoryError: there is nothing "
        "left to halve."
    )


parts_judged = judged(_parts, "every sample once, whatever the number of processes.")
repair_judged = judged(_repaired, "the same training, and nothing stays.")
mfu_judged = judged(
    _utilised,
    "what the model needs counts, however often the machine computes it.",
)
retry_judged = judged(
    _smaller,
    "the exception holds the failed step's tensors until its block is left.",
)
