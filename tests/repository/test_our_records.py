"""The project's own records of GPUs: in order, and what the witnesses say of them."""

import statistics
from collections import Counter
from functools import cache

import pytest
import verify_record
from settings import ROOT
from vramlab import Recipe, RecipeError, predict, simulate
from vramlab.base.data import data_path
from vramlab.hardware.contexts import context_on
from vramlab.hardware.gpu import find_gpu
from vramlab.hardware.overhead import rules_of
from vramlab.interfaces.measure_and_record import card_of
from vramlab.measurement.records import load
from vramlab.report.report import KiB, MiB, Report
from vramlab.tracking.history import BEYOND
from vramlab_course.claims import judge, load_claims
from vramlab_course.claims.verdicts import UNDER

FILES = sorted(data_path("measurements").glob("*.json"))
# Without a bias no version of cuBLASLt matters (`simulate.make_tracker`), so the installed torch
# says what theirs held.
EQUAL = (
    "gemma-2-2b · batch 1 · 16 tokens · fp32 · adamw_torch · 2 layers · eager",
    "llama-3.2-1b · batch 1 · 512 tokens · bf16-true · adamw_bnb_8bit",
    "llama-3.1-8b · batch 1 · 1024 tokens · bf16-true · adamw_torch · checkpointing · LoRA r=16",
    "llama-3.2-1b · batch 1 · 1024 tokens · bf16-true · adamw_torch · accumulate ×16 · eager",
)


@cache
def records(gpu: str) -> dict[str, Report]:
    """By key, those of cards with `gpu` in their name that did not run out of memory."""
    found = {}
    for path in FILES:
        for key, report in load(path).items():
            if report.status == "ok" and gpu in report.environment["gpu"]:
                found[key] = report
    return found


def every_record() -> list[Report]:
    return [*records("H100").values(), *records("H200").values()]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_as_share_wrote_it_and_possible(path):
    reports = list(load(path).values())
    assert [*verify_record._form(path.name, path.read_text(), reports)] == []
    assert [f"{r.title}: {why}" for r in reports for why in verify_record._physics(r)] == []


@pytest.mark.parametrize("title", EQUAL)
def test_simulate_says_every_byte_that_a_gpu_allocated_and_reserved(title):
    held = next(report for report in every_record() if report.title == title)
    said = simulate(Recipe(**held.recipe), gpu=card_of(held.environment))
    assert (said.requested, said.allocated) == (held.requested, held.allocated)
    assert said.reserved.value == int(
        BEYOND * held.reserved
    )  # the replay's is the card's, to the byte


@pytest.mark.parametrize(
    "title",
    [
        "gpt2 · batch 8 · 512 tokens · fp32 · sgd",
        # its 4-bit layers have a bias: bitsandbytes unpacks them for `addmm`
        "qwen2.5-0.5b · batch 2 · 512 tokens · fp16-mixed · adamw_torch_fused · LoRA r=16 · "
        "nf4 double · not prepared",
    ],
)
def test_a_record_is_held_against_the_rules_of_its_own_torch(title):
    """Up to torch 2.11 cuBLASLt, which multiplies where there is a bias, had a workspace of its
    own: 1 MiB a thread.
    """
    held = next(report for report in every_record() if report.title == title)
    recipe, card = Recipe(**held.recipe), card_of(held.environment)
    off = {}
    for torch in (held.environment["torch"], "2.13.0"):
        with rules_of(torch):
            off[torch] = simulate(recipe, gpu=card).allocated - held.allocated
    assert abs(off["2.11.0"]) < 16 * KiB and abs(off["2.13.0"]) > 1000 * KiB


def test_the_context_of_an_h100_grows_with_flash_attentions_code():
    """742 MiB, and 758 where the kernel is FlashAttention's; `data/contexts.json` says so."""
    found = {True: Counter(), False: Counter()}
    for held in records("H100").values():
        recipe = Recipe(**held.recipe)
        half = recipe.precision not in ("fp32", "tf32")
        flash = half and recipe.attn_implementation == "sdpa" and not recipe.quantization
        found[flash][(held.process - held.reserved) // MiB] += 1
    assert found[True].most_common(1) == [(758, 95)] and found[False].most_common(1) == [(742, 88)]
    assert sum(found[True].values()) - 95 <= 1 and sum(found[False].values()) - 88 <= 4
    h100 = find_gpu("H100 SXM")
    flash, without = (context_on(h100, loaded) for loaded in ("flash", "cublas"))
    assert abs(flash.value // MiB - 758) <= 1 and without.value == 742 * MiB
    one_rank = []
    for held in records("H100").values():
        if not held.recipe["sharding"]:
            one_rank.append(held.process - held.reserved)
    assert max(one_rank) <= flash.high


def test_the_context_of_an_h200_is_what_was_read():
    """758 MiB with FlashAttention's code, 742 without; 828 with copies on a stream of their own.

    Such are activations that go to host memory, and the units that an FSDP rank gathers.
    """
    found = Counter()
    for held in records("H200").values():
        streams = bool(held.recipe.get("activation_offloading") or held.recipe["sharding"])
        found[streams, (held.process - held.reserved) // MiB] += 1
    assert found == {(False, 758): 51, (False, 742): 2, (True, 828): 5}
    h200 = context_on(find_gpu("H200"), "flash")
    assert h200.value == 758 * MiB and h200.high == 828 * MiB


def test_what_checkpointing_costs_in_time():
    """15 pairs of records that differ in nothing else, as the glossary and chapter 03 say them.

    A claim of 20 % is judged by them.
    """
    seen = records("H100")
    ratios = []
    for report in seen.values():
        recipe = Recipe(**report.recipe)
        plain = seen.get(recipe.replace(gradient_checkpointing=False).key)
        if recipe.gradient_checkpointing and plain and plain.speed and report.speed:
            ratios.append(report.speed.median / plain.speed.median)
    found = len(ratios), min(ratios), statistics.median(ratios), max(ratios)
    assert found == (
        15,
        pytest.approx(1.08, abs=0.005),
        pytest.approx(1.53, abs=0.005),
        pytest.approx(2.08, abs=0.005),
    )
    _, least, _, most = (f"{value:.3g}" for value in found)
    glossary = " ".join((ROOT / "site" / "glossary.md").read_text(encoding="utf-8").split())
    assert f"steps took {least} to {most} times as long on an H100" in glossary
    verdict = judge(load_claims("03")["guide-checkpointing-20"])
    assert (verdict.outcome, verdict.holding) == (UNDER, ["gpt2, fp32", "Llama 3.2 1B, bf16-mixed"])


def test_predict_is_near_what_a_gpu_allocated():
    errors = {}
    for held in every_record():
        if held.recipe["torch_compile"]:
            continue
        try:
            said = predict(Recipe(**held.recipe), gpu=card_of(held.environment)).peak.total
        except RecipeError:  # Whisper
            continue
        errors[held.title, held.environment["gpu"]] = abs(said / held.allocated - 1)
    assert len(errors) > 215 and sum(errors.values()) / len(errors) < 0.002
    assert {held: error for held, error in errors.items() if error > 0.015} == {}
