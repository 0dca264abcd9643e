"""`generate` on fake tensors against a real one on this CPU, to the byte.

And few layers and steps against all of them.
"""

import json

import pytest
import torch
from quick import params
from tiny_models import config
from transformers import LogitsProcessor, LogitsProcessorList
from vramlab import Generation, Recipe, RecipeError, Sharding, simulate_generation
from vramlab.base.data import data_path
from vramlab.hardware.overhead import rules_of
from vramlab.recipe.shapes import read_shape
from vramlab.simulation.simulate_generation import trace_generation
from vramlab.tracking.history import History
from vramlab.tracking.tracked import claim_cache, claim_model, run_tracked_generation
from vramlab.tracking.tracker import Tracker
from vramlab.training.fixed_generation import build_generation, layers_of
from vramlab.training.models import build_model

SMALL = {"hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64, "intermediate_size": 32}
DEEPSEEK = read_shape("deepseek-v3").config | {
    **SMALL,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 6,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
QWEN_3_5 = {
    "model_type": "qwen3_5_text",
    **SMALL,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_hidden_layers": 8,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    * 2,
}
MAMBA_2 = {
    "model_type": "mamba2",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_heads": 4,
    "head_dim": 16,
    "state_size": 8,
    "n_groups": 1,
    "num_hidden_layers": 4,
    "chunk_size": 8,
}
GEMMA_3 = read_shape("gemma-3-1b", num_layers=7).config | {
    **SMALL,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "sliding_window": 12,
}
LAYERS = {"num_hidden_layers": 5}
T5 = config("t5", num_layers=5, num_decoder_layers=5)
# model, recipe, generation
CASES = {
    "grouped heads": (config("qwen3", **LAYERS), {}, {}),
    "in fp32, one prompt": (config("llama", **LAYERS), {"precision": "fp32", "batch_size": 1}, {}),
    "learned positions": (config("gpt2", n_layer=5), {}, {}),
    "written-out attention": (config("llama", **LAYERS), {"attn_implementation": "eager"}, {}),
    "experts": (config("mixtral", **LAYERS), {}, {}),
    "sliding windows that fill up": (GEMMA_3, {}, {}),
    "sliding windows, full from the prompt on": (GEMMA_3, {}, {"prompt": 15}),
    "latent attention": (DEEPSEEK, {}, {}),
    "a hybrid's states": (QWEN_3_5, {}, {}),
    "states alone": (MAMBA_2, {}, {}),
    "an encoder": (T5, {}, {}),
    "sound": ("whisper-tiny", {"num_layers": 2, "batch_size": 2, "precision": "fp32"}, {}),
    "static": (config("qwen3", **LAYERS), {}, {"cache_implementation": "static"}),
    "static, sliding": (GEMMA_3, {}, {"cache_implementation": "static"}),
    "static, an encoder": (T5, {}, {"cache_implementation": "static"}),
    "quantized": (
        config("qwen3", **LAYERS),
        {},
        {"cache_implementation": "quantized", "cache_backend": "fp8"},
    ),
    "sampled": (config("qwen3", **LAYERS), {}, {"do_sample": True}),
    "several answers": (
        config("qwen3", **LAYERS),
        {},
        {"do_sample": True, "num_return_sequences": 3},
    ),
    "beams": (config("qwen3", **LAYERS), {}, {"num_beams": 2}),
    "a prompt in pieces": (config("qwen3", **LAYERS), {}, {"prefill_chunk_size": 3}),
}
QUICK = ["grouped heads", "sliding windows that fill up", "an encoder", "static, sliding"]


def case(name: str) -> tuple[Recipe, Generation]:
    model, fields, asked = CASES[name]
    recipe = Recipe(model, **{"batch_size": 3, "precision": "bf16-true", **fields})
    return recipe, Generation(**{"prompt": 7, "new_tokens": 14, **asked})


def real(recipe: Recipe, generation: Generation) -> History:
    """The same on real tensors."""
    started = build_generation(recipe, generation)
    tracker = run_tracked_generation(started, Tracker("cpu"), generation.new_tokens)
    return History(tracker.log, tracker.marks)


@pytest.mark.parametrize("name", params(CASES, QUICK))
def test_equals_real_tensors(name):
    recipe, generation = case(name)
    seen = real(recipe, generation)
    said = trace_generation(recipe, generation, "cpu")
    assert said.phases() == seen.phases()
    assert list(said.phases()) == ["load", "prefill", "decode"]
    steps = [moment for moment in said.moments() if moment[0] == "decode"]
    runs_all = generation.num_beams > 1 or recipe.shape.features
    assert runs_all or len(steps) < generation.new_tokens - 1
    assert said.phases()["decode"].end.kv_cache > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_step_equals_real_tensors(name):
    recipe, generation = case(name)
    seen = real(recipe, generation)
    assert trace_generation(recipe, generation, "cpu", full=True).moments() == seen.moments()


class Watched(LogitsProcessor):
    """Tells a tracker when a token is chosen, as the tests of a real card do."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.tracker.begin("decode")
        return scores


def test_equals_a_generation_that_nobody_has_changed():
    """It ends by itself, and its cache is a user's own."""
    from transformers import DynamicCache

    recipe, generation = case("grouped heads")
    model = build_model(recipe).eval()
    ids = torch.randint(recipe.shape.vocab_size, (recipe.batch_size, generation.prompt))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    cache = DynamicCache(config=model.config)
    tracker = Tracker("cpu")
    claim_model(tracker, model)
    tracker.claim(inputs.values(), "inputs")
    with tracker.modules(model), tracker:
        tracker.begin("prefill")
        made = model.generate(
            **inputs,
            past_key_values=cache,
            logits_processor=LogitsProcessorList([Watched(tracker)]),
            max_new_tokens=generation.new_tokens,
            do_sample=False,
            eos_token_id=None,
        )
        claim_cache(tracker, cache)
    assert made.shape == (recipe.batch_size, generation.prompt + generation.new_tokens)
    seen = History(tracker.finish().log, tracker.marks)
    said = trace_generation(recipe, generation, "cpu")
    # the end token's own tensors: which rows have ended
    assert 0 <= said.live.max() - seen.live.max() <= 3 * 8 * recipe.batch_size
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers_of(cache))
    assert held == said.phases()["decode"].end.kv_cache


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("grouped heads", {}),
        pytest.param("grouped heads", {"cache_implementation": "static"}, marks=pytest.mark.slow),
        pytest.param("sliding windows that fill up", {}, marks=pytest.mark.slow),
        pytest.param("a hybrid's states", {}, marks=pytest.mark.slow),
        pytest.param("an encoder", {}, marks=pytest.mark.slow),
    ],
)
def test_few_layers_and_steps_say_all_on_cuda(name, asked):
    """But what the allocator holds beyond the requests, which depends on all that was before."""
    recipe, _ = case(name)
    generation = Generation(prompt=40, new_tokens=30, **asked)
    few = trace_generation(recipe, generation)
    every = trace_generation(recipe, generation, full=True)
    assert few.requested == every.requested
    for phase in ("prefill", "decode"):
        for moment in ("peak", "end"):
            one = getattr(few.phases()[phase], moment)
            other = getattr(every.phases()[phase], moment)
            assert {**vars(one), "workspace": 0} == {**vars(other), "workspace": 0}


RUNS = json.loads(data_path("phase_peaks.json").read_text())["runs"]
GENERATED = {f"{run['model']} {n}": run for n, run in enumerate(RUNS) if "new_tokens" in run}
WORKSPACE = 32 * 1024**2  # bytes of cuBLAS's on that card
FORMS = {"bfloat16": "bf16-true", "float16": "fp16-true"}


@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
@pytest.mark.parametrize("name", params(GENERATED, ["qwen3-0.6b 0"]))
def test_peaks_of_a_real_card(name, monkeypatch):
    """An H200's: what was asked for to the byte, less what the runs before left there.

    The allocator holds more where blocks are not divided, which depends on all steps before.
    """
    run = GENERATED[name]
    asked = run["generate"]
    kept = {"cache_implementation": asked.get("cache_implementation", "dynamic")}
    generation = Generation(run["prompt_tokens"], run["new_tokens"], **kept)
    monkeypatch.setattr(Generation, "arguments", {**generation.arguments, **asked})
    monkeypatch.delitem(Generation.arguments, "max_new_tokens")
    recipe = Recipe(run["model"], run["batch_size"], precision=FORMS[run["dtype"]])
    with rules_of(run["environment"]["torch"]):
        said = simulate_generation(
            recipe, generation.prompt, generation.new_tokens, gpu="H200", **kept
        )
    prefill = run["marks"][0]["peak"]
    decode = run["peak_decode"]
    left = max(0, run["before"]["workspaces"] - WORKSPACE)
    assert said.requested == max(prefill["requested"], decode["requested"]) - left
    assert 0 <= prefill["allocated"] - said.phases["prefill"].peak.total <= left
    assert said.phases["decode"].peak.total == pytest.approx(decode["allocated"], rel=3e-4)
    reserved = max(mark["peak"]["reserved"] for mark in run["marks"])
    assert said.reserved.low < reserved < said.reserved.high < 1.3 * reserved


def test_the_cache_is_a_line_of_the_report():
    recipe, _ = case("grouped heads")
    report = simulate_generation(recipe, 7, 14)
    shape = recipe.shape.config
    of_a_token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    tokens = recipe.batch_size * (7 + 14 - 1)
    held = report.phases["decode"].end.kv_cache
    # each tensor takes multiples of 512 bytes
    assert 0 <= held - 2 * of_a_token * tokens < 512 * 2 * shape["num_hidden_layers"]
    assert "kv cache" in str(report) and "decode" in str(report)
    assert "7 tokens and 14 new ones" in report.title


def test_the_published_weights_say_the_precision():
    config = read_shape("qwen3-0.6b", num_layers=1).config
    report = simulate_generation(config, 4, 2)
    assert report.recipe["precision"] == "bf16-true"


@pytest.mark.parametrize(
    ("recipe", "asked", "field"),
    [
        (Recipe(config("bert")), {}, "model"),
        (Recipe(config("vit")), {}, "model"),
        (Recipe(config("gpt2")), {"prompt": 100, "new_tokens": 30}, "generation.new_tokens"),
        (Recipe(config("gpt2")), {"prompt": 200}, "generation.prompt"),
        (Recipe(config("llama"), sharding=Sharding(3, 2)), {}, "sharding"),
        (Recipe(config("llama"), precision="bf16-mixed"), {}, "precision"),
        (Recipe(config("llama")), {"cache_implementation": "paged"}, "generation.cache_impl"),
        (Recipe(config("llama")), {"new_tokens": 0}, "generation.new_tokens"),
        (Recipe(config("llama")), {"num_return_sequences": 2}, "generation.num_return"),
    ],
)
def test_refuses_in_a_sentence(recipe, asked, field):
    with pytest.raises(RecipeError) as caught:
        simulate_generation(recipe, **{"prompt": 8, "new_tokens": 2, **asked})
    assert caught.value.field.startswith(field) and str(caught.value).count("\n") == 0


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-true", "fp32"])
def test_a_cache_that_quanto_packs(precision):
    """By quanto's own code, past the 128 tokens that it keeps as they are."""
    pytest.importorskip("optimum.quanto")
    recipe = Recipe(config("qwen3", **LAYERS, head_dim=64), 2, precision=precision)
    generation = Generation(7, 140, cache_implementation="quantized")
    seen = real(recipe, generation).phases()
    assert trace_generation(recipe, generation, "cpu").phases() == seen
    plain = trace_generation(recipe, Generation(7, 140), "cpu").phases()
    assert seen["decode"].end.kv_cache < plain["decode"].end.kv_cache / 2


def test_a_quantized_cache_needs_its_package(monkeypatch):
    monkeypatch.setattr("vramlab.recipe.generation.installed", lambda name: None)
    with pytest.raises(RecipeError, match="pip install optimum-quanto"):
        Generation(cache_implementation="quantized")


def test_one_token_needs_no_decoding():
    report = simulate_generation(Recipe(config("gpt2", n_layer=1)), 8, 1)
    assert list(report.phases) == ["load", "prefill"]


def test_all_of_the_models_positions_can_be_used():
    """The last token is made and never read."""
    report = simulate_generation(Recipe(config("gpt2", n_layer=1)), 100, 29, target="cpu")
    assert report.phases["decode"].end.kv_cache == 4 * 2 * 96 * 128
