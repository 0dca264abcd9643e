"""What a simulated module knows of values (lengths, masks, counters), and what it says of those it
does not know.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from vramlab import RecipeError, simulate
from vramlab.simulation.fake_mode import RuledFakeMode
from vramlab.simulation.values import Values
from watched_steps import measured


def both(make, batch, loss, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01)):
    torch.manual_seed(0)
    model = make()
    said = simulate(
        model=model, batch=batch, loss=loss, optimizer=optimizer(model.parameters()), target="cpu"
    )
    return said, measured(model, batch, loss, optimizer(model.parameters()))


def total(outputs, batch):
    return outputs.float().sum()


class Function(nn.Module):
    """One layer, and a function of it and the batch."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(8, 8), function

    def forward(self, *batch):
        return self.function(self.layer, *batch)


def times(layer, x, count):
    for _ in range(int(count.item())):
        x = torch.tanh(layer(x))
    return x


def experts(layer, x, chosen):
    out = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        rows = torch.where(chosen == expert)[0]
        out = out.index_add(0, rows, torch.relu(layer(x[rows])))
    return out


X, LENGTHS = torch.rand(4, 6, 8), torch.tensor([6, 3, 2, 5])
MASK = torch.arange(6) < LENGTHS[:, None]
KNOWN = {
    "a number of times": (times, (X, torch.tensor(5))),
    "a list of lengths": (
        lambda layer, x, n: torch.cat(
            [torch.relu(layer(x[i, :k])) for i, k in enumerate(n.tolist())]
        ),
        (X, LENGTHS),
    ),
    "a mask": (lambda layer, x, mask: torch.tanh(layer(x)[mask]), (X, MASK)),
    "a mask from lengths": (
        lambda layer, x, n: torch.tanh(layer(x)[torch.arange(x.shape[1]) < n[:, None]]),
        (X, LENGTHS),
    ),
    "a branch": (
        lambda layer, x, n: layer(x) if n.max() > 9 else layer(torch.tanh(layer(x))),
        (X, LENGTHS),
    ),
    "written in place": (
        lambda layer, x, n: times(
            layer, x, torch.zeros(3, dtype=torch.int64).index_fill_(0, n[1:2] - 1, 4).sum()
        ),
        (X, LENGTHS),
    ),
    "experts": (experts, (X.flatten(0, 1), torch.arange(24) % 3)),
}


@pytest.mark.parametrize("case", KNOWN)
def test_values_of_the_batch_decide_as_they_do_for_real(case):
    function, batch = KNOWN[case]
    said, seen = both(lambda: Function(function), batch, total)
    assert said.phases == seen.phases and said.peak == seen.peak
    assert not said.notes


def part_of(storage: torch.UntypedStorage, offset: int) -> torch.Tensor:
    """A slice without a base, as what is loaded from a file."""
    return torch.empty(0).set_(storage, offset, (8, 8))


FUNCTIONAL = {
    "grad": lambda layer, x: torch.func.grad(lambda y: layer(y).tanh().sum())(x) + layer(x),
    "vmap": lambda layer, x: torch.vmap(layer)(x),
}


@pytest.mark.parametrize("kind", FUNCTIONAL)
def test_functional_transforms(kind):
    said, seen = both(lambda: Function(FUNCTIONAL[kind]), (X,), total)
    assert said.phases == seen.phases


LOADED = torch.rand(64 * 8).untyped_storage()
SLICES = {
    "views": (X.flatten(0, 1)[8:16], X.flatten(0, 1)[:8]),
    "a column": (torch.rand(8, 64)[:, :8], torch.rand(8, 8)),
    "expanded": (torch.rand(1, 8).expand(8, 8), torch.rand(8, 8)),
    "without a base": (part_of(LOADED, 64), part_of(LOADED, 0)),
}


@pytest.mark.parametrize("kind", SLICES)
def test_a_slice_counts_with_all_that_it_keeps_alive(kind):
    said, seen = both(
        lambda: Function(lambda layer, a, b: layer(a) + layer(b)), SLICES[kind], total
    )
    assert said.phases == seen.phases
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in SLICES[kind]
    }
    assert said.phases["load"].end.inputs == sum(storages.values())


def test_a_counter_in_a_buffer_is_counted():
    class Alternating(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("steps", torch.tensor(0))

        def forward(self, x):
            self.steps += 1
            return times(self.layer, x, self.steps * 2)

    said, seen = both(Alternating, (X,), total)
    assert said.phases == seen.phases and not said.notes


def test_the_batch_is_as_it_was():
    def clears(layer, x, mask):
        mask[0] = False
        return layer(x)[mask]

    mask = MASK.clone()
    simulate(
        model=Function(clears), batch=(X, mask), loss=total, optimizer=torch.optim.SGD, target="cpu"
    )
    assert torch.equal(mask, MASK) and type(mask) is torch.Tensor


def test_a_value_that_nobody_knows_is_noted_with_its_line():
    def branch(layer, x):
        if layer(x).mean() > 100:
            return layer(x)
        return torch.tanh(layer(x))

    said, _ = both(lambda: Function(branch), (X,), total)
    assert len(said.notes) == 1
    assert (
        "test_simulate_values.py, line" in said.notes[0]
        and "if layer(x).mean() > 100:" in said.notes[0]
    )


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda layer, x: x[layer(x) > 0], "aten.nonzero"),
        (lambda layer, x: layer(x)[torch.where(layer(x)[:, 0, 0] > 0)[0]], "aten.nonzero"),
        (lambda layer, x: layer(x).masked_select(layer(x) > 0), "aten.masked_select"),
        (
            lambda layer, x: F.ctc_loss(layer(x), LENGTHS[:6], LENGTHS[:1], LENGTHS[:1]),
            "aten._ctc_loss",
        ),
    ],
    ids=["a mask", "routing", "a selection", "connectionist"],
)
def test_a_size_that_nobody_knows_is_refused_with_operator_and_line(function, operator):
    with pytest.raises(
        RecipeError, match=rf"{operator}.*test_simulate_values.py, line \d+.*`watch` measures"
    ) as error:
        simulate(
            model=Function(function),
            batch=(X,),
            loss=total,
            optimizer=torch.optim.SGD,
            target="cpu",
        )
    assert error.value.field == "model"


KINDS = [
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.ASGD,
    torch.optim.Rprop,
    torch.optim.Adamax,
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_optimizers_that_count_steps(kind):
    said, seen = both(lambda: Function(lambda layer, x: layer(x)), (X,), total, kind)
    assert said.phases == seen.phases and not said.notes


def test_a_scheduler_does_not_step_the_real_optimizer():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.optim.lr_scheduler.LinearLR(optimizer)
    report = simulate(model=model, batch=X, loss=total, optimizer=optimizer, target="cpu")
    assert report.phases["step"].end.optimizer_states == 2 * 4 * 72 + 2 * 4
    assert not optimizer.state


def test_sparse_tensors_and_bags_are_refused():
    of_batch = Function(lambda layer, x, a: a @ layer(x)), (X[:, 0], torch.eye(4).to_sparse())
    ids = torch.arange(6)
    tables = (
        (nn.Embedding(50, 8, sparse=True), ids),
        (nn.EmbeddingBag(50, 8), (ids, torch.tensor([0, 2]))),
    )
    for model, batch in (of_batch, *tables):
        with pytest.raises(
            RecipeError,
            match=r"or sparse tensors are simulated: `watch` measures .*, if none is sparse",
        ):
            simulate(model=model, batch=batch, loss=total, optimizer=torch.optim.SGD, target="cpu")


def test_what_wraps_fake_tensors_is_not_taken_for_a_real_one():
    """torchao's states were, and then counted twice: as they were made, and as what they became."""
    values = Values(RuledFakeMode({}))
    real = torch.ones(2, 3)
    fake = values.stand_in(real)
    wrapped = TwoTensor(fake, fake)
    assert values.stand_ins([wrapped])[0] is wrapped
    assert values.stand_ins([TwoTensor(real, real)])[0] is not wrapped
