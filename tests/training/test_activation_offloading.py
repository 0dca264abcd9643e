"""TRL's activation offloading, its own code on fake tensors.

No CPU can run it for real: TRL asks for an accelerator.
"""

import pytest
import torch
from tiny_models import config
from vramlab import LoRA, Recipe, RecipeError, Sharding, predict, simulate
from vramlab.training.trl_trainers import offloading

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


def test_on_a_gpu_trl_can_warn_that_ram_is_nearly_full(monkeypatch):
    """It does by a logger of accelerate's, which raises an error in a process without a Trainer."""
    from accelerate.logging import get_logger
    from accelerate.state import AcceleratorState
    from trl.models import activation_offloading as trl_code

    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setattr(trl_code, "get_act_offloading_ctx_manager", lambda model, **options: "made")
    assert offloading(torch.nn.Linear(1, 1), torch.device("cuda")) == "made"
    get_logger(__name__).warning("curr_pct=61% of virtual memory used")


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
