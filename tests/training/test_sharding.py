"""What ranks send each other, counted in real runs and held against formulas; and one rank of many
that are not there.
"""

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from compared_ranks import Ranks, run_alone, run_ranks
from tiny_models import config
from vramlab import Recipe, Sharding, measure, simulate
from vramlab.measurement import worker
from vramlab_course.collectives import ring_share

SMALL = {"batch_size": 2, "seq_len": 16, "num_layers": 2, "loop": "plain"}
LLAMA = Recipe(config("llama"), **SMALL)
SHARDINGS = {
    "DDP": Sharding(0, 2, "ddp"),
    "stage 2": Sharding(2, 2, "fsdp"),
    "stage 3": Sharding(3, 2, "fsdp"),
    "stage 3, one unit": Sharding(3, 2, "fsdp", wrap="model"),
}


@pytest.fixture(scope="module")
def ran(launcher) -> dict[str, Ranks]:
    return {
        name: run_ranks(LLAMA.replace(sharding=s), launcher=launcher)
        for name, s in SHARDINGS.items()
    }


@pytest.fixture(scope="module")
def alone() -> Ranks:
    return run_alone(LLAMA.replace(sharding=Sharding(3, 2)))


def numbers(recipe: Recipe) -> dict[str, int]:
    """Elements of the trained parameters, of those in layers and of the buffers, by the model
    itself.
    """
    from vramlab.training.models import build_model

    model = build_model(recipe, "meta")
    layers = sum(p.numel() for name, p in model.named_parameters() if ".layers." in name)
    whole = sum(p.numel() for p in model.parameters())
    return {"all": whole, "layers": layers, "buffers": sum(b.numel() for b in model.buffers())}


# --- volume


@pytest.mark.parametrize("name", SHARDINGS)
def test_ranks_compute_what_one_process_does(ran, alone, name):
    assert ran[name].losses == pytest.approx(alone.losses, rel=1e-6)
    assert set(ran[name].gradients) == set(alone.gradients)
    for parameter, gradient in alone.gradients.items():
        assert torch.allclose(ran[name].gradients[parameter], gradient, rtol=1e-4, atol=1e-7), (
            parameter
        )


@pytest.mark.parametrize(
    "sharding", [Sharding(0, 2, "tensor"), Sharding(0, 2, "pipeline", micro_batches=2)], ids=str
)
def test_ranks_that_share_the_batch_compute_what_one_process_does(launcher, sharding):
    """All have the same rows; the pipeline's gradients come from the stage that has the layer."""
    recipe = LLAMA.replace(sharding=sharding)
    ranks, one = run_ranks(recipe, launcher=launcher), run_alone(recipe)
    assert ranks.losses == pytest.approx(one.losses, rel=1e-6) and set(ranks.gradients) == set(
        one.gradients
    )
    for parameter, gradient in one.gradients.items():
        assert torch.allclose(ranks.gradients[parameter], gradient, rtol=1e-4, atol=1e-7), parameter


def test_ddp_reduces_each_gradient_once_and_sends_its_buffers_before(ran):
    """The reducer's all-reduces are issued in C++; the payload says that none escapes."""
    size = numbers(LLAMA)
    seen = ran["DDP"].collectives
    assert set(seen) == {"all_reduce", "broadcast"}
    assert seen["all_reduce"].bytes == 4 * size["all"]
    assert seen["broadcast"].bytes == 4 * size["buffers"]
    assert ran["DDP"].volume == 2 * 4 * size["all"] + 4 * size["buffers"], "2Ψ, and the buffers"


def test_stage_2_gathers_once_and_stage_3_twice_what_it_freed(ran):
    size = numbers(LLAMA)
    whole, layers = 4 * size["all"], 4 * size["layers"]
    assert ran["stage 2"].volume == 2 * whole
    assert (
        ran["stage 2"].collectives["reduce_scatter"].bytes
        == ran["stage 2"].collectives["all_gather"].bytes
        == whole
    )
    assert ran["stage 3"].collectives["reduce_scatter"].bytes == whole
    assert ran["stage 3"].volume == 2 * whole + layers, (
        "the root is kept from the forward to the backward pass"
    )
    assert 0.5 < layers / whole < 1, "so with more layers it nears 3Ψ"
    one = ran["stage 3, one unit"]
    assert {kind: seen.calls for kind, seen in one.collectives.items()} == {
        "all_gather": 2,
        "reduce_scatter": 1,
    }
    assert one.volume == 3 * whole, "3Ψ"


def test_what_a_ring_sends():
    assert [ring_share(kind, 4) for kind in ("all_gather", "reduce_scatter", "all_reduce")] == [
        0.75,
        0.75,
        1.5,
    ]
    assert (ring_share("send", 2), ring_share("recv", 2), ring_share("all_reduce", 1)) == (1, 0, 0)


def test_sent_is_the_rings_share_of_the_payload(ran):
    for ranks in ran.values():
        for kind, seen in ranks.collectives.items():
            assert seen.sent == pytest.approx(seen.bytes * ring_share(kind, 2)), kind


def counted_twice(recipe: dict[str, Any]) -> dict[str, Any]:
    """On a rank: a step's collectives by the counter, and by the profiler, which hears of them from
    gloo itself.
    """
    from torch.profiler import ProfilerActivity, profile
    from vramlab.measurement.worker import on_rank
    from vramlab.training.process_group import real_rank
    from vramlab.training.training import train_step
    from vramlab_course.collectives import Collectives
    from vramlab_course.training_on_rank import build_on_rank

    with real_rank("cpu") as rank:
        here = Recipe(**recipe)
        training = build_on_rank(on_rank(here, rank), "cpu")
        for _ in range(2):
            train_step(training)
        with Collectives() as counter:
            train_step(training)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            train_step(training)
        names = [event.name for event in profiler.events() if event.name.startswith("gloo:")]
        del training
    return {"counter": {kind: seen.calls for kind, seen in counter.seen.items()}, "gloo": names}


@pytest.mark.parametrize("name", ["DDP", "stage 3"])
def test_gloo_itself_says_the_same(launcher, name):
    recipe = LLAMA.replace(sharding=SHARDINGS[name])
    gloos = {
        "reduce_scatter": "all_reduce"
    }  # gloo's is an all-reduce of which the rank's part is kept
    for found in launcher.run(
        "test_sharding:counted_twice",
        {"recipe": recipe.to_dict()},
        preload="vramlab_course.chapters.fsdp_units:preload",
    ):
        expected = [
            f"gloo:{gloos.get(kind, kind)}"
            for kind, calls in found["counter"].items()
            for _ in range(calls)
        ]
        assert sorted(found["gloo"]) == sorted(expected) and len(expected) >= 3


# --- one rank alone


@pytest.mark.parametrize("name", SHARDINGS)
def test_a_rank_alone_holds_what_it_holds_among_others(ran, name):
    """What one GPU measures of its rank in a large world, on the CPU: the worker's passes in a fake
    process group.
    """
    for rank, report in enumerate(ran[name].reports):
        recipe = LLAMA.replace(sharding=dataclasses.replace(SHARDINGS[name], rank=rank))
        one = worker.run(recipe, repeats=1, warmup=2, device="cpu")
        assert (one.source, one.status) == ("measured", "ok") and one.phases == report.phases, name
        assert one.peak == report.peak and one.recipe["sharding"]["rank"] == rank
        assert any(
            f"rank {rank} of 2 alone" in note and "computation only" in note for note in one.notes
        )


def test_a_rank_alone_of_a_large_world_is_as_simulated():
    recipe = LLAMA.replace(sharding=Sharding(3, 64, rank=63), precision="fp16-mixed")
    one = worker.run(recipe, repeats=1, warmup=2, device="cpu")
    assert one.phases == simulate(recipe, target="cpu", full=True).phases
    from vramlab.training.models import build_model

    rows = [(p.shape[0], p.numel() // p.shape[0]) for p in build_model(LLAMA, "meta").parameters()]
    assert one.phases["load"].end.parameters == sum(
        4 * -(-count // 64) * width for count, width in rows
    ), "padded"


def test_measure_runs_all_ranks_and_reports_the_one_asked_for(launcher, monkeypatch):
    monkeypatch.setattr(
        "vramlab.measurement.measure.Launcher", lambda: contextlib.nullcontext(launcher)
    )
    recipe = LLAMA.replace(sharding=Sharding(0, 2, "ddp", rank=1))
    report = measure(recipe, repeats=1, device="cpu", recorded=False)
    assert (report.source, report.status, report.recipe) == ("measured", "ok", recipe.to_dict())
    assert report.phases == simulate(recipe, target="cpu", full=True).phases
    assert any(
        "2 processes on this machine; their peaks by rank: " in note for note in report.notes
    )
    assert report.speed.repeats == 1 and report.rss > report.peak.total
