"""The experiments that test what the sources say about many GPUs (B 5.3, C's row, D's half on FSDP, E's remarks).

What a rank holds is simulated (equal to a real rank's bytes on a CPU, `tests/test_sharding_simulate.py`); what ranks
send, and when, is counted from two real processes.
"""

import atexit
import dataclasses
from functools import cache

from ..claims import Finding
from ..data import data_path
from ..formulas.zero_paper import largest_model
from ..gpu import find_gpu
from ..launch import Launcher, launch
from ..plot.ranks import bubble, pipeline_slots
from ..recipe import Recipe, Sharding
from ..report import MiB, Report, format_bytes
from ..simulate import simulate
from ..topology import bytes_sent, pcie_bandwidth

KINDS = ("parameters", "gradients", "optimizer_states")
WAYS = {
    "DDP": Sharding(0, 2, "ddp"),
    "ZeRO-1": Sharding(1, 2, "ddp"),
    "ZeRO-2": Sharding(2, 2, "fsdp"),
    "ZeRO-3": Sharding(3, 2, "fsdp"),
    "tensor": Sharding(0, 2, "tensor"),
    "pipeline": Sharding(0, 2, "pipeline", schedule="gpipe"),
}


def small(**changes) -> Recipe:
    """The course's own model on 2 × 64 tokens."""
    return Recipe(str(data_path("base_model", "config.json")), batch_size=2, seq_len=64, loop="plain", **changes)


@cache
def rank_of(way: str | None, world_size: int = 2, rank: int = 0) -> Report:
    """One rank's report, simulated for this machine's kernels; `way` None is a process alone."""
    sharding = dataclasses.replace(WAYS[way], world_size=world_size, rank=rank) if way else None
    return simulate(small(sharding=sharding), target="cpu")


def held(way: str | None, what: str, world_size: int = 2, rank: int = 0) -> int:
    """Bytes of a category that a rank holds between steps."""
    return getattr(rank_of(way, world_size, rank).phases["between_steps"].end, what)


@cache
def _launcher() -> Launcher:
    """One for all experiments; it ends with this process."""
    launcher = Launcher().start()
    atexit.register(launcher.end)
    return launcher


@cache
def sends(way: str, accumulate: int = 1) -> dict[str, dict[str, int]]:
    """What one of two real ranks sends in a step: phase to kind of collective to payload bytes."""
    recipe = small(sharding=WAYS[way], gradient_accumulation_steps=accumulate)
    return launch("vramlab.chapters.units_04:by_phase", {"recipe": recipe.to_dict()}, 2, launcher=_launcher())[0]


@cache
def hundred(wrapping: str) -> dict:
    """Two real ranks with a hundred linear layers, wrapped so."""
    return launch("vramlab.chapters.units_04:hundred", {"wrapping": wrapping}, 2, launcher=_launcher())[0]


def psi() -> int:
    """Bytes of the small model's parameters."""
    return 4 * small().shape.num_parameters


def compared(way: str, what: str, world_size: int = 2) -> Finding:
    """What a rank holds of a category between steps, as a multiple of what a process alone holds."""
    one, all_of_it = held(way, what, world_size), held(None, what)
    said = f"{small()}, {way} × {world_size}: {format_bytes(one, 'MiB')} of {format_bytes(all_of_it, 'MiB')}"
    return Finding(one / all_of_it, "simulated", said)


def copies(way: str, what: str) -> Finding:
    """How many copies of a category two ranks hold together."""
    both = sum(held(way, what, rank=rank) for rank in (0, 1))
    return Finding(both / held(None, what), "simulated", f"{small()}, {way} × 2")


def speedup(link: str, world_size: int = 8) -> Finding:
    """How many times as many tokens a second N GPUs read, if no sending is hidden; Llama 3.1 8B on H100s.

    4 × 2,048 tokens a GPU, bf16, 40 % of the peak rate. `link`: "none" (sending takes no time), "NVLink" or "PCIe".
    """
    card, parameters, tokens = find_gpu("H100 SXM"), Recipe("llama-3.1-8b").shape.num_parameters, 4 * 2048
    rates = {"none": float("inf"), "NVLink": card.nvlink / 2, "PCIe": pcie_bandwidth(card.pcie)}
    compute = 6 * parameters * tokens / (0.4 * card.peak["bf16"])
    wait = bytes_sent("DDP", 2 * parameters, world_size) / rates[link]
    return Finding(
        world_size * compute / (compute + wait), "derived", f"{compute:.2f} s of computing, {wait:.2f} s of sending"
    )


def layers_dealt(world_size: int) -> Finding:
    """Whether each rank of a pipeline holds whole layers, some of them, and all ranks together each layer once."""
    ranks = [held("pipeline", "parameters", world_size, rank) for rank in range(world_size)]
    tied = 4 * small().shape.vocab_size * small().shape.hidden_size  # the first rank and the last have it
    said = f"{small()}: " + ", ".join(format_bytes(n, "MiB") for n in ranks)
    return Finding(sum(ranks) == psi() + tied and max(ranks) < psi(), "simulated", said)


def one_after_the_other(micro_batches: int, stages: int = 4) -> Finding:
    """Whether a pipeline's stages work one after the other, never two at a time."""
    waiting = bubble(pipeline_slots("gpipe", stages, micro_batches))
    return Finding(waiting >= (stages - 1) / stages - 1e-9, "derived", f"waiting {waiting:.0%} of the time")


def part_of_each_layer(part: str) -> Finding:
    """Whether a tensor-parallel rank holds half of each layer's "matrices", or of its "norms"."""
    shape = small().shape
    norms = 4 * (2 * shape.num_layers + 1) * shape.hidden_size
    matrices, whole = held("tensor", "parameters") - norms, psi() - norms
    found = matrices == whole // 2 if part == "matrices" else held("tensor", "parameters") == psi() // 2
    return Finding(found, "simulated", f"{small()}: {format_bytes(held('tensor', 'parameters'), 'MiB')} on each of two")


def like_both(side: str, way: str) -> Finding:
    """Whether ZeRO divides the "parameters" as model parallelism does, the "batch" as data parallelism does."""
    if side == "parameters":
        return Finding(held(way, "parameters") < psi(), "simulated", f"{small()}, {way} × 2")
    inputs = rank_of(way).phases["load"].end.inputs, rank_of("DDP").phases["load"].end.inputs
    return Finding(inputs[0] == inputs[1], "simulated", f"{small()}, {way} × 2: each rank reads rows of its own")


def cuts_the_work(way: str) -> Finding:
    """Whether a rank computes a part of each layer, or of the layers, only: activations of its rows fall."""
    kept = rank_of(way).phases["forward"].end.activations
    return Finding(kept < 0.9 * rank_of(None).phases["forward"].end.activations, "simulated", f"{small()}, {way} × 2")


def holds_a_part(way: str) -> Finding:
    """Whether a rank holds less than all parameters between steps."""
    return Finding(held(way, "parameters") < psi(), "simulated", f"{small()}, {way} × 2")


def fetched_when_needed(way: str) -> Finding:
    """Whether parameters are gathered in a step, and not held in full between steps."""
    gathered = sum(phase.get("all_gather", 0) for phase in sends(way).values())
    found = gathered >= psi() and held(way, "parameters") < psi()
    return Finding(found, "measured", f"{small()}, {way} × 2: {gathered / psi():.2f} Ψ gathered a step")


def synchronised(micro_batches: int, no_sync: bool) -> Finding:
    """How many Ψ DDP all-reduces for one update of several micro-batches; alone the `no_sync` loop is really run."""
    if not no_sync:
        return Finding(float(micro_batches), "derived", "an all-reduce in each backward pass")
    reduced = sends("DDP", micro_batches)["backward"]["all_reduce"] / psi()
    return Finding(reduced, "measured", f"{small(gradient_accumulation_steps=micro_batches)}, DDP × 2")


def larger_models(stage: int, world_size: int) -> Finding:
    """How many times as many parameters fit the same memory a GPU as with one GPU; model states by the paper."""
    ratio = largest_model(1.0, world_size, stage) / largest_model(1.0, world_size, 0)
    return Finding(ratio, "derived", f"stage {stage} on {world_size} GPUs: bytes a parameter, before and after")


def sent_in(way: str, phase: str, kind: str) -> Finding:
    """Ψ that a kind of collective carries in one phase of a step."""
    return Finding(sends(way)[phase].get(kind, 0) / psi(), "measured", f"{small()}, {way} × 2")


def states_travel(way: str) -> Finding:
    """Whether anything is sent that could be optimizer states: more than gradients and parameters once each."""
    sent = sum(size for phase in sends(way).values() for size in phase.values())
    return Finding(sent > 2.01 * psi(), "measured", f"{small()}, {way} × 2: {sent / psi():.2f} Ψ in all")


def steps_in_backward(way: str) -> Finding:
    """Whether updated parameters go out during the backward pass."""
    return Finding("broadcast" in sends(way)["backward"], "measured", f"{small()}, {way} × 2")


def peak_falls(way: str, below: str) -> Finding:
    """Whether a way's peak in the backward pass is lower than another's."""
    ours, others = (rank_of(name).phases["backward"].peak.total for name in (way, below))
    said = f"{small()} × 2: {format_bytes(ours, 'MiB')} against {format_bytes(others, 'MiB')}"
    return Finding(ours < others, "simulated", said)


def wrapper_exists(name: str) -> Finding:
    """Whether torch.distributed.fsdp has it."""
    import torch
    import torch.distributed.fsdp as fsdp

    return Finding(hasattr(fsdp, name), "measured", f"torch.distributed.fsdp.{name}, torch {torch.__version__}")


def optimizer_reaches(made: str) -> Finding:
    """Whether a step of an optimizer made "before" or "after" `fully_shard` changes the model's parameters."""
    import torch
    from torch.distributed.fsdp import fully_shard

    from ..world import one_rank_of

    with one_rank_of(Sharding(3, 1)), torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        early = torch.optim.SGD(model.parameters(), lr=1.0)
        fully_shard(model)
        optimizer = early if made == "before" else torch.optim.SGD(model.parameters(), lr=1.0)
        before = model.weight.to_local().clone()
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        moved = not torch.equal(before, model.weight.to_local())
    return Finding(moved, "measured", "nn.Linear(8, 8) under fully_shard, SGD")


def gathered_at_once(wrapping: str) -> Finding:
    """Linear layers, of a hundred, that are gathered by one all-gather."""
    calls, size = hundred(wrapping)["collectives"]["all_gather"]
    return Finding(
        size / calls / (256 * 256 * 4), "measured", f"{wrapping}: {calls} all-gathers of {size / MiB:.0f} MiB"
    )


def saves_nothing(wrapping: str, what: str) -> Finding:
    """Whether sharding a hundred layers saves nothing of the gathered "parameters", or of the whole "peak"."""
    found, whole = hundred(wrapping), 100 * 256 * 256 * 4
    if what == "parameters":
        return Finding(
            found["gathered"] >= whole, "measured", f"{found['gathered'] / MiB:.1f} MiB at a time of {whole / MiB:.0f}"
        )
    return Finding(
        found["peak"] >= 4 * whole, "measured", f"peak {found['peak'] / MiB:.1f} MiB; unsharded 16 bytes a parameter"
    )
