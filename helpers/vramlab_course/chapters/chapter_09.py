"""What chapter 09's cells share.

That is the base model's stages, how a layer is cut, a small mixture of experts, and each of them in
one process, to compare with.
"""

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from ..base_model import load_base_model

HIDDEN = 32  # numbers of a token in the mixture
VISITS = 2  # experts of each token


def stage_of(rank: int, world: int) -> torch.nn.Module:
    """Return the base model with this rank's layers only; the last rank has the norm, too."""
    model = load_base_model()
    each = len(model.model.layers) // world
    model.model.layers = model.model.layers[rank * each : (rank + 1) * each]
    if rank < world - 1:
        model.model.norm = torch.nn.Identity()
    return model


def gradient_of(layer: torch.nn.Module) -> float:
    """Return the norm of the gradient of a layer's query matrix."""
    return layer.self_attn.q_proj.weight.grad.norm().item()


def base_model_alone() -> tuple[list[float], float]:
    """Return each layer's `gradient_of`, and the loss, of four samples of 32 tokens at once."""
    model = load_base_model()
    ids = torch.arange(4 * 32).view(4, 32)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return [gradient_of(layer) for layer in model.model.layers], loss.item()


def mixture(ranks: int) -> tuple[torch.Tensor, ...]:
    """Return the experts' weights, tokens, and for each token its experts' shares and numbers.

    There is an expert and 64 tokens for each rank. The router is random, and likes the first expert
    a little more.
    """
    torch.manual_seed(0)
    weights = torch.randn(ranks, HIDDEN, HIDDEN) / HIDDEN**0.5
    router = torch.randn(HIDDEN, ranks)
    router[:, 0] += 0.15
    tokens = torch.randn(ranks, 64, HIDDEN) + 0.2
    shares, choice = (tokens @ router).softmax(-1).topk(VISITS)
    return weights, tokens, shares, choice


def mixture_alone(ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mixture's outputs and its weights' gradients, computed in one process."""
    weights, tokens, shares, choice = mixture(ranks)
    weights.requires_grad_()
    # r: ranks, t: tokens, k: a token's experts, h and w: numbers before and after
    outputs = torch.einsum("rth,rtkhw,rtk->rtw", tokens, weights[choice], shares)
    outputs.square().sum().backward()
    return outputs.detach(), weights.grad


def cuts(by_tokens: bool) -> dict[str, ParallelStyle]:
    """Return how each module of a layer is cut, for `parallelize_module`.

    Queries, keys, values, gate and up are cut by columns, and the outputs of both blocks by rows.
    `by_tokens` adds sequence parallelism: what lies between the blocks is cut by tokens.
    """
    columns = [f"self_attn.{name}_proj" for name in "qkv"]
    columns += ["mlp.gate_proj", "mlp.up_proj"]
    cut: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    # Shard(1): each rank keeps some tokens.
    output = Shard(1) if by_tokens else Replicate()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        cut[name] = RowwiseParallel(output_layouts=output)
    if by_tokens:
        norm = SequenceParallel()
        cut["input_layernorm"] = norm
        cut["post_attention_layernorm"] = norm
        cut["self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        )
        cut["mlp"] = PrepareModuleInput(
            input_layouts=Shard(1),
            desired_input_layouts=Replicate(),
        )
    return cut
