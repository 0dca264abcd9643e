"""What chapter 09's cells share.

That is the base model's stages, sequence parallelism's part of a plan, a small mixture of experts,
and each of them in one process, to compare with; and what each cut costs one of eight H100s.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from vramlab import Recipe, Sharding, simulate
from vramlab.report.report import Bytes

from ..base_model import load_base_model

HIDDEN = 32  # numbers of a token in the mixture
VISITS = 2  # experts of each token
# With checkpointing a weight takes 8 operations a token: 2 forward, 2 again and 4 backward.
FORWARD = 2 / 8  # of a step's computing


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


@dataclass(frozen=True)
class Way:
    """What one way of cutting a run costs a rank, in a pass.

    Attributes:
        peak: its bytes by category.
        sent: bytes that it sends in the forward pass, and in the backward pass.
        computing: seconds that it computes in both.
        hides: whether it can send while it computes.
        idle: the part of the time that a pipeline's stage waits for another.
    """

    peak: Bytes
    sent: tuple[float, float]
    computing: float
    hides: bool = True
    idle: float = 0

    def phases(self) -> list[tuple[float, float]]:
        """Return the bytes of each of the two passes, and the seconds that can hide them."""
        computing = self.computing if self.hides else 0.0
        seconds = (FORWARD * computing, (1 - FORWARD) * computing)
        return list(zip(self.sent, seconds, strict=True))

    def times(self, bandwidth: float) -> float:
        """Return how many times its computing a pass takes over a link of so many bytes/s."""
        waits = sum(max(0, sent / bandwidth - seconds) for sent, seconds in self.phases())
        return 1 / (1 - self.idle) + waits / self.computing

    def hidden_from(self) -> float:
        """Return the bytes/s of a link over which nothing is waited for; infinite without one."""
        if not self.hides:
            return inf
        return max(sent / seconds for sent, seconds in self.phases())


def ways_of_eight(
    base: Recipe,
    peaks: Mapping[str, Bytes],
    rate: float,
    bubbles: tuple[float, float],
) -> dict[str, Way]:
    """Return what each way to cut costs one of eight H100s in a pass, by name.

    Args:
        base: eight samples in a pass, with checkpointing.
        peaks: a rank's under FSDP, tensor and pipeline parallelism, by names of the chapter's.
        rate: operations per second.
        bubbles: the pipeline's, with 8 and with 32 micro-batches.
    """
    shape = base.shape
    weights = shape.num_parameters
    tokens = base.batch_size * base.seq_len
    # 2 forward, 2 again and 4 backward; without attention, since samples are short.
    computing = 8 * weights * tokens / 8 / rate
    passed = 7 / 8  # of a tensor, by a ring of eight ranks; a sum passes it twice
    shard = passed * 2 * weights  # bytes, to gather the weights or to sum gradients, in 16 bits
    activations = 2 * tokens * shape.hidden_size
    layers = shape.num_layers
    # The paper's two forward and two backward, and the first of the repeated forward pass: torch
    # ends the repetition where nothing more is needed, which is before the second.
    sums = 5 * layers * 2 * passed * activations
    # Keys and values, in 16 bits: round once, round again, and back with their gradients.
    width = shape.num_kv_heads / shape.num_heads  # of the keys, in parts of the hidden width
    keys = passed * layers * 2 * activations * width
    # Scores and their products with values, half of them behind the mask: forward, repeated, and
    # twice as much backward.
    attention = 4 * 4 * tokens**2 / 2 * shape.hidden_size * layers / 8 / rate
    four = base.replace(batch_size=4, sharding=Sharding(3, 8, "fsdp"))
    ring = base.replace(batch_size=1, seq_len=tokens, sharding=Sharding(3, 8, cp_size=8))
    gathers = (shard, 2 * shard)
    rings = (shard + keys, 2 * shard + 3 * keys)
    staged = peaks["pipeline, 8 in turn"]  # no more with 32: 1F1B holds eight at most
    few, many = bubbles
    return {
        "FSDP, 1 sample": Way(peaks["FSDP, 1 a rank"], gathers, computing),
        "FSDP, 4 samples": Way(simulate(four, gpu="H100").peak, gathers, 4 * computing),
        "tensor": Way(peaks["tensor, 8 in turn"], (0, sums), computing, hides=False),
        "pipeline": Way(staged, (activations, activations), computing, idle=few),
        "pipeline, 32 in turn": Way(staged, (4 * activations,) * 2, 4 * computing, idle=many),
        "context, FSDP": Way(simulate(ring, gpu="H100").peak, rings, computing + attention),
    }
