"""The estimate of a step's time reads what the account of its memory reads, and knows the kernel
that ran.
"""

import importlib.util
import itertools
import json
import statistics
from pathlib import Path

import pytest
from vramlab import LoRA, Recipe, Sharding, find_gpu, predict, step_time
from vramlab.formulas.account import kept_account
from vramlab.measurement.records import measurements_folder
from vramlab.planning.rates import Rates
from vramlab.planning.step_time import (
    RATES,
    SPREAD,
    SPREAD_ELSEWHERE,
    USUAL,
    estimate,
    operations,
    timed_records,
    walk,
)
from vramlab.planning.step_traffic import moved_pages, paged_bytes, sent, to_host

BENCHMARK = Path(__file__).parent.parent.parent / "benchmarks" / "step_times.py"

CARD = find_gpu("RTX 4090")
PLAIN = dict(batch_size=4, seq_len=1024, precision="bf16-mixed", num_layers=3)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_liger_kernel": True},
        {"lengths": (1024, 1024, 700, 100)},
        {"trainer": "sft", "padding_free": True},
        {"trainer": "sft", "packing": True},
        {"trainer": "sft", "use_liger_kernel": True},
        {"pad_to_multiple_of": 1000},
    ],
    ids=str,
)
def test_a_walk_keeps_what_the_account_keeps(changes):
    recipe = Recipe("qwen2.5-0.5b", **PLAIN | changes)
    assert walk(recipe, CARD.chip).kept == kept_account(recipe, CARD.chip).phases[2]["activations"]


def test_ligers_kernels_write_less_and_all_chunks_of_the_logits_count():
    """A frozen head has no gradient that each chunk is added to; a trained one of a small model has
    a hundred chunks.
    """
    frozen = Recipe("llama-3.2-1b", **PLAIN | {"precision": "bf16-true"}, lora=LoRA(r=8))
    liger = frozen.replace(use_liger_kernel=True)
    assert walk(liger, CARD.chip).written < walk(frozen, CARD.chip).written
    assert step_time(liger, CARD).seconds < step_time(frozen, CARD).seconds
    births = [
        (n, e) for n, e in kept_account(liger, CARD.chip).births() if e.op == "mm" and e.shape
    ]
    of_logits = [(n, e.size) for n, e in births if e.shape[-1] == liger.shape.vocab_size]
    assert max(n for n, _ in of_logits) > 2
    assert sum(n * size for n, size in of_logits) == 4 * 1024 * liger.shape.vocab_size * 2
    trained = Recipe("qwen2.5-0.5b", **PLAIN, use_liger_kernel=True)
    assert (
        step_time(trained, CARD).seconds
        > step_time(trained.replace(use_liger_kernel=False), CARD).seconds
    )


def test_a_mask_makes_the_kernel_compare_all_pairs():
    even = Recipe("qwen2.5-0.5b", **PLAIN)
    padded = even.replace(lengths=(1024, 1024, 1024, 1000))
    assert not walk(even, CARD.chip).masked and walk(padded, CARD.chip).masked
    pairs = [sum(operations(recipe, walk(recipe, CARD.chip)).values()) for recipe in (even, padded)]
    half = (
        4 * 4 * 1024**2 * even.shape.num_heads * even.shape.head_dim * 3 * 3 // 2
    )  # layers, passes
    assert pairs[1] - pairs[0] == half


def test_ranks_that_have_a_samples_tokens_together_compute_parts_of_it():
    whole = Recipe("qwen3-0.6b", **PLAIN | {"seq_len": 8192}, sharding=Sharding(3, 4))
    ring = whole.replace(sharding=Sharding(3, 4, cp_size=4))
    one, part = (operations(each, walk(each, CARD.chip)) for each in (whole, ring))
    assert {form: 4 * count for form, count in part.items()} == one
    # casts of weights and their gradients are whole on each rank
    assert walk(ring, CARD.chip).written == pytest.approx(walk(whole, CARD.chip).written / 4, 0.05)
    assert 4 * step_time(ring, CARD).tokens == step_time(whole, CARD).tokens == 4 * whole.tokens


def test_keys_go_around_and_their_gradients_with_them():
    """Three times in forward, three times in backward, and of each the gradient in fp32 four times
    (torch's `_templated_ring_attention` and its backward).
    """
    whole = Recipe("qwen3-0.6b", **PLAIN | {"seq_len": 8192}, sharding=Sharding(3, 4))
    ring = whole.replace(sharding=Sharding(3, 4, cp_size=4))
    keys = 4 * 8192 // 4 * 2 * 8 * 128 * 3  # samples, tokens, both, heads, channels, layers
    assert sent(ring) - sent(whole) == keys * (2 * (3 + 3) + 4 * 4)


def test_heads_are_exchanged_with_the_results_of_attention():
    """Three of four parts go to others, in two passes through each layer (DeepSpeed's
    `UlyssesSPAttentionHF`).
    """
    whole = Recipe("qwen3-0.6b", **PLAIN | {"seq_len": 8192}, sharding=Sharding(3, 4, "deepspeed"))
    together = whole.replace(sharding=Sharding(3, 4, "deepspeed", sp_size=4))
    numbers = 4 * 8192 // 4 * (2 * 16 + 2 * 8) * 128 * 3  # samples, tokens, heads, channels, layers
    assert sent(together) - sent(whole) == numbers * 2 * 2 * 3 // 4


@pytest.mark.parametrize(
    "stage, engine, once, again",
    [(0, "ddp", 2, 0), (1, "ddp", 3, 0), (1, "deepspeed", 3, 0), (2, "deepspeed", 3, 2)],
)
def test_the_libraries_lower_stages_send_all_gradients_twice_and_weights_once(
    stage, engine, once, again
):
    """As real ranks sent them, counted (chapter 04)."""
    recipe = Recipe("qwen3-0.6b", **PLAIN | {"precision": "bf16-true"})
    recipe = recipe.replace(sharding=Sharding(stage, 4, engine))
    weights = 2 * recipe.shape.num_parameters
    assert sent(recipe) == pytest.approx(weights * once * 3 / 4, rel=1e-5)  # with padding
    three = recipe.replace(gradient_accumulation_steps=3)
    whole = weights * (once + 2 * again)
    assert sent(three) == pytest.approx(whole * 3 / 4, rel=1e-5)


@pytest.mark.parametrize("engine, stage", [("fsdp", 2), ("fsdp", 3), ("deepspeed", 3)])
def test_mixed_precision_sends_what_it_computes_with(engine, stage):
    """accelerate lets FSDP gather and reduce in 16 bits; DDP averages gradients as they are."""
    mixed = Recipe("qwen3-0.6b", **PLAIN | {"precision": "bf16-mixed"})
    mixed = mixed.replace(sharding=Sharding(stage, 4, engine))
    assert sent(mixed) == sent(mixed.replace(precision="bf16-true"))
    alike = mixed.replace(sharding=Sharding(0, 4, "ddp"))
    half = sent(alike.replace(precision="bf16-true"))
    assert sent(alike) == pytest.approx(2 * half, rel=1e-4)  # with padding


@pytest.mark.parametrize(
    "sharding, of_one, of_three",
    [
        # Weights come up once; gradients go down in fp32, and their sum five times of three.
        (Sharding(2, 1, "deepspeed", offload="optimizer"), 2 + 4, 2 + 4 + 5 * 2),
        # Weights come up twice a micro-batch; the sum goes down and up with each.
        (Sharding(3, 1, "deepspeed", offload="parameters"), 4 + 4 + 4, 12 + 4 + 12),
        # Weights twice and gradients, in fp32 (torch's `fully_shard`): no sum is on the card.
        (Sharding(3, 1, "fsdp", offload="parameters"), 8 + 4, 3 * 12),
    ],
)
def test_what_is_updated_on_the_host_comes_up_when_it_is_gathered(sharding, of_one, of_three):
    recipe = Recipe("qwen3-0.6b", **PLAIN, sharding=sharding)
    for times, a_number in ((1, of_one), (3, of_three)):
        crossing, through = to_host(recipe.replace(gradient_accumulation_steps=times))
        numbers = through / 28
        assert crossing / numbers == pytest.approx(a_number, rel=1e-5)  # with padding


@pytest.fixture(scope="module")
def step_times():
    """The benchmark that fits the constants."""
    spec = importlib.util.spec_from_file_location("step_times", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_constants_are_what_the_fit_gives(step_times):
    for card in step_times.CARDS:
        fitted = step_times.fit(step_times.chosen(card))
        # A model more or less moves attention's share from 0.16 to 0.28, the host's seconds by 5 %.
        loose = {"attention": 0.06, "issue": 0.02}
        for name, constant in zip(Rates._fields, fitted, strict=True):
            used = getattr(RATES[card], name)
            assert constant == pytest.approx(used, rel=loose.get(name, 0.01)), (card, name)
    # pairs that tell it are an H100's alone
    assert len({rates[-2:] for rates in RATES.values()}) == 1
    both = zip(RATES["T4"], RATES["H100 SXM"], strict=True)
    assert tuple(map(statistics.geometric_mean, both)) == pytest.approx(USUAL, rel=0.01)


def test_the_intervals_are_those_of_what_no_fit_has_seen(step_times):
    for card in step_times.CARDS:
        found = [ratio for _, ratio in step_times.held_out(card)]
        assert step_times.spread(found) == pytest.approx(SPREAD[card], abs=0.01)
    assert step_times.spread(step_times.elsewhere()) == pytest.approx(SPREAD_ELSEWHERE, abs=0.015)


@pytest.mark.parametrize(
    ("card", "count", "mean", "worst"),
    [("T4", 61, 0.1, 0.42), ("H100 SXM", 184, 0.131, 0.73), ("H200", 49, 0.17, 0.7)],
)
def test_seconds_come_to_those_measured_on_models_that_the_fit_has_not_seen(
    step_times, card, count, mean, worst
):
    found = step_times.held_out(card)
    errors = [abs(1 / ratio - 1) for _, ratio in found]
    assert len(errors) == count
    assert statistics.mean(errors) < mean and max(errors) < worst
    times = [(run.seconds, step_time(run.recipe, card)) for run, _ in found]
    inside = [time.low <= seconds <= time.high for seconds, time in times]
    assert statistics.mean(inside) >= 0.9


def test_bitsandbytes_waits_for_each_tensor():
    """Qwen2.5-0.5b, batch 4 × 1,024 tokens in bf16 on an H100: 0.204 s with 8-bit states, 0.096 s
    with AdamW's own.
    """
    recipe = Recipe("qwen2.5-0.5b", 4, 1024, "bf16-true", "adamw_torch")
    plain, waiting = (
        step_time(recipe.replace(optim=name), "H100").seconds
        for name in ("adamw_torch", "adamw_bnb_8bit")
    )
    assert waiting > plain + 290 * 0.9 * RATES["H100 SXM"].waiting - 0.02


def test_updates_in_8_bits_take_what_their_search_takes(step_times):
    """Llama 3.1 8B, all weights, 1 × 1,024 tokens in bf16 with checkpointing on an H100: 0.494 s
    with 8-bit states, 0.353 s with AdamW's own.
    """
    whole = Recipe("llama-3.1-8b", 1, 1024, "bf16-true", gradient_checkpointing=True)
    plain = step_time(whole, "H100").seconds
    for optim in ("adamw_bnb_8bit", "paged_adamw_8bit"):
        searched = step_time(whole.replace(optim=optim), "H100").seconds
        assert searched / plain == pytest.approx(0.494 / 0.353, rel=0.05)
    rest = [run for run in step_times.chosen("H100 SXM") if run.recipe.name != "llama-3.1-8b"]
    unseen = step_times.fit(rest)
    assert unseen[-1] == pytest.approx(RATES["H100 SXM"].searching, rel=0.45)
    pairs = step_times.in_pairs("H100 SXM", step_times.SWITCHES["optimizer"])
    # What is wrong is said as no difference, or was measured with runs that overlap but one.
    wrong = [pair for pair in pairs if (pair[0] > 1) != (pair[1] > 1)]
    assert len(wrong) <= 6 and len(pairs) == 79


def test_the_kernel_that_ran_is_timed():
    """TinyLlama, 8 × 1,024 tokens in fp16 on a T4, as published: 8.69 s written out, 6.17 s with
    repeated keys.
    """
    lora = LoRA(r=32, target_modules="all-linear")
    recipe = Recipe(
        "tinyllama-1.1b",
        8,
        1024,
        "fp16-true",
        "adamw_torch",
        gradient_checkpointing=True,
        lora=lora,
    )
    seconds = {
        name: step_time(recipe.replace(attn_implementation=name), "T4").seconds
        for name in ("sdpa_repeated", "eager", "sdpa")
    }
    assert list(seconds) == sorted(seconds, key=seconds.get)
    assert 1.2 < seconds["eager"] / seconds["sdpa_repeated"] < 2


def test_four_timed_pairs_of_lora_and_qlora_as_plan_writes_them_are_in_order():
    """An H200, mixed precision, not prepared: what 4 bits took more is what the host does, unless
    there is enough to compute.
    """
    card, found = find_gpu("H200"), {}
    for recipe, seconds in timed_records("H200"):
        is_planned = recipe.optim == "adamw_torch_fused" and not recipe.use_liger_kernel
        prepared = recipe.quantization and recipe.quantization.prepare
        if recipe.lora and is_planned and not prepared:
            asked = recipe.name, recipe.batch_size, recipe.seq_len
            found.setdefault(asked, {})[bool(recipe.quantization)] = (
                seconds,
                sum(estimate(recipe, card).values()),
            )
    slower = {}
    pairs = {asked: of for asked, of in found.items() if len(of) == 2}
    for asked, of in pairs.items():
        slower[asked] = [four / sixteen for four, sixteen in zip(of[True], of[False], strict=True)]
    assert {asked: round(measured, 2) for asked, (measured, _) in slower.items()} == {
        ("llama-3.1-8b", 1, 1024): 1.51,
        ("llama-3.1-8b", 4, 1024): 1.04,
        ("llama-3.1-8b", 1, 2048): 1.41,
        ("qwen2.5-0.5b", 2, 512): 2.41,
    }
    estimates = [round(estimated, 2) for _, estimated in slower.values()]
    assert sorted(estimates) == [1.09, 1.24, 1.44, 1.48]
    assert slower["llama-3.1-8b", 4, 1024][1] == min(of[1] for of in slower.values())


def test_what_dora_multiplies_and_writes_counts():
    plain = Recipe("llama-3.1-8b", 1, 1024, "bf16-mixed", lora=LoRA(r=8))
    dora = plain.replace(lora=LoRA(r=8, use_dora=True))
    walks = [walk(recipe, CARD.chip) for recipe in (plain, dora)]
    # q_proj: 4,096 to 4,096; v_proj: 4,096 to 1,024; fp32, of which autocast copies some
    weights = 32 * (2 * 4096**2 * 6 + 4096 * (4096 + 1024) * 18)
    results = 32 * 2 * 2 * 1024 * (4096 + 1024) * 4
    assert walks[1].written - walks[0].written == weights + results
    assert walks[1].calls - walks[0].calls == 32 * 2 * 38
    count, more = (
        sum(operations(recipe, walked).values())
        for recipe, walked in zip((plain, dora), walks, strict=True)
    )
    assert more - count == 32 * 2 * 8 * 4096 * (2 * 4096 + 4096 + 1024)
    assert step_time(dora, CARD).seconds > 1.1 * step_time(plain, CARD).seconds


def test_of_records_that_differ_in_the_micro_batch_the_larger_is_the_faster():
    """So of recipes whose estimates are alike the larger micro-batch goes first."""
    rates = {}
    for path in measurements_folder().glob("*.json"):
        for report in json.loads(path.read_text(encoding="utf-8"))["reports"].values():
            recipe = report["recipe"]
            if report["speed"] and not recipe["torch_compile"]:
                rest = recipe | dict.fromkeys(("batch_size", "gradient_accumulation_steps"))
                by_size = rates.setdefault((path.name, str(sorted(rest.items()))), {})
                timed = by_size.setdefault(recipe["batch_size"], [])
                timed.append(report["speed"]["tokens_per_second"])
    gains = []
    for by_size in rates.values():
        medians = [statistics.median(by_size[size]) for size in sorted(by_size)]
        gains += [larger / smaller for smaller, larger in itertools.pairwise(medians)]
    assert len(gains) > 20 and min(gains) > 0.98 and statistics.median(gains) > 1.5


def test_paged_states_stay_on_a_card_with_room():
    recipe = Recipe(
        "llama-3.2-1b", 1, 1024, "bf16-true", "paged_adamw_32bit", gradient_checkpointing=True
    )
    assert moved_pages(recipe, find_gpu("H100")) == (0, 0, 0)
    likely, least, most = moved_pages(recipe.replace(model="llama-3.2-3b"), find_gpu("RTX 4090"))
    assert least < likely < most <= 2 * paged_bytes(recipe.replace(model="llama-3.2-3b"))


def test_paged_states_are_those_that_the_card_does_not_count():
    """With the embedding's, which the Trainer keeps in 32 bits."""
    paged = Recipe("llama-3.1-8b", 1, 1024, "bf16-mixed", "paged_adamw_8bit")
    held, with_pages = (
        predict(one).peak.optimizer_states for one in (paged, paged.replace(optim="adamw_8bit"))
    )
    assert paged_bytes(paged) == pytest.approx(with_pages - held, rel=1e-3)
    by_hand = paged.replace(loop="plain")
    embedding = 128_256 * 4096
    assert paged_bytes(paged) - paged_bytes(by_hand) == 2 * (4 - 1) * embedding
