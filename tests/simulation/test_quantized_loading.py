"""Loading a 4-bit base, deepened from a shallow one, against the loading of all its layers."""

import pytest
from quick import params
from tiny_models import config
from vramlab import Recipe
from vramlab.recipe.recipe import LoRA, Quantization
from vramlab.simulation import quantized_loading
from vramlab.simulation.repetition import NotRegular

MODELS = ("llama", "qwen3-0.6b", "llama-3.2-1b", "gpt2", "gemma-3-1b", "mixtral-8x7b")
CASES = [
    (model, prepare, target)
    for model in MODELS
    for prepare in (True, False)
    for target in ("cuda", "cpu")
]
QUICK = [("llama", False, "cuda")]


@pytest.mark.parametrize(("model", "prepare", "target"), params(CASES, QUICK))
def test_deepened_loading_is_the_whole_one(model, prepare, target, monkeypatch):
    """The split at its highest moment, and what its segments have free afterwards."""
    recipe = Recipe(
        config(model) if model == "llama" else model,
        quantization=Quantization("nf4", double=True, prepare=prepare),
        lora=LoRA(target_modules="all-linear"),
        precision="bf16-mixed",
        num_layers=20 if model == "gemma-3-1b" else 9,
    )
    deepened = []
    deepen = quantized_loading.deepen

    def noted(*arguments):
        deepened.append(True)
        return deepen(*arguments)

    def refuse(shape):
        raise NotRegular("all layers are loaded")

    quantized_loading._highest.cache_clear()
    monkeypatch.setattr(quantized_loading, "deepen", noted)
    found = quantized_loading._of(recipe, target)
    assert deepened
    quantized_loading._highest.cache_clear()
    monkeypatch.setattr(quantized_loading, "find", refuse)
    assert quantized_loading._of(recipe, target) == found
