"""Tiers of simulate: the log is replayed in what each end of the context leaves, and nothing is
clipped at the card.
"""

import dataclasses
import importlib.util

import pytest
from quick import params
from settings import ROOT
from vramlab import GiB, LoRA, MiB, Quantization, Recipe, predict, simulate
from vramlab.hardware.allocator import replay
from vramlab.hardware.gpu import find_gpu
from vramlab.recipe.options import Sharding
from vramlab.recipe.process_context import room_on
from vramlab.simulation.as_run import simulate_as_run
from vramlab.simulation.simulate import trace
from vramlab.tracking.history import BEYOND, History, to_report
from vramlab_course.published import runs

BENCHMARK = ROOT / "benchmarks" / "tiers.py"

POLYGLOT = Recipe("polyglot-ko-1.3b", 11, 256, "fp16-true")
QWEN = Recipe("qwen3-0.6b", 2, 512, "fp16-mixed", "adamw_torch_fused")
LLAMA = Recipe(
    "llama-3.1-8b",
    4,
    1024,
    "bf16-true",
    "adamw_torch_fused",
    lora=LoRA(r=16),
    gradient_checkpointing=True,
)


CASES = [(POLYGLOT, "T4"), (QWEN, "T4"), (LLAMA, "RTX 4090")]


@pytest.mark.parametrize(("recipe", "card"), CASES)
def test_a_run_that_just_fits_is_not_safe_with_the_allocators_default_segments(recipe, card):
    by_default, expandable = (
        simulate(recipe, gpu=card),
        simulate(recipe, gpu=card, expandable_segments=True),
    )
    assert by_default.verdict == "likely" and by_default.process.high > find_gpu(card).total
    assert expandable.verdict == "safe" and expandable.process.high < by_default.process.high
    # Each names the other setting's tier too.
    assert (by_default.otherwise, expandable.otherwise) == (expandable.process, by_default.process)
    assert "; safe with expandable segments" in by_default.grade
    assert "; likely without expandable segments" in expandable.grade


def made(usable):
    """The report of POLYGLOT on a T4 that has so many bytes, and the log's history."""
    t4 = find_gpu("T4")
    room = dataclasses.replace(room_on(POLYGLOT, t4), usable=usable)
    whole = trace(POLYGLOT, "cuda", t4)
    history = History(
        whole.log, [(start, name) for name, start, _ in whole.stretches[1:]], True, room
    )
    return to_report(history, "simulated", POLYGLOT, "cuda"), history


def test_each_tier_is_a_replay_in_the_room_that_its_context_leaves():
    _, history = made(find_gpu("T4").total)
    log, room = history.log, history.room
    low, high = 13 * GiB, 16 * GiB  # the least in which it runs lies between
    while high - low > MiB:
        middle = (low + high) // 2
        if replay(log.sizes, log.keys, log.streams, middle).failed:
            low = middle
        else:
            high = middle
    for room_for, verdict, beyond in (("value", "likely", BEYOND), ("low", "tight", 1)):
        report, _ = made(int(high * beyond) + MiB + getattr(room.context, room_for))
        assert report.verdict == verdict and report.granted.startswith("granted to the allocator")
    report, _ = made(low - 8 * MiB + room.context.low)
    assert report.verdict == "does not fit" and report.process.low > report.usable
    assert any(note.startswith("does not fit T4: in step") for note in report.notes)


def test_what_others_hold_changes_the_verdict():
    small = Recipe("gpt2", 4, 256)
    assert simulate(small, gpu="T4").verdict == "safe"
    crowded = simulate(small, gpu="T4", other_memory=12 * GiB)
    assert crowded.verdict == "does not fit" and crowded.usable == find_gpu("T4").total - 12 * GiB


def test_loading_counts():
    """Each of FSDP's ranks loads a 4-bit base whole, which is more than training its shard."""
    base = Quantization("nf4", double=True, prepare=False)
    sharded = {"lora": LoRA(r=8), "quantization": base, "sharding": Sharding(3, 8, "fsdp")}
    recipe = Recipe(
        "llama-3.1-8b",
        1,
        16,
        "bf16-mixed",
        "adamw_torch_fused",
        gradient_checkpointing=True,
        **sharded,
    )
    for witness in (predict, simulate):
        report = witness(recipe, gpu="RTX 3060")
        assert report.loading.total > report.peak.total
        assert report.reserved.value >= report.loading.total
        assert report.process.low > report.loading.total


def test_ranks_of_fsdp_that_load_the_whole_model_need_room_for_it():
    pair = Recipe("pythia-410m", 1, 64, "bf16-true", "sgd", sharding=Sharding(3, 2, "fsdp"))
    own = pair.replace(loop="plain")
    assert predict(pair).loading is None and simulate(pair).loading is None
    said, seen = predict(own), simulate(own)
    assert said.loading.total == pytest.approx(seen.loading.total, rel=0.01)
    assert seen.loading.total > 1.9 * seen.peak.parameters
    assert said.process.value > said.loading.total and seen.process.value > seen.loading.total


NF4 = [
    run for run in runs() if run.reserved and run.recipe.quantization and run.recipe.batch_size == 1
]


@pytest.mark.parametrize("name", ["qwen2.5-1.5b", "llama-3.2-3b"])
def test_what_loading_leaves_counts_in_the_upper_end(name):
    """Both runs reserved far beyond the replay: an embedding in fp16 whose place its fp32 copy did
    not take.
    """
    known = [
        run for run in NF4 if run.recipe.name == name and run.as_run and run.recipe.seq_len == 1024
    ]
    run = known[0]
    said = simulate_as_run(run.recipe, run.as_run, run.use_reentrant).reserved
    assert said.value < run.reserved < said.high


# What accuracy.md has of each: the figures of `python benchmarks/tiers.py`.
SHARES = {
    "predict, PyTorch's allocator on the stand-in": (100.0, 93.7, 44.5),
    "predict, records": (100.0, 98.1, 44.5),
    "predict, published": (100.0, 90.4, 31.1),
    "simulate, records": (100.0, 99.7, 10.9),
    "simulate, published": (100.0, 92.2, 7.3),
}


@pytest.mark.parametrize("name", params(SHARES, ["predict, published", "simulate, published"]))
def test_safe_is_safe_likely_likely_and_half_of_tight_dies(name):
    spec = importlib.util.spec_from_file_location("tiers", BENCHMARK)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    shares = benchmark.judge(name, list(benchmark.SOURCES[name]()))
    assert shares["safe"] >= 0.99 and shares["likely"] >= 0.9 and shares["tight"] <= 0.5
    for share, said in zip(shares.values(), SHARES[name], strict=True):
        assert 100 * share == pytest.approx(said, abs=0.5)
    page = (ROOT / "site" / "accuracy.md").read_text(encoding="utf-8")
    assert " | ".join(f"{said} %" for said in SHARES[name]) in page
