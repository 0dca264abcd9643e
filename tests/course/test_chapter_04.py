"""What chapter 04's cells share: ranks that run any function, collectives, and a step that is
followed to the byte.
"""

import gc
import json
import time

import pytest
import torch
import torch.distributed as dist
from settings import ROOT
from vramlab import GiB, MiB, Recipe, Sharding, predict, simulate
from vramlab_course.base_model import base_model_path, load_base_model
from vramlab_course.chapters import chapter_04
from vramlab_course.chapters.chapter_04 import (
    RankFailed,
    all_gather,
    apart,
    followed,
    on_ranks,
    reduce_scatter,
    seconds_of,
)
from vramlab_course.collectives import Collectives
from vramlab_course.judges import judges_04


@pytest.mark.parametrize("world", [1, 3])
def test_a_reduce_scatter_and_an_all_gather_are_an_all_reduce(world):
    def both(rank, world):
        whole = torch.arange(12.0).reshape(6, 2) * 10**rank
        gathered = all_gather(reduce_scatter(whole))
        dist.all_reduce(whole)
        return gathered, whole

    for gathered, whole in on_ranks(both, world):
        assert torch.equal(gathered, whole)
        assert torch.equal(whole, torch.arange(12.0).reshape(6, 2) * (10**world - 1) / 9)


def test_a_rank_that_fails_ends_all_and_is_told():
    with pytest.raises(RankFailed, match=r"^ZeroDivisionError: division by zero$"):
        on_ranks(lambda rank, world: 1 / rank)


def test_what_failed_is_told_and_not_what_lost_it(monkeypatch):
    """Both ranks have ended before their parent looks: the first of them lost the other."""

    def work(rank, world):
        if rank == 1:
            raise ValueError("mine")
        dist.all_reduce(torch.ones(1))

    join = torch.multiprocessing.ProcessContext.join

    def late(self, *args):
        for process in self.processes:
            process.join()
        return join(self, *args)

    monkeypatch.setattr(torch.multiprocessing.ProcessContext, "join", late)
    with pytest.raises(RankFailed, match=r"^ValueError: mine$"):
        on_ranks(work)


def test_ranks_that_lose_a_connection_start_again(tmp_path):
    def work(rank, world, lost):
        start = len([*tmp_path.glob(f"{lost} {rank} *")])
        (tmp_path / f"{lost} {rank} {start}").touch()
        if rank == 1 and start < lost:
            return None  # its connections end with it
        one = torch.ones(1)
        dist.all_reduce(one)
        return one.item()

    assert on_ranks(lambda rank, world: work(rank, world, 1)) == [2.0, 2.0]
    with pytest.raises(RankFailed, match=r"^a rank waits for one that has ended"):
        on_ranks(lambda rank, world: work(rank, world, 3))


def test_a_rank_that_nobody_answers_does_not_wait_for_ever():
    def lonely(rank, world):
        if rank == 0:
            all_gather(torch.ones(1))
        else:
            time.sleep(30)

    with pytest.raises(RankFailed, match="Timed out"):
        on_ranks(lonely, seconds=2)


def test_a_process_apart_has_no_group_and_leaves_none():
    assert apart(dist.is_initialized) is False
    assert not dist.is_initialized()


def test_steps_that_are_timed_take_turns_and_one_slow_turn_does_not_count():
    turns = []

    def late():
        turns.append("late")
        time.sleep(0.3 if len(turns) < 3 else 0)

    first, second = seconds_of(late, lambda: turns.append("other"))
    assert turns == ["late", "other"] * 5
    assert first < 0.3 and second < 0.3


def parts(report):
    """MiB of weights, gradients, states, workspace and rest at the peak, without cuBLAS's own."""
    peak = report.peak
    cublas = report.phases["between_steps"].end.workspace  # no unit is whole then
    known = [peak.parameters, peak.gradients, peak.optimizer_states, peak.workspace - cublas]
    return [part / MiB for part in (*known, peak.total - cublas - sum(known))]


def test_the_step_that_is_followed_is_simulates_for_a_gpu():
    """It leaves out what gloo needs, and `parts` what cuBLAS keeps."""
    recipe = Recipe(base_model_path(), 2, 32, optim="adamw_torch_fused", loop="plain")
    model, batch = load_base_model(), torch.arange(128).reshape(4, 32)

    def sharded_step(rank, world):
        from torch.distributed.device_mesh import init_device_mesh

        rows = batch.chunk(world)[rank]
        judges_04.right_order(model, init_device_mesh("cpu", (world,)))
        report = followed(model, torch.optim.AdamW(model.parameters()), rows)
        sent = []
        for stage in (3, 2):
            if stage == 2:
                model.set_reshard_after_forward(False)
            with Collectives() as counting:
                model(input_ids=rows, labels=rows, use_cache=False).loss.backward()
            sent.append(sum(traffic.bytes for traffic in counting.seen.values()) / 4 / psi)
        return report, sent

    psi = sum(p.numel() for p in model.parameters())
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    root = psi - 4 * layer
    shared = recipe.replace(sharding=Sharding(3, 2, "fsdp", rank=0))
    simulated = parts(simulate(shared, "cuda"))
    for report, sent in on_ranks(sharded_step):
        assert report.source == "measured"
        # a GPU's allocator rounds up
        assert parts(report) == pytest.approx(simulated, abs=0.05)
        # the root's unit is kept between the passes
        assert sent == pytest.approx([3 - root / psi, 2])
        assert round(sent[0], 2) == 2.86
    assert report.peak.workspace == 4 * (root + 3 * layer)
    # however many layers there are, one is on its way
    deeper = parts(simulate(shared.replace(num_layers=6), "cuda"))
    assert deeper[3] == pytest.approx(simulated[3], abs=0.01)


def test_the_published_price_of_sharding():
    """Section 5 opens with two runs of the same samples on the same two cards."""
    published = json.loads((ROOT / "data/elsewhere/answer_ai.json").read_text(encoding="utf-8"))
    chapter = (ROOT / "notebooks/04_zero_and_fsdp.ipynb").read_text(encoding="utf-8")
    assert published["source"]["url"] in chapter
    same = {"gpu": "RTX 3090", "method": "lora", "batch_size": 4, "tokens": 2048, "ranks": 2}
    rows = {}
    for run in published["runs"]:
        if run | same == run:
            row = f"{run['seconds']:,} s, {run['peak_reserved_gib']:.1f} GiB"
            ours = run["simulated"]
            ends = f"{ours['reserved_from_gib']:.1f} to {ours['reserved_to_gib']:.1f} GiB"
            rows[run["sharding"]] = f"{row} | {ours['reserved_gib']:.1f}, {ends}"
    assert rows.keys() == {"ddp", "fsdp"}
    assert f"| whole on each card | {rows['ddp']} |" in chapter
    assert f"| at stage 3 | {rows['fsdp']} |" in chapter


def test_the_small_print_of_section_4():
    eight = Recipe("llama-3.1-8b", 1, 2048, "bf16-mixed", "adamw_torch_fused")
    eight = eight.replace(gradient_checkpointing=True, sharding=Sharding(3, 8))
    default = predict(eight, gpu="RTX 4090", expandable_segments=False).process
    assert (round(default.value / GiB, 1), round(default.high / GiB, 1)) == (22.0, 48.8)
    # the weights alone would fit, and stage 2 does not
    second = eight.replace(sharding=Sharding(2, 8))
    need = predict(second, gpu="RTX 4090", expandable_segments=True).process
    assert round(need.high / GiB, 1) == 33.2


@pytest.mark.slow
def test_what_liger_saves_on_eight_cards():
    """Nothing of one sample's peak, which is in the backward pass."""
    eight = Recipe("llama-3.1-8b", 1, 2048, "bf16-mixed", "adamw_torch_fused")
    eight = eight.replace(gradient_checkpointing=True, sharding=Sharding(3, 8))
    fused = eight.replace(use_liger_kernel=True)
    one = simulate(fused, "cuda")
    assert one.peak_phase == "backward"
    assert one.peak.total == pytest.approx(predict(eight).peak.total, rel=1e-4)


def test_what_does_not_shrink_on_1024_cards():
    """Section 4's guess: the head and its buffer, and no other unit."""
    llama = Recipe("llama-3.1-8b", 1, 2048, "bf16-mixed", "adamw_torch_fused")
    llama = llama.replace(gradient_checkpointing=True, num_layers=2, sharding=Sharding(3, 1024))
    report = simulate(llama, "cuda")
    gathered = [group for group in report.largest if group.category == "workspace"]
    assert [(group.where, round(group.size / GiB, 1)) for group in gathered[:2]] == [
        ("model.norm", 1.0),
        ("lm_head.weight", 1.0),
    ]
    logits = [round(g.size / GiB, 1) for g in report.largest if 128256 in g.shape and g.count == 1]
    assert logits == [1.0, 1.0, 0.5]


def test_forked_ranks_are_needed_where_a_function_is_no_modules():
    number = 7
    assert on_ranks(lambda rank, world: number + rank) == [7, 8]
    # what the parent has is out of a collection's way, which would copy each of its pages
    assert min(on_ranks(lambda rank, world: gc.get_freeze_count())) > 10_000
    assert chapter_04.apart(lambda: number) == 7
