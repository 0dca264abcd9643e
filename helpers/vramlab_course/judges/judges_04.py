"""Judges of chapter 04's blanks and exercises.

They say what readers' pieces do, on real ranks where they send anything.
"""

import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from ..answers import BrokenPiece
from ..chapters.chapter_04 import RankFailed, on_ranks
from ..collectives import Collectives
from .judges_07 import judged

NUMBERS = 12  # weights of the blanks' tiny models
# The Trainer makes units of embedding and head, and the chapter's simulation does not.
SPARE_UNITS = (
    " Four units would do, and these are {}: your bytes will differ from section 3's text."
)
# What autograd says of a Function's backward, and what is meant.
SAID_OF_BACKWARD = {
    "incorrect number of gradients": (
        "backward has to return two gradients, one for each argument of forward: x and shard."
    ),
    "invalid gradient at index 0": (
        "The gradient of x has to have the shape of x: it is gradient @ weight, with all rows of "
        "the weight."
    ),
    "invalid gradient at index 1": (
        "The shard's gradient has to have the shape of the shard. Of gradient.T @ x, which is as "
        "large as the whole weight, a rank gets its own rows."
    ),
}


def _on_two(work: Callable[[int, int], Any]) -> list[Any]:
    """What `work` returns on two ranks; raises BrokenPiece where it fails on one."""
    try:
        return on_ranks(work, seconds=20)
    except RankFailed as error:
        text = str(error)
        known = [means for said, means in SAID_OF_BACKWARD.items() if said in text]
        own = text.partition("BrokenPiece: ")[2]
        raw = f"On a rank your piece fails with {text.removesuffix('.')}."
        raise BrokenPiece(own or "".join(known) or raw) from None


def sent(counting: Collectives, numbers: int) -> float:
    """What a ring carries of the counted collectives, in units of `numbers` fp32 numbers.

    An all-reduce counts twice.
    """
    return sum(2 * seen.sent for seen in counting.seen.values()) / (
        4 * numbers
    )  # two ranks: a ring sends half


def _must_be_function(answer: Any) -> None:
    if not callable(answer):
        raise BrokenPiece("A function was expected.")


def updated(answer: Callable) -> SimpleNamespace:
    """What `zero_1` does in two updates by SGD, on two ranks of different gradients.

    SGD tells a mean from a sum.
    """

    _must_be_function(answer)

    def work(rank: int, world: int) -> tuple[Any, float, int]:
        weights = torch.arange(float(NUMBERS))
        shard = weights.chunk(world)[rank].clone()
        optimizer = torch.optim.SGD([shard], lr=1.0)
        steps = []
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
        for step in (1, 2):
            # Rank 0 has 1 and 2, rank 1 has 3 and 4: the means are 2 and 3, the sums 4 and 6.
            gradients = torch.full((NUMBERS,), float(step + 2 * rank))
            with Collectives() as counting:
                weights = answer(gradients, shard, optimizer)
        return weights, sent(counting, NUMBERS), len(steps)

    (first, numbers, steps), (second, *_) = _on_two(work)
    wanted = torch.arange(float(NUMBERS)) - 5  # the means are 2 and 3
    before = torch.arange(float(NUMBERS)) - 2  # those of the second update
    summed = torch.arange(float(NUMBERS)) - 7  # 2, then 2 + 3: the old gradient was kept
    own = [torch.arange(float(NUMBERS)).chunk(2)[rank] for rank in range(2)]
    return SimpleNamespace(
        first=first,
        kind=type(first).__name__,
        length=len(first) if hasattr(first, "__len__") else 0,
        same=lambda: bool(torch.equal(first, second)),
        # The ranks that did not update their own shard, whatever they did with the others'.
        idle=lambda: [
            rank
            for rank, row in enumerate((first, second))
            if torch.equal(row.chunk(2)[rank], own[rank])
        ],
        right=lambda: bool(torch.allclose(first, wanted)),
        stale=lambda: bool(torch.allclose(first, before)),
        added_up=lambda: bool(torch.allclose(first, summed)),
        steps=steps,
        sent=round(numbers, 2),
    )


def gathered(answer: Any) -> SimpleNamespace:
    """What the layer of shards does on two ranks with different rows, beside a whole one."""
    if not (isinstance(answer, type) and issubclass(answer, torch.autograd.Function)):
        raise BrokenPiece("A class was expected, a torch.autograd.Function.")
    torch.manual_seed(0)
    weight = torch.randn(6, 4)
    x = torch.randn(2, 5, 4)
    slope = torch.randn(2, 5, 6)

    def work(rank: int, world: int) -> dict[str, Any]:
        shard = weight.chunk(world)[rank].clone().requires_grad_()
        rows = x[rank].clone().requires_grad_()
        with Collectives() as counting:
            output = answer.apply(rows, shard)
            # What the context saved, by its method or as an attribute.
            kept = [*output.grad_fn.saved_tensors, *vars(output.grad_fn).values()]
            output.backward(slope[rank])
        return {
            "output": output.detach(),
            "kept": sum(one.numel() for one in kept if isinstance(one, torch.Tensor))
            - rows.numel(),
            "input": rows.grad,
            "shard": shard.grad,
            "sent": sent(counting, weight.numel()),
        }

    on_both = _on_two(work)
    mean = torch.einsum("nro,nri->oi", slope, x) / 2
    return SimpleNamespace(
        output=all(
            torch.allclose(one["output"], x[rank] @ weight.T, atol=1e-6)
            for rank, one in enumerate(on_both)
        ),
        kept=on_both[0]["kept"],
        input=all(
            torch.allclose(one["input"], slope[rank] @ weight, atol=1e-6)
            for rank, one in enumerate(on_both)
        ),
        shard=all(
            torch.allclose(one["shard"], mean.chunk(2)[rank], atol=1e-6)
            for rank, one in enumerate(on_both)
        ),
        sent=round(on_both[0]["sent"], 2),
    )


def tiny_llama() -> torch.nn.Module:
    """A Llama of three layers with random weights, the same on all ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))


def units(answer: Callable) -> SimpleNamespace:
    """How `sharded` cuts a Llama of three layers on two ranks.

    It says its units, and the parameters that it leaves whole.
    """
    _must_be_function(answer)
    model = tiny_llama()

    def work(rank: int, world: int) -> dict[str, Any]:
        # A blank's check is given the piece with its errors as BrokenPiece.
        try:
            returned = answer(model, init_device_mesh("cpu", (world,)))
        except BrokenPiece as error:
            # FSDP's own sentence for a module whose parameters another unit has already.
            if "Invariant encountered" not in str(error):
                raise
            return {"model_first": True}
        groups = {}
        for name, module in model.named_modules():
            # A unit whose parameters all went to units inside it has no group.
            group = (
                module._get_fsdp_state()._fsdp_param_group
                if isinstance(module, FSDPModule)
                else None
            )
            if group:
                # Several modules given in one call share a group, which is one unit.
                groups[name] = (id(group), group._reshard_after_forward)
        # A sharded parameter is a DTensor, which alone has `full_tensor`.
        whole = [name for name, p in model.named_parameters() if not hasattr(p, "full_tensor")]
        return {"model": returned is model, "groups": groups, "whole": whole}

    on_first = _on_two(work)[0]
    if "model_first" in on_first:
        return SimpleNamespace(model_first=True)
    groups = on_first["groups"]
    layers = [groups.get(f"model.layers.{i}") for i in range(3)]
    count = len(set(groups.values()))
    return SimpleNamespace(
        model_first=False,
        model=on_first["model"],
        whole=on_first["whole"],
        layers=None not in layers,
        apart=len(set(layers)) == len(layers),
        frees=all(layer[1] for layer in layers if layer),
        inside=[name for name in groups if re.match(r"model\.layers\.\d+\.", name)],
        more=SPARE_UNITS.format(count) if count > 4 else "",
    )


def _learns(answer: Callable) -> str | None:
    """Whether `answer(model, mesh)` returns a sharded model and an optimizer for it.

    The optimizer has to change the model's shards and keep no others.
    """
    model = tiny_llama()
    whole = sum(p.numel() for p in model.parameters())

    def work(rank: int, world: int) -> Any:
        returned = answer(model, init_device_mesh("cpu", (world,)))
        if returned is None or returned is ...:
            return None
        _, optimizer = returned
        before = [p.to_local().clone() for p in model.parameters()]
        # Other tokens on each rank.
        rows = torch.arange(16).reshape(2, 8) + rank
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        moved = any(
            not torch.equal(p.to_local(), old)
            for p, old in zip(model.parameters(), before, strict=True)
        )
        given = {id(p) for group in optimizer.param_groups for p in group["params"]}
        missing = [name for name, p in model.named_parameters() if id(p) not in given]
        # States of a DTensor are DTensors, of which this rank's part counts.
        held = [
            getattr(value, "_local_tensor", value)
            for state in optimizer.state.values()
            for value in state.values()
        ]
        units_of = sum(isinstance(module, FSDPModule) for module in model.modules())
        states = sum(tensor.numel() for tensor in held if tensor.dim())
        return moved, missing, states, units_of

    on_both = on_ranks(work, seconds=20)
    if any(one is None for one in on_both):
        return None
    moved, missing, states, count = on_both[0]
    if not moved:
        return "The step changes none of the model's shards."
    if missing:
        return (
            f"Part of the model learns. The optimizer lacks {len(missing)} of its parameters, "
            f"{missing[0]} first: when it was made, the model had others in their place."
        )
    # Two states a weight, half of them on each of two ranks, and some room for padding.
    if states > 2 * whole * 0.6:
        return f"A rank keeps {states:,} numbers of states, of {2 * whole:,}: half was expected."
    # Three layers and the rest.
    if count < 4:
        return "Each layer should stay a unit of its own."
    return ""


def wrong_order(model: torch.nn.Module, mesh: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The run that is to be repaired: it makes the optimizer first."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return right_order(model, mesh)[0], optimizer


def too_early(model: torch.nn.Module, mesh: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Makes the optimizer after the layers, and before what is left: embedding, norm and head."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fully_shard(model, mesh=mesh)
    return model, optimizer


def right_order(model: torch.nn.Module, mesh: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Shards first."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def one_unit(model: torch.nn.Module, mesh: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """It learns, and gathers everything at once."""
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _averaged(answer: Callable) -> str | None:
    torch.manual_seed(0)
    # The gradient of a mean over no tokens: 0 by cross_entropy, nan by a masked sum over its count.
    of_nothing = {(5, 0, 3): 0.0, (0, 6, 2): math.nan}
    # Equal, unequal and very unequal numbers of tokens, and ranks without any.
    for counts in ((10, 10), (10, 30), (7, 1, 40), *of_nothing):
        weight = torch.randn(3, requires_grad=True)
        rows = [torch.randn(count, 3) for count in counts]
        gradients = [
            torch.autograd.grad((row @ weight).square().mean(), weight)[0]
            if len(row)
            else torch.full((3,), of_nothing[counts])
            for row in rows
        ]
        # One process with all rows.
        (wanted,) = torch.autograd.grad((torch.cat(rows) @ weight).square().mean(), weight)
        returned = answer([gradient.clone() for gradient in gradients], list(counts))
        if returned is None or returned is ...:
            return None
        if isinstance(returned, torch.Tensor) and returned.isnan().any():
            return f"With {counts} tokens on the ranks it is nan: 0 times nan is nan."
        if not torch.allclose(returned, wanted, atol=1e-5):
            return (
                f"With {counts} tokens on the ranks it is not the gradient of the mean over "
                f"all tokens."
            )
    return ""


learns_judged = judged(
    _learns,
    "fully_shard gives the model other parameters, and the optimizer has to see those.",
)
averaged_judged = judged(_averaged, "every token counts the same, wherever it was read.")
