"""Bases in int8: what runs on a GPU, run on a CPU for real and simulated, equal to the byte.

On a CPU bitsandbytes trains another way (`test_simulate_cpu.py` has it), so that of GPUs is put in
its place: the same Python with other kernels, whose temporaries are held to their source.
"""

import dataclasses

import pytest
import torch
from quick import params
from test_simulate_cpu import EVERYWHERE, assert_equal
from tiny_models import config
from vramlab import Quantization, Recipe, predict, simulate
from vramlab.base.errors import RecipeError
from vramlab.private.of_bitsandbytes import INT8_ON_CPU, int8_products
from vramlab.private.patched import replaced
from vramlab.recipe.lora_modules import KEPT_INPUTS, OUTLIERS
from vramlab.simulation.cuda_scratch import kernel_scratch

INT8 = Quantization("int8", prepare=False)
BASE = Recipe(
    config("llama"),
    batch_size=2,
    seq_len=24,
    num_layers=2,
    precision="bf16-mixed",
    dtype="bfloat16",
    lora=EVERYWHERE,
    quantization=INT8,
)
RECOMPUTED = BASE.replace(gradient_checkpointing=True)
REENTRANT = RECOMPUTED.replace(use_reentrant=True)
CASES = {
    "mixed": BASE,
    "prepared, recomputed": RECOMPUTED.replace(quantization=Quantization("int8")),
    "re-entrant": REENTRANT,
    "biases in fp16": BASE.replace(model=config("opt"), precision="fp16-true", dtype=None),
}


@pytest.mark.parametrize("name", params(CASES, ["re-entrant"]))
def test_the_way_of_a_gpu_equals_a_real_step(name):
    owner, product = int8_products()
    with replaced(owner, INT8_ON_CPU, product):
        assert_equal(CASES[name])


@pytest.mark.parametrize("target", params(["cpu", "cuda"], ["cuda"]))
def test_re_entrant_checkpointing_matters_to_int8_alone(target):
    """Its layers keep their inputs past checkpointing, which only the first pass of the re-entrant
    kind, without a graph, avoids; with another base both kinds peak alike.
    """
    usual, reentrant = (simulate(one, target=target) for one in (RECOMPUTED, REENTRANT))
    kept = usual.phases["forward"].end.activations
    kept -= reentrant.phases["forward"].end.activations
    tokens = 2 * 24
    # q, k, v have one input, as have gate and up; 96 channels, 256 in the middle, in bf16
    inputs = 2 * tokens * (3 * 96 + 256) * 2
    assert kept == inputs
    assert {OUTLIERS, KEPT_INPUTS} <= {*usual.notes} and KEPT_INPUTS not in reentrant.notes
    other = dataclasses.replace(INT8, quant_type="nf4")
    recomputed = simulate(RECOMPUTED.replace(quantization=other), target=target)
    assert (
        recomputed.phases == simulate(REENTRANT.replace(quantization=other), target=target).phases
    )


def test_temporaries_of_cudas_kernels():
    """`int8_vectorwise_quant` and `int8_mm_dequant` of bitsandbytes 0.50, backends/cuda/ops.py."""
    scratch = kernel_scratch()
    half = torch.empty(48, 96, dtype=torch.float16)
    assert scratch("int8_vectorwise_quant", (half, 6.0)) == 48 * 96 * 3
    assert scratch("int8_vectorwise_quant", (half,)) == 0
    codes, weight = half.to(torch.int8), torch.empty(256, 96, dtype=torch.int8)
    assert scratch("int8_mixed_scaled_mm", (half, codes, weight)) == 48 * 256 * 4
    wider = (half.bfloat16(), codes, weight)
    assert scratch("int8_mixed_scaled_mm", wider) == 48 * 256 * (4 + 2)


@pytest.mark.parametrize(
    "make, field",
    [
        (lambda: Quantization("int8", double=True), "quantization.double"),
        (lambda: Quantization("int8", compute_dtype="float16"), "quantization.compute_dtype"),
        (lambda: BASE.replace(sharding={"stage": 3, "world_size": 2}), "quantization.quant_type"),
        (lambda: BASE.replace(use_reentrant=True), "use_reentrant"),
        (lambda: predict(BASE), "quantization.quant_type"),
        (lambda: predict(REENTRANT.replace(quantization=None)), "use_reentrant"),
    ],
)
def test_what_is_refused(make, field):
    with pytest.raises(RecipeError) as caught:
        make()
    assert caught.value.field == field
