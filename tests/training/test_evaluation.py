"""What evaluation takes: the Trainer's own loop on fake tensors, against real tensors and a real
`Trainer.evaluate()`.
"""

from functools import partial

import pytest
from quick import params
from real_ranks import births
from test_trainer_loop import trainer
from tiny_models import config
from vramlab import (
    Evaluation,
    LoRA,
    Quantization,
    Recipe,
    RecipeError,
    Sharding,
    simulate_evaluation,
)
from vramlab.simulation.simulate import _run
from vramlab.tracking.history import History
from vramlab.tracking.tracked import claim_model, run_tracked
from vramlab.tracking.tracker import Tracker
from vramlab.training.evaluation import evaluate
from vramlab.training.training import build, make_batch

pytestmark = pytest.mark.usefixtures("quiet")

SIZES = {"batch_size": 2, "seq_len": 24, "num_layers": 2}
KEPT = Evaluation(11, 3, compute_metrics=True)
CASES = {
    "losses only": ("gpt2", {}, Evaluation(11, 3)),
    "logits in fp32 after autocast": ("llama", {"precision": "bf16-mixed"}, KEPT),
    "logits in bf16": ("llama", {"precision": "bf16-true"}, KEPT),
    "to the host every two batches": ("gpt2", {}, Evaluation(11, 3, True, 2)),
    "a list of batches": ("gpt2", {}, Evaluation(11, 3, True, eval_do_concat_batches=False)),
    "metrics batch by batch": ("gpt2", {}, Evaluation(11, 3, True, batch_eval_metrics=True)),
    "argmax only": (
        "gpt2",
        {"precision": "bf16-mixed"},
        Evaluation(
            11, 3, True, preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1)
        ),
    ),
    "inputs kept too": (
        "gpt2",
        {},
        Evaluation(11, 3, True, include_for_metrics=("inputs", "loss")),
    ),
    "several outputs": ("t5", {}, KEPT),
    "LoRA": ("llama", {"lora": LoRA(r=4)}, KEPT),
    "4 bits": (
        "llama",
        {"lora": LoRA(r=4), "quantization": Quantization(), "precision": "bf16-mixed"},
        KEPT,
    ),
    "Liger, which computes logits here": (
        "llama",
        {"use_liger_kernel": True, "precision": "bf16-mixed"},
        KEPT,
    ),
    "an optimizer with modes": ("gpt2", {"optim": "schedule_free_adamw"}, KEPT),
}


def case(name: str) -> tuple[Recipe, Evaluation]:
    family, fields, evaluation = CASES[name]
    return Recipe(config(family), **{**SIZES, **fields}), evaluation


@pytest.mark.parametrize("name", params(CASES, ("logits in fp32 after autocast", "argmax only")))
def test_equals_real_tensors(name, monkeypatch):
    recipe, evaluation = case(name)
    if recipe.use_liger_kernel:  # kernels write where host code has allocated
        pytest.importorskip("liger_kernel", reason="Triton, which Liger needs, is for Linux")
        from triton.runtime.jit import KernelInterface

        monkeypatch.setattr(
            KernelInterface, "__getitem__", lambda kernel, grid: lambda *args, **kwargs: None
        )
    training, tracker = build(recipe, "cpu", target="cpu"), Tracker("cpu")

    def batch(samples: int):
        made = make_batch(recipe.replace(batch_size=samples))
        tracker.claim(made.values(), "inputs")
        return made

    run_tracked(
        training, tracker, 1, "cpu", then=partial(evaluate, training, evaluation, batch, True)
    )
    simulated = _run(recipe, "cpu", None, 1, evaluation, full=True)
    assert births(History(simulated.log, simulated.marks)) == births(
        History(tracker.log, tracker.marks)
    )
    assert simulate_evaluation(recipe, evaluation, "cpu").peak.total == max(
        History(tracker.log, tracker.marks).live[tracker.marks[-2][0] :]
    )


@pytest.mark.parametrize(
    "name",
    params(["logits in fp32 after autocast", "losses only"], ["logits in fp32 after autocast"]),
)
def test_equals_a_real_trainer(name, tmp_path):
    """Its data loader has the next batch ready on the CPU, which is all that differs."""
    recipe, evaluation = case(name)
    real = trainer(
        recipe, tmp_path, per_device_eval_batch_size=evaluation.per_device_eval_batch_size
    )
    batch = make_batch(recipe.replace(batch_size=evaluation.samples))
    real.eval_dataset = [
        {key: tensor[i] for key, tensor in batch.items()} for i in range(evaluation.samples)
    ]
    real.compute_metrics = (lambda prediction: {}) if evaluation.compute_metrics else None
    real.train()
    tracker = Tracker("cpu")
    claim_model(tracker, real.model)
    with tracker.modules(real.model), tracker:
        tracker.begin("forward")
        real.evaluate()
    history = History(tracker.finish().log, tracker.marks)
    real_bytes = max(history.live) - history.split(history.stretches[0][2]).total
    report = simulate_evaluation(recipe, evaluation, "cpu")
    said = report.peak.total - report.peak.optimizer_states - report.phases["load"].end.total
    assert abs(real_bytes - said) <= 2 * 8 * 3 * recipe.seq_len


def test_batches_in_between_need_not_run():
    """What is kept grows with each batch; what the model takes does not.

    Predictions go to the host in time.
    """
    recipe = Recipe(config("gpt2"), **SIZES)
    for changes in ({}, {"eval_accumulation_steps": 4}):
        asked = Evaluation(20, 3, True, **changes)
        assert (
            simulate_evaluation(recipe, asked).phases
            == simulate_evaluation(recipe, asked, full=True).phases
        )
    logits = 4 * 3 * recipe.seq_len * recipe.shape.vocab_size
    kept = [
        simulate_evaluation(
            recipe, Evaluation(samples, 3, True, eval_do_concat_batches=False), "cpu"
        ).peak.total
        for samples in (60, 63)
    ]
    assert logits <= kept[1] - kept[0] < 1.01 * logits


@pytest.mark.parametrize(
    "fields, field",
    [
        ({"trainer": "sft"}, "trainer"),
        ({"sharding": Sharding(3, 2)}, "sharding"),
    ],
)
def test_refuses_other_evaluations(fields, field):
    with pytest.raises(RecipeError) as caught:
        simulate_evaluation(Recipe(config("llama"), **SIZES, **fields), Evaluation())
    assert caught.value.field == field


@pytest.mark.parametrize(
    "fields", [{"samples": 0}, {"per_device_eval_batch_size": 1.5}, {"eval_accumulation_steps": 0}]
)
def test_bad_input(fields):
    with pytest.raises(RecipeError, match="whole number from 1"):
        Evaluation(**fields)


def test_only_python_gives_a_function():
    with pytest.raises(RecipeError, match=r"preprocess_logits_for_metrics.*function"):
        Evaluation(preprocess_logits_for_metrics="argmax")
