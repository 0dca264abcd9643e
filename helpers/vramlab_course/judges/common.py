"""Functions that the exercises' expressions call.

They are judges of readers' functions, and short algorithms.
"""

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from vramlab import Recipe, find_gpu, predict

from ..answers import NOT_ANSWERED, Feedback, Unclear, kind_of

SPLITS = [(12, 1), (12, 2), (12, 3), (13, 4), (3, 5), (100, 7), (0, 2)]  # samples, workers


def trained_until(moment: str, dtype: str = "float32") -> tuple[Any, Any]:
    """A model of 1,000 weights and its AdamW: "built", after "backward", or "updated"."""
    import torch

    model = torch.nn.Linear(
        100,
        10,
        bias=False,
        dtype=getattr(torch, dtype),
    )
    optimizer = torch.optim.AdamW(model.parameters())
    if moment != "built":
        model(torch.ones(1, 100, dtype=model.weight.dtype)).sum().backward()
    if moment == "updated":
        optimizer.step()
        optimizer.state[model.weight]["updates"] = 1  # some optimizers keep numbers, too
    return model, optimizer


def tied_model() -> tuple[Any, Any]:
    """A model of 200 fp32 weights that two layers share, with a buffer of 50 numbers, its AdamW."""
    import torch

    model = torch.nn.Sequential(torch.nn.Embedding(10, 20), torch.nn.Linear(20, 10, bias=False))
    model[1].weight = model[0].weight
    model.register_buffer("positions", torch.ones(50))
    return model, torch.optim.AdamW(model.parameters())


def frozen_model() -> tuple[Any, Any]:
    """A model of 2,000 fp32 weights, the first 1,000 of them frozen, and its AdamW."""
    import torch

    model = torch.nn.Sequential(
        torch.nn.Linear(100, 10, bias=False),
        torch.nn.Linear(10, 100, bias=False),
    )
    model[0].requires_grad_(False)
    return model, torch.optim.AdamW(model[1].parameters())


def largest_batch(model: str, card: str, seq_len: int, part: str = "value", **how: Any) -> int:
    """The largest batch whose process or peak is within the card; 0 for none.

    `part` is an end of the process, "low", "value" or "high", or "peak".

    `how` are arguments of predict in place of the right ones: mistakes that readers make.
    """
    total = find_gpu(card).total
    recipe = Recipe(model, 1, seq_len, "fp16-mixed")
    how = {"gpu": card, "expandable_segments": True} | how

    def fits(batch: int) -> bool:
        report = predict(recipe.replace(batch_size=batch), **how)
        return (report.peak.total if part == "peak" else getattr(report.process, part)) <= total

    low = 0
    high = 1
    # Doubled until one no longer fits, then halved between the two.
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def sharded(answer: Callable[[list, int, int], Any]) -> Feedback:
    """Whether `answer(samples, worker, workers)` gives each sample to exactly one worker."""
    for count, workers in SPLITS:
        samples = list(range(count))
        parts = []
        for worker in range(workers):
            # Each worker gets a list of its own, which it may change.
            part = called(answer, list(samples), worker, workers)
            parts.append(list(part))
        wrong = _wrong_shards(samples, parts)
        if wrong:
            return Feedback(False, f"With {count} samples and {workers} workers {wrong}.")
    return Feedback(True, "Right: none twice, none missing, whatever the number of workers.")


def _wrong_shards(samples: list[int], parts: list[list[int]]) -> str:
    seen = [sample for part in parts for sample in part]
    workers = len(parts)
    # The typical mistake, told before its consequences.
    if len(seen) == len(samples) * workers and samples and workers > 1:
        return f"every worker gives all samples: each comes {workers} times"
    twice = sorted({sample for sample in seen if seen.count(sample) > 1})
    if twice:
        return f"sample {twice[0]} comes more than once"
    missing = sorted(set(samples) - set(seen))
    if missing:
        return f"sample {missing[0]} never comes"
    counts = [len(part) for part in parts]
    share = math.ceil(len(samples) / workers)
    # More than the share of one worker between the most and the least.
    if max(counts) - min(counts) > share:
        return "one worker does far more than another"
    return ""


def random_tensor(*shape: int, low: int | None = None, high: int = 2):
    """A tensor of `shape`, the same in every call.

    It has normal numbers, or int32 from `low` to below `high`.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    if low is None:
        return torch.randn(shape, generator=generator)
    return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)


def same_tensor(
    answer: Any,
    reference: Callable,
    cases: Callable,
    mistakes: Sequence,
    right: str,
    together: str | None = None,
) -> Feedback:
    """Whether a function gives the tensor of `reference` in all `cases`.

    `mistakes` are pairs of function and text. `together` is said where the function makes a tensor
    as large as all those of a list that it is given.
    """
    import torch

    from ..chapters.chapter_10 import largest_made

    for case in cases():
        # Copies go to the reader's function, so that a change can be seen against the originals.
        given = {
            name: value.clone() if hasattr(value, "clone") else value
            for name, value in case.items()
        }
        returned = called(answer, *given.values())
        expected = reference(**case)
        if not isinstance(returned, torch.Tensor) or returned.shape != expected.shape:
            size = " × ".join(map(str, expected.shape))
            return Feedback(
                False,
                f"A tensor of {size} was expected, "
                f"not {getattr(returned, 'shape', kind_of(returned))}.",
            )
        # Operators in place would change the caller's tensors.
        changed = [
            name
            for name, value in case.items()
            if hasattr(value, "clone") and not value.equal(given[name])
        ]
        if changed:
            return Feedback(
                False,
                f"Your function changes the {changed[0]} that it was given: make a new one.",
            )
        if not torch.allclose(
            returned.to(expected.dtype),
            expected,
            rtol=1e-4,
            atol=1e-5,
        ):
            # Generators: mistakes are only computed for an answer that is wrong, up to the first
            # that fits.
            wrong = ((function(**case), text) for function, text in mistakes)
            known = (
                text
                for w, text in wrong
                if w.shape == returned.shape and torch.allclose(returned, w, atol=1e-5)
            )
            return Feedback(False, next(known, "The shape is right, the numbers are not."))
        if together:
            made = largest_made(lambda given=given: answer(*given.values()))
            lists = [value for value in given.values() if isinstance(value, list)]
            for parts in lists:
                # A list of one tensor is together already.
                if len(parts) > 1 and made >= sum(part.nbytes for part in parts):
                    return Feedback(False, together)
    return Feedback(True, f"Right: {right}")


def called(answer: Any, *arguments: Any, **named: Any) -> Any:
    """What a reader's function returns. Raises Unclear."""
    if not callable(answer):
        raise Unclear(f"A function was expected, not {kind_of(answer)}.")
    try:
        returned = answer(*arguments, **named)
    except Exception as error:
        raise Unclear(f"Your function fails with {type(error).__name__}: {error}.") from None
    if returned is None or returned is ...:
        raise Unclear(str(NOT_ANSWERED))
    return returned


def slim_history(answer: Callable[[Any, list], Any]) -> Feedback:
    """Whether `answer(model, batches)` lists the last token's logits of each batch.

    It must keep nothing else alive.
    """
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50))
    batches = [torch.randint(50, (2, tokens)) for tokens in (7, 8, 9)]
    returned = answer(model, batches)
    if not isinstance(returned, list) or len(returned) != len(batches):
        return Feedback(
            False,
            f"A list of {len(batches)} tensors was expected for {len(batches)} batches.",
        )
    for tensor, ids in zip(returned, batches, strict=True):
        # The same model again, because the answer is held against numbers and not a text.
        right = model(ids)[:, -1]
        if getattr(tensor, "shape", None) != right.shape or not tensor.allclose(right):
            return Feedback(False, "The numbers are not those of each batch's last token.")
        # A slice of the logits keeps all of them alive.
        held = tensor.untyped_storage().nbytes()
        if held > tensor.nbytes:
            return Feedback(
                False,
                f"Each element keeps {held // tensor.nbytes} times its own bytes alive.",
            )
        if tensor.grad_fn:
            return Feedback(
                False,
                "Each element remembers how it was made, and so keeps what backward would need.",
            )
    return Feedback(True, "Right: the list grows by what it shows.")


def updates_in_backward(answer: Callable[[Any, float], Any]) -> Feedback:
    """Whether after `answer(model, lr)` backward alone trains by SGD.

    Only one gradient may be alive at a time.
    """
    import torch

    # Two depths and rates, so that nothing is right by chance.
    for lr, *widths in ((0.1, 4, 6, 3), (0.02, 5, 5, 5, 5)):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
        model = torch.nn.Sequential(*layers)
        x = torch.randn(8, widths[0])
        most = 0
        # The same weights, trained in the usual way beside it.
        plain = copy.deepcopy(model)

        # Called when a gradient is complete, before the reader's own hook, which is registered
        # later.
        def count(_, model=model):
            nonlocal most
            most = max(most, sum(p.grad is not None for p in model.parameters()))

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(count)
        answer(model, lr)
        sgd = torch.optim.SGD(plain.parameters(), lr)
        for step in range(2):
            model(x).square().mean().backward()
            plain(x).square().mean().backward()
            sgd.step()
            sgd.zero_grad()
            # Before the weights: a gradient that is left adds to the next step's.
            if any(p.grad is not None for p in model.parameters()):
                return Feedback(False, "After backward there are still gradients.")
            pairs = zip(model.parameters(), plain.parameters(), strict=True)
            if not all(p.allclose(q, atol=1e-6) for p, q in pairs):
                return Feedback(
                    False,
                    f"After step {step + 1} the weights are not those of SGD with lr={lr}.",
                )
        if most > 1:
            return Feedback(False, f"In backward, {most} gradients were alive at once.")
    return Feedback(
        True,
        "Right: the same training, without the gradients' bytes. Clipping needs them all, though.",
    )
