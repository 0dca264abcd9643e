"""The share of the card that plan finds for a vLLM beside the trainer."""

import dataclasses
from typing import Any

import pytest
from vramlab import GiB, plan
from vramlab.base.errors import RecipeError
from vramlab.planning import search, vllm_share
from vramlab.planning.changes import advise
from vramlab.planning.question import Question
from vramlab.planning.vllm_share import STEP, about_share, search_of
from vramlab.report.report import Interval
from vramlab.simulation.colocated import cache_of_one, colocated, least_share

ROLLOUTS = {"use_vllm": True, "num_generations": 8, "prompt_length": 256}
ROLLOUTS |= {"max_completion_length": 1024}
FIELDS = {"trainer": "grpo", "method": "lora", "precisions": "bf16-mixed"}


def asked(gpu: str = "RTX 4090", **said: Any) -> Question:
    return Question("qwen3-4b", gpu, rollouts=ROLLOUTS | said, **FIELDS)


def share_of(question: Question) -> float:
    return question.rollouts.vllm_gpu_memory_utilization


def simulated_as(monkeypatch: pytest.MonkeyPatch, trainer: float) -> list[Any]:
    """Let the process of the trainer alone be of `trainer` GiB; return what was simulated."""
    tried = []

    def confirm(candidates: list[Any]) -> None:
        for candidate in candidates:
            vllm = colocated(candidate.recipe, candidate.question.gpu)
            process = Interval.of(int(trainer * GiB)) + vllm.awake
            candidate.simulated = dataclasses.replace(candidate.report, process=process)
            tried.append(candidate)

    monkeypatch.setattr(vllm_share, "confirm", confirm)
    return tried


def test_a_share_that_is_not_said_holds_all_completions_of_a_step(monkeypatch):
    tried = simulated_as(monkeypatch, 9.0)
    found = search_of(asked()).question
    least = least_share(found.plain, found.gpu)
    assert least <= share_of(found) < least + STEP
    assert len(tried) == 1
    (note,) = about_share(found)
    assert f"--vllm-gpu-memory-utilization {share_of(found)} (found)" in note
    assert "holds all 16 completions" in note


@pytest.mark.parametrize(("trainer", "tier"), [(12.0, "high"), (14.5, "value")])
def test_a_share_is_smaller_by_what_the_lightest_recipe_lacks(trainer, tier, monkeypatch):
    simulated_as(monkeypatch, trainer)
    found = search_of(asked()).question
    assert share_of(found) < least_share(found.plain, found.gpu)
    vllm = colocated(found.plain, found.gpu)
    assert getattr(Interval.of(int(trainer * GiB)) + vllm.awake, tier) <= found.usable
    held = vllm.cache // cache_of_one(found.plain)
    assert 1 <= held < 16
    (note,) = about_share(found)
    assert f"holds {held} of 16 completions" in note


def test_where_nothing_fits_the_share_is_the_least_that_samples(monkeypatch):
    simulated_as(monkeypatch, 20.0)
    found = search_of(asked()).question
    least = least_share(found.plain, found.gpu, completions=1)
    assert least <= share_of(found) < least + STEP


def test_where_nothing_fits_beside_a_vllm_that_is_awake_it_sleeps(monkeypatch):
    """Unless that was said, and then only the note names it."""

    def confirm(candidates: list[Any], tell: Any = None) -> None:
        for candidate in candidates:
            vllm = colocated(candidate.recipe, candidate.question.gpu)
            process = Interval.of(17 * GiB) + vllm.training
            candidate.simulated = dataclasses.replace(candidate.report, process=process)
            candidate.tried = True

    monkeypatch.setattr(vllm_share, "confirm", confirm)
    monkeypatch.setattr(search, "confirm", confirm)
    found = plan("qwen3-4b", "RTX 4090", rollouts=ROLLOUTS, **FIELDS)
    assert found.best.recipe.rollouts.vllm_enable_sleep_mode
    assert any("(found: awake nothing fits)" in note for note in found.notes)
    # Of 7B both have weights on the card while vLLM samples, asleep or not.
    assert not vllm_share.may_fit_asleep(
        Question("qwen2.5-7b", "RTX 4090", rollouts=ROLLOUTS, **FIELDS)
    )
    said = ROLLOUTS | {"vllm_enable_sleep_mode": False}
    assert not plan("qwen3-4b", "RTX 4090", rollouts=said, **FIELDS).choices


def test_a_share_that_is_said_is_kept_and_one_too_small_is_refused():
    assert share_of(search_of(asked(vllm_gpu_memory_utilization=0.5)).question) == 0.5
    with pytest.raises(RecipeError, match=r"take more than 0\.34, or leave it out"):
        asked(vllm_gpu_memory_utilization=0.3)


@pytest.mark.slow
def test_the_plan_has_the_share_and_no_larger_one_of_use_fits():
    found = plan("qwen3-4b", "RTX 4090", rollouts=ROLLOUTS, **FIELDS)
    share = found.best.recipe.rollouts.vllm_gpu_memory_utilization
    assert found.best.tier == "safe" and share == 0.46
    assert found.best.report.process.high <= found.usable


def test_on_a_larger_card_the_advice_has_the_share_of_that_card(monkeypatch):
    """As many bytes are a smaller share of it; nothing is simulated where a bound says no."""
    tried = []

    def confirm(candidates: list[Any]) -> None:
        for candidate in candidates:
            vllm = colocated(candidate.recipe, candidate.question.gpu)
            process = Interval.of(16 * GiB) + vllm.awake
            candidate.simulated = dataclasses.replace(candidate.report, process=process)
            candidate.tried = True
            tried.append(candidate.question.gpu.name)

    monkeypatch.setattr(vllm_share, "confirm", confirm)
    monkeypatch.setattr(search, "confirm", confirm)
    narrow = Question("qwen2.5-7b", "RTX 4090", rollouts=ROLLOUTS, **FIELDS)
    found = search_of(narrow).question
    assert tried == []
    sentences = list(advise(found))
    assert tried and len(tried) <= 2 * len(set(tried))
    (larger,) = [line for line in sentences if line.startswith("gpu=")]
    share = int(larger.split("vLLM in ")[1].split("%")[0]) / 100
    assert share < share_of(found)
