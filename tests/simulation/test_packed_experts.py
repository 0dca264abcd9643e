"""Fused experts in 4 bits: a simulated step equals a real one on the CPU to the byte, the formulas
agree with both, and so does loading, with transformers' own loader of a real checkpoint.
"""

import dataclasses

import pytest
import torch
from quick import params
from test_simulate_peft import assert_equal
from tiny_models import config
from vramlab import LoRA, Quantization, Recipe, Sharding, predict, simulate
from vramlab.base.errors import RecipeError
from vramlab.recipe.lora_modules import KEPT_EXPERTS, notes
from vramlab.recipe.options import PACKED_EXPERTS
from vramlab.simulation.quantized_loading import loading_peak
from vramlab.tracking.tracked import quantization_statistics
from vramlab.training.models import build_model

ATTENTION = LoRA(r=4, target_modules=("q_proj", "v_proj"))
WAYS = {
    "mixed, recomputed": {"precision": "bf16-mixed", "gradient_checkpointing": True},
    "half precision": {"precision": "bf16-true"},
    "fp32": {"precision": "fp32"},
    "mixed over bf16": {"precision": "bf16-mixed", "dtype": "bfloat16"},
    "SFT": {"precision": "bf16-mixed", "trainer": "sft", "prepare": False},
}
CASES = [(way, double) for way in WAYS for double in (False, True)]
QUICK = [("mixed, recomputed", True), ("SFT", False)]


def recipe_of(model="mixtral", double=False, experts="loaded", prepare=True, **fields) -> Recipe:
    usual = {
        "model": config(model) if model == "mixtral" else model,
        "batch_size": 2,
        "seq_len": 24,
        "lora": ATTENTION,
        "precision": "bf16-mixed",
        "quantization": Quantization("nf4", double=double, prepare=prepare, experts=experts),
    }
    return Recipe(**{**usual, **fields})


@pytest.mark.parametrize(("way", "double"), params(CASES, QUICK))
def test_equals_real_tensors(way, double):
    assert_equal(recipe_of(double=double, num_layers=2, **WAYS[way]))


LARGE = [
    (model, double, experts, checkpointing)
    for model in ("mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b", "glm-4.5-air")
    for double in (False, True)
    for experts in PACKED_EXPERTS
    for checkpointing in (False, True)
]


@pytest.mark.parametrize(
    ("model", "double", "experts", "checkpointing"),
    params(LARGE, [("qwen3-30b-a3b", True, "loading", True), ("gpt-oss-20b", *LARGE[0][1:])]),
)
def test_formulas_agree(model, double, experts, checkpointing):
    recipe = recipe_of(
        model,
        double,
        experts,
        seq_len=512,
        num_layers=2,
        gradient_checkpointing=checkpointing,
        dtype="bfloat16",
    )
    predicted, simulated = predict(recipe), simulate(recipe)
    assert predicted.peak.total == pytest.approx(simulated.peak.total, rel=2e-3)
    assert predicted.loading.total == pytest.approx(simulated.loading.total, rel=1e-2)


@pytest.mark.parametrize("experts", PACKED_EXPERTS)
def test_loading_holds_whole_experts_once_at_most(experts):
    """Packed in turn, one layer's are there in 16 bits; packed later, all of them."""
    recipe = recipe_of("qwen3-30b-a3b", experts=experts, prepare=False, dtype="bfloat16")
    packed = simulate(recipe).phases["load"].peak.total
    whole = 2 * sum(weight.size for weight in recipe.shape.weights() if weight.kind == "expert")
    peak = loading_peak(recipe, "cuda").total
    if experts == "loading":
        assert peak < packed + 3 * whole / recipe.shape.num_layers
    else:
        assert peak > whole


def test_a_loaded_model_is_the_built_one(tmp_path):
    """transformers' loader with axolotl's patch of it, bitsandbytes for real."""
    from bitsandbytes.nn.parametrize import replace_parameter_4bit
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, MixtralConfig

    recipe = recipe_of(double=True, prepare=False, num_layers=2, precision="bf16-true")
    plain = recipe.shape.config | {"num_hidden_layers": 2}
    tiny = MixtralConfig(**{key: plain[key] for key in plain if key != "model_type"})
    AutoModelForCausalLM.from_config(tiny, dtype=torch.bfloat16).save_pretrained(tmp_path)
    packing = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=packing, device_map="cpu"
    )
    for module in list(loaded.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() == 3:
                replace_parameter_4bit(module, name, True, "nf4")
    built = build_model(recipe)

    def sizes(model) -> list[int]:
        owners = [*model.parameters(), *model.modules()]
        tensors = list(model.parameters())
        for owner in owners:
            tensors += quantization_statistics(owner)
        unique = {id(tensor): tensor.nbytes for tensor in tensors}
        return sorted(unique.values())

    adapters = [parameter.nbytes for name, parameter in built.named_parameters() if "lora_" in name]
    assert sizes(built) == sorted([*sizes(loaded), *adapters])


def test_what_no_checkpointing_costs_is_said():
    recipe = recipe_of("qwen3-30b-a3b", gradient_checkpointing=False)
    assert KEPT_EXPERTS in notes(recipe)
    shorter = recipe.replace(num_layers=4)
    kept = simulate(shorter).peak.total
    recomputed = simulate(shorter.replace(gradient_checkpointing=True)).peak.total
    layer = (
        2 * sum(weight.size for weight in shorter.shape.weights() if weight.kind == "expert") / 4
    )
    assert kept - recomputed > 2.9 * layer
    left = dataclasses.replace(recipe.quantization, experts=None)
    (note,) = notes(recipe.replace(quantization=left))
    assert note.endswith("quantization.experts says how to pack them too")


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"model": "llama-3.2-1b"}, "llama-3.2-1b has no fused experts"),
        ({"experts": "always"}, "allowed are 'loading', 'loaded' or None"),
        (
            {"lora": LoRA(r=4, target_parameters=("experts.down_proj",))},
            "PEFT 0.21 fails in the second step",
        ),
        ({"sharding": Sharding(3, 2, "fsdp"), "prepare": False}, "one device, or 'ddp'"),
    ],
)
def test_refusals(fields, words):
    with pytest.raises(RecipeError) as caught:
        recipe_of(**fields)
    assert words in str(caught.value)
