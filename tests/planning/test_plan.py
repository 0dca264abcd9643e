"""A plan's recipes really fit, nothing faster in the space does, and what it says can be pasted,
stored and read.
"""

import dataclasses
import importlib
import itertools
import json
import os
import random
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import params
from tiny_models import config
from typer.testing import CliRunner
from vramlab import LoRA, Recipe, Sharding, find_gpu, plan, predict, simulate, step_time
from vramlab.base.errors import RecipeError
from vramlab.formulas.whole_run import _packed
from vramlab.hardware.gpu import GpuError
from vramlab.interfaces.cli import app
from vramlab.planning import plan_notes
from vramlab.planning.candidate import Candidate, best_first, is_as_fast, simulate_briefly
from vramlab.planning.question import RANK, Question, usable_memory
from vramlab.planning.search import FASTER, NEAR, Search
from vramlab.planning.search_space import (
    EFFORTS,
    families,
    held_bytes,
    is_sound,
    method_of,
    micro_batches,
    saved_bytes,
    sizes_of,
    warned,
    with_micro_batch,
)
from vramlab.planning.step_time import _ratios, estimate, issuing
from vramlab.planning.step_traffic import link_of, waits
from vramlab.recipe.options import IN_BACKWARD, LOOPS
from vramlab.recipe.peft_methods import Peft
from vramlab.recipe.shapes import catalogue
from vramlab.report.report import TIERS, GiB, Interval, MiB, Report, format_bytes

LIGER = "Liger's kernels"
SMALL = dict(num_layers=2, seq_len=64, lora=LoRA(r=4))


def every(question: Question, method: str):
    """All candidates of a method without offload, with what each lacks in the question's tier."""
    for candidate in Search(question).candidates:
        if candidate.method == method and not (
            candidate.recipe.sharding and candidate.recipe.sharding.offload
        ):
            yield candidate, candidate.over(question.tiers[0])


@settings(max_examples=6)
@given(
    memory=st.integers(600, 5000),
    gpus=st.sampled_from([1, 1, 2]),
    parts=st.sampled_from([1, 4, 6]),
    method=st.sampled_from(["full", "lora", "qlora"]),
    card=st.sampled_from(["T4", "RTX 4090"]),
    tier=st.sampled_from(list(TIERS)),
    expandable=st.booleans(),
)
def test_nothing_faster_in_the_space_fits(memory, gpus, parts, method, card, tier, expandable):
    asked = dict(
        SMALL, gpus=gpus, global_batch=gpus * parts, method=method, memory=memory * MiB, tier=tier,
        offload=gpus > 1,
        attention=("sdpa", "eager"), optims=("adamw_torch", "paged_adamw_8bit"),
        engines=("ddp", "fsdp"),
        expandable_segments=expandable,
    )  # fmt: skip
    question = Question("gpt2", card, **asked)
    needs = list(every(question, method))
    fitting = [candidate for candidate, over in needs if over <= 0]
    search = Search(question)
    found, said = search.answer(method)
    assert said == tier
    sound = [candidate for candidate in fitting if is_sound(candidate.recipe)]
    if not fitting or (not sound and found.recipe.sharding and found.recipe.sharding.offload):
        assert found is None or found.recipe.sharding.offload
        return
    fitting = sound or fitting
    least = min((candidate.kind[2] for candidate in fitting), key=EFFORTS.index)
    fitting = [candidate for candidate in fitting if candidate.kind[2] == least]
    needs = [pair for pair in needs if pair[0].kind == (method, bool(sound), least)]
    fastest = min((candidate.rank, candidate.recipe) for candidate in fitting)
    plain = [
        (candidate.rank, candidate.recipe)
        for candidate in fitting
        if candidate.recipe.group.stage == 0 and candidate.rank[0] <= fastest[0][0] / FASTER
    ]
    # What hardly takes longer and divides no weights comes first.
    assert (found.rank, found.recipe) == (min(plain) if plain else fastest)
    near = [
        over
        for candidate, over in needs
        if 0 < over <= NEAR and candidate.rank[0] < FASTER * found.rank[0]
    ]
    better = search.better(method, tier, found)
    assert (better.over(tier) if better else None) == min(near, default=None)


WAYS = [(gpus, method) for gpus in (1, 2) for method in ("full", "lora", "qlora")]


@pytest.mark.parametrize(("gpus", "method"), params(WAYS, [(1, "lora"), (2, "full"), (1, "qlora")]))
def test_the_bound_is_below_and_memory_grows_with_the_micro_batch(method, gpus):
    question = Question(
        "llama-3.2-1b", "RTX 4090", gpus=gpus, global_batch=8, method=method, **SMALL
    )
    for family in families(question, method):
        totals, accumulate, saved = [], [], []
        for size in sizes_of(family, micro_batches(question)):
            recipe = with_micro_batch(family, size)
            found = predict(recipe, question.gpu).peak.total
            assert held_bytes(recipe, question.gpu.chip) <= found
            totals.append(found)
            saved.append(saved_bytes(recipe, question.gpu.chip))
            accumulate.append(recipe.gradient_accumulation_steps > 2)
        # by which a search gives up all larger micro-batches at once
        assert saved == sorted(saved, reverse=True)
        rounding = 1e-5  # of blocks of a few kilobytes, where weights are all that counts
        # a third micro-batch adds to gradients that are there; FSDP keeps those whole
        alike = [total for total, many in zip(totals, accumulate, strict=True) if many]
        assert all(large >= small * (1 - rounding) for large, small in itertools.pairwise(alike))


def test_every_choice_is_predicted_to_fit_and_keeps_the_global_batch():
    found = plan("polyglot-ko-1.3b", "RTX 4070", global_batch=12, seq_len=256, confirm=False)
    assert sorted(choice.method for choice in found.choices) == ["full", "lora", "qlora"]
    for choice in found.choices:
        assert getattr(choice.needs, TIERS[choice.tier]) <= found.usable
        assert predict(choice.recipe, "RTX 4070").peak == choice.report.peak
        assert choice.recipe.batch_size * choice.recipe.gradient_accumulation_steps == 12
        assert choice.time.tokens == 12 * 256
    assert found.best is found.choices[0]
    for first, second in itertools.pairwise(found.choices):
        assert first.order[0] <= second.order[0] and (
            first.order < second.order or is_as_fast(first, second)
        )


def test_updates_that_are_rounded_away_come_after_all_that_are_not():
    """Full training in bf16-true was the answer wherever it was faster, and QLoRA in fp16-true a
    T4's for a small model.
    """
    full = plan("llama-3.2-1b", "RTX 4090", seq_len=1024, method="full", confirm=False).best
    assert full.recipe.precision == "bf16-mixed" and full.tier == "safe"
    shards = plan("qwen2.5-32b", "H100", 8, seq_len=2048, method="full", confirm=False).best
    assert shards.recipe.precision == "bf16-mixed" and shards.tier == "safe"
    small = plan("qwen2.5-0.5b", "T4", seq_len=512, confirm=False)
    assert small.best.method != "qlora" and {c.recipe.precision for c in small.choices} == {
        "fp16-mixed"
    }
    asked = dict(precisions="bf16-true", seq_len=1024, method="full", confirm=False)
    rounded = plan("llama-3.2-1b", "RTX 4090", **asked)
    text = " ".join(str(rounded).split())
    assert "an update below about 1/256 of a weight is rounded away" in text
    mixed = predict(rounded.best.recipe.replace(precision="bf16-mixed"), "RTX 4090").peak.total
    more = format_bytes(mixed - rounded.best.report.peak.total, digits=2)
    assert (
        f"what helps: fp32 weights (bf16-mixed), {more} more; adapters in fp32 (method lora)"
        in text
    )


def test_of_methods_as_fast_as_each_other_the_simpler_comes_first():
    found = plan("llama-3.1-8b", "A100 80GB", seq_len=1024, confirm=False)
    lora, qlora = (
        next(c for c in found.choices if c.method == method) for method in ("lora", "qlora")
    )
    assert qlora.seconds < lora.seconds * 1.3 and found.choices.index(lora) < found.choices.index(
        qlora
    )
    assert any("lora and qlora: about as fast" in note for note in found.notes)
    seconds = 3 * qlora.time.seconds
    slow = dataclasses.replace(
        lora, time=dataclasses.replace(lora.time, seconds=seconds, high=1.3 * seconds)
    )
    assert [choice.method for choice in best_first([slow, qlora])] == ["qlora", "lora"]


def test_why_what_is_as_fast_stands_in_this_order_is_said():
    time = SimpleNamespace(seconds=1.0, high=2.0)

    def said(*methods: str) -> str:
        each = [
            SimpleNamespace(method=name, seconds=1.0, order=(0, 1.0), time=time) for name in methods
        ]
        (note,) = plan_notes._as_fast(each)
        return note

    assert said("lora", "qlora").endswith("the simpler first")
    assert said("qlora", "lora").endswith("what takes less of the host's memory first")


def test_what_likely_fits_goes_before_what_waits_for_the_host():
    asked = dict(seq_len=4096, confirm=False, liger=False)
    for method in ("lora", "any"):
        found = plan("llama-3.1-8b", "RTX 4090", method=method, **asked)
        assert (
            next(c.tier for c in found.choices if c.method == "lora" and not c.recipe.sharding)
            == "likely"
        )
    assert [(c.method, c.tier) for c in found.choices] == [
        ("qlora", "safe"),
        ("lora", "likely"),
        ("full", "safe"),
    ]


def test_the_fused_loss_is_searched_and_its_worth_is_said():
    asked = dict(seq_len=4096, confirm=False)
    found = plan("llama-3.1-8b", "RTX 4090", method="qlora", **asked)
    assert found.best.recipe.use_liger_kernel and found.best.report.peak.total < 8.8 * GiB
    for choice in found.choices:
        whole = predict(choice.recipe.replace(use_liger_kernel=False), "RTX 4090").peak.total
        assert choice.without[LIGER] == whole - choice.report.peak.total > 0
    text = " ".join(str(found).split())
    assert f"qlora without: Liger's kernels {found.best.without[LIGER] / GiB:+.2f}" in text
    assert "to install: liger-kernel, peft" in text
    assert "LoRA r=16: --lora-target all-linear, which predict and simulate" in text
    long = plan("qwen2.5-0.5b", "RTX 4090", seq_len=16384, confirm=False)
    # LoRA's base is in bf16, which predict takes for fp32 unless it is told.
    assert "--lora-target all-linear --dtype bfloat16, which" in " ".join(str(long).split())
    assert {choice.tier for choice in long.choices} == {"safe"} and len(long.choices) == 3
    assert not plan(
        "llama-3.1-8b", "RTX 4090", liger=False, method="qlora", **asked
    ).best.recipe.use_liger_kernel


@pytest.mark.parametrize(
    ("model", "card", "asked"),
    [
        ("llama-3.2-1b", "T4", {}),  # Triton's kernels start at 8.0
        ("gpt2", "RTX 4090", {}),  # which Liger does not patch
        ("llama-3.2-1b", "RTX 4090", {"gpus": 2, "engines": ("fsdp", "deepspeed")}),
        ("llama-3.2-1b", "RTX 4090", {"trainer": "sft"}),
    ],
)
def test_liger_is_not_proposed_where_it_does_not_run(model, card, asked):
    question = Question(model, card, seq_len=512, **asked)
    for method in ("full", "qlora"):
        assert not any(family.use_liger_kernel for family in families(question, method))


def test_trls_fused_loss_is_searched_where_ligers_kernels_do_not_run():
    """Liger patches no GPT-2; SFTTrainer's head makes no logits either.

    Both launch Triton's kernels.
    """
    found = plan("gpt2", "RTX 4070", seq_len=1024, confirm=False)
    trl = [choice for choice in found.choices if choice.recipe.trainer == "sft"]
    assert trl
    for choice in trl:
        whole = predict(choice.recipe.replace(trainer="transformers"), "RTX 4070").peak.total
        assert choice.without["SFTTrainer's loss"] == whole - choice.report.peak.total > 0
    assert "trl" in str(found).partition("to install: ")[2]
    for card, asked in (("RTX 4070", {"liger": False}), ("T4", {})):
        alone = plan("gpt2", card, seq_len=1024, confirm=False, **asked)
        assert {choice.recipe.trainer for choice in alone.choices} == {"transformers"}
    # Nor is it named beside an answer where its kernels do not run.
    switches = [other.switch for others in alone.alternatives.values() for other in others]
    assert switches and not any("SFTTrainer" in switch for switch in switches)


def test_trls_fused_loss_is_searched_where_deepspeed_offloads():
    """Liger's kernels are not tried there, and a larger micro-batch has room without logits."""
    question = Question("llama-3.1-8b", "RTX 4090", seq_len=4096, method="full")
    ways = {(way.trainer, bool(way.sharding)) for way in families(question, "full")}
    assert ways == {("transformers", False), ("transformers", True), ("sft", True)}
    best = Search(question).answer("full")[0].recipe
    assert best.trainer == "sft" and best.sharding.offload and best.batch_size > 1


def test_weights_are_updated_in_the_backward_pass_before_updates_are_rounded_away():
    """Gradients that do not wait leave a small card room for fp32 weights of 1.2 billion.

    The last of what computes such updates: with clipping, 8-bit states go before it.
    """
    asked = dict(seq_len=512, method="full", offload=False)
    best = plan("llama-3.2-1b", "RTX 4070", memory="10.5GiB", **asked).best
    recipe = best.recipe
    assert recipe.loop == IN_BACKWARD and is_sound(recipe)
    assert recipe.gradient_accumulation_steps == 1 and recipe.batch_size == 16
    simulated = simulate(recipe, gpu="RTX 4070").peak.total
    # With the Trainer's fp32 states of embeddings, which simulate had left out.
    assert abs(predict(recipe, "RTX 4070").peak.total / simulated - 1) < 0.002
    clipped = predict(recipe.replace(loop="trainer"), "RTX 4070").peak.total
    assert best.without["updates in the backward pass"] == pytest.approx(
        clipped - simulated, abs=0.02 * GiB
    )
    assert any("no gradient waits to be clipped" in note for note in best.notes)
    larger = plan("llama-3.2-1b", "RTX 4090", **asked, confirm=False).best.recipe
    assert larger.loop == LOOPS["trainer"] and larger.precision == "bf16-mixed"
    scaled = Question("llama-3.2-1b", "T4", precisions="fp16-mixed", **asked)
    ranks = Question("llama-3.2-1b", "RTX 4070", gpus=2, **asked)
    for question in (scaled, ranks):
        assert {family.loop for family in families(question, "full")} == {LOOPS["trainer"]}


def test_samples_of_several_lengths_are_ranked_by_the_epoch_and_joined_where_that_is_faster():
    lengths = [1000] * 10 + [600] * 90  # no two of which make a row
    asked = dict(lengths=lengths, method="lora", trainer="sft", global_batch=16, confirm=False)
    best = plan("qwen2.5-0.5b", "RTX 4090", **asked).best
    assert best.recipe.padding_free and best.recipe.attn_implementation == "flash_attention_2"
    padded = plan("qwen2.5-0.5b", "RTX 4090", attention="sdpa", **asked).best
    assert not padded.recipe.joins and padded.epoch > best.epoch
    alike = plan("qwen2.5-0.5b", "RTX 4090", **asked | {"lengths": [1000] * 100}).best.recipe
    cut = plan("qwen2.5-0.5b", "RTX 4090", **asked, seq_len=500).best.recipe
    old = plan("qwen2.5-0.5b", "T4", **asked).best.recipe
    assert not (alike.joins or cut.joins or old.joins)


@pytest.mark.parametrize("trainer", ["sft", "transformers"])
def test_short_samples_are_packed_where_an_epoch_is_faster(trainer):
    """A step keeps its samples, in fewer rows, and FlashAttention keeps those apart."""
    lengths = [1000] * 10 + [100] * 90
    asked = dict(lengths=lengths, method="lora", trainer=trainer, global_batch=16, confirm=False)
    found = plan("qwen2.5-0.5b", "RTX 4090", **asked)
    best = found.best
    recipe = best.recipe
    assert recipe.packing and recipe.trainer == "sft"
    assert recipe.attn_implementation == "flash_attention_2"
    # 19 rows of 100 samples: 3 rows have about 16
    assert recipe.batch_size * recipe.gradient_accumulation_steps == 3
    assert recipe.lengths is None or max(Counter(recipe.lengths).values()) >= 10
    text = " ".join(str(found).split())
    assert "FlashAttention keeps the samples of a row apart, 5.3 on average, 16 in a step" in text
    without = next(
        other for other in found.alternatives["lora"] if other.switch.startswith("without packing")
    )
    assert without.recipe.batch_size * without.recipe.gradient_accumulation_steps == 16
    assert not without.recipe.packing and without.epoch > best.epoch
    for card, asked_too in (("RTX 4090", {"attention": "sdpa"}), ("T4", {})):
        apart = plan("qwen2.5-0.5b", card, **asked, **asked_too).best
        assert not apart.recipe.packing and apart.epoch > best.epoch


@pytest.mark.parametrize("count", [900, 2500])
def test_rows_are_as_many_as_trl_packs(count):
    draw = random.Random(count)
    lengths = [min(700, int(draw.lognormvariate(4.5, 0.9)) + 1) for _ in range(count)]
    question = Question("gpt2", "RTX 4090", lengths=lengths, seq_len=512, trainer="sft")
    recipe = Recipe("gpt2", 1, 512, trainer="sft", packing=True)
    rows = _packed(recipe, lengths)
    if count <= 1000:
        assert question.data.packed_rows == len(rows)
    # What lies together in a thousand samples depends on their order.
    assert question.data.packed_rows == pytest.approx(len(rows), rel=0.01)
    row = question.data.packed_lengths(1, is_usual=False)
    assert sum(row) == 512 and len(row) >= max(map(len, rows))
    pairs = sum(sum(length**2 for length in row) for row in rows) / len(rows)
    usual = question.data.packed_lengths(1, is_usual=True)
    assert sum(length**2 for length in usual) == pytest.approx(pairs, rel=0.25)


def test_an_epoch_of_narrow_rows_takes_no_less_than_to_issue_their_kernels():
    asked = dict(
        method="lora", global_batch=4, confirm=False, attention="sdpa", optims="adamw_torch"
    )
    lengths = [1024] + [4] * 999
    found = plan("gpt2", "RTX 4090", lengths=lengths, **asked, checkpointing=False).best
    steps = 1000 / 4
    assert found.epoch >= steps * issuing(found.recipe, find_gpu("RTX 4090"))


def test_packing_that_is_asked_for_says_what_keeps_samples_apart():
    asked = dict(seq_len=128, method="lora", packing=True, trainer="sft", confirm=False)
    asked |= dict(global_batch=2, attention="sdpa", checkpointing=False)
    for model, said in (("gpt2", "a mask of tokens × tokens"), ("opt-125m", "another training")):
        text = " ".join(str(plan(model, "RTX 4090", **asked)).split())
        assert f"lora packed: {said}" in text


@pytest.mark.slow
def test_activations_go_to_the_host_where_nothing_else_fits():
    found = plan(
        "qwen2.5-14b", "RTX 4090", seq_len=24576, method="qlora", global_batch=4, confirm=False
    )
    assert not found.choices
    assert any(
        advice.startswith("activation_offloading=True fits (SFTTrainer)") for advice in found.advice
    )


def test_activations_go_to_the_host_where_a_method_has_no_other_answer(tmp_path):
    deep = config(
        "llama",
        num_hidden_layers=8,
        hidden_size=512,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1 << 17,
    )
    asked = dict(seq_len=1 << 17, method="lora", global_batch=1, trainer="sft")
    asked |= dict(optims="adamw_torch_fused", precisions="bf16-mixed", attention="sdpa")
    ends = Search(Question(deep, "RTX 4090", **asked)).ends
    asked["memory"] = int(min(end.interval.low for end in ends)) - 1
    found = plan(deep, "RTX 4090", **asked)
    (choice,) = found.choices
    recipe = choice.recipe
    assert recipe.activation_offloading and recipe.gradient_checkpointing
    assert choice.report.source == "simulated" and choice.tier in ("safe", "likely")
    inputs = 8 * (1 << 17) * 512 * 2
    assert choice.host >= inputs
    text = " ".join(str(found).split())
    assert f"lora: {choice.tier} with {choice.host / GiB:.1f} GiB of host memory free" in text
    assert "activations offloaded: up to" in text
    assert f"GiB to be {choice.tier}: batch 1 · bf16-mixed" in text
    assert not found.better[0].recipe.activation_offloading
    kept = step_time(recipe.replace(activation_offloading=False), "RTX 4090")
    assert choice.time.high > kept.high and choice.time.seconds >= kept.seconds
    last = dataclasses.replace(choice, recipe=recipe.replace(activation_offloading=False))
    assert best_first([choice, last]) == [last, choice]
    program = found.write(tmp_path / "train.py")[0].read_text()
    assert "activation_offloading=torch.cuda.is_available()," in program
    compile(program, "train.py", "exec")
    for no in ({"confirm": False}, {"offload": False}, {"host_memory": inputs}):
        assert not plan(deep, "RTX 4090", **asked | no).choices


def test_packed_rows_of_the_trainer_are_said_to_have_no_mask():
    asked = dict(seq_len=512, method="lora", packing=True, confirm=False)
    said = {
        name: str(plan("gpt2", "T4", trainer=name, **asked)) for name in ("transformers", "sft")
    }
    assert "packing: the samples of a row attend to those before them" in said["transformers"]
    assert "packing: the samples" not in said["sft"]


def test_packing_is_named_where_lengths_differ():
    asked = dict(seq_len=1024, method="lora", confirm=False, global_batch=8, liger=False)
    lengths = [1000] * 10 + [100] * 90
    padded = plan("gpt2", "RTX 4090", lengths=lengths, **asked)
    packed = plan("gpt2", "RTX 4090", lengths=lengths, packing=True, **asked)
    assert any("packing (--packing) would make an epoch" in note for note in padded.notes)
    assert not any("--packing" in note for note in packed.notes)
    assert packed.best.epoch < 0.9 * padded.best.epoch


def test_the_surest_tier_is_taken_and_a_lower_one_on_request():
    asked = dict(  # whose loss scaler excludes updates in the backward pass, the next way
        method="full", optims="adamw_torch", precisions="fp16-mixed", checkpointing=True
    )
    asked |= dict(attention="sdpa", seq_len=64, global_batch=1, confirm=False, offload=False)
    needs = plan("gpt2-medium", "T4", **asked).best.needs
    for size, tier in (
        (needs.high, "safe"),
        (needs.high - 1, "likely"),
        (needs.value - 1, "tight"),
        (needs.low - 1, ""),
    ):
        found = plan("gpt2-medium", "T4", memory=size, **asked)
        assert [choice.tier for choice in found.choices] == ([tier] if tier else [])
        if tier == "likely":
            assert not plan("gpt2-medium", "T4", memory=size, tier="safe", **asked).choices


def test_expandable_segments_narrow_the_interval():
    asked = dict(seq_len=1024, method="lora", tier="safe", offload=False, confirm=False)
    found = plan("llama-3.1-8b", "RTX 4090", **asked)
    assert found.choices and not any("--method qlora" in note for note in found.notes)
    assert not plan("llama-3.1-8b", "RTX 4090", expandable_segments=False, **asked).choices


def test_an_offloaded_answer_of_lora_alone_names_qlora():
    found = plan("llama-3.1-8b", "T4", seq_len=1024, method="lora", confirm=False)
    assert found.best.recipe.sharding.offload
    assert "--method qlora, whose base takes a quarter, may fit without offloading" in found.notes


def test_an_answer_is_simulated_and_gives_way_where_it_does_not_fit(monkeypatch):
    asked = dict(seq_len=64, method="full", num_layers=2, memory="6GiB", tier="safe", offload=False)
    simulated = plan("gpt2", "T4", **asked).best
    assert simulated.report.source == "simulated"
    assert simulated.needs.high - simulated.report.peak.total < 3 * GiB

    def too_much(candidate):
        return dataclasses.replace(candidate.report, otherwise=Interval.of(8 * GiB))

    monkeypatch.setattr(Candidate, "simulation", too_much)
    assert not plan("gpt2", "T4", **asked).choices


SIDE_BY_SIDE = """
import multiprocessing, sys
from vramlab import plan
real = multiprocessing.get_context
multiprocessing.get_context = lambda name: print(name, file=sys.stderr) or real(name)
print(plan("gpt2", "T4", seq_len=64, num_layers=2, offload=False, global_batch=2).to_json())
"""


@pytest.mark.skipif(sys.platform != "linux" or os.cpu_count() == 1, reason="nothing runs beside it")
def test_a_plan_stands_at_once_and_after_each_simulation(monkeypatch):
    """By formula first; the last that stands is the answer but for what is looked for once."""
    seen = []
    asked = dict(SMALL, method="any", optims="adamw_torch", global_batch=2)
    found = plan("gpt2", "T4", standing=lambda *each: seen.append(each), **asked)
    count = len(found.choices)
    assert [(done, of) for _, done, of in seen] == [(n, count) for n in range(count + 1)]
    sources = [[c.report.source for c in standing.choices] for standing, _, _ in seen]
    assert [each.count("simulated") for each in sources] == list(range(count + 1))
    _, *_, (last, _, _) = seen
    assert last.table() == found.table() and not last.alternatives
    by_formula = plan("gpt2", "T4", confirm=False, standing=lambda *_: pytest.fail(), **asked)
    assert seen[0][0].table() == by_formula.table()


def test_alternatives_turn_one_switch_and_fit():
    found = plan("llama-3.1-8b", "RTX 4090", seq_len=4096, confirm=False, method="qlora")
    trl, without = found.alternatives["qlora"][:2]
    assert (trl.switch, trl.recipe.trainer) == ("with TRL's SFTTrainer", "sft")
    assert without.switch == "without Liger's kernels" and not without.recipe.use_liger_kernel
    assert without.recipe.trainer == "transformers"
    for other in (trl, without):
        assert other.recipe.quantization and other.recipe.batch_size >= 1
        assert other.recipe.tokens == found.best.recipe.tokens
        by_itself = Candidate(Question("llama-3.1-8b", "RTX 4090", seq_len=4096), other.recipe, 0)
        assert by_itself.fits(other.tier) and by_itself.interval.high == other.high
        assert f"qlora {other}"[:60] in str(found)


def test_states_of_half_precision_weights_are_of_16_bits():
    asked = dict(seq_len=2048, method="full", trainer="dpo", confirm=False)
    found = plan("qwen2.5-7b", "A100 80GB", **asked)
    (other,) = found.alternatives["full"]
    assert other.recipe.precision == "bf16-true" and "with 16-bit states" in other.switch
    assert other.tier == "likely" and other.high > found.usable
    said = str(found).replace("\n    ", " ")
    assert "at most: upper end, which fits if safe" in said


SLOWER = [("gemma-2-2b", "H100 SXM", 576, "full"), ("qwen2.5-14b", "RTX 4070", 192, "qlora")]


@pytest.mark.parametrize(("model", "card", "tokens", "method"), params(SLOWER, SLOWER[:1]))
def test_an_alternative_is_faster_within_the_error_only_and_is_said_to_be(
    model, card, tokens, method
):
    found = plan(model, card, seq_len=tokens, method=method, confirm=False)
    gains = []
    for choice in found.choices:
        for other in found.alternatives[choice.method]:
            gains.append(other.tokens_per_second / choice.time.tokens_per_second)
            assert gains[-1] <= choice.time.seconds / choice.time.low
            words = f"{choice.method} {other}; faster within the error of the estimate"
            assert (words in str(found).replace("\n    ", " ")) == (gains[-1] > 1.005), str(other)
    assert max(gains) > 1.1


def test_what_offloads_has_alternatives_of_its_own_and_is_no_simpler_with_more_host_memory():
    asked = dict(seq_len=2048, gpus=2, confirm=False)
    found = plan("llama-3.1-70b", "RTX 4090", **asked)
    qlora, lora, full = found.choices
    assert (qlora.method, lora.method, full.method) == ("qlora", "lora", "full")
    assert qlora.host < lora.host < full.host
    text = " ".join(str(found).split())
    assert "from_pretrained(device_map={'': 'cpu'})" in text
    # offloaded, the base's format saves the host's memory
    saved = qlora.without["the 4-bit base"]
    assert saved < 0 and "the 4-bit base -" not in text
    assert f"the 4-bit base takes {-saved / GiB:.2f} GiB more on the card than it saves" in text
    alone = "qlora: with nothing offloaded, batch 1: does not fit: RTX 4090 has 23.510 GiB, the"
    assert f"{alone} tensors alone take" in text
    alone = plan("qwen3-4b", "RTX 4090", seq_len=8192, method="full", confirm=False)
    first, *others = alone.alternatives["full"]
    assert first.switch.startswith("on the card alone (--no-offload) in bf16-true")
    assert first.recipe.sharding is None and first.recipe.optim == "paged_adamw_8bit"
    assert not any("8-bit" in other.switch for other in others)


@pytest.mark.slow  # a process of its own, which forks
def test_answers_simulated_side_by_side_are_the_same():
    done = subprocess.run(
        [sys.executable, "-c", SIDE_BY_SIDE], capture_output=True, text=True, check=True
    )
    alone = plan("gpt2", "T4", seq_len=64, num_layers=2, offload=False, global_batch=2)
    # one that loads early, which forks what simulates
    assert done.stderr == 2 * "fork\n"
    assert json.loads(done.stdout) == json.loads(alone.to_json())
    assert {choice.report.source for choice in alone.choices} == {"simulated"}


def test_what_is_faster_is_explained_in_bytes():
    found = plan("llama-3.1-8b", "RTX 4090", seq_len=4096, method="qlora", confirm=False)
    (better,) = found.better
    assert better.time.seconds < 0.96 * found.best.time.seconds
    assert better.over == better.needs.high - found.usable > 0
    text = " ".join(str(found).split())
    assert f"lacks {better.over / GiB:.2f} GiB to be safe" in text


def test_a_data_set_gives_lengths_and_an_epoch():
    asked = dict(
        lengths=[100] * 60 + [50] * 30 + [700] * 10,
        method="lora",
        global_batch=4,
        confirm=False,
        liger=False,
    )
    padded = plan("gpt2", "T4", **asked).best
    assert padded.recipe.seq_len == 700
    if padded.recipe.lengths:
        assert set(padded.recipe.lengths) == {700, 50}
    packed = plan("gpt2", "T4", packing=True, **asked).best
    assert packed.recipe.lengths is None and packed.epoch <= padded.epoch
    rows = sum(asked["lengths"]) / 700
    assert packed.epoch == pytest.approx(packed.time.seconds * rows / 4)
    # Its program cuts rows of joined samples, so what is longer than a row is trained on too.
    whole = plan("gpt2", "T4", packing=True, **{**asked, "seq_len": 350})
    assert whole.best.epoch == pytest.approx(whole.best.time.seconds * rows * 2 / 4)
    assert "10 are longer than a row and go on in the next" in str(whole).replace("\n    ", " ")
    assert plan("gpt2", "T4", **{**asked, "lengths": [4000, 20]}).best.recipe.seq_len == 1024
    assert "100 samples of 50 to 700 tokens" in str(plan("gpt2", "T4", **asked))


def test_of_even_and_padded_rows_those_that_take_more_are_planned():
    asked = dict(
        method="lora",
        seq_len=512,
        global_batch=2,
        checkpointing=False,
        attention="sdpa",
        offload=False,
    )
    asked |= dict(confirm=False, optims="adamw_torch", memory="24GiB")
    for card, precision, lengths, padded in (
        ("RTX 4090", "bf16-mixed", None, True),  # a mask makes transformers repeat the shared keys
        (
            "T4",
            "fp16-mixed",
            (500, 512),
            False,
        ),  # whose kernels do not share keys: torch's own saves the scores
    ):
        best = plan(
            "qwen2.5-0.5b", card, **asked, precisions=precision, lengths=lengths
        ).best.recipe
        assert best.batch_size == 2 and bool(best.lengths) is padded
        even, uneven = (
            predict(best.replace(lengths=n), card).peak.total for n in (None, (512, 500))
        )
        assert (uneven > even) is padded
    assert plan("qwen2.5-0.5b", "RTX 4090", **asked, packing=True).best.recipe.lengths is None


def test_a_card_is_found_by_its_memory():
    found = plan("gpt2", memory="24GiB", seq_len=64, confirm=False, method="lora")
    assert found.usable == 24 * GiB and find_gpu(found.question["gpu"]).memory_gb == 24
    assert "no card is named: speed and kernels are L4's" in " ".join(str(found).split())


def test_ranks_share_the_global_batch():
    found = plan(
        "llama-3.2-1b", "RTX 4090", 4, global_batch=24, method="full", seq_len=512, confirm=False
    )
    for choice in found.choices:
        recipe = choice.recipe
        assert recipe.sharding.world_size == 4
        assert recipe.batch_size * recipe.gradient_accumulation_steps * 4 == 24
        assert choice.time.tokens == 24 * 512


def test_only_what_the_card_computes_in_is_proposed():
    for card, wanted, never in (("T4", "fp16", "bf16"), ("A100", "bf16", "fp16")):
        found = plan("gpt2", card, seq_len=128, confirm=False)
        precisions = {choice.recipe.precision for choice in found.choices}
        assert any(p.startswith(wanted) for p in precisions) and not any(
            p.startswith(never) for p in precisions
        )
    t4 = plan("gpt2", "T4", seq_len=128, method="full", confirm=False)
    assert not t4.notes
    assert "fp16-true" not in {
        choice.recipe.precision for choice in t4.choices
    }  # AdamW's epsilon is zero there
    forced = plan(
        "gpt2", "T4", seq_len=128, method="full", precisions=("fp16-true",), confirm=False
    )
    assert forced.best.recipe.precision == "fp16-true" and "scales the loss" in str(forced)


def test_nothing_fits_and_each_piece_of_advice_is_true():
    again = dict(seq_len=1024, method="full", optims=("adamw_torch",), offload=False, confirm=False)
    found = plan("llama-3.1-8b", "T4", **again)
    assert not found.choices and "Nothing fits" in str(found)
    text = "\n".join(found.advice)
    assert "method='qlora' fits" in text or "method='lora' fits" in text
    (card,) = [line.split("'")[1] for line in found.advice if line.startswith("gpu=")]
    assert plan("llama-3.1-8b", card, **again).best.tier == "safe"
    smaller = find_gpu("RTX A6000")
    assert (
        smaller.total < find_gpu(card).total and not plan("llama-3.1-8b", smaller, **again).choices
    )
    with pytest.raises(RecipeError, match="no recipe fits"):
        found.best  # noqa: B018


NEAREST = {"seq_len": 16384, "offload": False}


def test_half_precision_is_advised_where_mixed_does_not_fit_and_its_price_is_said():
    """With adapters in fp32 its bound of memory is lower, and its peak may be higher."""
    asked = {"seq_len": 8192, "method": "lora", "checkpointing": True, "offload": False}
    question = Question("llama-3.1-8b", "RTX 4090", **asked)
    mixed = Search(question).any_fit()
    recipe = Search(dataclasses.replace(question, precisions=("bf16-true",))).any_fit()
    assert mixed.precision == "bf16-mixed" and warned(mixed) == ""
    assert predict(mixed, "RTX 4090").peak.total < predict(recipe, "RTX 4090").peak.total
    assert warned(recipe) == "; without autocast PEFT copies each adapter's input to fp32"
    narrow = dataclasses.replace(recipe.lora, autocast_adapter_dtype=False)
    assert warned(recipe.replace(lora=narrow)) == ""
    full = Recipe("gpt2", 1, precision="bf16-true")
    assert warned(full) == "; bf16-true rounds small updates away"


def test_the_nearest_try_is_named_where_nothing_fits():
    found = plan("llama-3.1-8b", "T4", confirm=False, **NEAREST)
    assert not found.choices and sorted(near.method for near in found.better) == [
        "full",
        "lora",
        "qlora",
    ]
    for near in found.better:
        assert near.over > NEAR
        assert f"{near.method}: the nearest lacks {near.over / GiB:.2f} GiB" in " ".join(
            str(found).split()
        )


@pytest.mark.parametrize("method", params(("full", "lora", "qlora"), ("full",)))
def test_the_nearest_try_lacks_least_of_all_of_its_method(method):
    (near,) = plan("llama-3.1-8b", "T4", confirm=False, method=method, **NEAREST).better
    question = Question("llama-3.1-8b", "T4", tier="tight", method=method, **NEAREST)
    assert near.over == int(min(over for _, over in every(question, method)))


def test_the_rule_that_refused_is_named_and_what_lifts_it():
    found = plan("gpt2", "T4", seq_len=512, trainer="sft", method="qlora", confirm=False)
    text = " ".join(str(found).split())
    assert (
        "qlora: no recipe, because --precision 'fp16-mixed': the loss scaler refuses the bfloat16 "
        "adapters" in text
    )
    assert "ask simulate" not in text
    kinds = [line.partition("=")[0] for line in found.advice]
    assert kinds == ["method", "trainer"]  # 124M parameters need no larger card


@pytest.mark.parametrize(
    ("lora", "words"),
    [({"use_dora": True}, "DoRA r=16"), ({"lora_bias": True}, "LoRA r=16")],
)
def test_adapters_that_no_formula_knows_are_simulated(lora, words):
    asked = dict(seq_len=128, method="lora", num_layers=2, lora=lora, offload=False)
    found = plan("llama-3.2-1b", "RTX 4090", **asked)
    assert found.best.report.source == "simulated" and found.best.tier == "safe"
    assert found.best.recipe.lora == dataclasses.replace(RANK, **lora) and words in str(found)


def test_another_of_pefts_methods_is_simulated():
    asked = dict(seq_len=128, num_layers=2, peft="ia3", offload=False)
    found = plan("llama-3.2-1b", "RTX 4090", method="lora", **asked)
    assert found.best.report.source == "simulated" and found.best.tier == "safe"
    assert found.best.recipe.peft == Peft("IA3") and found.best.recipe.lora is None
    with pytest.raises(RecipeError, match="modelled on one device"):
        plan("llama-3.2-1b", "RTX 4090", gpus=2, **asked)


def test_what_lacks_least_is_named_where_nothing_fits():
    question = Question(
        "gpt2", "T4", method="full", global_batch=4, memory=100 * MiB, offload=False, **SMALL
    )
    search = Search(question)
    assert search.answer("full") == (None, "tight")
    nearest = search.better("full", "tight", None)
    assert (
        nearest.over("tight") == min(c.over("tight") for c in Search(question).candidates) <= NEAR
    )


def test_a_plan_is_the_same_each_time_and_its_recipes_are_read_from_json():
    found = plan("gpt2", "T4", seq_len=256, confirm=False)
    assert plan("gpt2", "T4", seq_len=256, confirm=False).to_json() == found.to_json()
    first = json.loads(found.to_json())["choices"][0]
    assert Recipe(**first["recipe"]) == found.best.recipe
    assert Report.from_dict(first["report"]) == found.best.report


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(gpus=0), "'gpus'"),
        (dict(gpus=3), "take a multiple"),
        (dict(gpus=True), "'gpus'"),
        (dict(gpus=4096), "1,024"),
        (dict(global_batch=0), "'global_batch'"),
        (dict(global_batch="16"), "'global_batch'"),
        (dict(seq_len=10**7), "positions"),
        (dict(method="best"), "'any', 'full', 'lora', 'qlora'"),
        (dict(precisions=("bf16-true",)), "starts at 8.0"),
        (dict(precisions=()), "at least one"),
        (dict(optims=("adam",)), "'optims'"),
        (dict(engines=("horovod",)), "'ddp', 'fsdp', 'deepspeed'"),
        (dict(offload="yes"), "True or False"),
        (dict(checkpointing=(1, "x")), "'checkpointing'"),
        (dict(lora=8), "must be a LoRA"),
        (dict(lora=LoRA(target_modules="nothing_like_it")), "lora.target_modules"),
        (dict(memory=-1), "'memory'"),
        (dict(memory="much"), "'24GiB'"),
        (dict(memory=24), "'memory' is 24"),
        (dict(host_memory="64 monkeys"), "'host_memory'"),
        (dict(lengths=[]), "'lengths'"),
        (dict(trainer="kto", global_batch=1), "KTOTrainer compares"),
        (dict(tier="vram"), "'safe', 'likely', 'tight'"),
        (dict(link=-1.0), "a number over 0"),
        (dict(task="translation"), "'task'"),
    ],
)
def test_a_bad_question_is_answered_in_one_sentence(changes, said):
    with pytest.raises(RecipeError) as error:
        plan("gpt2", "T4", **changes)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_an_unknown_card_or_model_says_what_is_near():
    with pytest.raises(GpuError, match="known are"):
        plan("gpt2", "RTX 409")
    with pytest.raises(RecipeError, match="did you mean 'gpt2"):
        plan("gpt-2", "T4")


def test_a_card_that_reports_nothing_is_taken_for_the_least_of_its_box():
    card = find_gpu("RTX 4070")
    assert not card.total_known and 0.9 * card.total < usable_memory(card) < 0.92 * card.total
    assert usable_memory(find_gpu("T4")) == find_gpu("T4").total
    assert "is not known" in str(plan("gpt2", "RTX 4070", seq_len=64, confirm=False))


# --- time


def test_time_is_made_of_its_parts_and_says_what_it_rests_on():
    recipe = Recipe("gpt2", batch_size=4, seq_len=256, precision="bf16-mixed")
    time = step_time(recipe, "A100")
    assert sum(time.parts.values()) == pytest.approx(time.seconds)
    assert time.low < time.seconds < time.high and "uncalibrated" in time.basis
    twice = step_time(recipe.replace(gradient_accumulation_steps=2), "A100")
    assert twice.parts["matmuls"] == pytest.approx(2 * time.parts["matmuls"])
    assert twice.parts["optimizer"] == time.parts["optimizer"]
    again = step_time(recipe.replace(gradient_checkpointing=True), "A100")
    assert (
        1.15 < again.parts["matmuls"] / time.parts["matmuls"] < 1.34
    )  # a forward more, but for the head
    assert step_time(recipe, "H100").seconds < time.seconds
    with pytest.raises(RecipeError, match="bf16"):
        step_time(recipe, "T4")
    with pytest.raises(GpuError, match="no bandwidth rate"):
        step_time(
            recipe.replace(precision="fp32"), dataclasses.replace(find_gpu("T4"), bandwidth=None)
        )
    few = step_time(
        recipe.replace(batch_size=1, seq_len=8), "A100"
    )  # the host issues no faster for few tokens
    assert few.parts["launches"] > 0.5 * few.seconds and few.seconds > 0.5 * time.seconds


def test_links_cost_what_the_formulas_send():
    recipe = Recipe("llama-3.2-1b", batch_size=1, seq_len=64, precision="bf16-true", num_layers=2)
    parts = {}
    for name, sharding in {"ddp": Sharding(0, 4, "ddp"), "zero": Sharding(3, 4, "fsdp")}.items():
        parts[name] = step_time(recipe.replace(sharding=sharding), "RTX 4090", link=1e6).parts[
            "links"
        ]
    assert parts["zero"] / parts["ddp"] == pytest.approx(
        1.5, rel=0.01
    )  # Rajbhandari et al. 2020, section 7


def test_a_stock_4090_sends_through_the_host_and_pcie_reaches_no_line_rate():
    """Three of them: 12.9 GB/s each way of 31.5 (tinygrad/open-gpu-kernel-modules, issue 6,
    "P2P=Disabled").
    """
    rates = {}
    for name in ("RTX 4090", "L40S", "A100"):
        rate, (likely, best, worst) = link_of(find_gpu(name))
        assert worst < likely < best < 1
        rates[name] = rate * likely / 1e9
    assert rates["RTX 4090"] == pytest.approx(12.9, abs=0.1)
    assert 20 < rates["L40S"] < 25 < rates["A100"] < 300
    recipe = Recipe(
        "llama-3.2-1b", seq_len=64, precision="bf16-true", sharding=Sharding(0, 4, "ddp")
    )
    slow = waits(recipe, find_gpu("RTX 4090"), None)["links"]
    quick = waits(recipe, dataclasses.replace(find_gpu("RTX 4090"), peer_to_peer=True), None)[
        "links"
    ]
    assert slow[0] / quick[0] == pytest.approx(0.76 / 0.41)


def test_records_of_a_card_calibrate_it(tmp_path, monkeypatch):
    from vramlab.measurement import records
    from vramlab.report.report import Speed
    from vramlab.report.report import environment as stamp

    monkeypatch.setattr(
        sys.modules["vramlab.planning.step_time"], "measurements_folder", lambda: tmp_path
    )
    _ratios.cache_clear()
    try:
        card = find_gpu("A100")
        for i, factor in enumerate((1.8, 1.9, 2.0, 2.1, 2.2)):
            recipe = Recipe("gpt2", batch_size=i + 1, seq_len=64, num_layers=2)
            seconds = factor * sum(estimate(recipe, card).values())
            values = {
                **predict(recipe).__dict__,
                "source": "measured",
                "speed": Speed(seconds, seconds, seconds, 3, 1.0),
            }
            records.save(
                Report(**{**values, "environment": stamp(gpu="NVIDIA A100-SXM4-40GB")}), tmp_path
            )
        time = step_time(Recipe("gpt2", seq_len=32, num_layers=1), "A100")
        uncalibrated = sum(estimate(Recipe("gpt2", seq_len=32, num_layers=1), card).values())
        assert (
            time.seconds == pytest.approx(2.0 * uncalibrated) and "5 records of A100" in time.basis
        )
        assert time.low == pytest.approx(1.8 * uncalibrated) and time.high == pytest.approx(
            2.2 * uncalibrated
        )
        assert sum(time.parts.values()) == pytest.approx(time.seconds)
        assert "uncalibrated" in step_time(Recipe("gpt2", seq_len=32), "L40S").basis
    finally:
        _ratios.cache_clear()


def test_autocast_over_adapters_has_a_half_precision_base():
    for card, precision, dtype in (
        ("T4", "fp16-mixed", "float16"),
        ("RTX 4090", "bf16-mixed", "bfloat16"),
    ):
        found = plan(
            "llama-3.2-1b",
            card,
            method="lora",
            precisions=precision,
            seq_len=64,
            offload=False,
            confirm=False,
        )
        assert found.best.recipe.dtype == dtype


def test_a_plan_of_trls_trainer_has_no_logits():
    asked = dict(
        seq_len=2048,
        method="full",
        optims=("adamw_torch_fused",),
        checkpointing=(True,),
        liger=False,
    )
    plain, fused = (
        plan("qwen3-0.6b", "RTX 4090", **asked, trainer=name, confirm=False).best
        for name in ("transformers", "sft")
    )
    assert (
        fused.recipe.trainer == "sft"
        and fused.report.peak.total < plain.report.peak.total - 2 * GiB
    )
    with pytest.raises(RecipeError) as caught:
        plan("mixtral-8x7b", "RTX 4090", trainer="sft")
    assert caught.value.field == "trainer"


@pytest.mark.parametrize("trainer", ["dpo", "kto", "reward"])
def test_preferences_are_planned_on_several_gpus(trainer, tmp_path):
    asked = dict(seq_len=1024, trainer=trainer, confirm=False)
    found = plan("llama-3.2-1b", "A100 40GB", 4, **asked)
    assert [choice.tier for choice in found.choices] == ["safe"] * 3
    for choice in found.choices:
        assert choice.recipe.trainer == trainer and choice.recipe.sharding.world_size == 4
        program, *_ = found.write(tmp_path / f"{choice.method}.py", choice)
        assert "torchrun --nproc-per-node 4" in program.read_text(encoding="utf-8")
    # Adapters need no reference model, so their base may be divided.
    asked["memory"] = "18GiB"
    cut = plan("llama-3.1-8b", "RTX 4090", 2, method="lora", **asked).best.recipe.sharding
    assert cut.engine == "fsdp" or trainer != "dpo"


def test_a_reference_that_answers_first_is_named_where_it_leaves_no_room():
    asked = dict(trainer="dpo", method="full", seq_len=128, global_batch=1)
    asked |= dict(confirm=False, offload=False)
    found = plan("gpt2", "T4", memory="1.5GiB", **asked)
    (said,) = (note for note in found.notes if "precompute_ref_log_probs=True" in note)
    recipe = found.better[0].recipe.replace(precompute_ref_log_probs=True)
    most = predict(recipe, gpu="T4", expandable_segments=True).process.high
    assert not found.choices and f"likely, at most {most / GiB:.2f} GiB" in said
    for memory in ("1GiB", "2.2GiB"):  # where it does not help, and where nothing has to
        assert "precompute" not in str(plan("gpt2", "T4", memory=memory, **asked).notes)


def test_ligers_kernels_are_planned_on_ranks_of_ddp():
    asked = dict(seq_len=1024, method="lora", confirm=False)
    best = plan("llama-3.2-1b", "RTX 4090", 2, **asked).best
    assert best.recipe.use_liger_kernel and best.recipe.sharding.engine == "ddp"
    assert best.without[LIGER] > GiB
    # Where the weights have to be divided, TRL's loss makes no logits either.
    divided = plan("llama-3.1-8b", "RTX 4090", 4, seq_len=1024, method="lora", confirm=False).best
    assert divided.recipe.trainer == "sft" or divided.recipe.use_liger_kernel


def test_what_fits_whole_is_not_divided_for_a_few_percent_of_the_time():
    asked = dict(seq_len=2048, global_batch=16, packing=True, method="qlora", confirm=False)
    best = plan("llama-3.1-8b", "T4", 2, host_memory="30GiB", **asked).best
    assert best.recipe.sharding.engine == "ddp"
    divided = best.recipe.replace(sharding=Sharding(3, 2, "fsdp"), batch_size=2)
    divided = divided.replace(gradient_accumulation_steps=4)
    assert FASTER < step_time(divided, "T4").seconds / best.time.seconds < 1


def test_trls_sft_trainer_has_a_plan_on_several_gpus(tmp_path):
    found = plan("llama-3.1-8b", "A100", 4, trainer="sft", seq_len=2048, confirm=False)
    assert [choice.tier for choice in found.choices] == ["safe"] * 3
    assert {choice.recipe.trainer for choice in found.choices} == {"sft"}
    assert all(choice.recipe.sharding.world_size == 4 for choice in found.choices)
    for choice in found.choices:
        (program, *_) = found.write(tmp_path / f"{choice.method}.py", choice)
        assert "SFTTrainer(" in program.read_text(encoding="utf-8")


# --- the command line


def run(*words):
    return CliRunner().invoke(app, ["plan", *words])


def test_the_command_prints_the_plan_and_says_when_nothing_fits(tmp_path):
    done = run(
        "gpt2",
        "--gpu",
        "T4",
        "--tokens",
        "128",
        "--method",
        "lora",
        "--lora-r",
        "4",
        "--no-confirm",
    )
    lora = LoRA(r=4, lora_alpha=8, target_modules="all-linear")
    found = plan("gpt2", "T4", seq_len=128, method="lora", lora=lora, confirm=False)
    assert done.exit_code == 0 and done.output.strip() == str(found).strip()
    assert max(map(len, done.output.splitlines())) <= 80
    as_json = run("gpt2", "--gpu", "T4", "--seq-len", "128", "--no-confirm", "--json")
    said = json.loads(plan("gpt2", "T4", seq_len=128, confirm=False).to_json())
    assert json.loads(as_json.output) == {"schema": 1, **said}
    script = tmp_path / "train.py"
    for model, method, transposed in (
        ("gpt2", "lora", True),
        ("gpt2", "qlora", False),
        ("llama-3.2-1b", "lora", False),
    ):
        written = run(
            model, "--gpu", "RTX 4090", "--method", method, "--no-confirm", "--write", str(script)
        )
        assert f"train.py: {method}\n" in written.output and "LoraConfig(" in script.read_text()
        assert ("fan_in_fan_out=True" in script.read_text()) == transposed, (
            "PEFT would set it and warn"
        )
    none = run(
        "llama-3.1-8b",
        "--memory",
        "16GiB",
        "--method",
        "full",
        "--optim",
        "adamw_torch",
        "--no-offload",
    )
    assert none.exit_code == 1 and "Nothing fits" in none.output
    (tmp_path / "data.jsonl").write_text("\n".join(["40", "90", "20", "70"]))
    lengths = run(
        "gpt2",
        "--gpu",
        "T4",
        "--dataset",
        str(tmp_path / "data.jsonl"),
        "--no-confirm",
        "--tier",
        "likely",
    )
    assert "4 samples of 20 to 90 tokens" in lengths.output and " likely " not in lengths.output


def test_a_data_set_of_text_is_counted_by_the_models_tokenizer(tmp_path):
    from vramlab.base.data import data_path

    folder, data = data_path("base_model"), tmp_path / "data.jsonl"
    rows = [{"text": "def f(x): return x"}, {"prompt": "def f", "completion": "(x): return x"}]
    rows += [{"prompt": "def f", "chosen": "(x): return x", "rejected": "(x)"}, {"length": 40}]
    data.write_text("\n".join(map(json.dumps, rows)))
    from transformers import AutoTokenizer

    tokens = len(AutoTokenizer.from_pretrained(folder)("def f(x): return x")["input_ids"]) + 1
    found = run(str(folder), "--gpu", "T4", "--dataset", str(data), "--no-confirm")
    assert f"4 samples of {tokens} to 40 tokens, median {tokens}" in found.output, found.output
    for model, said in (
        ("gpt2", "no tokenizer of gpt2 is here"),
        (str(folder), "a sample has a text"),
    ):
        data.write_text(json.dumps({"text" if model == "gpt2" else "prompt": "hello"}))
        failed = run(model, "--gpu", "T4", "--dataset", str(data))
        assert failed.exit_code == 2 and said in " ".join(failed.output.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("gpt2", "--gpu", "T5"), "not in the table"),
        (("gpt2", "--memory", "tons"), "24GiB"),
        (("gpt9", "--gpu", "T4"), "no model"),
        (("gpt2", "--gpu", "T4", "--gpus", "3"), "multiple"),
        (("gpt2", "--gpu", "T4", "--precision", "bf16-true"), "starts at 8.0"),
    ],
)
def test_the_command_refuses_in_one_sentence(words, said):
    failed = run(*words)
    assert failed.exit_code == 2 and said in failed.output and "Traceback" not in failed.output
    assert len(failed.output.strip().splitlines()) == 1


def test_a_family_keeps_its_batch():
    question = Question("gpt2", "T4", global_batch=12, **SMALL)
    family = next(iter(families(question, "lora")))
    for size in micro_batches(question):
        recipe = with_micro_batch(family, size)
        assert (
            recipe.batch_size == size
            and recipe.batch_size * recipe.gradient_accumulation_steps == 12
        )
        assert recipe == family.replace(batch_size=size, gradient_accumulation_steps=12 // size)
        assert method_of(recipe) == "lora"


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_deepspeeds_half_precision_has_one_name(method):
    """Its programs keep fp32 copies under both, and at stage 3 only "-mixed" makes half-precision
    weights.
    """
    ways = families(
        Question("qwen3-4b", "RTX 4090", 2, seq_len=64, global_batch=2, engines="deepspeed"), method
    )
    assert {recipe.precision for recipe in ways} >= {"bf16-mixed"}
    ways = families(
        Question("qwen3-4b", "RTX 4090", seq_len=64, global_batch=2, precisions="bf16-true"), method
    )
    assert not [recipe for recipe in ways if recipe.sharding]
    with pytest.raises(RecipeError, match="fp32 copies of such weights: take '-mixed'"):
        Question("gpt2", "RTX 4090", 2, seq_len=64, engines="deepspeed", precisions=("bf16-true",))


@pytest.mark.parametrize("model", ["gemma-2-2b", "gpt-oss-20b"])
def test_a_model_without_sdpa_has_a_plan(model):
    """A footnote asked what sdpa would take, of models that transformers has no sdpa for."""
    asked = dict(method="lora", precisions="bf16-true", optims="adamw_torch", num_layers=2)
    found = plan(model, "RTX 4090", seq_len=64, **asked, confirm=False)
    assert found.best.recipe.attn_implementation == "eager"
    assert not any("sdpa" in note for note in found.notes)


@pytest.mark.slow
@pytest.mark.parametrize("card", ["T4", "RTX 4090", "H100"])
@pytest.mark.parametrize("name", catalogue())
def test_every_model_has_a_plan_or_a_sentence(name, card):
    for method in ("full", "lora", "qlora"):
        try:
            found = plan(name, card, method=method, confirm=False)
        except RecipeError as error:
            assert error.field == "model" and "ask simulate" in str(error)  # no formula knows it
        else:
            assert found.choices or "Nothing fits." in str(found)


def test_a_plan_that_could_not_simulate_says_so_first_and_why(monkeypatch):
    def refuse(*args, **options):
        raise RecipeError(
            "model", "gpt2", "its training step does not run on fake tensors: a reason"
        )

    asked = {"seq_len": 64, "global_batch": 8}
    assert plan("gpt2", "T4", method="lora", **asked).not_simulated == {}
    monkeypatch.setattr(importlib.import_module("vramlab.simulation.simulate"), "simulate", refuse)
    found = plan("gpt2", "T4", **asked)
    first = str(found).partition("gpt2, 64 tokens")[0]
    assert " ".join(first.split()).startswith("NOT SIMULATED (")
    assert all(method in first for method in ("full", "lora", "qlora")) and "a reason" in first
    name, reasons = next(iter(json.loads(found.to_json()).items()))
    assert name == "not_simulated" and set(reasons) == {"full", "lora", "qlora"}
    assert "NOT SIMULATED" not in str(plan("gpt2", "T4", confirm=False, **asked))


def test_an_engines_recipe_of_eighty_layers_is_simulated(monkeypatch):
    def reached(*args, **options):
        raise RecipeError("model", "llama-3.1-70b", "it is simulated")

    monkeypatch.setattr(importlib.import_module("vramlab.simulation.simulate"), "simulate", reached)
    question = Question("llama-3.1-70b", "A100 80GB", 8, seq_len=64)
    sharding = Sharding(world_size=8, engine="deepspeed", stage=3)
    recipe = question.plain.replace(sharding=sharding)
    assert "it is simulated" in simulate_briefly(recipe, question)


def test_what_others_hold_of_this_machines_card_is_left_out(monkeypatch):
    """Without a name the card is this machine's, of which NVML says what a display or other
    processes hold.
    """
    from vramlab.planning import question

    monkeypatch.setattr(question, "held_by_others", lambda: 3 * GiB)
    monkeypatch.setattr(question, "current_device", lambda: SimpleNamespace(gpu=find_gpu("T4")))
    live, named = question.Question("gpt2"), question.Question("gpt2", "T4")
    assert (live.other_memory, live.usable) == (3 * GiB, find_gpu("T4").total - 3 * GiB)
    assert (named.other_memory, named.usable) == (0, find_gpu("T4").total)
    assert question.Question("gpt2", other_memory="0").usable == find_gpu("T4").total
    assert question.Question("gpt2", "T4", other_memory="1GiB").usable == named.usable - GiB
    with pytest.raises(RecipeError, match=r"other_memory.*leaves nothing of T4"):
        question.Question("gpt2", "T4", other_memory="15GiB")


def test_a_plan_says_both_settings_of_the_allocator_and_the_hosts_memory():
    found = plan(
        "llama-3.1-8b", "RTX 4090", seq_len=1024, method="lora", offload=False, confirm=False
    )
    best, said = found.best, " ".join(str(found).split())
    assert best.by_default.high > best.needs.high
    setting = "(no PYTORCH_ALLOC_CONF=expandable_segments:True)"
    verdict = best.by_default.verdict(found.usable)
    assert f"without expandable segments {setting}: lora {verdict}, at most" in said
    weights = 2 * best.recipe.shape.num_parameters
    assert best.host == pytest.approx(weights, rel=0.01)
    assert (
        f"lora: {best.tier} with {best.host / GiB:.1f} GiB of host memory free (free Colab has "
        f"12.7)" in said
    )
    colab = plan(
        "llama-3.1-8b",
        "RTX 4090",
        seq_len=1024,
        method="lora",
        confirm=False,
        host_memory="12.7GiB",
    )
    assert not colab.choices and "what the host has to hold" in str(colab)
