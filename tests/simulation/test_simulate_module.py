"""simulate(model=…): any nn.Module with a batch, a loss and an optimizer, and the originals left as
they were.
"""

import copy
import dataclasses
import itertools
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from quick import params
from torch import nn
from torch.nn import functional as F
from vramlab.base.errors import RecipeError
from vramlab.hardware.gpu import find_gpu
from vramlab.recipe.recipe import Loop, Recipe
from vramlab.report.report import PHASES, GiB
from vramlab.simulation.simulate import simulate
from vramlab.tracking.history import History
from vramlab.tracking.tracked import run_tracked
from vramlab.tracking.tracker import Tracker
from vramlab.training.engine import Together, Training


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 10))


class Convolutions(nn.Module):
    """Batch norm: buffers that training changes."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        )
        self.head = nn.Linear(8 * 7 * 7, 10)

    def forward(self, images):
        return self.head(self.body(images))


class Tied(nn.Module):
    """One matrix is embedding and output head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 32)
        self.head = nn.Linear(32, 100, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.embedding(ids))


class Keeper(nn.Module):
    """Holds tensors that are neither parameters nor buffers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.scale = torch.full((16,), 2.0)
        self.table = {"shift": torch.ones(16)}

    def forward(self, x):
        return self.layer(x * self.scale + self.table["shift"])


class Named(nn.Module):
    """Takes keywords and returns its loss, as transformers' models do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x, labels):
        logits = self.layer(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)

    def forward(self, x, mask):
        return self.layer(x, src_key_padding_mask=mask)


def total(outputs, batch):
    return outputs.sum()


IDS, LABELS = torch.arange(20).reshape(2, 10), torch.tensor([0, 1, 2, 3])
CASES = {
    "mlp, a tensor": (mlp, torch.rand(4, 64), lambda outputs, batch: outputs.pow(2).mean()),
    "convolutions, a tuple": (Convolutions, (torch.rand(4, 3, 16, 16),), total),
    "tied weights, a list": (
        Tied,
        [IDS],
        lambda o, b: F.cross_entropy(o.flatten(0, 1), b[0].flatten()),
    ),
    "plain tensors": (Keeper, torch.rand(3, 16), total),
    "keywords and its own loss": (Named, {"x": torch.rand(4, 16), "labels": LABELS}, None),
    "attention with a mask": (
        Attention,
        (torch.rand(2, 6, 32), torch.zeros(2, 6, dtype=torch.bool)),
        total,
    ),
}
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3),
}


def really(make, batch, loss, optimizer, precision="fp32", loop="plain") -> dict:
    """The phases of the same step on real CPU tensors."""

    torch.manual_seed(0)
    model = make()
    training = Training(
        model=model,
        optimizer=optimizer(model.parameters()),
        batch=copy.deepcopy(batch),
        device=torch.device("cpu"),
        multi_tensor=False,
        loop=Loop.named(loop),
        precision=precision,
        **({"loss_of": loss} if loss else {}),
    )
    tracker = Tracker("cpu")
    tracker.meets = True
    run_tracked(training, tracker, 2, "cpu")
    return History(tracker.log, tracker.marks).phases()


@pytest.mark.parametrize(
    ("case", "optimizer"),
    params(
        itertools.product(CASES, OPTIMIZERS),
        [*zip(CASES, itertools.cycle(OPTIMIZERS), strict=False)],
    ),
)
def test_equals_real_tensors_to_the_byte(case, optimizer):
    make, batch, loss = CASES[case]
    model = make()
    build = OPTIMIZERS[optimizer]
    report = simulate(
        model=model, batch=batch, loss=loss, optimizer=build(model.parameters()), target="cpu"
    )
    assert report.phases == really(make, batch, loss, build)
    assert (report.source, report.title, report.recipe) == ("simulated", type(model).__name__, None)
    assert set(report.phases) == set(PHASES)


class CutCrossEntropy(nn.Module):
    """No trainer has an argument for it: the module calls it itself."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(300, 64), nn.Linear(64, 300, bias=False)

    def forward(self, ids):
        from cut_cross_entropy import linear_cross_entropy

        hidden = self.embedding(ids).bfloat16()
        return linear_cross_entropy(hidden, self.head.weight.bfloat16(), ids, shift=True)


def test_cut_cross_entropy_runs_its_host_code(monkeypatch):
    """Its kernels write where host code has allocated, so they are not launched; what torch.compile
    makes runs eagerly.
    """
    pytest.importorskip("cut_cross_entropy", reason="Apple's package is of no extra")
    from triton.runtime.jit import KernelInterface

    monkeypatch.setattr(
        KernelInterface, "__getitem__", lambda kernel, grid: lambda *args, **kwargs: None
    )
    build, ids = OPTIMIZERS["adamw"], torch.randint(0, 300, (2, 16))
    simulated = simulate(
        model=CutCrossEntropy(), batch=ids, loss=total, optimizer=build, target="cpu"
    )
    with torch.compiler.set_stance("force_eager"):
        assert simulated.phases == really(CutCrossEntropy, ids, total, build)


class Tiled(nn.Module):
    """Layers and a loss in four tiles by DeepSpeed's own functions (ALST, 2025)."""

    def __init__(self, deepspeed: Any):
        super().__init__()
        self.deepspeed = deepspeed
        self.first = nn.Linear(64, 64)
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.head = nn.Linear(64, 100, bias=False)

    def forward(self, x, labels):
        mlp, loss = self.deepspeed.TiledMLP, self.deepspeed.TiledFusedLogitsLoss
        x = self.first(x)
        x = x + mlp.apply(lambda self, x: self.layers(x), self, x, 4, [*self.layers.parameters()])
        return {"loss": loss.apply(tile_loss, self, x, labels, None, 4, [self.head.weight], "mean")}


def tile_loss(model, x, labels):
    return F.cross_entropy(model.head(x), labels)


@pytest.mark.slow
def test_deepspeeds_tiles_run():
    """No Trainer's argument puts them into a model, so no recipe has them."""
    deepspeed = pytest.importorskip("deepspeed.runtime.sequence_parallel.ulysses_sp")
    batch = {"x": torch.rand(2, 64, 64), "labels": torch.randint(100, (2, 64))}
    made = partial(Tiled, deepspeed)
    build = OPTIMIZERS["adamw"]
    report = simulate(model=made(), batch=batch, optimizer=build, target="cpu")
    assert report.phases == really(made, batch, None, build)
    tiles = report.phases["forward"].peak.activations
    with mock.patch.object(deepspeed.TiledMLP, "apply", lambda f, self, x, *_: f(self, x)):
        whole = simulate(model=made(), batch=batch, optimizer=build, target="cpu")
    assert whole.phases["forward"].peak.activations > 2 * tiles


def test_muon_for_matrices_beside_adamw():
    """The Trainer has no name for Muon, so it is given with the module."""

    def build(parameters) -> list[torch.optim.Optimizer]:
        parameters = list(parameters)
        matrices = [p for p in parameters if p.dim() == 2]
        return [
            torch.optim.Muon(matrices),
            torch.optim.AdamW([p for p in parameters if p.dim() != 2]),
        ]

    make, batch, loss = CASES["mlp, a tensor"]
    model = make()
    report = simulate(
        model=model, batch=batch, loss=loss, optimizer=build(model.parameters()), target="cpu"
    )
    real = really(make, batch, loss, lambda parameters: Together(build(parameters)))
    assert report.phases == real and real["step"].end.optimizer_states > 0


@pytest.mark.parametrize(
    "case", ["mlp, a tensor", "tied weights, a list", "keywords and its own loss"]
)
def test_autocast_and_loops_too(case):
    make, batch, loss = CASES[case]
    build = OPTIMIZERS["adamw"]
    model = make()
    arguments = {"precision": "bf16-mixed", "loop": "trainer"}
    report = simulate(
        model=model,
        batch=batch,
        loss=loss,
        optimizer=build(model.parameters()),
        target="cpu",
        **arguments,
    )
    assert report.phases == really(make, batch, loss, build, **arguments)


def test_a_group_norm_after_a_convolution_under_autocast():
    """Its input is in half precision and its parameters are not: what it keeps and its gradient
    were counted in fp32.
    """

    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU())

    def loss(outputs, batch):
        return outputs.float().sum()

    batch, build = torch.rand(4, 3, 16, 16), OPTIMIZERS["momentum"]
    report = simulate(
        model=make(), batch=batch, loss=loss, optimizer=build, target="cpu", precision="bf16-mixed"
    )
    assert report.phases == really(make, batch, loss, build, precision="bf16-mixed")


class Bank(nn.Module):
    """Makes a buffer, or a tensor that is none, anew from itself and the step's hidden states."""

    def __init__(self, is_buffer: bool = True):
        super().__init__()
        self.layer = nn.Linear(32, 32)
        if is_buffer:
            self.register_buffer("bank", torch.zeros(64, 32))
        else:
            self.bank = torch.zeros(64, 32)

    def forward(self, x):
        hidden = self.layer(x)
        scores = hidden @ self.bank.T
        self.bank = torch.cat([self.bank[8:], hidden.detach().float()])
        return scores


def in_fp32(outputs, batch):
    return outputs.float().sum()


def convolutions(convolution: type, transposed: type) -> nn.Module:
    return nn.Sequential(convolution(4, 8, 3, groups=2), nn.ReLU(), transposed(8, 4, 3))


IMAGES, ROWS = torch.rand(2, 4, 16, 16), torch.rand(64, 64)
# (module, batch, precision): each was off without a note, the first of a kind by this much.
ONCE_OFF = {
    "a convolution into windows, -29 %": (
        lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.Unfold(3)),
        IMAGES,
        "fp32",
    ),
    "windows and their sums": (
        lambda: nn.Sequential(
            nn.ConvTranspose2d(4, 8, 3), nn.Unfold(3, stride=2), nn.Fold((18, 18), 3, stride=2)
        ),
        IMAGES,
        "bf16-mixed",
    ),
    "a buffer made anew from itself, +50 %": (Bank, torch.rand(8, 32), "fp32"),
    "a buffer made anew under autocast": (Bank, torch.rand(8, 32), "bf16-mixed"),
    "a plain tensor made anew": (lambda: Bank(is_buffer=False), torch.rand(8, 32), "fp32"),
    "convolutions under autocast, +14 %": (
        lambda: convolutions(nn.Conv2d, nn.ConvTranspose2d),
        IMAGES,
        "bf16-mixed",
    ),
    "convolutions of volumes under autocast": (
        lambda: convolutions(nn.Conv3d, nn.ConvTranspose3d),
        torch.rand(2, 4, 6, 6, 6),
        "bf16-mixed",
    ),
    "part of a larger tensor, -19 %": (mlp, ROWS[:4], "fp32"),
    "columns of a larger tensor": (mlp, torch.rand(4, 128)[:, :64], "fp32"),
    "parts of two in a dictionary": (
        Named,
        {"x": torch.rand(64, 16)[8:12], "labels": (torch.arange(64) % 4)[:4]},
        "bf16-mixed",
    ),
}


@pytest.mark.parametrize("case", ONCE_OFF)
def test_equals_a_real_step_where_it_once_did_not(case):
    make, batch, precision = ONCE_OFF[case]
    loss = None if make is Named else in_fp32
    build = OPTIMIZERS["momentum"]
    report = simulate(
        model=make(), batch=batch, loss=loss, optimizer=build, target="cpu", precision=precision
    )
    assert report.phases == really(make, batch, loss, build, precision=precision)
    assert not report.notes


def test_a_function_of_parameters_serves_as_optimizer():
    model = mlp()
    batch, loss = CASES["mlp, a tensor"][1:]
    made = simulate(
        model=model,
        batch=batch,
        loss=loss,
        optimizer=torch.optim.AdamW(model.parameters()),
        target="cpu",
    )
    given = simulate(
        model=model, batch=batch, loss=loss, optimizer=lambda p: torch.optim.AdamW(p), target="cpu"
    )
    named = simulate(model=model, batch=batch, loss=loss, optimizer=torch.optim.AdamW, target="cpu")
    assert made.phases == given.phases == named.phases


def test_only_what_the_optimizer_holds_gets_states():
    model = mlp()
    batch, loss = CASES["mlp, a tensor"][1:]
    last = list(model[3].parameters())
    report = simulate(
        model=model, batch=batch, loss=loss, optimizer=torch.optim.AdamW(last), target="cpu"
    )
    assert report.phases["between_steps"].end.optimizer_states == sum(
        2 * 4 * p.numel() + 4 for p in last
    )


def test_frozen_parameters_get_no_gradient():
    model = mlp()
    model[0].requires_grad_(False)
    batch, loss = CASES["mlp, a tensor"][1:]
    report = simulate(
        model=model, batch=batch, loss=loss, optimizer=torch.optim.SGD, target="cpu", loop="plain"
    )
    assert report.phases["backward"].end.gradients == sum(
        4 * p.numel() for p in model[3].parameters()
    )


def test_the_originals_are_untouched():
    model, batch = Convolutions(), (torch.rand(4, 3, 16, 16),)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = copy.deepcopy(model.state_dict())
    pointers = [p.data_ptr() for p in model.parameters()]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    for target in ("cuda", "cpu"):
        simulate(
            model=model,
            batch=batch,
            loss=total,
            optimizer=optimizer,
            target=target,
            precision="bf16-mixed",
        )
    assert pointers == [p.data_ptr() for p in model.parameters()]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(
        type(p) is nn.Parameter and p.grad is None and p.dtype == torch.float32
        for p in model.parameters()
    )
    assert not optimizer.state
    assert groups == [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [
        id(p) for p in model.parameters()
    ]
    assert type(batch[0]) is torch.Tensor and batch[0].device.type == "cpu"
    model(batch[0]).sum().backward()  # and it still trains
    optimizer.step()
    assert optimizer.state


def test_a_state_that_exists_is_neither_counted_twice_nor_changed():
    model, (batch, loss) = mlp(), CASES["mlp, a tensor"][1:]
    fresh = torch.optim.AdamW(model.parameters())
    expected = simulate(model=model, batch=batch, loss=loss, optimizer=fresh, target="cpu").phases
    used = torch.optim.AdamW(model.parameters())
    loss(model(batch), batch).backward()
    used.step()
    states = {id(p): s["exp_avg"].clone() for p, s in used.state.items()}
    model.zero_grad()
    assert (
        simulate(model=model, batch=batch, loss=loss, optimizer=used, target="cpu").phases
        == expected
    )
    assert all(torch.equal(s["exp_avg"], states[id(p)]) for p, s in used.state.items())


def test_a_model_without_storage_will_do():
    """On the meta device a model of any size costs nothing to build."""
    with torch.device("meta"):
        model = mlp()
    report = simulate(
        model=model, batch=torch.rand(4, 64), loss=total, optimizer=torch.optim.SGD, target="cpu"
    )
    assert report.phases["load"].end.parameters == sum(4 * p.numel() for p in model.parameters())
    assert all(p.is_meta for p in model.parameters())


def test_cuda_rounds_and_adds_workspaces():
    model = mlp()
    arguments = {
        "model": model,
        "batch": torch.rand(4, 64),
        "loss": total,
        "optimizer": torch.optim.SGD,
    }
    on_cuda, on_cpu = simulate(target="cuda", **arguments), simulate(target="cpu", **arguments)
    sizes = [4 * p.numel() for p in model.parameters()]
    assert on_cpu.phases["load"].end.parameters == sum(sizes)
    assert on_cuda.phases["load"].end.parameters == sum(-(-size // 512) * 512 for size in sizes)
    assert on_cuda.peak.workspace > 0 and on_cpu.peak.workspace == 0


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 4)

    def forward(self, x):
        return self.missing(x)


def with_attribute(value) -> nn.Module:
    model = mlp()
    model.held = {"here": [value]}
    return model


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"model": None}, "model"),
        ({"batch": None}, "batch"),
        ({"optimizer": None}, "optimizer"),
        ({"model": "gpt2"}, "model"),
        ({"optimizer": "adamw"}, "optimizer"),
        ({"precision": "fp8"}, "precision"),
        ({"loop": "forever"}, "loop"),
        ({"target": "tpu"}, "target"),
        ({"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)}, "optimizer"),
        ({"batch": torch.rand(4, 63)}, "model"),
        ({"loss": lambda outputs, batch: outputs}, "loss"),
        ({"loss": None}, "loss"),
        ({"steps": 0}, "steps"),
        ({"loop": None}, "loop"),
        ({"optimizer": []}, "optimizer"),
        ({"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=-1)}, "optimizer"),
        (
            {
                "optimizer": lambda parameters: torch.optim.AdamW(parameters, capturable=True),
                "target": "cpu",
            },
            "optimizer",
        ),
        ({"optimizer": torch.optim.LBFGS}, "optimizer"),
        (
            {"optimizer": lambda parameters: torch.optim.SGD(nn.Linear(2, 2).parameters())},
            "optimizer",
        ),
        ({"loop": Loop.named("plain", foreach=True)}, "loop.foreach"),
        ({"loss": lambda outputs, batch: outputs.nope}, "model"),
        ({"loss": lambda outputs, batch: outputs.detach().sum()}, "loss"),
        ({"model": mlp().requires_grad_(False)}, "model"),
        ({"model": nn.ReLU()}, "model"),
        ({"model": nn.LazyLinear(4)}, "model"),
        ({"model": Failing()}, "model"),
        ({"model": nn.Sequential(nn.LSTM(64, 8))}, "model"),
        ({"model": nn.GRUCell(64, 8)}, "model"),
        ({"batch": {"y": torch.rand(4, 64)}}, "model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_input_gets_one_clear_sentence(changes, names):
    arguments = {
        "model": mlp(),
        "batch": torch.rand(4, 64),
        "loss": total,
        "optimizer": torch.optim.SGD,
        **changes,
    }
    with pytest.raises(RecipeError) as caught:
        simulate(**arguments)
    assert caught.value.field == names and "\n" not in str(caught.value)


def test_layers_that_may_be_dropped_at_random_are_there():
    """The draw is a fake tensor without a value, and real models drop a layer now and then only."""
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {
        f"{part}_{name}": size
        for part in ("encoder", "decoder")
        for name, size in (("layers", 2), ("ffn_dim", 64))
    }
    rates = {"encoder_layerdrop": 0.1, "decoder_layerdrop": 0.1}
    model = BartForConditionalGeneration(BartConfig(vocab_size=128, d_model=32, **sizes, **rates))
    ids = torch.arange(16).reshape(2, 8)
    report = simulate(
        model=model,
        batch={"input_ids": ids, "labels": ids},
        optimizer=torch.optim.AdamW,
        target="cpu",
    )
    assert report.phases["backward"].end.gradients == report.phases["backward"].end.parameters


class Growing(nn.Module):
    """Buffers of 256 MiB, 512 MiB … 2 GiB, one after the other: each strands the segments before
    it.
    """

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        for n in range(1, 9):
            x.new_empty(n << 26)
        return self.layer(x)


def test_a_card_reserves_no_more_than_it_holds():
    """`release_cached_blocks`: where cudaMalloc fails, unused segments are given back before the
    step fails.
    """
    model = Growing()
    step = {
        "model": model,
        "batch": torch.rand(4, 64),
        "loss": total,
        "optimizer": torch.optim.SGD(model.parameters()),
    }
    endless = simulate(**step)
    assert endless.reserved.value > 9 * GiB > 3 * GiB > endless.allocated
    card = find_gpu("T4")
    small = dataclasses.replace(card, total=4 * GiB)
    report = simulate(**step, gpu=small)
    assert (
        report.allocated
        == endless.allocated
        <= report.reserved.value
        <= report.reserved.high
        <= report.process.high
    )
    assert report.process.value <= small.total and not report.notes
    assert report.verdict == "likely"  # the upper end is above the card, and nothing is clipped
    tiny = simulate(**step, gpu=dataclasses.replace(card, total=2 * GiB))
    # what a card of twice the peak reserves, which is asked to give back what is cached
    assert endless.allocated < tiny.reserved.value < 1.02 * 2 * endless.allocated
    assert tiny.notes == [
        "does not fit T4: in step 1, forward, it tries to allocate 2.00 GiB, and 1.89 GiB are "
        "free. Of 1.91 GiB, 8.14 MiB "
        "are allocated, 13.86 MiB reserved but unallocated"
    ]
    # tensors alone do not fit, so what a larger card would reserve is not shown
    assert tiny.beyond == tiny.allocated - tiny.usable > 0 == report.beyond
    assert "\nreserved" not in str(tiny) and "\nreserved" in str(report)
    assert tiny.answer("T4").endswith(f"{tiny.beyond / GiB:.3f} GiB more")


def test_a_run_that_outgrows_the_card_after_its_first_step_says_so():
    """AdamW's states come with the first update, so the second step's forward pass finds 4.4 GiB
    less.
    """
    recipe = Recipe("qwen3-0.6b", batch_size=4, seq_len=512, precision="fp16-mixed")
    (note,) = simulate(recipe, gpu="T4").notes
    assert "in step 2, forward, it tries to allocate 64.00 MiB, and 8.74 MiB are free" in note
    (note,) = simulate(recipe.replace(model="llama-3.1-8b"), gpu="T4").notes
    assert "in load it tries to allocate 224.00 MiB" in note


def of_mlp(**changes):
    return simulate(
        **{
            "model": mlp(),
            "batch": X,
            "loss": total,
            "optimizer": torch.optim.AdamW,
            "target": "cpu",
            **changes,
        }
    )


X = torch.rand(4, 64)


@pytest.mark.parametrize("precision", ["bf16-true", "fp16-true"])
def test_a_true_precision_is_the_modules_and_its_inputs(precision):
    """As after `model.to(dtype)` and the same of the batch: every byte of weights, gradients,
    states and inputs halves.
    """
    whole, half = (of_mlp(precision=p).phases["step"].end for p in ("fp32", precision))
    counters = 4 * 4
    assert (half.parameters, half.gradients, half.inputs) == (
        whole.parameters // 2,
        whole.gradients // 2,
        whole.inputs // 2,
    )
    assert half.optimizer_states - counters == (whole.optimizer_states - counters) // 2
    assert mlp()[0].weight.dtype == torch.float32


@pytest.mark.parametrize("made", [False, True])
def test_an_optimizer_in_the_backward_pass(made):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters()) if made else torch.optim.AdamW
    report = of_mlp(model=model, optimizer=optimizer, loop="optimizer_in_backward")
    largest = 4 * 64 * 256
    assert (
        report.phases["backward"].peak.gradients <= largest
        and report.phases["backward"].end.gradients == 0
    )
    assert (
        report.phases["step"].end.optimizer_states
        == 8 * sum(p.numel() for p in model.parameters()) + 4 * 4
    )


def test_several_optimizers():
    model = mlp()
    members = [
        torch.optim.AdamW(model[0].parameters()),
        torch.optim.SGD(model[3].parameters(), momentum=0.9),
    ]
    sizes = [sum(4 * p.numel() for p in model[i].parameters()) for i in (0, 3)]
    for loop in ("plain", "trainer", "optimizer_in_backward"):
        states = (
            of_mlp(model=model, optimizer=members, loop=loop).phases["step"].end.optimizer_states
        )
        assert states == 2 * sizes[0] + 2 * 4 + sizes[1]
    assert not members[0].state and not members[1].state


def test_inputs_of_nested_batches_are_counted():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 4)

        def forward(self, inputs, extra):
            return self.layer(inputs["img"]["x"]) + extra[0][0]

    batch = {"inputs": {"img": {"x": X}}, "extra": [(torch.rand(4),)]}
    assert of_mlp(model=Nested(), batch=batch).phases["load"].end.inputs == 4 * (4 * 64 + 4)


def test_what_the_trainers_loop_sets_is_set_on_the_copy():
    class Configured(nn.Linear):
        def forward(self, x):
            return torch.cat([super().forward(x)] * (2 if self.config.use_cache else 1))

    model = Configured(64, 4)
    model.config = type("Config", (), {"use_cache": True})()
    plain, trainer = (of_mlp(model=model, loop=loop) for loop in ("plain", "trainer"))
    assert plain.phases["forward"].peak.activations > trainer.phases["forward"].peak.activations
    assert model.config.use_cache


def test_hooks_run_and_the_modules_are_as_they_were():
    class Hooked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.seen, self.all = (
                nn.Linear(64, 64),
                nn.Linear(64, 4),
                None,
                [],
            )
            self.first.register_forward_hook(
                lambda module, inputs, output: setattr(self, "seen", output)
            )
            self.first.register_forward_hook(lambda module, inputs, output: self.all.append(output))

        def forward(self, x):
            return self.second(self.first(x)) + self.seen.mean()

    model, kept = Hooked(), []
    plain = model.second.forward
    model.second.forward = lambda x: plain(x) * 2
    model.first.weight.register_hook(lambda gradient: kept.append(gradient))

    def penalized(outputs, batch):
        return outputs.sum() + sum(p.pow(2).sum() for p in model.parameters())

    report = of_mlp(model=model, loss=penalized)
    assert (
        model.seen is None
        and not model.all
        and [tuple(gradient.shape) for gradient in kept] == [(64, 64)] * 2
    )
    assert all(type(p) is nn.Parameter and p.grad is None for p in model.parameters())
    assert report.phases["backward"].end.gradients == sum(4 * p.numel() for p in model.parameters())
    penalized(model(X), X).backward()
    assert type(model.seen) is torch.Tensor and type(kept[-1]) is torch.Tensor and len(kept) == 3


def test_a_teacher_in_the_loss_is_as_it_was():
    teacher = mlp()

    def distilled(outputs, batch):
        return F.mse_loss(outputs, teacher(batch))

    weights = list(teacher.parameters())
    taught, plain = of_mlp(loss=distilled), of_mlp()
    assert taught.peak.total - plain.peak.total >= sum(4 * p.numel() for p in weights)
    assert [id(p) for p in teacher.parameters()] == [id(p) for p in weights]
    assert all(type(p) is nn.Parameter and p.grad is None for p in weights)


def test_locks_and_generators_of_numbers_do_no_harm():
    import threading

    for held in (threading.Lock(), threading.RLock(), torch.Generator()):
        model = with_attribute(held)
        assert of_mlp(model=model).phases == of_mlp().phases and model.held["here"][0] is held


def test_what_is_left_out_is_noted():
    assert any("torch.compile" in note for note in of_mlp(model=torch.compile(mlp())).notes)
    assert any(
        "empty_cache_steps" in note
        for note in of_mlp(loop=Loop.named("plain", empty_cache_steps=1)).notes
    )


def test_errors_name_the_line(capfd):
    with pytest.raises(
        RecipeError, match=r"test_simulate_module\.py, line \d+: return self\.missing\(x\)"
    ):
        of_mlp(model=Failing())
    with pytest.raises(RecipeError, match="unexpected keyword argument 'y'"):
        of_mlp(batch={"y": X})
    with pytest.raises(RecipeError, match="its forward fails on fake tensors: RuntimeError"):
        of_mlp(batch=torch.rand(4, 63))
    assert "Traceback" not in capfd.readouterr().err


def test_a_loss_that_takes_no_batch_is_told_how_it_is_called():
    model = nn.Linear(4, 4)
    asked = dict(model=model, batch=torch.rand(2, 4), optimizer=torch.optim.SGD(model.parameters()))
    with pytest.raises(RecipeError, match=r"'loss' .* it is called as loss\(output, batch\)"):
        simulate(**asked, loss=lambda out: out.sum())
    assert simulate(**asked, loss=lambda out, _: out.sum(), target="cpu").peak.total
