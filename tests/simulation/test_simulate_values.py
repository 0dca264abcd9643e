"""What a simulated module knows of values (lengths, masks, counters), and what it says of those it does not know."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import rnn
from vramlab import RecipeError, simulate
from watched_steps import measured


def both(make, batch, loss, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01)):
    torch.manual_seed(0)
    model = make()
    said = simulate(model=model, batch=batch, loss=loss, optimizer=optimizer(model.parameters()), target="cpu")
    return said, measured(model, batch, loss, optimizer(model.parameters()))


def total(outputs, batch):
    return outputs.float().sum()


class Function(nn.Module):
    """One layer, and a function of it and the batch."""

    def __init__(self, function, layer=None):
        super().__init__()
        self.layer, self.function = layer or nn.Linear(8, 8), function

    def forward(self, *batch):
        return self.function(self.layer, *batch)


def times(layer, x, count):
    for _ in range(int(count.item())):
        x = torch.tanh(layer(x))
    return x


def padded(layer, x, lengths):
    packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return rnn.pad_packed_sequence(layer(packed)[0], batch_first=True)[0]


def experts(layer, x, chosen):
    out = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        rows = torch.where(chosen == expert)[0]
        out = out.index_add(0, rows, torch.relu(layer(x[rows])))
    return out


def ctc(layer, x, targets, lengths, target_lengths):
    return F.ctc_loss(layer(x).log_softmax(-1), targets, lengths, target_lengths)


X, LENGTHS = torch.rand(4, 6, 8), torch.tensor([6, 3, 2, 5])
MASK = torch.arange(6) < LENGTHS[:, None]
KNOWN = {
    "a number of times": (times, (X, torch.tensor(5))),
    "a list of lengths": (
        lambda layer, x, n: torch.cat([torch.relu(layer(x[i, :k])) for i, k in enumerate(n.tolist())]),
        (X, LENGTHS),
    ),
    "a mask": (lambda layer, x, mask: torch.tanh(layer(x)[mask]), (X, MASK)),
    "a mask from lengths": (
        lambda layer, x, n: torch.tanh(layer(x)[torch.arange(x.shape[1]) < n[:, None]]),
        (X, LENGTHS),
    ),
    "a selection": (lambda layer, x, mask: torch.tanh(layer(x).masked_select(mask[..., None])), (X, MASK)),
    "a branch": (lambda layer, x, n: layer(x) if n.max() > 9 else layer(torch.tanh(layer(x))), (X, LENGTHS)),
    "written in place": (
        lambda layer, x, n: times(layer, x, torch.zeros(3, dtype=torch.int64).index_fill_(0, n[1:2] - 1, 4).sum()),
        (X, LENGTHS),
    ),
    "experts": (experts, (X.flatten(0, 1), torch.arange(24) % 3)),
    "a packed sequence": (padded, (X, LENGTHS), nn.LSTM(8, 8, batch_first=True)),
    "connectionist": (
        ctc,
        (torch.rand(12, 3, 8), torch.randint(1, 8, (3, 5)), torch.tensor([12, 11, 10]), torch.tensor([5, 3, 4])),
    ),
    "sparse gradients": (
        lambda layer, ids: torch.tanh(layer(ids)),
        (torch.arange(24).reshape(4, 6),),
        nn.Embedding(50, 8, sparse=True),
    ),
}


@pytest.mark.parametrize("case", KNOWN)
def test_values_of_the_batch_decide_as_they_do_for_real(case):
    function, batch, *layer = KNOWN[case]
    said, seen = both(lambda: Function(function, *layer), batch, total)
    assert said.phases == seen.phases and said.peak == seen.peak
    assert not said.notes


def test_a_packed_sequence_is_a_batch_of_its_own():
    batch = rnn.pack_sequence([X[0], X[1, :3]])
    said, seen = both(lambda: nn.GRU(8, 8), batch, lambda outputs, batch: outputs[0].data.sum())
    assert said.phases == seen.phases and said.phases["load"].end.inputs == 9 * 8 * 4 + 6 * 8


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
    simulate(model=Function(clears), batch=(X, mask), loss=total, optimizer=torch.optim.SGD, target="cpu")
    assert torch.equal(mask, MASK) and type(mask) is torch.Tensor


def test_a_value_that_nobody_knows_is_noted_with_its_line():
    def branch(layer, x):
        if layer(x).mean() > 100:
            return layer(x)
        return torch.tanh(layer(x))

    said, _ = both(lambda: Function(branch), (X,), total)
    assert len(said.notes) == 1
    assert "test_simulate_values.py, line" in said.notes[0] and "if layer(x).mean() > 100:" in said.notes[0]


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda layer, x: x[layer(x) > 0], "aten.index"),
        (lambda layer, x: layer(x)[torch.where(layer(x)[:, 0, 0] > 0)[0]], "aten.nonzero"),
        (lambda layer, x: layer(x).masked_select(layer(x) > 0), "aten.masked_select"),
    ],
    ids=["a mask", "routing", "a selection"],
)
def test_a_size_that_nobody_knows_is_refused_with_operator_and_line(function, operator):
    with pytest.raises(
        RecipeError, match=rf"{operator} returns depends on values .*test_simulate_values.py, line \d+"
    ) as error:
        simulate(model=Function(function), batch=(X,), loss=total, optimizer=torch.optim.SGD, target="cpu")
    assert error.value.field == "model"


KINDS = [torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD, torch.optim.Rprop, torch.optim.Adamax]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_optimizers_that_count_steps(kind):
    said, seen = both(lambda: Function(lambda layer, x: layer(x)), (X,), total, kind)
    assert said.phases == seen.phases and not said.notes


def test_a_closure_runs_inside_the_step_and_lbfgs_keeps_states():
    def lbfgs(parameters):
        return torch.optim.LBFGS(parameters, lr=0.5, max_iter=3, tolerance_grad=0, tolerance_change=0)

    loss = lambda outputs, batch: (outputs - 3).pow(2).mean()  # noqa: E731
    said, seen = both(lambda: Function(lambda layer, x: layer(x)), (X,), loss, lbfgs)
    assert "as if it never converged" in " ".join(said.notes)
    for phase in ("forward", "backward", "step", "between_steps"):
        for moment in ("peak", "end"):  # the loss that `step` returns is a variable there, and none here
            ours, real = (dict(getattr(each.phases[phase], moment).items()) for each in (said, seen))
            assert max(abs(ours[category] - real[category]) for category in real) <= 4, (phase, moment)
    assert said.phases["between_steps"].end.optimizer_states > 5 * 4 * 72


def test_a_scheduler_does_not_step_the_real_optimizer():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.optim.lr_scheduler.LinearLR(optimizer)
    report = simulate(model=model, batch=X, loss=total, optimizer=optimizer, target="cpu")
    assert report.phases["step"].end.optimizer_states == 2 * 4 * 72 + 2 * 4
    assert not optimizer.state


class Sparse(nn.Module):
    """Two tables with sparse gradients, one of which is looked into twice."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 8, sparse=True, padding_idx=2)
        self.bags = nn.EmbeddingBag(40, 4, mode="sum", sparse=True)

    def forward(self, ids):
        return sum(torch.tanh(part).sum() for part in (self.words(ids), self.bags(ids), self.words(ids * 2)))


SPARSE = {
    "SparseAdam": torch.optim.SparseAdam,
    "Adagrad": torch.optim.Adagrad,
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("optimizer", SPARSE)
def test_rows_of_sparse_gradients_are_counted(optimizer):
    said, seen = both(Sparse, torch.arange(12).reshape(3, 4) % 5, total, SPARSE[optimizer])
    last = [name for name in said.phases if name != "load"]  # where watch has not met Adagrad's states
    assert {name: said.phases[name] for name in last} == {name: seen.phases[name] for name in last}
    assert said.peak == seen.peak and not said.notes


GRAPHS = {
    "product": torch.sparse.mm,
    "scaled": lambda a, x: (a * 2) @ x,
    "transposed": lambda a, x: a.t() @ x,
    "merged": lambda a, x: a.coalesce() @ x,
    "by indices": lambda a, x: x[a._indices()[0]] * a._values()[:, None],
    "dense": lambda a, x: a.to_dense() @ x,
}


@pytest.mark.parametrize("case", GRAPHS)
@pytest.mark.parametrize("merged", [True, False])
def test_a_sparse_matrix_of_the_batch_is_counted(case, merged):
    matrix = (torch.arange(400).reshape(20, 20) % 7 == 0).float().to_sparse()
    if not merged:
        matrix = torch.sparse_coo_tensor(matrix.indices(), matrix.values(), (20, 20), check_invariants=False)
    model = Function(lambda layer, x, a: GRAPHS[case](a, torch.relu(layer(x))))
    said, seen = both(lambda: model, (torch.rand(20, 8), matrix), total)
    assert said.phases == seen.phases and said.peak == seen.peak and not said.notes


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_compressed_sparse_matrix_is_noted():
    model, batch = Function(lambda layer, x, a: a @ layer(x)), (X[:, 0], torch.eye(4).to_sparse_csr())
    (note,) = simulate(model=model, batch=batch, loss=total, optimizer=torch.optim.SGD, target="cpu").notes
    assert note.startswith("a torch.sparse_csr tensor")


def test_a_sparse_result_of_unknown_size_is_noted():
    model = Function(lambda layer, x, a: torch.sparse.sum(a, 1).to_dense()[:, None] * layer(x))
    matrix = torch.eye(4).to_sparse()
    said = simulate(model=model, batch=(X[:, 0], matrix), loss=total, optimizer=torch.optim.SGD, target="cpu")
    assert [note for note in said.notes if "it is not counted" in note]


def test_a_sparse_gradient_of_unknown_indices_is_noted():
    table = nn.Embedding(8, 8, sparse=True)
    model = Function(lambda layer, x: table(layer(x).argmax(-1)).sum() + layer(x).sum())
    model.table = table
    optimizer = torch.optim.SparseAdam(table.parameters())
    said = simulate(model=model, batch=(X,), loss=total, target="cpu", optimizer=optimizer)
    assert [note for note in said.notes if "as if all its rows differed" in note]


def test_cuda_gives_back_what_coalesced_rows_do_not_need():
    model, ids = nn.Embedding(50, 256, sparse=True), torch.arange(1200) % 50
    step = {
        target: simulate(model=model, batch=ids, loss=total, optimizer=torch.optim.SparseAdam, target=target)
        for target in ("cpu", "cuda")
    }
    at_peak = [report.phases["step"].peak.temporaries for report in step.values()]
    assert at_peak[0] - at_peak[1] > 1100 * 256 * 4
