"""The loop "trainer" is what `transformers.Trainer` does: one of its real steps, watched, against
the simulation.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch
import transformers
from quick import params
from tiny_models import TINY, config
from torch.utils._python_dispatch import _get_current_dispatch_mode
from vramlab import LoRA, Quantization, Recipe, WatchCallback, simulate
from vramlab.report.report import CATEGORIES
from vramlab.training.models import build_model
from vramlab.training.training import _groups, make_batch

pytestmark = pytest.mark.usefixtures("quiet")

SIZES = {"batch_size": 2, "seq_len": 32, "num_layers": 2}
# What the Trainer keeps besides, in bytes: the number of labels, the running loss, the last
# gradient norm, and a loss per micro-batch that is divided by the number of those: one scalar each.
# No tensor that grows with anything.
SCALARS = 32


def trainer(recipe: Recipe, out, *callbacks, model=None, **changes) -> transformers.Trainer:
    model = model or build_model(recipe, "cpu")
    if recipe.quantization:
        model.hf_quantizer = SimpleNamespace(is_trainable=True)  # as from_pretrained leaves one
    rows = recipe.batch_size * recipe.gradient_accumulation_steps * 3
    batch = make_batch(
        recipe.replace(
            batch_size=rows, lengths=recipe.lengths and recipe.lengths * (rows // recipe.batch_size)
        )
    )
    data = [{name: tensor[i] for name, tensor in batch.items()} for i in range(rows)]
    changes = {
        "logging_strategy": "no",
        "train_sampling_strategy": "sequential",
        "max_steps": 3,
        **changes,
    }
    arguments = recipe.training_arguments(
        str(out), disable_tqdm=True, dataloader_pin_memory=False, **changes
    )
    return transformers.Trainer(
        model, arguments, train_dataset=data, eval_dataset=data, callbacks=list(callbacks)
    )


HALF = {"precision": "bf16-mixed", "dtype": "bfloat16"}
CASES = {
    "gpt2": ("gpt2", {}),
    "bert": ("bert", {}),
    "gpt2 bf16-mixed": ("gpt2", {"precision": "bf16-mixed"}),
    "bert bf16-mixed accumulation": (
        "bert",
        {"precision": "bf16-mixed", "gradient_accumulation_steps": 3},
    ),
    "gpt2 bf16-true": ("gpt2", {"precision": "bf16-true"}),
    "gpt2 accumulation": ("gpt2", {"gradient_accumulation_steps": 2}),
    "vit accumulation": ("vit", {"gradient_accumulation_steps": 4, "seq_len": None}),
    "gpt2 checkpointing": ("gpt2", {"gradient_checkpointing": True}),
    "llama checkpointing bf16-mixed": (
        "llama",
        {"gradient_checkpointing": True, "precision": "bf16-mixed"},
    ),
    "gpt2 adafactor": ("gpt2", {"optim": "adafactor"}),
    "gpt2 momentum": ("gpt2", {"optim": "sgd", "optim_args": "momentum=0.9"}),
    "gpt2 fused": ("gpt2", {"optim": "adamw_torch_fused"}),
    "gpt2 lion": ("gpt2", {"optim": "lion_32bit"}),
    "gpt2 schedule-free": ("gpt2", {"optim": "schedule_free_adamw"}),
    "gpt2 AdEMAMix in 8 bits": ("gpt2", {"optim": "ademamix_8bit"}),
    "gpt2 8-bit": ("gpt2", {"optim": "adamw_bnb_8bit"}),
    "gpt2 smoothed labels": (
        "gpt2",
        {
            "label_smoothing_factor": 0.1,
            "precision": "bf16-mixed",
            "gradient_accumulation_steps": 2,
        },
    ),
    "gpt2 unclipped": ("gpt2", {"loop": "unclipped"}),
    "gpt2 LoRA": ("gpt2", {"lora": LoRA(r=4)}),
    # PEFT makes the embeddings' output a leaf, whose gradient lives as long as the loss
    "gpt2 LoRA checkpointing": ("gpt2", {"lora": LoRA(r=4), "gradient_checkpointing": True}),
    "gpt2 bf16 under bf16-mixed": ("gpt2", HALF),
    "llama bf16 under bf16-mixed, checkpointing": (
        "llama",
        {**HALF, "gradient_checkpointing": True},
    ),
    "llama bf16 under bf16-mixed, LoRA": (
        "llama",
        {**HALF, "lora": LoRA(r=4, target_modules="all-linear")},
    ),
    "llama bf16 under bf16-mixed, bf16 LoRA": (
        "llama",
        {**HALF, "lora": LoRA(r=4, autocast_adapter_dtype=False)},
    ),
    "llama padded": ("llama", {"lengths": (32, 9)}),
    "bert padded, bf16-mixed": ("bert", {"lengths": (32, 9), "precision": "bf16-mixed"}),
    "llama int8, re-entrant": (
        "llama",
        {
            **HALF,
            "lora": LoRA(r=4, target_modules="all-linear"),
            "quantization": Quantization("int8", prepare=False),
            "gradient_checkpointing": True,
            "use_reentrant": True,
        },
    ),
    "llama 4 bits": (
        "llama",
        {"precision": "bf16-mixed", "lora": LoRA(r=4), "quantization": Quantization()},
    ),
    "llama 4 bits, unprepared": (
        "llama",
        {
            **HALF,
            "lora": LoRA(r=4),
            "quantization": Quantization(prepare=False, compute_dtype="float32"),
        },
    ),
}


def make(name: str) -> Recipe:
    from vramlab import Loop

    family, fields = CASES[name]
    fields = {**SIZES, **fields}
    if fields.get("loop"):
        fields["loop"] = Loop(max_grad_norm=None)
    return Recipe(config(family), **fields)


def assert_same_but_for_scalars(ran, simulated):
    """Each category of each phase, at its peak and its end."""
    for phase in ("forward", "backward", "step", "between_steps"):
        for moment in ("peak", "end"):
            real, said = (getattr(report.phases[phase], moment) for report in (ran, simulated))
            for category in CATEGORIES:
                difference = getattr(real, category) - getattr(said, category)
                assert abs(difference) <= SCALARS, (
                    f"{phase} {moment} {category}: {difference:+,} bytes"
                )


COMBINED = (
    *("bert", "gpt2 bf16-mixed", "gpt2 accumulation", "gpt2 checkpointing", "vit accumulation"),
    *("gpt2 momentum", "gpt2 lion", "gpt2 AdEMAMix in 8 bits", "gpt2 LoRA"),
    *(
        "gpt2 bf16 under bf16-mixed",
        "llama bf16 under bf16-mixed, LoRA",
        "llama 4 bits",
        "llama int8, re-entrant",
        "llama padded",
    ),
)


@pytest.mark.parametrize("name", params(CASES, CASES.keys() - COMBINED))
def test_a_real_trainer_step_is_what_simulate_says(name, tmp_path):
    recipe, seen = make(name), WatchCallback()
    trainer(recipe, tmp_path, seen).train()
    simulated = simulate(recipe, target="cpu", full=True)
    assert seen.report.source == "measured" and simulated.source == "simulated"
    assert_same_but_for_scalars(seen.report, simulated)
    assert (
        seen.report.phases["load"].end.optimizer_states
        == simulated.phases["step"].end.optimizer_states
    )


NEUTRAL = dict(
    learning_rate=1.0, lr_scheduler_type="cosine", warmup_steps=1, adam_beta1=0.5, adam_beta2=0.0,
    adam_epsilon=1e-3,
    average_tokens_across_devices=False, logging_strategy="steps", logging_steps=1,
    logging_nan_inf_filter=False,
    include_num_input_tokens_seen="non_padding", eval_strategy="steps", eval_steps=1,
    per_device_eval_batch_size=5,
    bf16_full_eval=True, save_strategy="steps", save_steps=1, seed=1, data_seed=2,
    dataloader_drop_last=True,
    remove_unused_columns=False, train_sampling_strategy="group_by_length",
    skip_memory_metrics=False, max_steps=4,
)  # fmt: skip


def test_arguments_that_move_no_memory_move_none(tmp_path):
    recipe, seen = make("gpt2"), WatchCallback()
    trainer(recipe, tmp_path, seen, **NEUTRAL).train()
    assert_same_but_for_scalars(seen.report, simulate(recipe, target="cpu", full=True))


@pytest.mark.parametrize("family", sorted(TINY))
def test_the_optimizers_groups_are_the_trainers(family):
    """The real steps above have them from the Trainer itself; this is every architecture."""
    recipe = Recipe(config(family), batch_size=1, num_layers=2)
    model = build_model(recipe, "meta")
    decayed = set(transformers.Trainer.get_decay_parameter_names(None, model))
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [{names[id(p)] for p in group["params"]} for group in _groups(recipe, model)]
    assert groups == [
        {n for n in names.values() if n in decayed},
        {n for n in names.values() if n not in decayed},
    ]
    assert len(groups) == 2 and all(groups)


def test_the_scalars_allowed_for_hide_nothing(tmp_path):
    """A Trainer with one fault, a hook that hoards the logits, is told from a sound one."""
    recipe, seen, hoard = make("gpt2"), WatchCallback(), []
    model = build_model(recipe)
    model.lm_head.register_forward_hook(lambda module, args, logits: hoard.append(logits.detach()))
    trainer(recipe, tmp_path, seen, model=model).train()
    simulated = simulate(recipe, target="cpu", full=True)
    logits = 4 * 2 * 32 * 1000
    assert seen.report.phases["step"].end.total - simulated.phases["step"].end.total >= logits


# --- the callback itself


def test_the_step_asked_for_is_watched(tmp_path):
    recipe = make("gpt2")
    first, second, never = WatchCallback(step=1), WatchCallback(), WatchCallback(step=9)
    trainer(recipe, tmp_path, first, second, never).train()
    assert never.report is None
    assert (
        first.report.title == "Trainer, step 1: GPT2LMHeadModel"
        and second.report.title.startswith("Trainer, step 2")
    )
    assert (
        first.report.phases["load"].end.optimizer_states
        == 0
        < second.report.phases["load"].end.optimizer_states
    )
    assert _get_current_dispatch_mode() is None


def test_training_again_watches_again(tmp_path):
    recipe, seen = make("gpt2"), WatchCallback(step=1)
    reports = []
    for _ in range(2):
        trainer(recipe, tmp_path, seen).train()
        reports.append(seen.report)
    assert reports[0] is not reports[1] and reports[0].peak == reports[1].peak


def broken(recipe: Recipe, tmp_path, seen: WatchCallback) -> transformers.Trainer:
    """A trainer whose second step fails in the forward pass."""
    training = trainer(recipe, tmp_path, seen)
    calls = []

    def fail(module, args, kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError

    training.model.register_forward_pre_hook(fail, with_kwargs=True)
    return training


def test_a_training_that_breaks_off_can_be_closed_and_begun_again(tmp_path):
    recipe, seen = make("gpt2"), WatchCallback()
    with pytest.raises(MemoryError):
        broken(recipe, tmp_path, seen).train()
    assert _get_current_dispatch_mode() is not None, "the Trainer told nobody"
    seen.close()
    assert _get_current_dispatch_mode() is None and seen.report is None
    with pytest.raises(MemoryError):
        broken(recipe, tmp_path, seen).train()
    trainer(recipe, tmp_path, seen).train()
    assert seen.report.peak_phase and _get_current_dispatch_mode() is None


def test_in_a_notebook_the_end_of_the_cell_closes_it(tmp_path, monkeypatch):
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    seen = WatchCallback()
    shell.user_ns["training"] = broken(make("gpt2"), tmp_path, seen)
    result = shell.run_cell("training.train()")
    assert isinstance(result.error_in_exec, MemoryError)
    assert (
        _get_current_dispatch_mode() is None
        and torch.autograd.backward.__module__ == "torch.autograd"
    )
    shell.user_ns["training"] = trainer(make("gpt2"), tmp_path, seen)
    assert shell.run_cell("training.train()").success and seen.report is not None
    assert (
        shell.events.callbacks["post_run_cell"]
        == InteractiveShell().events.callbacks["post_run_cell"]
    )


def test_a_step_that_is_never_reached_is_said(tmp_path):
    recipe, seen = make("gpt2"), WatchCallback(step=7)
    with pytest.warns(UserWarning, match="waits for step 7, and training ended in step 3"):
        trainer(recipe, tmp_path, seen).train()
    assert seen.report is None


class Reporter(transformers.TrainerCallback):
    """Notes what TensorBoard would be given; it stands before the callbacks that the user names."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def run_of(tmp_path, monkeypatch, sizes, hoard):
    """A run of 16 steps with a checkpoint and evaluations, in which `sizes` are seen to be held."""
    from vramlab.interfaces import callback

    seen, reporter, kept, coming = WatchCallback(), Reporter(), [], iter(sizes)
    monkeypatch.setattr(callback, "held_bytes", lambda: (next(coming), 2**40))
    recipe = make("gpt2")
    model = build_model(recipe)
    if hoard:
        model.lm_head.register_forward_hook(
            lambda module, args, logits: kept.append(logits.detach())
        )
    options = {
        "max_steps": 16,
        "logging_strategy": "steps",
        "logging_steps": 8,
        "eval_strategy": "steps",
        "eval_steps": 8,
    }
    options |= {"save_strategy": "steps", "save_steps": 16}
    training = trainer(recipe, tmp_path, reporter, seen, model=model, **options)
    training.train()
    return seen, reporter, training


def test_a_leak_is_named_by_its_line(tmp_path, monkeypatch):
    with pytest.warns(
        UserWarning,
        match=r"(?s)every step in `kept` \(.*modeling_gpt2.py:\d+ logits = self.lm_head",
    ):
        seen, _, _ = run_of(tmp_path, monkeypatch, range(0, 2**40, 2**20), hoard=True)
    (leak,) = seen.leaks
    assert (leak.size, leak.count) == (2 * 32 * 1000 * 4, 1)
    assert seen.report is not None and _get_current_dispatch_mode() is None


def test_growth_that_no_step_leaves_is_no_leak(tmp_path, monkeypatch):
    seen, _, _ = run_of(tmp_path, monkeypatch, range(0, 2**40, 2**20), hoard=False)
    assert seen.leaks == () and seen._looks == 1 and _get_current_dispatch_mode() is None


def test_what_is_held_is_logged_and_kept(tmp_path, monkeypatch):
    seen, reporter, training = run_of(tmp_path, monkeypatch, itertools.repeat(2**30), hoard=True)
    assert seen.leaks == () and seen._looks == 0
    others = [(step, after) for step, after, *_ in seen.held if after != "step"]
    assert sorted(others) == [(8, "evaluation"), (16, "checkpoint"), (16, "evaluation")]
    assert len(seen.held) == 16 + 3 and set(seen.held[0][2:]) == {2**30, 2**40}
    assert (
        len(reporter.logs) == len(training.state.log_history) == 5
    )  # losses, evaluations and the end
    for entry in (*reporter.logs, *training.state.log_history):
        assert (entry["memory_gib"], entry["memory_peak_gib"]) == (1, 1024)


def test_without_a_gpu_the_resident_set_is_held():
    from vramlab.interfaces.callback import held_bytes

    now, peak = held_bytes()
    assert 2**20 < now <= peak


class Everybody(dict):
    """Every parameter's id is known, and its states are to be fp32."""

    def __contains__(self, key):
        return True

    def __getitem__(self, key):
        return {"optim_bits": 32}


def test_what_a_trainer_told_bitsandbytes_of_its_parameters_is_not_taken_for_ours():
    """Its manager is one a process, with ids of parameters that are gone, which later ones get."""
    from bitsandbytes.optim import GlobalOptimManager

    recipe = Recipe(config("gpt2"), optim="adamw_bnb_8bit", loop="plain", **SIZES)
    with pytest.MonkeyPatch.context() as patch:
        manager = object.__new__(GlobalOptimManager)
        manager.initialize()
        manager.pid2config = Everybody()
        patch.setattr(GlobalOptimManager, "_instance", manager)
        after = simulate(recipe).phases
    assert after == simulate(recipe).phases


def test_two_cards_under_one_trainer_are_warned_of():
    with pytest.warns(UserWarning, match=r"over 2 GPUs .DataParallel.*CUDA_VISIBLE_DEVICES=0"):
        WatchCallback().on_train_begin(SimpleNamespace(n_gpu=2), None, None)
