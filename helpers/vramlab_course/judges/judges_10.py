"""Judges of chapter 10's pieces: a block on some tokens at a time, and a loop that samples."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..chapters.chapter_10 import saved_for_backward
from ..made_tensors import MadeTensors

VOCABULARY = 11  # of the small model that 10.1's loop samples from


@dataclass(frozen=True)
class TiledRun:
    """What came of a block that somebody runs on some tokens at a time."""

    shape: str  # of the result
    same: bool
    gradients: bool
    most_tokens: int  # that the block got at once
    calls: int  # of the block in the forward pass
    kept_wide: bool  # whether wide numbers wait for the backward pass
    most_wide: int  # rows of wide numbers in memory at a time, in either pass


class _WideRows(MadeTensors):
    """While entered, notes how many rows of `width` numbers are in memory at a time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.most = 0
        self.made: list[weakref.ref] = []

    def see(self, tensor: torch.Tensor) -> None:
        if tensor.shape[-1:] != (self.width,):
            return
        self.made.append(weakref.ref(tensor))
        rows = {}  # by storage, so that a view counts once
        for made in self.made:
            wide = made()
            if wide is not None:
                torch.Tensor._fix_weakref(wide)  # else it goes while autograd still has it
                rows[wide.untyped_storage()._cdata] = wide.numel() // self.width
        self.most = max(self.most, sum(rows.values()))


def tiled_run(tiled: Callable[..., Any], tokens: int, size: int) -> TiledRun:
    """Run a reader's `tiled` of a small block, forward and backward."""
    torch.manual_seed(0)
    hidden = 3
    wide = 64
    up = torch.nn.Linear(hidden, wide)
    down = torch.nn.Linear(wide, hidden)
    got = []

    def block(x: torch.Tensor) -> torch.Tensor:
        got.append(x.shape[0])
        return down(up(x).relu())

    x = torch.randn(tokens, hidden)
    expected = _with_gradients(block, x, up, down)
    # The whole block was called for the expected result.
    got.clear()
    saved = {}
    calls = 0

    def forward(x: torch.Tensor) -> Any:
        nonlocal calls
        # The forward pass alone: in the backward pass a piece saves its wide numbers, and may.
        with saved_for_backward(up, down) as kept:
            output = tiled(block, x, size)
        saved.update(kept)
        calls = len(got)
        return output

    with _WideRows(wide) as rows:
        found = _with_gradients(forward, x, up, down)
    output = found[0]
    is_tensor = isinstance(output, torch.Tensor)
    same = is_tensor and _close(output, expected[0])
    return TiledRun(
        shape=str(tuple(output.shape)) if is_tensor else "no tensor",
        same=same,
        gradients=same and all(map(_close, found[1:], expected[1:])),
        most_tokens=max(got, default=0),
        calls=calls,
        # What is as wide as the block's inside should be computed again, not kept.
        kept_wide=any(tensor.shape[-1:] == (wide,) for tensor in saved.values()),
        most_wide=rows.most,
    )


def _with_gradients(function: Callable[..., Any], x: torch.Tensor, *modules: Any) -> list[Any]:
    """Return what the function makes of `x`, and the gradients of `x` and of all parameters."""
    x = x.clone().requires_grad_()
    parameters = [parameter for module in modules for parameter in module.parameters()]
    for parameter in parameters:
        parameter.grad = None
    output = function(x)
    # A wrong piece may return something that has no gradient.
    if isinstance(output, torch.Tensor) and output.requires_grad:
        output.square().sum().backward()
    return [output, x.grad, *(parameter.grad for parameter in parameters)]


def _close(found: Any, expected: torch.Tensor) -> bool:
    return (
        found is not None
        and found.shape == expected.shape
        and torch.allclose(found, expected, atol=1e-5)
    )


@dataclass
class Sampled:
    """What came of a loop that samples."""

    fails: str | None = None
    tokens_right: bool = False
    calls: int = 0
    again: int = 0  # tokens that were computed although the cache had them
    handed_again: bool = False  # whether a cache came with tokens that it had
    graph: bool = False  # whether autograd recorded a call
    restored: bool = True  # whether autograd is on afterwards
    cached: list[int] = field(default_factory=list)


def sampled(sample: Any, new: int = 5) -> Sampled:
    """Run 10.1's `sample`, a function or the name of one of its known answers."""
    if isinstance(sample, str):
        sample = LOOPS[sample]
    result = Sampled()
    prompt = torch.tensor([[3, 1, 4], [2, 7, 1]])
    step = _counting_step(result)
    # Restores the mode afterwards, whatever the loop did with it.
    with torch.enable_grad():
        try:
            found = sample(step, prompt.clone(), new)
        except Exception as error:
            result.fails = f"{type(error).__name__}: {error}"
            return result
        result.restored = torch.is_grad_enabled()
    # Against the loop without a cache, which computes all from the beginning.
    wanted = LOOPS["as_given"](_counting_step(Sampled()), prompt, new)
    result.tokens_right = isinstance(found, torch.Tensor) and torch.equal(found, wanted)
    return result


def _counting_step(result: Sampled) -> Callable[..., Any]:
    """Return a model that says the likeliest next token by the sum of all tokens before it."""
    weight = torch.ones(1, requires_grad=True)

    def step(ids: torch.Tensor, cache: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        before = torch.zeros(len(ids), 0, dtype=torch.long) if cache is None else cache
        result.calls += 1
        # Tokens that a call before this one had computed.
        known = result.cached[-1] if result.cached else 0
        # With all ids next to the cache, what the cache has would stand there twice.
        if 0 < before.shape[1] <= ids.shape[1]:
            is_same = torch.equal(ids[:, : before.shape[1]], before)
            result.handed_again = result.handed_again or is_same
        whole = torch.cat([before, ids], 1)
        # What it had and was not handed back has to be computed again.
        result.again += max(0, known - before.shape[1])
        result.cached.append(whole.shape[1])
        # A token's logits depend on all before it, as attention's do.
        sums = whole.cumsum(1)[:, before.shape[1] :]
        likeliest = (3 * sums + 1) % VOCABULARY
        # Times a weight, so that autograd records the call where it is on.
        logits = torch.nn.functional.one_hot(likeliest, VOCABULARY) * weight
        result.graph = result.graph or logits.requires_grad
        return logits, whole

    return step


def _as_given(step: Any, prompt: torch.Tensor, new: int) -> torch.Tensor:
    ids = prompt
    for _ in range(new):
        logits, _cache = step(ids, None)
        likeliest = logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, likeliest], 1)
    return ids


def _with_cache(step: Any, prompt: torch.Tensor, new: int) -> torch.Tensor:
    ids = prompt
    newest = prompt
    cache = None
    for _ in range(new):
        logits, cache = step(newest, cache)
        newest = logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, newest], 1)
    return ids


def _all_ids(step: Any, prompt: torch.Tensor, new: int) -> torch.Tensor:
    ids = prompt
    cache = None
    for _ in range(new):
        logits, cache = step(ids, cache)
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    return ids


def _twice(step: Any, prompt: torch.Tensor, new: int) -> torch.Tensor:
    _with_cache(step, prompt, new)
    return _with_cache(step, prompt, new)


def _off_for_good(step: Any, prompt: torch.Tensor, new: int) -> torch.Tensor:
    torch.set_grad_enabled(False)
    return _with_cache(step, prompt, new)


LOOPS: dict[str, Callable[..., Any]] = {
    "as_given": _as_given,
    "graph": _with_cache,
    "no_grad": torch.no_grad()(_with_cache),
    "inference": torch.inference_mode()(_with_cache),
    "twice": torch.no_grad()(_twice),
    "all_ids": torch.no_grad()(_all_ids),
    "no_cache": torch.no_grad()(_as_given),
    "off_for_good": _off_for_good,
    "one_too_few": lambda step, prompt, new: _with_cache(step, prompt, new - 1),
    "fails": lambda step, prompt, new: 1 / 0,
}
