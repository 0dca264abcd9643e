"""The cheapest changes of a recipe: each figure is that of the changed recipe, and their order is
by what they cost.
"""

import pytest
from tiny_models import config
from vramlab import LoRA, Recipe, RecipeError, Report, Sharding, predict
from vramlab.hardware.gpu import find_gpu
from vramlab.planning.changes import cheapest
from vramlab.planning.evaluation_cures import cures
from vramlab.recipe.evaluation import Evaluation

RECIPE = Recipe("gpt2", batch_size=8)


def test_each_change_saves_what_it_says():
    found = cheapest(RECIPE, count=99)
    assert len(found) > 5 and all(change.saves > 0 for change in found)
    for change in found:
        assert (
            predict(RECIPE).peak.total - predict(RECIPE.replace(**change.fields)).peak.total
            == change.saves
        )


def test_the_same_training_comes_first_and_what_is_not_enough_last():
    found = cheapest(RECIPE, count=99)
    assert [change.same for change in found] == sorted(
        (change.same for change in found), reverse=True
    )
    need = 3 * 2**30
    enough = [change.saves >= need for change in cheapest(RECIPE, find_gpu("T4"), need, count=99)]
    assert enough == sorted(enough, reverse=True) and enough[0] and not enough[-1]
    first, second, *_ = map(str, cheapest(RECIPE, need=need))
    # Half of its micro-batch is not enough, and half of that is, in less time.
    assert RECIPE.batch_size == 8
    assert first == "batch_size=2, gradient_accumulation_steps=4: −4.291 GiB, the same training"
    assert second.startswith("gradient_checkpointing=True: −3.870 GiB, step time ×1.2")


@pytest.mark.parametrize(("card", "runs"), [("T4", False), ("RTX 4090", True)])
def test_ligers_kernels_are_proposed_where_they_run(card, runs):
    found = cheapest(Recipe("llama-3.2-1b", batch_size=4), find_gpu(card), count=99)
    assert any("use_liger_kernel" in change.fields for change in found) == runs


def test_what_a_recipe_has_or_cannot_have_is_not_proposed():
    recipe = Recipe(
        "llama-3.1-8b", precision="bf16-true", lora=LoRA(r=4), gradient_checkpointing=True
    )
    fields = [change.fields for change in cheapest(recipe, count=99)]
    assert not any(
        names.keys() & {"gradient_checkpointing", "batch_size"} or "lora" in names
        for names in fields[:1]
    )
    assert any("nf4 double" in str(change) for change in cheapest(recipe, count=99))
    vit = cheapest(Recipe("vit-base", batch_size=4), count=99)
    assert vit and not any("seq_len" in change.fields for change in vit)


def test_another_witness_may_be_asked():
    asked = []

    def witness(recipe) -> Report:
        asked.append(recipe)
        return predict(recipe)

    assert cheapest(Recipe(config("gpt2")), witness=witness) and len(asked) > 3

    def refuses(recipe):
        raise RecipeError("model", "x", "no")

    with pytest.raises(RecipeError):
        cheapest(RECIPE, witness=refuses)


def test_a_card_that_lacks_the_format_has_changes_without_times():
    recipe = Recipe(
        "llama-3.2-1b", 2, precision="bf16-mixed", attn_implementation="flash_attention_2"
    )
    changes = cheapest(recipe, find_gpu("T4"))
    assert changes and {change.time for change in changes} == {None}


@pytest.mark.parametrize(("card", "runs"), [("T4", False), ("RTX 4090", True)])
def test_of_a_divided_model_trls_loss_is_proposed_where_its_kernels_run(card, runs):
    """Formulas do not know what FSDP keeps of the head of Liger's kernels."""
    recipe = Recipe("llama-3.2-1b", 4, sharding=Sharding(3, 8), gradient_checkpointing=True)
    found = cheapest(recipe, find_gpu(card), count=99)
    assert not any("use_liger_kernel" in change.fields for change in found)
    changes = [str(change) for change in found if "trainer" in change.fields]
    assert bool(changes) == runs
    assert all("whose loss makes no logits): −" in change for change in changes)
    whole = cheapest(recipe.replace(sharding=None), find_gpu(card), count=99)
    assert not any("trainer" in change.fields for change in whole)


def test_a_training_that_does_not_fit_is_said_before_any_cure_of_its_evaluation():
    recipe = Recipe("gpt2", batch_size=64, seq_len=1024)
    evaluation = Evaluation(samples=8, compute_metrics=True)
    # The evaluation's own report is not looked at.
    (said,) = cures(recipe, evaluation, found=None, card=find_gpu("T4"), host=0)
    assert said.startswith("before any evaluation, the training step does not fit: T4 has 14.562")
    assert "`vramlab explain`" in said
