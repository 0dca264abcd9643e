"""predict against simulate for TRL's trainers that learn from preferences: a recipe of every causal
family and size.
"""

import gc

import pytest
from predict_grid import assert_still_said, preference_grid, simulated, stored
from quick import params
from test_predict_grid import error, worst
from vramlab import LoRA, Recipe, RecipeError, predict, simulate
from vramlab.formulas.account import cached_account

GRID = [r for r in preference_grid() if (r.name, r.attn_implementation) != ("falcon-7b", "eager")]
SAMPLE = 20
LORA = {"lora": LoRA(r=16, target_modules="all-linear"), "dtype": "bfloat16"}


@pytest.mark.parametrize("recipe", params(GRID, GRID[::SAMPLE]), ids=str)
def test_simulate_still_says_what_is_stored(recipe):
    assert_still_said("preference_grid.jsonl", recipe, simulated)


def test_the_peak_is_what_simulate_says():
    truths = stored("preference_grid.jsonl")
    rows = [(error(predict(r).peak.total, truths[r.key]["peak"]), str(r)) for r in GRID]
    mean = sum(abs(e) for e, _ in rows) / len(rows)
    print(f"\n{len(rows)} recipes, mean error {100 * mean:.3f} %, worst:\n{worst(rows)}")
    assert len(rows) > 35 and mean <= 0.0015
    assert max(abs(e) for e, _ in rows) <= 0.014, worst(rows)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["dpo", "kto", "reward"])
@pytest.mark.parametrize(
    "model, fields", [("llama-3.2-1b", {}), ("qwen3-4b", LORA), ("gemma-2-2b", LORA), ("gpt2", {})]
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_so_is_that_of_the_whole_depth(model, fields, trainer, checkpointing):
    sizes = dict(
        batch_size=4, seq_len=1024, precision="bf16-mixed", gradient_checkpointing=checkpointing
    )
    recipe = Recipe(model, trainer=trainer, **sizes, **fields)
    said, truth = predict(recipe), simulate(recipe)
    assert abs(error(said.peak.total, truth.peak.total)) <= 0.014


@pytest.mark.parametrize(
    "model, fields, field",
    [
        ("mixtral-8x7b", {}, "trainer"),
        (
            "falcon-7b",
            {"attn_implementation": "eager", "batch_size": 2, "trainer": "kto"},
            "attn_implementation",
        ),
    ],
)
def test_what_it_does_not_know_names_simulate(model, fields, field):
    with pytest.raises(RecipeError, match="ask simulate") as caught:
        predict(Recipe(model, **{"trainer": "dpo", **fields}))
    assert caught.value.field == field


def test_adapters_need_no_second_model():
    """The reference is the policy without its adapters; precomputed, it is gone in full fine-tuning
    too.
    """
    full = Recipe(
        "llama-3.1-8b",
        4,
        1024,
        "bf16-mixed",
        dtype="bfloat16",
        trainer="dpo",
        gradient_checkpointing=True,
    )
    weights = predict(full.replace(trainer="sft", batch_size=8)).peak.parameters
    parameters = [
        predict(r).peak.parameters for r in (full, full.replace(precompute_ref_log_probs=True))
    ]
    assert parameters == [2 * weights, weights]
    adapted = predict(full.replace(lora=LoRA(r=16)))
    assert 0 < adapted.peak.parameters - weights < weights / 100


@pytest.mark.parametrize(
    "changes", [{"trainer": "sft"}, {"trainer": "dpo"}, {"use_liger_kernel": True}], ids=str
)
def test_a_prediction_leaves_no_cycles(changes):
    """A head that referred to its own result kept what it had saved to the end of the backward
    pass.
    """
    recipe = Recipe("qwen2.5-0.5b", batch_size=2, seq_len=64, precision="bf16-mixed", **changes)
    predict(recipe)
    cached_account.cache_clear()
    gc.collect()
    gc.disable()
    try:
        predict(recipe)
        cached_account.cache_clear()
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_model_whose_window_is_the_length_has_a_reference():
    """Its two kinds of attention have masks of their own at 512 tokens, so three stacks run."""
    recipe = Recipe("gemma-3-1b", num_layers=8, precision="bf16-mixed", trainer="dpo")
    assert predict(recipe).peak.total == pytest.approx(simulate(recipe).peak.total, rel=0.003)
