"""Cut cross-entropy: what axolotl's fork of the package allocates, and who trains with it."""

import dataclasses

import pytest
import torch
from real_ranks import births
from test_simulate_cpu import EVERYWHERE, real
from tiny_models import config
from vramlab import Quantization, Recipe, predict, simulate
from vramlab.base.errors import RecipeError
from vramlab.recipe.liger import HEAD, kernels
from vramlab.simulation.simulate import trace
from vramlab.tracking.history import to_report

CUT = Recipe(
    config("llama"),
    batch_size=2,
    seq_len=24,
    num_layers=2,
    precision="bf16-mixed",
    dtype="bfloat16",
    lora=EVERYWHERE,
    cut_cross_entropy=True,
)
CASES = {
    "LoRA": CUT,
    "all weights, recomputed": CUT.replace(
        model=config("qwen3"), lora=None, gradient_checkpointing=True, precision="bf16-true"
    ),
    "mixture, re-entrant": CUT.replace(
        model=config("mixtral"), gradient_checkpointing=True, use_reentrant=True
    ),
}


def unnamed(history) -> list:
    """Every allocation in order but for the operator's name, and what is alive then."""
    return [[size, *rest] for size, _, _, *rest in births(history)]


@pytest.mark.parametrize("name", CASES)
def test_it_allocates_what_the_package_does(name, monkeypatch):
    """Kernels of Triton's write where host code has allocated, so they are not launched."""
    pytest.importorskip("cut_cross_entropy.transformers", reason="axolotl's fork is of no extra")
    from triton.runtime.jit import KernelInterface

    def unlaunched(kernel, grid):
        return lambda *args, **kwargs: None

    monkeypatch.setattr(KernelInterface, "__getitem__", unlaunched)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    recipe = CASES[name]
    simulated = trace(recipe, "cpu", full=True)
    with torch.compiler.set_stance("force_eager"):
        ran = real(recipe)
    for one, other in zip(unnamed(simulated), unnamed(ran), strict=True):
        assert one == other
    reports = [to_report(history, "simulated", recipe, "cpu") for history in (simulated, ran)]
    assert reports[0].phases == reports[1].phases


def test_neither_logits_nor_their_gradient_are_there():
    """Of logits and what is made of them nothing is left but numbers a token and a word."""
    wide = CUT.replace(model=config("llama", vocab_size=20_000), num_layers=1)
    tokens, words = 48, 20_000
    logits = simulate(wide.replace(cut_cross_entropy=False)).phases["backward"].peak
    cut = simulate(wide).phases["backward"].peak
    # fp32 logits, their gradient, and the loss's
    assert logits.total - cut.total > 2 * tokens * words * 4
    assert cut.temporaries < tokens * words


def test_liger_leaves_it_the_head():
    with_liger = CUT.replace(use_liger_kernel=True)
    assert kernels(with_liger.replace(cut_cross_entropy=False)) - kernels(with_liger) == {HEAD}


@pytest.mark.parametrize(
    "make, field, said",
    [
        (lambda: CUT.replace(model=config("gpt2")), "cut_cross_entropy", "for causal-lm of"),
        (lambda: CUT.replace(trainer="sft"), "cut_cross_entropy", "with trainer 'transformers'"),
        (lambda: CUT.replace(dtype=None), "cut_cross_entropy", "in half precision"),
        (
            lambda: CUT.replace(quantization=Quantization("nf4")),
            "cut_cross_entropy",
            "quantization.prepare",
        ),
        (
            lambda: CUT.replace(lora=dataclasses.replace(EVERYWHERE, target_modules=("lm_head",))),
            "lora.target_modules",
            "would not be trained",
        ),
        (lambda: predict(CUT), "cut_cross_entropy", "ask simulate"),
    ],
)
def test_what_is_refused(make, field, said):
    with pytest.raises(RecipeError, match=said) as caught:
        make()
    assert caught.value.field == field
