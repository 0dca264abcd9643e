"""Fake tensors against real ones: the same step, once simulated and once really run, equal to the
byte.

Real: `build` and `train_step` on CPU tensors with weights and values, followed by the tracker.
    Simulated: fake tensors.
Compared are every allocation of both runs in order, what was alive then by category, phases, peak
and largest tensors. `test_simulate_witness.py` holds the tracker itself against the allocator's own
events.
"""

import dataclasses

import pytest
import torch
from pairwise import every_value, pairs_of, pairwise
from quick import params
from real_ranks import births
from tiny_models import TINY, config
from vramlab.base.errors import RecipeError
from vramlab.recipe.recipe import OPTIMIZERS, PRECISIONS, Loop, LoRA, Quantization, Recipe
from vramlab.recipe.shapes import read_shape
from vramlab.simulation.simulate import trace
from vramlab.tracking.history import History, to_report
from vramlab.tracking.tracked import run_tracked
from vramlab.tracking.tracker import Tracker
from vramlab.training.training import build

EVERYWHERE = LoRA(r=4, target_modules="all-linear")
ADAPTERS = {
    "none": {},
    "lora": {"lora": EVERYWHERE},
    "lora in the base's dtype": {
        "lora": LoRA(
            r=4,
            target_modules="all-linear",
            lora_dropout=0.1,
            bias="all",
            autocast_adapter_dtype=False,
        )
    },
    "nf4": {"lora": EVERYWHERE, "quantization": Quantization("nf4")},
    "nf4 double": {"lora": EVERYWHERE, "quantization": Quantization("nf4", double=True)},
    "fp4 unprepared": {"lora": EVERYWHERE, "quantization": Quantization("fp4", prepare=False)},
    "int8": {"lora": EVERYWHERE, "quantization": Quantization("int8")},
}
LOOPS = {
    "trainer": {},
    "plain": {"loop": "plain"},
    "optimizer in backward": {"loop": "optimizer_in_backward"},
    "accumulating": {"gradient_accumulation_steps": 2},
    "accumulating onto zeros": {
        "gradient_accumulation_steps": 2,
        "loop": Loop.named("plain", set_to_none=False, zero_grad="before_backward"),
    },
    "clipping, zeros at the end": {
        "loop": Loop.named("plain", set_to_none=False, zero_grad="end", max_grad_norm=1.0)
    },
    "outputs and cache kept, foreach": {
        "loop": Loop.named("trainer", keep_outputs=True, use_cache=True, foreach=True)
    },
}
FACTORS = {
    "family": TINY,
    "precision": (*PRECISIONS, "bf16-mixed over bfloat16", "fp16-mixed over float16"),
    "optim": OPTIMIZERS,
    "adapter": ADAPTERS,
    "loop": LOOPS,
    "checkpointing": (False, True),
    "attention": ("sdpa", "eager"),
}


def recipe_of(row: dict) -> Recipe:
    family, adapter = row["family"], ADAPTERS[row["adapter"]]
    precision, _, dtype = row["precision"].partition(" over ")
    if family == "vit" and adapter:
        # With only a bias to train, CPU's convolution makes the weight's gradient too and drops it;
        # fake ones do not.
        adapter = {**adapter, "lora": dataclasses.replace(adapter["lora"], bias="none")}
    return Recipe(
        config(family),
        batch_size=2,
        seq_len=None if family == "vit" else 24,
        num_layers=2,
        precision=precision,
        dtype=dtype or None,
        optim=row["optim"],
        gradient_checkpointing=row["checkpointing"],
        attn_implementation=row["attention"],
        **adapter,
        **LOOPS[row["loop"]],
    )


def valid(row: dict) -> bool:
    try:
        recipe_of(row)
    except RecipeError:
        return False
    return True


ROWS, IMPOSSIBLE = pairwise(FACTORS, valid, optional=[("family", "optim")], tries=200)
QUICK = every_value(
    ROWS, times=1
)  # each value of each setting; every pair of them is for `make test-all`

SMALL = {"batch_size": 2, "seq_len": 24, "num_layers": 2}
HEARING = read_shape("whisper-tiny").config | dict(
    vocab_size=96, d_model=32, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=48, num_mel_bins=8,
    decoder_ffn_dim=48, max_source_positions=20, decoder_start_token_id=1, pad_token_id=0,
)  # fmt: skip
CLASSES = {"task": "sequence-classification"}
NO_CLIP = Loop.named("trainer", max_grad_norm=None)
FOUR_BITS = {"precision": "bf16-mixed", "gradient_checkpointing": True}
QLORA = {
    "lora": LoRA(),
    "quantization": Quantization("nf4", double=True),
    "optim": "paged_adamw_8bit",
}
# What pairs of settings do not reach: real widths, other heads, saved modules, other optimizers'
# arguments.
SPECIAL = {
    "gpt2 as published": Recipe("gpt2", seq_len=32, num_layers=2),
    "pythia-70m, all of it": Recipe("pythia-70m", seq_len=64, precision="bf16-mixed"),
    "t5-small as published": Recipe(
        "t5-small", seq_len=16, num_layers=1, optim="adafactor", precision="fp16-mixed"
    ),
    "bert-base, checkpointing": Recipe(
        "bert-base", seq_len=32, num_layers=2, gradient_checkpointing=True
    ),
    "vit-base as published": Recipe("vit-base", num_layers=2, precision="bf16-true", loop="plain"),
    "Qwen's widths in 4 bits": Recipe(
        "qwen2.5-0.5b", seq_len=16, num_layers=1, precision="bf16-true", **QLORA
    ),
    "sequence classification": Recipe(config("bert"), lora=LoRA(), **CLASSES, **SMALL),
    "a causal model that classifies": Recipe(config("gpt2", pad_token_id=0), **CLASSES, **SMALL),
    "saved modules": Recipe(
        config("llama"), lora=LoRA(modules_to_save=("lm_head",)), precision="bf16-true", **SMALL
    ),
    "DoRA": Recipe(
        config("llama"), lora=LoRA(use_dora=True, lora_dropout=0.1), **{**FOUR_BITS, **SMALL}
    ),
    "DoRA on Conv1D": Recipe(
        config("gpt2"), lora=LoRA(use_dora=True), precision="bf16-true", **SMALL
    ),
    "adapters with biases": Recipe(
        config("gpt2"), lora=LoRA(lora_bias=True, bias="lora_only"), **SMALL
    ),
    "fused experts": Recipe(
        config("mixtral"),
        lora=LoRA(
            r=4,
            target_modules=("q_proj",),
            target_parameters=("experts.gate_up_proj", "experts.down_proj"),
        ),
        **SMALL,
    ),
    "trained embeddings": Recipe(
        config("llama"),
        lora=LoRA(target_modules=("embed_tokens",), modules_to_save=("lm_head",)),
        **SMALL,
    ),
    "LoRA on PEFT's default targets": Recipe(
        config("gpt2"), lora=LoRA(use_rslora=True), precision="fp16-true", **SMALL
    ),
    "4 bits quantized from fp32": Recipe(
        config("llama"),
        dtype="float32",
        **FOUR_BITS,
        lora=EVERYWHERE,
        quantization=Quantization("nf4"),
        **SMALL,
    ),
    "4 bits computed in fp32": Recipe(
        config("gpt2"),
        dtype="bfloat16",
        **FOUR_BITS,
        lora=EVERYWHERE,
        quantization=Quantization("nf4", compute_dtype="float32", prepare=False),
        **SMALL,
    ),
    "fp16 weights under bf16": Recipe(
        config("llama"), dtype="float16", precision="bf16-mixed", **SMALL
    ),
    "momentum": Recipe(
        config("gpt2"), optim="sgd", optim_args="momentum=0.9", loop=NO_CLIP, **SMALL
    ),
    "rmsprop with momentum": Recipe(
        config("gpt2"), optim="rmsprop", optim_args="momentum=0.9,alpha=0.9", **SMALL
    ),
    "one token more than a tile": Recipe(
        config("llama"), 1, 65, num_layers=2, precision="bf16-true"
    ),
    "half-precision input of fp32 norms": Recipe(
        config("phi", qk_layernorm=True), 1, 8, num_layers=1, precision="bf16-mixed"
    ),
    "TRL's head over three tiles": Recipe(
        config("qwen3", vocab_size=70_000),
        2,
        24,
        num_layers=1,
        precision="bf16-mixed",
        trainer="sft",
    ),
    "TRL's head, frozen": Recipe(
        config("llama"),
        lora=EVERYWHERE,
        trainer="sft",
        gradient_checkpointing=True,
        **SMALL,
        precision="bf16-true",
    ),
    "TRL's mixture in 4 bits": Recipe(
        config("mixtral"),
        trainer="sft",
        lora=LoRA(r=4),
        quantization=Quantization("nf4", prepare=False),
        **SMALL,
    ),
    "Whisper": Recipe(HEARING, precision="bf16-true", optim="adafactor", **SMALL),
    "Whisper in 4 bits": Recipe(
        HEARING, lora=EVERYWHERE, quantization=Quantization("nf4"), **FOUR_BITS, **SMALL
    ),
    "Muon": Recipe(config("llama"), optim="muon", precision="bf16-true", **SMALL),
    "Muon, its arguments": Recipe(
        config("gpt2"),
        optim="muon",
        optim_args="nesterov=0,momentum=0.9,weight_decay=0.1",
        precision="bf16-mixed",
        **SMALL,
    ),
    "Muon of adapters": Recipe(
        config("qwen2"), optim="muon", lora=EVERYWHERE, loop="plain", **SMALL
    ),
    "Muon under a loss scaler": Recipe(
        config("llama"), optim="muon", precision="fp16-mixed", **SMALL
    ),
    "smoothed labels": Recipe(
        config("llama"), label_smoothing_factor=0.1, precision="bf16-mixed", **SMALL
    ),
    "smoothed labels of classes": Recipe(
        config("bert"), label_smoothing_factor=0.1, **CLASSES, **SMALL
    ),
    "noisy embeddings": Recipe(config("llama"), neftune_noise_alpha=5.0, **FOUR_BITS, **SMALL),
    "noisy embeddings in SFT": Recipe(
        config("llama"), neftune_noise_alpha=5.0, trainer="sft", lora=LoRA(r=4), **SMALL
    ),
    "three layers of two kinds": Recipe(
        config("gemma2"), 2, 24, num_layers=3, gradient_checkpointing=True
    ),
}


def real(recipe: Recipe, seed: int = 0) -> History:
    """The step really run, on CPU tensors with random weights and data."""
    torch.manual_seed(seed)
    tracker = run_tracked(build(recipe, "cpu", target="cpu"), Tracker("cpu"), 2, "cpu")
    return History(tracker.log, tracker.marks)


def assert_equal(recipe: Recipe) -> None:
    simulated, ran = trace(recipe, "cpu", full=True), real(recipe)
    for one, other in zip(births(simulated), births(ran), strict=True):
        assert one == other
    a, b = (
        to_report(simulated, "simulated", recipe, "cpu"),
        to_report(ran, "measured", recipe, "cpu"),
    )
    assert a.phases == b.phases
    assert (a.peak, a.peak_phase, a.largest) == (b.peak, b.peak_phase, b.largest)
    peaks = [
        a.phases[name].peak.parameters
        for name in ("load", "forward", "backward", "step", "between_steps")
    ]
    # bitsandbytes puts the biases of a 4-bit layer into the activations' dtype when it first sees
    # them
    assert min(peaks) > 0 and len(set(peaks if recipe.quantization is None else peaks[1:])) == 1
    assert a.phases["forward"].end.activations > 0 and a.phases["forward"].peak.inputs > 0
    assert recipe.loop.optimizer_in_backward or a.phases["backward"].end.gradients > 0
    assert (recipe.optim == "sgd" and not recipe.optim_args) or a.phases[
        "between_steps"
    ].end.optimizer_states > 0


@pytest.mark.parametrize(
    "row", params(ROWS, QUICK), ids=lambda row: "-".join(str(value) for value in row.values())
)
def test_equals_real_tensors(row):
    assert_equal(recipe_of(row))


SLOW = (
    *(
        "gpt2 as published",
        "pythia-70m, all of it",
        "t5-small as published",
        "bert-base, checkpointing",
    ),
    *(
        "vit-base as published",
        "Qwen's widths in 4 bits",
        "Whisper in 4 bits",
        "TRL's head, frozen",
    ),
    *(
        "a causal model that classifies",
        "DoRA on Conv1D",
        "saved modules",
        "4 bits computed in fp32",
        "4 bits quantized from fp32",
        "TRL's mixture in 4 bits",
    ),
)


@pytest.mark.parametrize("name", params(SPECIAL, SPECIAL.keys() - SLOW))
def test_equals_real_tensors_at_real_widths_and_in_corners(name):
    assert_equal(SPECIAL[name])


def test_the_trainers_noise_is_added_to_embeddings():
    """A tensor of zeros that becomes noise, and the sum; the hook is transformers' own."""
    recipe = Recipe(config("llama"), neftune_noise_alpha=5.0, **SMALL)
    plain = [birth[2] for birth in births(real(recipe.replace(neftune_noise_alpha=None)))]
    noisy = [birth[2] for birth in births(real(recipe))]
    for operator in ("zeros_like", "add"):
        assert noisy.count(operator) >= plain.count(operator) + 2  # one a step
    model = build(recipe).model
    (hook,) = model.get_input_embeddings()._forward_hooks.values()
    assert hook.__name__ == "neftune_post_forward_hook"


def test_rows_hold_every_pair():
    """All but the training of fp16 weights under autocast, and Gemma 2's capped scores under sdpa;
    every optimizer meets many families."""
    scaled = {("fp16-mixed over float16", name) for name in ("none", "lora in the base's dtype")}
    assert {pair[1::2] for pair in IMPOSSIBLE} == {("gemma2", "sdpa"), *scaled}
    met = set().union(*map(pairs_of, ROWS))
    assert (
        len([p for p in met if (p[0], p[2]) == ("family", "optim")])
        > len(TINY) * len(OPTIMIZERS) / 3
    )
    assert len(TINY) >= 8


def test_would_see_a_difference():
    """The comparison is no tautology: another loop, or one token more, is told apart."""
    recipe = Recipe(config("llama"), 2, 24, num_layers=1)
    same, other = births(trace(recipe, "cpu", full=True)), births(real(recipe))
    assert same == other
    assert births(real(recipe.replace(loop="plain"))) != same
    assert births(real(recipe.replace(seq_len=25))) != same


def test_routing_moves_no_byte():
    """A mixture of experts sorts tokens by expert and multiplies them in one grouped kernel, so
    sizes do not depend on where tokens go. (True of transformers' `grouped_mm` experts; a loop over
    experts would allocate what each gets.)"""
    recipe = Recipe(config("mixtral"), 2, 24, num_layers=2)
    first, second = real(recipe, seed=1), real(recipe, seed=2)
    assert births(first) == births(second)
    torch.manual_seed(1)
    one = build(recipe, "cpu")
    torch.manual_seed(2)
    two = build(recipe, "cpu")
    routed = []
    for training in (one, two):
        training.model.model.layers[0].mlp.gate.register_forward_hook(
            lambda m, i, o: routed.append(o)
        )
        training.model(**training.batch)
    assert not all(torch.equal(a, b) for a, b in zip(routed[0], routed[1], strict=True))
