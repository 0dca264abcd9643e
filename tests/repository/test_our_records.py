"""The project's own records of GPUs: in order, and what the witnesses say of them."""

from functools import cache

import pytest
import verify_record
from vramlab import Recipe, RecipeError, predict, simulate
from vramlab.faces.measure import card_of
from vramlab.measurement.records import load
from vramlab.report.data import data_path
from vramlab.report.report import Report

FILES = sorted(data_path("measurements").glob("*.json"))
# Without a bias no version of cuBLASLt matters (`simulate.make_tracker`), so the installed torch says what theirs held.
EQUAL = (
    "gemma-2-2b · batch 1 · 16 tokens · fp32 · adamw_torch · 2 layers · eager",
    "llama-3.2-1b · batch 1 · 512 tokens · bf16-true · adamw_bnb_8bit",
    "llama-3.1-8b · batch 1 · 1024 tokens · bf16-true · adamw_torch · checkpointing · LoRA r=16",
    "llama-3.2-1b · batch 1 · 1024 tokens · bf16-true · adamw_torch · accumulate ×16 · eager",
)


@cache
def records() -> dict[str, Report]:
    """By key, those that did not run out of memory."""
    return {key: r for path in FILES for key, r in load(path).items() if r.status == "ok"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_as_share_wrote_it_and_possible(path):
    reports = list(load(path).values())
    assert [*verify_record._form(path.name, path.read_text(), reports)] == []
    assert [f"{r.title}: {why}" for r in reports for why in verify_record._physics(r)] == []


@pytest.mark.parametrize("title", EQUAL)
def test_simulate_says_every_byte_that_a_gpu_allocated_and_reserved(title):
    held = next(report for report in records().values() if report.title == title)
    said = simulate(Recipe(**held.recipe), gpu=card_of(held.environment))
    assert (said.requested, said.allocated, said.reserved.value) == (held.requested, held.allocated, held.reserved)


def test_predict_is_near_what_a_gpu_allocated():
    errors = {}
    for key, held in records().items():
        if held.recipe["torch_compile"]:
            continue
        try:
            said = predict(Recipe(**held.recipe), gpu=card_of(held.environment)).peak.total
        except RecipeError:  # Whisper
            continue
        errors[key] = abs(said / held.allocated - 1)
    assert len(errors) > 180 and sum(errors.values()) / len(errors) < 0.002
    assert {key: error for key, error in errors.items() if error > 0.015} == {}
