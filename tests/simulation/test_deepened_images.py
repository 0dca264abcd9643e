"""Models that read images from a shallow run: equal to the whole run to the byte.

A language model's layers are repeated, and windows of a tower that are alike are run as one.
"""

import json

import numpy as np
import pytest
from quick import params
from test_simulate_depth import assert_same
from test_simulate_images import LENGTHS, TOWERS, as_llama_4_takes_it
from tiny_image_models import SMALL
from vramlab import LoRA, Quantization, Recipe
from vramlab.hardware.gpu import find_gpu
from vramlab.simulation.repetition import find
from vramlab.simulation.simulate import trace

LANGUAGE = LoRA(r=4, target_modules=r".*language_model.*(q|v)_proj")
EVERYWHERE = LoRA(r=4, target_modules="all-linear")
RECIPES = {
    "all of it": {"precision": "bf16-true"},
    "recomputed, factored": {
        "precision": "bf16-mixed",
        "gradient_checkpointing": True,
        "optim": "adafactor",
    },
    "tower frozen": {"precision": "fp32", "freeze": ("the tower",)},
    "LoRA on all, accumulating": {
        "precision": "bf16-mixed",
        "dtype": "bfloat16",
        "lora": EVERYWHERE,
        "trainer": "sft",
        "gradient_checkpointing": True,
        "gradient_accumulation_steps": 3,
    },
    "LoRA on language in 4 bits": {
        "precision": "bf16-mixed",
        "lora": LANGUAGE,
        "quantization": Quantization("nf4", prepare=False),
        "trainer": "sft",
    },
}
CASES = [(family, name, 10) for family in SMALL for name in RECIPES]
CASES += [(family, "all of it", 7) for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")]
FEW_TOKENS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3", "paligemma")
QUICK = [("qwen3_vl", "recomputed, factored", 10)]


def deep(family: str, layers: int, tower: int = 2, **fields) -> Recipe:
    """A recipe for a model of so many layers in its language model and its tower."""
    config = json.loads(json.dumps(SMALL[family]))
    text = config["text_config"]
    text["num_hidden_layers"] = layers
    if "layer_types" in text:
        text["layer_types"] = ["sliding_attention", "full_attention"] * (layers // 2)
    if family == "gemma4":  # as in 26B-A4B and 31B: what stands outside has no part for each layer
        text["hidden_size_per_layer_input"] = 0
    if family == "llama4":
        text["no_rope_layers"] = [1, 0] * (layers // 2)
        text["moe_layers"] = list(range(1, layers, 2))
        fields = as_llama_4_takes_it(dict(fields))
    name = "depth" if "depth" in config["vision_config"] else "num_hidden_layers"
    config["vision_config"][name] = tower
    usual = {"batch_size": 1, "images": 1, "image_size": "40x24"}
    usual["seq_len"] = LENGTHS.get(family, 90 if family in FEW_TOKENS else 330)
    freeze = fields.pop("freeze", None)
    if freeze:  # the name that this tower has
        fields["freeze"] = (TOWERS[family],)
    return Recipe(**{"model": config, **usual, **fields})


@pytest.mark.parametrize(("family", "name", "layers"), params(CASES, QUICK))
def test_layers_of_a_language_model_stand_for_all(family, name, layers):
    recipe = deep(family, layers, **RECIPES[name])
    assert find(recipe.shape).more > 0
    assert not any("none repeated" in note for note in assert_same(recipe, "cuda").notes)


@pytest.mark.slow
@pytest.mark.parametrize("tower", [1, 3, 10])
@pytest.mark.parametrize("family", list(SMALL))
def test_a_tower_is_run_whole_however_deep(family, tower):
    """Also where it is as deep as the language model."""
    assert_same(deep(family, 10, tower, precision="bf16-true"), "cuda")


# Windows of 4 × 4 patches: all alike, and with edges, of which the last is smaller still.
SIZES = ["128x128", "136x100", "40x136"]
WINDOWS = [(size, name) for size in SIZES for name in RECIPES]


@pytest.mark.parametrize(("size", "name"), params(WINDOWS, [("136x100", "all of it")]))
def test_windows_that_are_alike_are_run_as_one(size, name):
    recipe = deep("qwen2_5_vl", 2, image_size=size, seq_len=330, **RECIPES[name])
    report = assert_same(recipe, "cuda")
    assert not any("none repeated" in note for note in report.notes)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["all of it", "recomputed", "LoRA on language in 4 bits"])
def test_windows_are_run_as_one_where_no_flash_attention_runs(size, name):
    """A T4 has the memory-efficient kernel alone, which pads what it keeps of a window's rows."""
    fields = RECIPES.get(name, {}) | {"precision": "fp16-mixed", "trainer": "transformers"}
    fields["gradient_checkpointing"] = name == "recomputed"
    recipe = deep("qwen2_5_vl", 2, image_size=size, seq_len=330, **fields)
    report = assert_same(recipe, "cuda", gpu="T4")
    assert not any("none repeated" in note for note in report.notes)
    joined = trace(recipe, card=find_gpu("T4")).log
    assert len(joined.events) < 0.9 * len(trace(recipe, card=find_gpu("T4"), full=True).log)


@pytest.mark.parametrize("size", params(SIZES, ["128x128"]))
def test_each_window_has_events_of_its_own(size):
    """Two images of a sample, with other windows: their events are those of the whole run."""
    fields = {"images": 2, "image_size": (size, "64x64"), "seq_len": 600}
    recipe = deep("qwen2_5_vl", 2, gradient_checkpointing=True, precision="bf16-true", **fields)
    joined = trace(recipe).log
    whole = trace(recipe, full=True).log
    assert len(joined) == len(whole) and len(joined.events) < 0.75 * len(whole)
    assert np.array_equal(np.sort(joined.sizes), np.sort(whole.sizes))
    frees = joined.sizes < 0
    assert len(np.unique(joined.keys[frees])) == frees.sum()
