"""predict names the same allocation before a peak as simulate, which runs the step."""

import pytest
from vramlab import LoRA, Recipe, predict, simulate
from vramlab.formulas.account import kept_account
from vramlab.hardware.gpu import DEFAULT_CHIP
from vramlab.simulation.simulate import trace

CHECKPOINTED = Recipe(
    "gpt2", batch_size=4, seq_len=256, optim="sgd", gradient_checkpointing=True, trainer="dpo"
)
ADAPTERS = Recipe("llama-3.2-1b", precision="bf16-mixed", lora=LoRA(r=8))
RECIPES = {
    "logits": (Recipe("gpt2", batch_size=8, seq_len=512), "backward"),
    "step": (Recipe("gpt2", batch_size=1, seq_len=8), "step"),
    "layer": (CHECKPOINTED, "backward"),
    "adapters": (ADAPTERS, "backward"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_both_name_the_allocation_before_the_peak(name):
    recipe, phase = RECIPES[name]
    predicted = predict(recipe)
    simulated = simulate(recipe)
    assert predicted.peak_phase == simulated.peak_phase == phase
    assert predicted.cause == predicted.phases[phase].cause
    ours = predicted.cause
    truth = simulated.cause
    assert (ours.direction, ours.category) == (truth.direction, truth.category)
    if phase == "step":
        # of an optimizer's tensors predict knows the sum
        assert ours.size == pytest.approx(truth.size, rel=0.002)
    else:
        assert (ours.shape, ours.dtype) == (truth.shape, truth.dtype)


def test_what_a_checkpoint_runs_again_is_known():
    def places(recipe: Recipe) -> set[str]:
        log = trace(recipe).log
        return {storage.where for _, storage, _ in log if storage.recomputed}

    again = places(CHECKPOINTED)
    assert again and all(where.startswith("transformer.h.") for where in again)
    kept = CHECKPOINTED.replace(gradient_checkpointing=False)
    assert places(kept) == set()
    for recipe, count in ((CHECKPOINTED, 1), (kept, 0)):
        spans = kept_account(recipe, DEFAULT_CHIP).ledger.recomputed
        assert len(spans) == count and all(end > first for first, end in spans)
