"""`watch` finds phases and names storages in code that is not ours, and leaves nothing behind."""

import io
import re
from contextlib import redirect_stdout
from types import SimpleNamespace

import pytest
import torch
from tiny_models import config
from torch.nn import functional as F
from torch.utils import checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode
from vramlab import Loop, Recipe, VramLabError, simulate, watch
from vramlab.report.report import CATEGORIES
from vramlab.training.models import build_model
from vramlab.training.training import make_batch

SIZES = {"batch_size": 2, "seq_len": 32, "num_layers": 2}
TIDY = Loop("tidy", zero_grad="end", outputs_to_fp32=False, use_cache=None)


def recipe(**fields) -> Recipe:
    return Recipe(config("gpt2"), **{**SIZES, "loop": "plain", **fields})


def mlp() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))


X, Y = torch.randn(32, 64), torch.randint(0, 10, (32,))


def entropy(outputs, batch=None):
    return F.cross_entropy(outputs, Y)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def phases(watcher: watch) -> list[str]:
    return [name for name, _, _ in watcher.history.stretches]


STEP = ["forward", "backward", "step", "between_steps"]

# --- to the byte
# Each loop is written as its users write it. What it holds at the end is handed back, so that it
# outlives the block.


def tutorial(model, batch, optimizer, loss_of=lambda outputs: outputs.loss):
    """The loop of PyTorch's tutorials: clear, forward, loss, backward, step; outputs and loss are
    variables.
    """
    for _ in range(2):
        optimizer.zero_grad()
        outputs = model(**batch) if isinstance(batch, dict) else model(batch)
        loss = loss_of(outputs)
        loss.backward()
        optimizer.step()
    return outputs, loss


def tidy(model, batch, optimizer):
    """Keeps no outputs, clips, and clears at the end."""
    for _ in range(2):
        loss = model(**batch).loss
        loss.backward()
        last = loss.detach()
        del loss
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return last


def accumulating(model, batch, optimizer):
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(3):
            outputs = model(**batch)
            loss = outputs.loss / 3
            loss.backward()
        optimizer.step()
    return outputs, loss


def late_clearing(model, batch, optimizer):
    for _ in range(2):
        outputs = model(**batch)
        loss = outputs.loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return outputs, loss


def in_bf16(model, batch, optimizer):
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(**batch)
            loss = outputs.loss
        loss.backward()
        optimizer.step()
    return outputs, loss


def in_fp16(model, batch, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)  # no overflow, so no step is skipped
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            outputs = model(**batch)
            loss = outputs.loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return outputs, loss, scaler


LOOPS = {
    "tutorial": (tutorial, {}),
    "tidy": (tidy, {"loop": TIDY}),
    "accumulating": (accumulating, {"gradient_accumulation_steps": 3}),
    "late_clearing": (late_clearing, {"loop": Loop.named("plain", zero_grad="before_backward")}),
    "in_bf16": (in_bf16, {"precision": "bf16-mixed"}),
    "in_fp16": (in_fp16, {"precision": "fp16-mixed"}),
    "checkpointing": (tutorial, {"gradient_checkpointing": True}),
}


# One fp32 number counts in a neighbouring phase: phases begin and end with backward() here, and
# train_step's "backward" also scales the loss first (in_fp16) and afterwards drops the last step's
# loss for the new one (tidy).
SCALAR = {"tidy": 4, "in_fp16": 4}


@pytest.mark.parametrize("name", LOOPS)
def test_a_hand_written_loop_is_what_simulate_says_to_the_byte(name):
    loop, fields = LOOPS[name]
    wanted = recipe(**fields)
    model, batch = build_model(wanted), make_batch(wanted)
    with watch(model, batch=batch) as seen:
        kept = loop(model, batch, adamw(model))
    report, simulated = seen.report(), simulate(wanted, target="cpu", full=True)
    for phase, split in simulated.phases.items():
        for moment in ("peak", "end"):
            real, said = (
                dict(getattr(report.phases[phase], moment).items()),
                dict(getattr(split, moment).items()),
            )
            differences = [abs(real[category] - said[category]) for category in CATEGORIES]
            assert max(differences) <= SCALAR.get(name, 0), (phase, moment, differences)
    assert (report.peak, report.peak_phase) == (simulated.peak, simulated.peak_phase)
    micro = wanted.gradient_accumulation_steps
    assert phases(seen) == [
        "load",
        *[*["forward", "backward"] * micro, "step", "between_steps"] * 2,
    ]
    del kept


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.AdamW])
def test_any_module_is_what_simulate_says_to_the_byte(kind):
    model = mlp()
    optimizer = kind(model.parameters(), lr=0.1)
    simulated = simulate(
        model=model, batch=(X,), optimizer=optimizer, loss=entropy, target="cpu", loop="plain"
    )
    with watch(model, optimizer, batch=X) as seen:
        kept = tutorial(model, X, optimizer, entropy)
    assert seen.report().phases == simulated.phases and seen.report().peak == simulated.peak
    # the loss is made and differentiated outside the model, and still in the right phases
    assert seen.report().phases["forward"].end.activations >= 4 * (32 * 256 + 32 * 10)
    assert seen.report().phases["step"].end.gradients == 4 * sum(
        p.numel() for p in model.parameters()
    )
    del kept


def test_a_tensor_that_outlives_the_step_is_seen():
    """What simulate is not told about shows: a hoard of outputs grows by one output a step."""
    model, hoard = mlp(), []
    optimizer = adamw(model)
    with watch(model) as seen:
        for _ in range(3):
            hoard.append(model(X))
            entropy(hoard[-1]).backward()
            optimizer.step()
            optimizer.zero_grad()
    live = [
        seen.history.live[end] for name, _, end in seen.history.stretches if name == "between_steps"
    ]
    assert live[2] - live[1] == live[1] - live[0] == 4 * 32 * 10


# --- phases


class Reentrant(torch.nn.Module):
    """Checkpointing that runs another forward and backward pass inside the backward pass."""

    def __init__(self, reentrant: bool = True):
        super().__init__()
        self.reentrant, self.first, self.blocks = (
            reentrant,
            torch.nn.Linear(64, 64),
            torch.nn.ModuleList([mlp()]),
        )
        self.last = torch.nn.Linear(10, 10)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint.checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("part", ["", "blocks.0"])
def test_a_recomputed_forward_pass_is_backward(reentrant, part):
    model = Reentrant(reentrant)
    optimizer = adamw(model)
    with watch(model.get_submodule(part)) as seen:
        for _ in range(2):
            entropy(model(X)).backward()
            optimizer.step()
            optimizer.zero_grad()
    if (
        part and reentrant
    ):  # its first forward runs without gradients: only the recomputation could be recognised
        assert phases(seen) == ["load", *["backward", "step", "between_steps"] * 2]
    else:
        assert phases(seen) == ["load", *STEP * 2]
        # by phase, over all moments: the phases' peaks come at moments when gradients weigh more
        highest = {
            name: max(seen.history.split(p).activations for p in range(start, end + 1))
            for name, start, end in seen.history.last_step
        }
        assert highest["forward"] < 4 * 32 * 256 < highest["backward"], (
            "the ReLU's result is made again in there"
        )


def test_the_optimizer_is_found_and_its_states_are_named():
    model = mlp()
    optimizer = adamw(model)
    for given in ([], [optimizer]):
        with watch(model, *given) as seen:
            tutorial(model, X, optimizer, entropy)
        numbers = sum(p.numel() for p in model.parameters())
        assert seen.report().phases["step"].end.optimizer_states == 8 * numbers + 4 * 4
    assert seen.report().phases["load"].end.optimizer_states == 8 * numbers + 4 * 4, (
        "it had them before the block"
    )


def test_another_models_optimizer_is_nobodys_step():
    model, other = mlp(), mlp()
    optimizer = adamw(other)
    with watch(model) as seen:
        entropy(model(X)).backward()
        entropy(other(X)).backward()
        optimizer.step()
    assert "step" not in phases(seen) and seen.report().phases["backward"].end.optimizer_states == 0


def test_an_update_by_hand_is_a_step():
    model = mlp()
    with watch(model) as seen:
        for _ in range(2):
            entropy(model(X)).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    assert phases(seen) == ["load", *STEP * 2]
    step = seen.report().phases["step"]
    assert step.end.gradients == 0 < step.peak.gradients and step.peak.temporaries >= 4 * 64 * 256


def test_without_any_update_there_is_no_step():
    model = mlp()
    with watch(model) as seen:
        for _ in range(2):
            entropy(model(X)).backward()
    assert phases(seen) == ["load", *["forward", "backward"] * 2, "between_steps"]
    assert seen.report().phases["between_steps"].end.gradients == 4 * sum(
        p.numel() for p in model.parameters()
    )


def test_evaluation_and_a_second_model_call_begin_nothing():
    model = mlp()
    optimizer = adamw(model)
    with watch(model) as seen:
        (entropy(model(X)) + entropy(model(X))).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(X)
    assert phases(seen) == ["load", *STEP]
    assert seen.report().phases["forward"].end.activations >= 2 * 4 * 32 * 256, (
        "both calls' activations"
    )


def test_a_step_inside_the_backward_pass_stays_there_and_its_gradients_have_a_name():
    model = mlp()
    steps = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def update(parameter):
        steps[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    with watch(model) as seen:
        for _ in range(2):
            entropy(model(X)).backward()
    assert seen.report().phases["backward"].end.optimizer_states == 4 * sum(
        p.numel() for p in model.parameters()
    )
    splits = [seen.history.split(p).gradients for p in range(len(seen.history.log))]
    assert 0 < max(splits) < 4 * sum(p.numel() for p in model.parameters()), "one at a time"


def test_part_of_a_model_and_a_watch_inside_a_watch():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), mlp())
    optimizer = adamw(model)
    with watch(model) as outer, watch(model[1]) as inner:
        tutorial(model, X, optimizer, entropy)
    assert phases(outer) == phases(inner) == ["load", *STEP * 2]
    assert inner.report().peak.total == outer.report().peak.total, (
        "the step touches the rest of the model too"
    )
    assert inner.report().peak.parameters == 4 * sum(p.numel() for p in model.parameters())
    gradients = [seen.report().phases["backward"].end.gradients for seen in (inner, outer)]
    assert gradients == [
        4 * sum(p.numel() for p in part.parameters()) for part in (model[1], model)
    ]


def test_inputs_are_what_the_model_is_called_with():
    model = mlp()
    with watch(model) as seen:
        for _ in range(2):
            x = torch.randn(32, 64)
            entropy(model(x)).backward()
    assert seen.report().phases["forward"].peak.inputs == 4 * 32 * 64 + Y.nbytes
    assert seen.report().phases["backward"].peak.inputs == 4 * 32 * 64 + Y.nbytes


# --- faults


def untouched(model: torch.nn.Module, backward) -> bool:
    hooks = [
        model._forward_pre_hooks,
        *(p._post_accumulate_grad_hooks or () for p in model.parameters()),
    ]
    return (
        _get_current_dispatch_mode() is None
        and torch.autograd.backward is backward
        and not any(hooks)
    )


class Broken(Exception):
    pass


def fail(*_):
    raise Broken


@pytest.mark.parametrize("where", ["forward", "backward", "step", "block"])
def test_an_error_in_the_block_gets_out_and_the_report_says_what_ran(where):
    model, backward = mlp(), torch.autograd.backward
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handles = []
    with pytest.raises(Broken), watch(model) as seen:
        tutorial(model, X, optimizer, entropy)
        if where == "forward":
            handles.append(model[2].register_forward_pre_hook(fail))
        elif where == "backward":
            handles.append(model[2].register_full_backward_hook(fail))
        elif where == "step":
            handles.append(optimizer.register_step_pre_hook(fail))
        else:
            raise Broken
        tutorial(model, X, optimizer, entropy)
    for handle in handles:
        handle.remove()
    assert untouched(model, backward)
    last = {
        "forward": ["forward"],
        "backward": ["forward", "backward"],
        "step": STEP[:3],
        "block": [],
    }[where]
    assert phases(seen) == ["load", *STEP * 2, *last, *(["between_steps"] if last else [])]
    assert seen.report().peak.parameters == 4 * sum(p.numel() for p in model.parameters())


def test_a_watch_begins_anew_and_leaves_nothing():
    model, backward = mlp(), torch.autograd.backward
    watcher = watch(model, title="mine")
    reports = []
    for _ in range(2):
        with watcher:
            entropy(model(X)).backward()
        model.zero_grad()
        reports.append(watcher.report())
        assert untouched(model, backward)
    assert reports[0].phases == reports[1].phases and reports[0].title == "mine"


def test_wrong_uses_are_sentences():
    with pytest.raises(VramLabError, match=r"torch\.nn\.Module, and this is a list"):
        watch([1])
    watcher = watch(mlp())
    with pytest.raises(VramLabError, match="after the with-block"):
        watcher.report()
    with watcher, pytest.raises(VramLabError, match="is running"):
        watcher.__enter__()
    assert watcher.report().source == "measured"


def test_sparse_gradients_are_refused():
    model = torch.nn.Embedding(50, 8, sparse=True)
    with (
        watch(model),
        pytest.raises(VramLabError, match=r"neither simulate nor watch follows torch\.sparse_coo"),
    ):
        model(torch.arange(6)).sum().backward()


def test_a_compiled_model_is_said_to_have_run_eagerly():
    wrapper, method = torch.compile(mlp(), backend="eager"), mlp()
    method.compile(backend="eager")
    for model in (wrapper, method):
        with watch(model) as seen:
            entropy(model(X)).backward()
        assert any(
            note.startswith("torch.compile: a watched model") for note in seen.report().notes
        )
    with watch(mlp()) as plain:
        entropy(plain.model(X)).backward()
    assert not any("torch.compile" in note for note in plain.report().notes)


def test_lazy_parameters_are_refused_in_a_sentence():
    with pytest.raises(VramLabError, match="'weight' is lazy"):
        watch(torch.nn.LazyLinear(4))


# --- %%watch


@pytest.fixture
def shell():
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()  # not the singleton: other tests may look for one
    shell.run_line_magic("load_ext", "vramlab")
    model = mlp()
    shell.user_ns.update(
        model=model, optimizer=adamw(model), box=SimpleNamespace(model=model), x=X, entropy=entropy
    )
    return shell


CELL = (
    "for _ in range(2):\n    entropy(model(x)).backward()\n    optimizer.step()\n    "
    "optimizer.zero_grad()\n"
)


def run(shell, text: str):
    out = io.StringIO()
    with redirect_stdout(out):
        result = shell.run_cell(text)
    return result, out.getvalue()


@pytest.mark.parametrize("line", ["model", "model optimizer", "box.model"])
def test_the_magic_prints_the_report_of_its_cell(shell, line):
    result, text = run(shell, f"%%watch {line}\n{CELL}answer = 42")
    assert result.success and shell.user_ns["answer"] == 42
    assert "measured (cpu), KiB: Sequential" in text and "between_steps" in text
    assert _get_current_dispatch_mode() is None


@pytest.mark.parametrize(("cell", "kind"), [("1 / 0", ZeroDivisionError), ("for", SyntaxError)])
def test_the_magic_shows_an_error_once_and_the_report_before_it(shell, cell, kind):
    result, text = run(shell, f"%%watch model\nentropy(model(x)).backward()\n{cell}")
    assert isinstance(result.error_in_exec, kind) and _get_current_dispatch_mode() is None
    assert text.index("measured (cpu)") < text.index(kind.__name__)
    assert text.count("Traceback (most recent call last)") == 1 or kind is SyntaxError
    assert run(shell, "1 / 0")[1].count("ZeroDivisionError") >= 1, "the shell shows errors again"


@pytest.mark.parametrize(
    ("line", "kind", "why"), [("modle", NameError, "modle"), ("x", VramLabError, "is a Tensor")]
)
def test_the_magic_refuses_in_a_sentence(shell, line, kind, why):
    result, _ = run(shell, f"%%watch {line}\nran = 1")
    assert isinstance(result.error_in_exec, kind) and why in str(result.error_in_exec)
    assert "ran" not in shell.user_ns


@pytest.mark.parametrize("keeps", [True, False])
def test_what_every_step_keeps_is_noted(keeps):
    model = mlp()
    optimizer = adamw(model)
    batch = torch.randn(4096, 64)
    kept = []
    with watch(model, optimizer) as watched:
        for _ in range(6):
            outputs = model(batch)
            outputs.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if keeps:
                kept.append(outputs)
    notes = [note for note in watched.report().notes if "memory grows with every step" in note]
    # 4,096 samples × 10 numbers in fp32, of the last layer
    said = "memory grows with every step, which keeps 160.000 KiB of activations by addmm in 2"
    keeper = r": in `kept` \(test_watch.py:\d+ kept = \[\]\)"
    line = r", made at test_watch.py:\d+ outputs = model\(batch\)"
    assert len(notes) == keeps
    assert all(re.fullmatch(re.escape(said) + keeper + line, note) for note in notes)
    assert watched.tracker.keeps_stacks is keeps, "without a leak no stack is kept"


def test_each_of_two_leaks_has_its_keeper_and_its_line():
    model = mlp()
    optimizer = adamw(model)
    batch = torch.randn(4096, 64)
    log = SimpleNamespace(stats={"out": []})
    total = penalty = torch.zeros(())
    with watch(model, optimizer) as watched:
        for _ in range(6):
            outputs = model(batch)
            loss = outputs.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log.stats["out"].append(outputs)
            total = total + loss
            penalty = penalty + model[0](batch).relu().mean()  # no backward frees what it saves
    grown, other, *graphs = [note for note in watched.report().notes if "every step" in note]
    assert re.search(r"4.000 MiB of activations by relu, made at .* penalty = penalty \+", grown)
    assert "160.000 KiB of activations by addmm in 2: in `log.stats` (test_watch.py), made" in other
    assert not watched._held, "a watch keeps no frame, and with it all variables"
    for name, note in zip(("total", "penalty"), graphs, strict=True):
        assert note.startswith(f"`{name}` keeps autograd's graph of every step: add .item()")
        assert f"{name} = {name} + " in note
