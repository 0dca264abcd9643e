"""What a loss holds besides the model (teachers, queues, labels) is counted, however it is held,
and is as it was.
"""

import functools
from typing import ClassVar

import pytest
import torch
from test_simulate_module import mlp, really
from torch import nn
from torch.nn import functional as F
from vramlab import VramLabError, simulate, watch

X, LABELS = torch.rand(8, 64), torch.arange(8)
ALL_LABELS = LABELS.repeat(100)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01)


def teacher() -> nn.Module:
    layers = nn.Linear(64, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 10)
    return nn.Sequential(*layers).eval().requires_grad_(False)


def distilled(taught_by, outputs, batch):
    with torch.no_grad():
        wanted = taught_by(batch)
    return F.mse_loss(outputs, wanted)


class Distillation:
    shared = teacher()

    def __init__(self):
        self.own = teacher()

    def __call__(self, outputs, batch):
        return distilled(self.own, outputs, batch)

    def of_class(self, outputs, batch):
        return distilled(self.shared, outputs, batch)


def nested():
    held = teacher()

    def inner(batch):
        return held(batch)

    return lambda outputs, batch: F.mse_loss(outputs, inner(batch))


def by_default(outputs, batch, held=teacher()):  # noqa: B008 — that is the case
    return distilled(held, outputs, batch)


HELD = teacher()
IN_CONTAINERS = {"teachers": [teacher()]}
TEACHERS = {
    "a global": lambda outputs, batch: distilled(HELD, outputs, batch),
    "functools.partial": functools.partial(distilled, teacher()),
    "a bound method": Distillation().__call__,
    "a callable object": Distillation(),
    "a class attribute": Distillation().of_class,
    "a list in a dictionary": lambda outputs, batch: distilled(
        IN_CONTAINERS["teachers"][0], outputs, batch
    ),
    "an inner function": nested(),
    "a default": by_default,
}


@pytest.mark.parametrize("held", TEACHERS)
def test_a_teacher_is_resident_from_the_start_however_it_is_held(held):
    said = simulate(model=mlp(), batch=X, loss=TEACHERS[held], optimizer=sgd, target="cpu")
    assert said.phases == really(mlp, X, TEACHERS[held], sgd)
    models = mlp(), HELD
    loaded = said.phases["load"].end
    assert loaded.parameters == sum(p.nbytes for model in models for p in model.parameters())
    assert loaded.buffers == sum(b.nbytes for b in HELD.buffers())
    assert not said.notes


def test_a_watched_teacher_is_there_before_the_block():
    model = mlp()
    optimizer = sgd(model.parameters())
    with watch(model, batch=X) as seen:
        F.mse_loss(model(X), HELD(X)).backward()
        optimizer.step()
    assert seen.report().phases["load"].end.parameters == sum(
        p.nbytes for m in (model, HELD) for p in m.parameters()
    )


class Queue:
    """Outputs of the last steps, in an object that is no module."""

    def __init__(self):
        self.held = torch.ones(256, 10)

    def __call__(self, outputs, batch):
        self.held = torch.cat([self.held[8:], outputs.detach()])
        return (outputs @ self.held.T).logsumexp(-1).sum()


class Bank(nn.Module):
    """The same in a module, made anew from itself."""

    def __init__(self):
        super().__init__()
        self.register_buffer("held", torch.ones(256, 10))
        self.seen = {}

    def forward(self, outputs):
        self.held = torch.cat([self.held[8:], outputs.detach()])
        self.seen["last"] = outputs.detach()
        return (outputs @ self.held.T).logsumexp(-1).sum()


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


def of_bank():
    bank = Bank()
    return lambda outputs, batch: bank(outputs)


def functional():
    held = teacher()
    weights = dict(held.named_parameters()) | dict(held.named_buffers())
    return lambda outputs, batch: F.mse_loss(
        outputs, torch.func.functional_call(held, weights, (batch,))
    )


def trained():
    held = teacher().requires_grad_(True)
    return lambda outputs, batch: F.mse_loss(outputs, held(batch))


def of_function():
    weight = torch.ones(10, 10, requires_grad=True)
    return lambda outputs, batch: Scaled.apply(outputs, weight).sum()


OTHERS = {
    "labels": lambda: lambda outputs, batch: F.cross_entropy(outputs, LABELS),
    "a slice of all labels": lambda: (
        lambda outputs, batch: F.cross_entropy(outputs, ALL_LABELS[:8])
    ),
    "a queue": Queue,
    "a bank": of_bank,
    "functional_call": functional,
    "a teacher that learns": trained,
    "an autograd.Function": of_function,
    "class weights": lambda: nn.CrossEntropyLoss(weight=torch.ones(10)),
}


@pytest.mark.parametrize("case", OTHERS)
def test_all_else_that_a_loss_holds(case):
    made = OTHERS[case]()
    is_module = isinstance(made, nn.Module)
    loss = (lambda outputs, batch: made(outputs, LABELS)) if is_module else made
    said = simulate(model=mlp(), batch=X, loss=loss, optimizer=sgd, target="cpu")
    assert said.phases == really(mlp, X, OTHERS[case]() if case == "a queue" else loss, sgd)


def test_parameters_held_in_a_list_are_the_models_own():
    """Their gradients go to the fake ones, once."""
    model = mlp()
    held = list(model.parameters())

    def penalized(outputs, batch):
        return outputs.sum() + sum(p.pow(2).sum() for p in held)

    said = simulate(model=model, batch=X, loss=penalized, optimizer=sgd, target="cpu")
    assert all(p.grad is None for p in held)
    assert said.phases == really(lambda: model, X, penalized, sgd)


class Peeking(nn.Module):
    """A teacher in a list, so that it is no submodule."""

    def __init__(self):
        super().__init__()
        self.layer, self.others = nn.Linear(64, 64), [nn.Linear(64, 64).requires_grad_(False)]

    def forward(self, x):
        return self.layer(x) - self.others[0](x)


def test_a_teacher_that_the_model_hides():
    def loss(outputs, batch):
        return outputs.pow(2).mean()

    said = simulate(model=Peeking(), batch=X, loss=loss, optimizer=sgd, target="cpu")
    assert said.phases == really(Peeking, X, loss, sgd)
    assert said.phases["load"].end.parameters == 2 * 4 * (64 * 64 + 64)


def test_what_a_loss_holds_is_as_it_was():
    bank, weight = Bank(), torch.ones(10, 10, requires_grad=True)
    held, weights = bank.held, dict(HELD.named_parameters())
    before = dict(weights)

    def loss(outputs, batch):
        taught = torch.func.functional_call(HELD, weights, (batch,))
        return F.mse_loss(Scaled.apply(outputs, weight), taught) + bank(outputs)

    simulate(model=mlp(), batch=X, loss=loss, optimizer=sgd)
    assert bank.held is held and not bank.seen and weight.grad is None
    assert weights.keys() == before.keys() and all(weights[name] is p for name, p in before.items())


class Lazy:
    """Makes its teacher at the first call, as an object, a class or a dictionary holds it."""

    shared = None
    known: ClassVar[dict] = {}

    def __init__(self):
        self.own, self.ready, self.queue = None, False, torch.ones(8, 10)

    def __call__(self, outputs, batch):
        if not self.ready:
            self.own, self.ready = teacher(), True
            type(self).shared = teacher()
            self.known["teacher"] = teacher()
        self.queue = outputs.detach()
        taught = sum(one(batch) for one in (self.own, self.shared, self.known["teacher"]))
        return F.mse_loss(outputs, taught + self.queue)


def lazy_function():
    held = None

    def loss(outputs, batch):
        nonlocal held
        held = held or teacher()
        return distilled(held, outputs, batch)

    return loss, lambda: held


@functools.cache
def cached_teacher():
    return teacher()


def global_loss(outputs, batch):
    global NEW_TEACHER
    NEW_TEACHER = globals().get("NEW_TEACHER") or teacher()
    return distilled(NEW_TEACHER, outputs, batch)


def fails_afterwards(outputs, batch):
    LAST.append(outputs.detach())
    raise ValueError("as a loss may")


LAST = []


def test_what_a_loss_makes_at_its_first_call_is_made_again_by_the_users_step():
    lazy, (inner, held) = Lazy(), lazy_function()
    queued = lazy.queue
    cached = functools.partial(lambda outputs, batch: distilled(cached_teacher(), outputs, batch))
    for loss in (lazy, lazy.__call__, inner, cached, global_loss):
        simulate(model=mlp(), batch=X, loss=loss, optimizer=sgd)
    assert (lazy.own, lazy.ready, Lazy.shared, Lazy.known, held()) == (None, False, None, {}, None)
    assert (
        lazy.queue is queued
        and "NEW_TEACHER" not in globals()
        and not cached_teacher.cache_info().currsize
    )
    with pytest.raises(VramLabError):
        simulate(model=mlp(), batch=X, loss=fails_afterwards, optimizer=sgd)
    assert LAST == []
    for loss in (lazy, inner, cached, global_loss):
        assert really(mlp, X, loss, sgd)["backward"].peak.total
    del globals()["NEW_TEACHER"]


def test_what_cannot_be_given_back_is_said():
    """A list is not remembered with its tensors: they would live on, and a step's do not."""
    held = [torch.ones(8, 10)]

    def loss(outputs, batch):
        held[0] = outputs.detach()
        return F.mse_loss(outputs, held[0])

    said = simulate(model=mlp(), batch=X, loss=loss, optimizer=sgd)
    assert said.notes == [
        "the loss keeps tensors of the simulation (list.0): make it anew to train"
    ]


def test_what_a_loss_counts_is_counted_on():
    """Only what has become fake is given back."""
    calls = []

    def loss(outputs, batch):
        calls.append(len(calls))
        return outputs.sum()

    simulate(model=mlp(), batch=X, loss=loss, optimizer=sgd)
    assert calls


def test_a_teacher_takes_no_memory_of_this_machine():
    """64 GiB that nobody allocates."""
    with torch.device("meta"):
        huge = nn.Sequential(
            nn.Linear(64, 2**19), nn.Linear(2**19, 2**15), nn.Linear(2**15, 10)
        ).requires_grad_(False)
    loss = functools.partial(distilled, huge)
    said = simulate(model=mlp(), batch=X, loss=loss, optimizer=sgd, target="cpu")
    assert said.phases["load"].end.parameters == sum(
        p.nbytes for m in (mlp(), huge) for p in m.parameters()
    )
    assert said.peak.parameters > 64 * 2**30
