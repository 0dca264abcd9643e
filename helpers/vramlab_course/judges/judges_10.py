"""The judge of chapter 10's block that works on some tokens at a time."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..made_tensors import MadeTensors


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
    # `_cdata` is the address of the storage's object, the same for all views of it.
    weights = set()
    for weight in (*up.parameters(), *down.parameters()):
        weights.add(weight.untyped_storage()._cdata)
    saved: list[torch.Tensor] = []
    calls = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in weights:
            saved.append(tensor)
        return tensor

    def forward(x: torch.Tensor) -> Any:
        nonlocal calls
        # The forward pass alone: in the backward pass a piece saves its wide numbers, and may.
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            output = tiled(block, x, size)
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
        kept_wide=any(tensor.shape[-1:] == (wide,) for tensor in saved),
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
