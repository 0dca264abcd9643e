"""PEFT's methods: a simulated step against a real one on the CPU, to the byte."""

import json

import pytest
from quick import params
from test_simulate_cpu import EVERYWHERE, births, real
from tiny_models import config
from vramlab import simulate
from vramlab.base.errors import RecipeError
from vramlab.recipe import peft_methods
from vramlab.recipe.recipe import LoRA, Quantization, Recipe
from vramlab.simulation.fakes import fake_world
from vramlab.simulation.simulate import trace
from vramlab.tracking.history import to_report
from vramlab.training.training import build

METHODS = {  # what a tiny model needs besides the method's defaults
    "ADALORA": {"total_step": 100},
    "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 1},
    "BEFT": {},
    "BOFT": {"boft_dropout": 0.1},
    "C3A": {"block_size": 16},
    "CARTRIDGE": {"num_virtual_tokens": 8},
    "DEFT": {},
    "DELORA": {},
    "FOURIERFT": {},
    "GLORA": {},
    "GRALORA": {},
    "HIRA": {},
    "HRA": {},
    "IA3": {},
    "LILY": {},
    "LN_TUNING": {},
    "LOHA": {},
    "LOKR": {},
    "MISS": {},
    "OFT": {},
    "OSF": {},
    "PEANUT": {},
    "PREFIX_TUNING": {"num_virtual_tokens": 8},
    "PROMPT_TUNING": {"num_virtual_tokens": 8},
    "PSOFT": {},
    "PVERA": {},
    "P_TUNING": {"num_virtual_tokens": 8},
    "RANDLORA": {},
    "ROAD": {"group_size": 16},
    "SHADOW": {},
    "SUPERTUNING": {},
    "TINYLORA": {},
    "TRAINABLE_TOKENS": {"token_indices": [1, 2, 3]},
    "UNILORA": {},
    "VBLORA": {"vector_length": 16, "num_vectors": 32},
    "VERA": {},
    "WAVEFT": {},
}
VARIANTS = {
    "PiSSA": {"init_lora_weights": "pissa"},
    "PiSSA, quickly": {"init_lora_weights": "pissa_niter_4"},
    "OLoRA": {"init_lora_weights": "olora"},
    "MiCA": {"init_lora_weights": "mica"},
    "some layers": {"layers_to_transform": [0]},
    "ranks by name": {"rank_pattern": {"q_proj": 4}},
    "all but one": {"target_modules": "all-linear", "exclude_modules": ["v_proj"]},
    "tokens": {"trainable_token_indices": [1, 2, 3]},
    "layers again": {"layer_replication": [[0, 1], [0, 1]]},
    "QALoRA": {"use_qalora": True},
    "KaSA": {"kasa_config": {}},
}
NF4 = {"quantization": Quantization("nf4", double=True), "precision": "bf16-mixed"}
CORNERS = {
    "IA³ over 4 bits": ("IA3", NF4 | {"gradient_checkpointing": True}),
    "VeRA over 4 bits": ("VERA", NF4),
    "OFT over 4 bits": ("OFT", NF4),
    "HiRA over 4 bits": ("HIRA", NF4),
    "AdaLoRA over 4 bits": ("ADALORA", NF4),
    "RandLoRA over 4 bits": ("RANDLORA", NF4),
    "IA³ in fp32": ("IA3", {"precision": "fp32"}),
    "IA³ over fp16": ("IA3", {"precision": "fp16-mixed", "dtype": "float16"}),
    "BOFT, recomputed": ("BOFT", {"precision": "bf16-mixed", "gradient_checkpointing": True}),
    "prompts, recomputed": ("PROMPT_TUNING", {"gradient_checkpointing": True}),
    "LoKr in Qwen3": ("LOKR", {"model": config("qwen3"), "precision": "bf16-mixed"}),
    "p-tuning of GPT-2": ("P_TUNING", {"model": config("gpt2"), "precision": "fp32"}),
    "SFT with IA³": ("IA3", {"trainer": "sft"}),
    "SFT with VeRA": ("VERA", {"trainer": "sft", "precision": "bf16-mixed"}),
    "SFT with prompts": ("PROMPT_TUNING", {"trainer": "sft"}),
    "SFT of norms": ("LN_TUNING", {"trainer": "sft"}),
}


def recipe_of(method: dict, **fields) -> Recipe:
    usual = {
        "model": config("llama"),
        "batch_size": 2,
        "seq_len": 24,
        "num_layers": 1,
        "precision": "bf16-true",
    }
    return Recipe(**{**usual, **fields}, peft=method)


def assert_equal(recipe: Recipe) -> None:
    simulated, ran = trace(recipe, "cpu", full=True), real(recipe)
    assert births(simulated) == births(ran)
    one, other = (
        to_report(simulated, "simulated", recipe, "cpu"),
        to_report(ran, "measured", recipe, "cpu"),
    )
    assert one.phases == other.phases
    assert (one.peak, one.peak_phase, one.largest) == (other.peak, other.peak_phase, other.largest)
    assert one.phases["backward"].end.gradients > 0


@pytest.mark.parametrize("method", METHODS)
def test_a_method_equals_real_tensors(method):
    assert_equal(recipe_of({"peft_type": method, **METHODS[method]}))


@pytest.mark.parametrize("name", params(VARIANTS, ["PiSSA", "OLoRA", "tokens"]))
def test_a_variant_of_lora_equals_real_tensors(name):
    recipe = recipe_of({"peft_type": "LORA", **VARIANTS[name]})
    assert recipe.peft and recipe.lora is None
    assert_equal(recipe)


@pytest.mark.parametrize("name", params(CORNERS, ["IA³ over 4 bits", "SFT with prompts"]))
def test_a_method_equals_real_tensors_in_corners(name):
    method, fields = CORNERS[name]
    assert_equal(recipe_of({"peft_type": method, **METHODS[method]}, **fields))


def test_every_method_is_modelled_or_refused():
    known = peft_methods._classes().keys()
    assert known == {*METHODS, *peft_methods.REFUSED, "LORA"}
    for name, reason in peft_methods.REFUSED.items():
        with pytest.raises(RecipeError, match=reason[:20]):
            Recipe("gpt2", peft=name)


@pytest.mark.parametrize("method", params(("IA3", "VERA", "UNILORA"), ("VERA",)))
def test_layers_stand_for_each_other(method):
    """A shallow run made deeper is the whole one, shared projections included."""
    recipe = recipe_of({"peft_type": method}, num_layers=9, precision="bf16-mixed")
    whole = trace(recipe, "cuda", full=True)
    assert not trace(recipe, "cuda").notes
    assert trace(recipe, "cuda").moments() == whole.moments()


def test_one_method_has_one_recipe(tmp_path):
    """As an object, a dictionary, a file that PEFT wrote, JSON and a name."""
    from peft import LoraConfig, VeraConfig

    made = VeraConfig(r=16, target_modules={"q_proj", "k_proj"}, task_type="CAUSAL_LM")
    made.save_pretrained(tmp_path)
    said = {"peft_type": "VERA", "target_modules": ["k_proj", "q_proj"], "r": 16}
    given = [made, said, tmp_path / "adapter_config.json", json.dumps(said)]
    recipes = [Recipe("llama-3.1-8b", peft=str(one) if one is given[2] else one) for one in given]
    assert len({recipe.key for recipe in recipes}) == 1
    assert Recipe(**recipes[0].to_dict()) == recipes[0]
    assert Recipe.from_json(recipes[0].to_json()) == recipes[0]
    assert str(recipes[0]).endswith("VERA r=16 target_modules=['k_proj', 'q_proj']")
    assert Recipe("gpt2", peft="ia3").peft == peft_methods.Peft("IA3")
    assert "peft" not in Recipe("gpt2").to_dict()
    plain = Recipe("gpt2", peft=LoraConfig(r=4, target_modules=["c_attn"], lora_alpha=8))
    assert plain == Recipe("gpt2", lora=LoRA(r=4, target_modules=("c_attn",)))


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"peft": "verra"}, "'VERRA', but the installed PEFT has ADALORA"),
        ({"peft": "adalora"}, "PEFT refuses it: AdaLoRA does not work"),
        ({"peft": {"peft_type": "VERA", "rank": 4}}, "VeraConfig has no such field"),
        ({"peft": {"r": 4}}, "a dictionary with a 'peft_type'"),
        ({"peft": "ia3", "lora": EVERYWHERE}, "say one of the two"),
        ({"peft": "ia3", "sharding": {"world_size": 2}}, "modelled on one device"),
        ({"peft": "ia3", "trainer": "dpo"}, "DPOTrainer is modelled with LoRA"),
        ({"peft": {"peft_type": "LORA", "init_lora_weights": "eva"}}, "with rho=1 they stay"),
        ({"peft": {"peft_type": "LORA", "alora_invocation_tokens": [1]}}, "do not have"),
        (
            {
                "peft": {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 4},
                "gradient_checkpointing": True,
            },
            "PEFT refuses PREFIX_TUNING with it",
        ),
    ],
)
def test_refusals(fields, words):
    with pytest.raises(RecipeError) as caught:
        Recipe("gpt2", **fields)
    assert words in str(caught.value)


@pytest.mark.parametrize("method", params(peft_methods.NEED_WHOLE_WEIGHTS, ["LOHA"]))
def test_what_computes_with_packed_weights_is_refused(method, monkeypatch):
    """As PEFT itself fails on such a base."""
    said = {"peft_type": method, **METHODS[method]}
    with pytest.raises(RecipeError, match="which 4 bits pack: take no quantization"):
        recipe_of(said, **NF4)
    monkeypatch.setattr(peft_methods, "NEED_WHOLE_WEIGHTS", ())
    with pytest.raises((RuntimeError, RecipeError)):
        real(recipe_of(said, **NF4))


def test_what_peft_itself_refuses_is_a_sentence():
    recipe = recipe_of({"peft_type": "HRA"}, model=config("gpt2"))
    with pytest.raises(RecipeError, match="PEFT refuses HRA for gpt2"):
        simulate(recipe, target="cpu")


@pytest.mark.parametrize(("target", "is_trained"), [("cuda", True), ("cpu", False)])
def test_what_peft_moves_to_the_card_is_trained(target, is_trained):
    """A `ParameterDict` makes a trained parameter of AdaLoRA's `ranknum`, which PEFT makes on the
    host, once it was moved: so it is on PyTorch's CUDA build (`data/stand_in/README.md`).
    """
    method = {"peft_type": "ADALORA", "total_step": 100}
    recipe = Recipe(config("llama"), 1, 16, peft=method, num_layers=1)
    with fake_world(target, None):
        model = build(recipe, "cpu", target).model
    ranks = [each for name, each in model.named_parameters() if "ranknum" in name]
    assert ranks and {each.requires_grad for each in ranks} == {is_trained}
