"""What chapter 09's cells share.

That is the base model's stages, sequence parallelism's part of a plan, a small mixture of experts,
and each of them in one process, to compare with.
"""

from collections.abc import Mapping

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from ..base_model import load_base_model

HIDDEN = 32  # numbers of a token in the mixture
VISITS = 2  # experts of each token


class Stage(torch.nn.Module):
    """This rank's layers of the base model, as one module.

    The first rank takes tokens and embeds them, the last one has norm and head and gives logits.
    """

    def __init__(self, rank: int, world: int):
        super().__init__()
        whole = load_base_model()
        self.layers = whole.model
        each = len(self.layers.layers) // world
        self.layers.layers = self.layers.layers[rank * each : (rank + 1) * each]
        self.embedding = self.layers.embed_tokens if rank == 0 else torch.nn.Identity()
        self.head = whole.lm_head
        if rank < world - 1:
            self.layers.norm = torch.nn.Identity()
            self.head = torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the next rank takes, of tokens or of what the rank before gave."""
        passed = self.layers(inputs_embeds=self.embedding(x), use_cache=False)
        return self.head(passed.last_hidden_state)

    def gradient(self) -> float:
        """Return `gradient_of` of its first layer."""
        return gradient_of(self.layers.layers[0])


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of one sample's next tokens."""
    return torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])


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


def with_sequence(plan: Mapping[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Return the plan of a layer with sequence parallelism added.

    What lies between the blocks is then cut by tokens: each rank keeps some of them.
    """
    tokens = Shard(1)
    cut = dict(plan)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        cut[name] = RowwiseParallel(output_layouts=tokens)
    for name in ("input_layernorm", "post_attention_layernorm"):
        cut[name] = SequenceParallel()
    cut["self_attn"] = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": tokens},
        desired_input_kwarg_layouts={"hidden_states": Replicate()},
    )
    cut["mlp"] = PrepareModuleInput(
        input_layouts=tokens,
        desired_input_layouts=Replicate(),
    )
    return cut
