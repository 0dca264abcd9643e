"""predict and simulate where a batch is as small as it gets: one token, no label, a head without a
single tile.
"""

import pytest
from predict_grid import written_down
from quick import params
from tiny_models import config
from vramlab import LoRA, Quantization, Recipe, RecipeError, plan, predict, simulate

BOUND = 0.01  # of each phase's peak
ROUNDING = 4 << 20  # bytes: two blocks of those that the allocator does not split
SFT = {"trainer": "sft", "precision": "bf16-mixed"}
QLORA = {"lora": LoRA(target_modules="all-linear"), "quantization": Quantization()}
SMALLEST = [  # models of few layers whose vocabularies take hundreds of megabytes
    ("gpt2", {"seq_len": 1, **SFT}),
    ("gpt2", {"lengths": (1,), **SFT}),
    ("olmo-2-1b", {"seq_len": 1, "precision": "bf16-mixed"}),
    ("llama-3.1-8b", {"seq_len": 1}),
    # few rows for which bitsandbytes unpacks no weight: forward was up to 38 % too high
    ("phi-3-mini", {"seq_len": 8, "precision": "bf16-true", **QLORA}),
    ("phi-3-mini", {"seq_len": 9, "precision": "bf16-true", **QLORA}),
    ("llama-3.1-8b", {"seq_len": 1, "use_liger_kernel": True, "precision": "bf16-mixed"}),
    ("qwen3-0.6b", {"seq_len": 1, "gradient_checkpointing": True, "lora": LoRA()}),
    (
        config("llama", vocab_size=90),
        {"seq_len": 8, "use_liger_kernel": True, "precision": "bf16-mixed"},
    ),
    ("gpt-oss-20b", {"seq_len": 1, "precision": "bf16-true"}),
    ("deepseek-v3", {"seq_len": 1, "precision": "bf16-true"}),
    ("gpt2", {"seq_len": 2, **SFT}),
    ("gpt2", {"lengths": (1, 1), **SFT}),
    ("gpt2", {"lengths": (1, 1, 1), "padding_free": True, **SFT}),
    ("gpt2", {"seq_len": 4, "completion_lengths": (1,), **SFT}),
    ("gpt2", {"seq_len": 1, "pad_to_multiple_of": 8, **SFT}),
    ("gpt2", {"seq_len": 1, "trainer": "dpo"}),
    ("gpt2", {"seq_len": 1, "batch_size": 2, "trainer": "kto"}),
    ("gpt2", {"seq_len": 1, "trainer": "reward"}),
    ("bert-base", {"seq_len": 1}),
    (config("gpt2", vocab_size=2), {"seq_len": 1, **SFT}),
    (config("llama", vocab_size=2), {"seq_len": 1, **SFT}),
]


@pytest.mark.parametrize(("model", "fields"), params(SMALLEST, SMALLEST[:7]), ids=str)
def test_the_smallest_batches_are_what_simulate_says(model, fields):
    recipe = Recipe(model, num_layers=2, **fields)
    predicted, simulated = predict(recipe), simulate(recipe)
    for name, phase in simulated.phases.items():
        size, truth = predicted.phases[name].peak.total, phase.peak.total
        assert size == pytest.approx(truth, rel=BOUND, abs=ROUNDING), name


@pytest.mark.parametrize(("gpu", "is_unpacked"), [("T4", False), ("H200", True)])
def test_what_a_card_unpacks_for_few_rows_is_what_simulate_says(gpu, is_unpacked):
    """With 48 rows a T4 multiplies by the codes, and an H200 unpacks the larger weights."""
    recipe = Recipe("phi-3-mini", num_layers=1, seq_len=48, precision="fp16-true", **QLORA)
    predicted, simulated = predict(recipe, gpu=gpu), simulate(recipe, gpu=gpu)
    found, truth = (each.phases["forward"].peak for each in (predicted, simulated))
    assert found.total == pytest.approx(truth.total, rel=BOUND, abs=ROUNDING)
    assert (truth.workspace > 2 * 3072 * 8192) == is_unpacked


@pytest.mark.parametrize("name", written_down())
def test_every_model_has_an_answer_for_one_token(name):
    """RMSNorm's weight has as many numbers then as a hidden state, and is no hidden state."""
    recipe = Recipe(name)
    if not recipe.shape.image_tokens:
        assert predict(recipe.replace(seq_len=1)).peak.total <= predict(recipe).peak.total
    if recipe.shape.task == "causal-lm" and not recipe.shape.experts_per_token:
        assert predict(recipe.replace(seq_len=1, **SFT)).peak.total > 0


def test_a_plan_for_one_token():
    found = plan("olmo-2-1b", "RTX 4090", seq_len=1, method="lora", confirm=False)
    assert found.best.recipe.seq_len == 1


def test_a_sample_without_any_label_is_refused():
    with pytest.raises(
        RecipeError, match="'completion_lengths' is 0, but it must be a whole number from 1"
    ):
        Recipe("gpt2", seq_len=4, trainer="sft", completion_lengths=(0,))
