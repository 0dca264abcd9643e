"""A thread that simulates and one that trains in the same process: neither sees the other.

The training runs in a thread of its own that is started, and waited for, from the middle of the
simulation, so nothing depends on who is quicker. Its losses are held, digit by digit, against those
that the same training has alone.
"""

import asyncio
import gc
import itertools
import os
import random
import sys
import threading
import traceback
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from tiny_models import config
from torch.utils.checkpoint import checkpoint
from vramlab.interfaces.watch import watch
from vramlab.private import patched
from vramlab.recipe.recipe import LoRA, Quantization, Recipe, Sharding
from vramlab.simulation import fakes
from vramlab.simulation.simulate import simulate
from vramlab.tracking.tracker import Tracker
from vramlab.training import models

SIZES = {"num_layers": 2, "batch_size": 2, "seq_len": 16}
EVERYWHERE = LoRA(r=4, target_modules="all-linear")


class Plain(torch.nn.Module):
    """Attention, dropout, softmax, a norm and recomputation, under autocast."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)
        self.norm = torch.nn.RMSNorm(16)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys, values = (
            self.first(self.norm(x)).view(2, 8, 2, 24).transpose(1, 2).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return x + F.dropout(F.softmax(self.last(mixed.transpose(1, 2).flatten(2)), -1), 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return checkpoint(
                self.attend, checkpoint(self.attend, x, use_reentrant=False), use_reentrant=False
            ).sum()


def plain() -> list[float]:
    torch.manual_seed(0)
    model = Plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.rand(2, 8, 16)
    return steps(optimizer, lambda: model(x))


def transformer(family: str, adapted: bool = False) -> list[float]:
    """A tiny model of transformers, with PEFT's adapters and bitsandbytes' 8-bit optimizer if
    `adapted`.
    """
    import transformers

    torch.manual_seed(0)
    settings = transformers.AutoConfig.for_model(**config(family, num_hidden_layers=2))
    model = transformers.AutoModelForCausalLM.from_config(settings)
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    kind = torch.optim.AdamW
    if adapted:
        import bitsandbytes
        import peft

        model.enable_input_require_grads()
        options = peft.LoraConfig(
            r=4, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        model, kind = peft.get_peft_model(model, options), bitsandbytes.optim.AdamW8bit
    optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=0.01)
    ids = torch.randint(0, 1000, (2, 16))
    losses = steps(optimizer, lambda: model(input_ids=ids, labels=ids).loss)
    assert all(
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        for tensor in model.state_dict(keep_vars=True).values()
    )
    return losses


def steps(optimizer, loss_of) -> list[float]:
    losses = []
    for _ in range(2):
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [*losses, torch.rand(1).item()]  # the generator is where the training alone leaves it


TRAININGS = {
    "plain torch": plain,
    "GPT-2": lambda: transformer("gpt2"),
    "LoRA, 8-bit optimizer": lambda: transformer("llama", adapted=True),
}
RECIPES = {
    "bf16-mixed, recomputed": ("gpt2", {"precision": "bf16-mixed", "gradient_checkpointing": True}),
    "LoRA in bf16": ("llama", {"lora": EVERYWHERE, "precision": "bf16-true"}),
    "4-bit": (
        "llama",
        {"lora": EVERYWHERE, "quantization": Quantization("nf4"), "optim": "adamw_bnb_8bit"},
    ),
    "a rank of FSDP": ("llama", {"sharding": Sharding(world_size=4), "precision": "bf16-mixed"}),
    "DPO": ("llama", {"trainer": "dpo", "precision": "bf16-mixed"}),
}


def recipe_of(name: str) -> Recipe:
    family, fields = RECIPES[name]
    return Recipe(config(family), **SIZES, **fields)


def in_thread(function):
    """What `function` returns when another thread runs it. Raises its error."""
    answers, errors = [], []

    def run():
        try:
            answers.append(function())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return answers[0]


def process_state() -> dict:
    """What a thread sees of the process."""
    return {
        "default dtype": torch.get_default_dtype(),
        "a new tensor": torch.ones(1).dtype,
        "generators": (torch.get_rng_state().tolist(), random.getstate()),
        "TF32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "process group": torch.distributed.is_initialized(),
        "environment": dict(os.environ),
        "autocast": (torch.is_autocast_enabled(), torch.is_autocast_enabled("cpu")),
    }


def during(monkeypatch, simulation, action) -> tuple:
    """Return what `simulation` returns, and a list of what `action` does in a thread of its own at
    each point of it.
    """
    found, plain_begin, plain_make = [], Tracker.begin, models.make
    main = threading.get_ident()

    def begin(tracker, phase):
        if (
            phase in ("backward", "between_steps")
            and threading.get_ident() == main
            and len(found) < 3
        ):
            found.append(in_thread(action))
        return plain_begin(tracker, phase)

    def make(*args, **options):  # in the middle of building
        if threading.get_ident() == main and not found:
            found.append(in_thread(action))
        return plain_make(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Tracker, "begin", begin)
        patch.setattr(models, "make", make)
        return simulation(), found


@pytest.fixture(scope="module")
def alone() -> dict[str, list[float]]:
    return {name: in_thread(training) for name, training in TRAININGS.items()}


@pytest.mark.parametrize("name", RECIPES)
def test_a_training_inside_a_simulation_is_what_it_is_alone(name, alone, monkeypatch):
    kinds = itertools.cycle(TRAININGS)

    def train():
        kind = next(kinds)
        before = torch.get_rng_state()
        losses = TRAININGS[kind]()
        torch.set_rng_state(before)
        return kind, losses

    recipe = recipe_of(name)
    report = simulate(recipe)
    inside, found = during(monkeypatch, lambda: simulate(recipe), train)
    assert len(found) == 3
    assert found == [(kind, alone[kind]) for kind, _ in found]
    assert inside == report


@pytest.mark.parametrize("name", [*RECIPES, "a rank of DeepSpeed", "TF32"])
def test_another_thread_sees_no_difference(name, monkeypatch):
    more = {
        "a rank of DeepSpeed": Recipe(
            config("llama"), sharding=Sharding(3, 2, "deepspeed"), **SIZES
        ),
        "TF32": Recipe(config("gpt2"), precision="tf32", **SIZES),
    }
    recipe = more.get(name) or recipe_of(name)
    simulate(recipe)  # libraries are loaded
    linear, filters, hook = (
        F.linear,
        list(warnings.filters),
        in_thread(lambda: __import__("sys").excepthook),
    )
    before = in_thread(process_state)
    _, found = during(monkeypatch, lambda: simulate(recipe), process_state)
    assert found == [before] * 3
    assert in_thread(process_state) == before
    assert (F.linear, list(warnings.filters), __import__("sys").excepthook) == (
        linear,
        filters,
        hook,
    )
    assert gc.isenabled()


def test_a_training_inside_the_simulation_of_any_module(alone):
    found = []

    def loss(outputs, batch):
        found.append(in_thread(plain))
        return outputs

    model = Plain()
    simulate(model=model, batch=torch.rand(2, 8, 16), optimizer=torch.optim.AdamW, loss=loss)
    assert found == [alone["plain torch"]] * 2
    assert all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())


def test_a_training_inside_a_watched_block_is_not_counted(alone):
    reports = []
    for between in (lambda: None, lambda: in_thread(plain)):
        torch.manual_seed(1)
        model, x = torch.nn.Linear(8, 8), torch.rand(4, 8)
        with watch(model) as watched:
            loss = model(x).sum()
            losses = between()
            loss.backward()
        reports.append(watched.report())
        assert losses in (None, alone["plain torch"])
    assert reports[0] == reports[1]


def test_two_threads_simulate_what_each_does_alone():
    recipes = [recipe_of("bf16-mixed, recomputed"), recipe_of("a rank of FSDP")]
    expected, found = [simulate(recipe) for recipe in recipes], {}
    threads = [
        threading.Thread(target=lambda r=recipe: found.update({r: simulate(r)}))
        for recipe in recipes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[recipe] for recipe in recipes] == expected
    assert gc.isenabled()


def test_a_task_simulates_in_a_thread_while_another_trains(alone):
    """`asyncio.to_thread` hands its caller's context on; what a simulation replaces is in none."""

    async def both() -> tuple:
        return await asyncio.gather(
            asyncio.to_thread(simulate, recipe_of("LoRA in bf16")), asyncio.to_thread(plain)
        )

    report, losses = asyncio.run(both())
    assert report == simulate(recipe_of("LoRA in bf16"))
    assert losses == alone["plain torch"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_forked_by_another_thread_trains_and_simulates(alone, monkeypatch):
    recipe = recipe_of("bf16-mixed, recomputed")
    report = simulate(recipe)

    def fork() -> int:
        child = os.fork()
        if child:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        status = 1
        try:
            same = plain() == alone["plain torch"] and simulate(recipe) == report
            status = (
                0
                if same and gc.isenabled() and torch.tensor.__module__ != "vramlab.private.patched"
                else 2
            )
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    _, found = during(monkeypatch, lambda: simulate(recipe), fork)
    assert found == [0] * 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_threads_that_train_beside_many_simulations(seed, alone):
    """At random times, as long as the simulations take."""
    draw, over, wrong = random.Random(seed), threading.Event(), []

    def train():
        while not over.is_set():
            losses = plain()[:0] or in_own_generator()
            if losses != expected:
                wrong.append(losses)

    def in_own_generator() -> list[float]:
        """Without dropout: threads share the generator."""
        model = torch.nn.Linear(8, 8)
        values = torch.linspace(-1, 1, 64).view(8, 8)
        with torch.no_grad():
            model.weight.copy_(values), model.bias.zero_()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return steps(optimizer, lambda: F.softmax(model(values), -1).square().sum())[:2]

    expected = in_own_generator()
    thread = threading.Thread(target=train)
    thread.start()
    try:
        for name in draw.choices([*RECIPES], k=12):
            simulate(recipe_of(name))
    finally:
        over.set()
        thread.join()
    assert wrong == []


def test_the_lock_is_free_after_an_error():
    with pytest.raises(ZeroDivisionError), fakes.fake_world("cuda"):
        raise ZeroDivisionError
    assert in_thread(lambda: fakes.lock.acquire(blocking=False) and not fakes.lock.release())
    assert in_thread(process_state)["a new tensor"] == torch.float32


def test_what_a_thread_keeps_lives_as_long_as_it_is_kept():
    """torch 2.11 takes the caller's reference to what it stashes: a process died of it."""

    class Values(dict):
        pass

    for _ in range(20):
        values = Values({"attribute": 1})
        alive = weakref.ref(values)
        patched._keep(values)
        references = sys.getrefcount(values)
        del values
        assert alive() is patched._values()
        assert references >= 3  # `values`, the call's argument, and torch's own
        patched._keep({})
        assert alive() is None
