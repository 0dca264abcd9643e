"""predict against simulate with Liger's kernels: a recipe of every model whose family predict knows
them in.
"""

import pytest
from predict_grid import assert_still_said, liger_grid, simulated, stored
from quick import params
from test_predict_grid import error, worst
from vramlab import LoRA, Recipe, RecipeError, predict
from vramlab.formulas import account, numerics

GRID = liger_grid()
SAMPLE = 12


@pytest.mark.parametrize("recipe", params(GRID, GRID[::SAMPLE]), ids=str)
def test_simulate_still_says_what_is_stored(recipe):
    pytest.importorskip("liger_kernel", reason="Triton, which Liger needs, is for Linux")
    assert_still_said("liger_grid.jsonl", recipe, simulated)


def test_the_peak_is_what_simulate_says():
    truths = stored("liger_grid.jsonl")
    rows = [
        (error(predict(recipe).peak.total, truths[recipe.key]["peak"]), str(recipe))
        for recipe in GRID
    ]
    mean = sum(abs(e) for e, _ in rows) / len(rows)
    print(f"\n{len(rows)} recipes, mean error {100 * mean:.3f} %, worst:\n{worst(rows)}")
    assert len(rows) > 20 and mean <= 0.002
    assert max(abs(e) for e, _ in rows) <= 0.02, worst(rows)


def test_a_family_that_liger_leaves_alone_takes_the_same():
    recipe = Recipe("gpt2", batch_size=2, seq_len=128)
    assert predict(recipe.replace(use_liger_kernel=True)).peak == predict(recipe).peak


def test_what_it_does_not_know_names_simulate():
    with pytest.raises(RecipeError, match="ask simulate"):
        predict(Recipe("granite-3.3-2b", use_liger_kernel=True))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_queries_turned_by_torch_leave_the_peak_as_it_is(checkpointing, monkeypatch):
    """`liger_rope` is a switch of axolotl's: without it their copies die in the layer."""
    fields = {"precision": "bf16-mixed", "dtype": "bfloat16", "use_liger_kernel": True}
    fields |= {"lora": LoRA(r=16, target_modules="all-linear")}
    recipe = Recipe("llama-3.1-8b", 4, 512, gradient_checkpointing=checkpointing, **fields)
    every = numerics.kernels(recipe)

    def peak_without(*switches: str) -> int:
        monkeypatch.setattr(numerics, "kernels", lambda recipe: every - set(switches))
        account.cached_account.cache_clear()
        return predict(recipe).peak.total

    assert peak_without("rope") == peak_without() < peak_without("rms_norm")
    account.cached_account.cache_clear()
