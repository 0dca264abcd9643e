"""What cannot be followed says the true reason: TorchScript, and a module that is cast inside its
own forward.
"""

import pytest
import torch
from torch import nn
from vramlab import RecipeError, VramLabError, simulate, watch

X = torch.ones(2, 4)


@pytest.mark.parametrize(
    "make",
    [
        torch.jit.script,
        lambda m: torch.jit.trace(m, X),
        lambda m: nn.Sequential(torch.jit.script(m)),
    ],
)
def test_a_torchscript_module_is_refused(make):
    """Its interpreter's bytes would be others than the module's own, and nothing would say so."""
    model = make(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(
        RecipeError,
        match=r"cannot follow a TorchScript module, .*: give the module that was scripted",
    ):
        simulate(model=model, batch=X, optimizer=torch.optim.SGD, loss=lambda out, *_: out.sum())
    with pytest.raises(VramLabError, match="watch cannot follow a TorchScript module"):
        watch(model)


class Casts(nn.Module):
    """As switch_transformers' router does."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        self.inner = self.inner.to(torch.float64)
        return self.inner(x.double()).sum()


def test_a_module_that_is_cast_inside_its_forward_is_named():
    with pytest.raises(
        RecipeError,
        match=r"a module is cast or moved inside the step, .*self\.inner\.to\(torch\.float64",
    ):
        simulate(model=Casts(), batch=X, optimizer=torch.optim.SGD, loss=lambda out, *_: out)
