"""TRL's activation offloading, its own code on fake tensors.

No CPU can run it for real: TRL asks for an accelerator.
"""

import pytest
from tiny_models import config
from vramlab import LoRA, Recipe, RecipeError, Sharding, predict, simulate

SFT = Recipe(config("llama"), 4, 64, num_layers=4, precision="bf16-mixed", trainer="sft")
OFFLOADED = SFT.replace(activation_offloading=True)


@pytest.mark.parametrize(
    "fields", [{}, pytest.param({"lora": LoRA(r=4), "trainer": "dpo"}, marks=pytest.mark.slow)]
)
def test_activations_leave_the_gpu_and_nothing_else_changes(fields):
    plain, offloaded = (simulate(recipe.replace(**fields)) for recipe in (SFT, OFFLOADED))
    before, after = (report.phases["forward"].end for report in (plain, offloaded))
    assert after.activations < before.activations / 2 and after.parameters == before.parameters
    scalars = 4096  # what is too small to be worth a copy, and lives until the next step's
    for phase in ("step", "between_steps"):
        ends = [report.phases[phase].end.total for report in (plain, offloaded)]
        assert 0 <= ends[1] - ends[0] < scalars
    assert offloaded.peak.total < plain.peak.total and "one stream" in offloaded.notes[0]


@pytest.mark.slow
def test_its_stash_is_what_stays(monkeypatch):
    """As many saved tensors as TRL keeps until their copies are done, the newest ones, stay on the
    GPU.
    """
    from trl.models import activation_offloading as trl_code

    ends = []
    for stash in (1, 5, 40):
        make = trl_code.OffloadActivations.__init__
        with monkeypatch.context() as patch:

            def init(self, *args, s=stash, m=make, **kwargs):
                m(self, *args, **{**kwargs, "max_fwd_stash_size": s})

            patch.setattr(trl_code.OffloadActivations, "__init__", init)
            ends.append(simulate(OFFLOADED).phases["forward"].end.activations)
    assert ends[0] < ends[1] < ends[2]


def test_refuses():
    for call, words in (
        (lambda: simulate(OFFLOADED, target="cpu"), "from a GPU only"),
        (lambda: predict(OFFLOADED), "ask simulate"),
        (lambda: Recipe("gpt2", activation_offloading=True), "only trainers sft"),
        (lambda: OFFLOADED.replace(sharding=Sharding(0, 2, "ddp")), "one device"),
    ):
        with pytest.raises(RecipeError, match=words) as caught:
            call()
        assert caught.value.field == "activation_offloading"


def test_the_recipe_says_it():
    again = Recipe.from_training_arguments(
        OFFLOADED.training_arguments("unused"), OFFLOADED.model, num_layers=4
    )
    assert again == OFFLOADED and "activations offloaded" in str(again)
    assert (
        "activation_offloading" not in SFT.to_dict() and Recipe.from_json(again.to_json()) == again
    )
