"""What chapter 09's cells share.

That is the base model's stages and layers, a small attention, a small mixture of experts, what
sends their tensors between ranks, and each of them in one process, to compare with; and at the end
what Answer.AI published of two cards (`data/elsewhere/answer_ai.json`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import ceil, inf
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

# Imported here, once, and not by each of the forked ranks: it takes a second.
from transformers import LlamaForCausalLM
from vramlab import LoRA, Recipe, Sharding, predict
from vramlab.report.report import GiB

from ..base_model import load_base_model
from ..collectives import Collectives
from ..published import json_of
from . import pipe

HIDDEN = 32  # numbers of a token in the mixture
VISITS = 2  # experts of each token
TOKENS = 64  # of each rank in the mixture, and of the sample that the ring cuts
# What FSDP gathers of Llama-2 7B in a pass: the layers. In 16 bits, or in 4.
LAYERS = 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096)
BYTES = {"lora": 2, "qlora": 0.5}


class Stage(pipe.Stage):
    """This rank's layers of the base model, as one module that reaches the stages next to it."""

    def __init__(self, rank: int, world: int):
        whole: LlamaForCausalLM = load_base_model()
        super().__init__(whole, world * [len(whole.model.layers) // world], rank)
        self.stages = range(world)
        self.sending: list[Any] = []

    def receive(self, source: int) -> torch.Tensor | None:
        """Return the activation, or its gradient, that a stage sends: one sample of 32 tokens.

        It is a leaf: autograd stops there and leaves the gradient in its `grad`. None: there is no
        such stage, so the last one's loss starts the backward pass by itself.
        """
        if source not in self.stages:
            return None
        activation = torch.empty(1, 32, 256)
        dist.recv(activation, source)
        return activation.requires_grad_()

    def send(self, numbers: torch.Tensor | None, target: int) -> None:
        """Send to a stage, if there is one, without waiting for it to take them."""
        if target in self.stages:
            self.sending.append(dist.isend(numbers, target))

    def gradient(self) -> float:
        """Wait until all is sent, and return `gradient_of` of its first layer."""
        for each in self.sending:
            each.wait()
        return gradient_of(self.base.layers[0])


def gradient_of(layer: torch.nn.Module) -> float:
    """Return the norm of the gradient of a layer's query matrix."""
    return layer.self_attn.q_proj.weight.grad.norm().item()


def base_model_alone() -> list[float]:
    """Return each layer's `gradient_of`, of four samples of 32 tokens at once."""
    model = load_base_model()
    ids = torch.arange(4 * 32).view(4, 32)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return [gradient_of(layer) for layer in model.model.layers]


class Layers(NamedTuple):
    """What the base model's layers gave on one rank.

    Attributes:
        output: of the last layer.
        sums: all-reduces of one layer, forward and backward together.
    """

    output: torch.Tensor
    sums: int


def run_layers(
    cut: Mapping[str, ParallelStyle] | None = None,
    world: int = 1,
) -> Layers:
    """Run the base model's layers forward and backward on two samples of 64 tokens.

    `cut` says how each layer is cut over `world` ranks; without it this rank has all of it.
    """
    model = load_base_model().model
    x = model.embed_tokens(torch.arange(2 * 64).view(2, 64)).detach()
    positions = model.rotary_emb(x, torch.arange(64)[None])
    if cut:
        mesh = init_device_mesh("cpu", (world,))
        for layer in model.layers:
            parallelize_module(layer, mesh, dict(cut))
    with Collectives() as counting:
        for layer in model.layers:
            x = layer(x, position_embeddings=positions)
        x.square().sum().backward()
    sums = counting.seen["all_reduce"].calls if cut else 0
    return Layers(x.detach(), sums // len(model.layers))


def whole_sample() -> torch.Tensor:
    """Return queries, keys and values of one sample: 3 × TOKENS × 16 numbers."""
    return torch.randn(3, TOKENS, 16, generator=torch.Generator().manual_seed(0))


def pass_on(mine: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """Send keys and values to the next rank, and return those of the rank before."""
    theirs = torch.empty_like(mine)
    sending = dist.isend(mine, (rank + 1) % world)
    dist.recv(theirs, (rank - 1) % world)
    sending.wait()
    return theirs


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention over these keys, and for each query the logarithm of its softmax's sum.

    `causal`: a query looks at the keys up to its own place only.
    """
    scores = q @ k.T / q.shape[1] ** 0.5
    if causal:
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -inf)
    return scores.softmax(1) @ v, scores.logsumexp(1)


@dataclass(frozen=True)
class Mixture:
    """A layer of experts, one a rank, with a router that is not trained.

    Attributes:
        weights: of each expert.
        tokens: of each rank.
        shares: of each token's two experts in its output.
        choice: their numbers.
        order: of each rank's visits, by expert; a token has as many visits as experts.
    """

    weights: torch.Tensor
    tokens: torch.Tensor
    shares: torch.Tensor
    choice: torch.Tensor
    order: torch.Tensor

    def visits(self, rank: int) -> tuple[torch.Tensor, list[int]]:
        """Return a token for each visit, in their order, and how many go to each expert's rank."""
        each = self.tokens[rank].repeat_interleave(VISITS, 0)
        counts = self.choice[rank].flatten().bincount(minlength=len(self.weights))
        return each[self.order[rank]], counts.tolist()

    def mixed(self, rank: int, results: torch.Tensor) -> torch.Tensor:
        """Return the rank's outputs of its visits' results, which come in their order."""
        by_token = torch.empty_like(results)
        by_token[self.order[rank]] = results
        each = by_token.view(TOKENS, VISITS, HIDDEN)
        return (each * self.shares[rank, ..., None]).sum(1)


def mixture(ranks: int) -> Mixture:
    """Return the mixture for that many ranks. Its router likes the first expert best."""
    torch.manual_seed(0)
    weights = torch.randn(ranks, HIDDEN, HIDDEN) / HIDDEN**0.5
    router = torch.randn(HIDDEN, ranks)
    router[:, 0] += 0.15
    tokens = torch.randn(ranks, TOKENS, HIDDEN) + 0.2
    preferences = (tokens @ router).softmax(-1)
    shares, choice = preferences.topk(VISITS)
    order = choice.flatten(1).argsort(stable=True)
    return Mixture(weights, tokens, shares, choice, order)


def mixture_alone(ranks: int) -> torch.Tensor:
    """Return the mixture's outputs, computed in one process."""
    layer = mixture(ranks)
    # r: ranks, t: tokens, k: a token's experts, h and w: numbers before and after
    chosen = layer.weights[layer.choice]
    return torch.einsum("rth,rtkhw,rtk->rtw", layer.tokens, chosen, layer.shares)


def travel(rows: torch.Tensor, leaving: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Send the first rows to rank 0, the next ones to rank 1 and so on, by an all-to-all.

    Return the rows that arrive, in the order of their ranks, and how many come from each rank.
    `leaving` has the number of rows for each rank.
    """
    counts = torch.tensor(leaving)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts)  # ranks tell each other how many rows to expect
    expected = arriving.tolist()
    there = rows.new_empty(sum(expected), rows.shape[1])
    dist.all_to_all_single(there, rows, expected, leaving)
    return there, expected


def lora_on_t4(sharding: Sharding | None) -> Any:
    """Predict a T4's memory for Qwen3 8B: 16-bit weights, LoRA, one sample of 1,024 tokens."""
    run = Recipe(
        "qwen3-8b",
        1,  # sample
        1024,  # tokens
        "fp16-mixed",
        "adamw_torch_fused",
        dtype="float16",
        lora=LoRA(r=16, target_modules="all-linear"),
        gradient_checkpointing=True,
        attn_implementation="sdpa_repeated",  # the T4's: chapter 10
        sharding=sharding,
    )
    return predict(run, gpu="T4", expandable_segments=True)


def row_of(name: str, report: Any) -> tuple:
    """Return a table's row of a prediction: GiB of weights, peak and upper end, and verdict."""
    sizes = (report.peak.parameters, report.peak.total, report.process.high)
    return (name, *(size / GiB for size in sizes), report.verdict)


@cache
def published() -> dict[tuple, dict[str, Any]]:
    """Return the published runs of Llama-2 7B with 2,048 tokens and nothing on the host.

    By card, method, sharding and samples a pass.
    """
    return {
        (run["gpu"], run["method"], run["sharding"], run["batch_size"]): run
        for run in json_of("elsewhere/answer_ai")["runs"]
        if run["model"] == "llama-2-7b" and run["tokens"] == 2048 and not run["offload"]
    }


class Step(NamedTuple):
    """One optimizer step of a published run: tokens of a rank, seconds, and those of computing."""

    tokens: int
    seconds: float
    computing: float

    @property
    def waiting(self) -> float:
        """Seconds that FSDP takes longer."""
        return self.seconds - self.computing


def seconds_of_step(run: Mapping[str, Any]) -> float:
    """Return the seconds of one step of two ranks; a batch that is not full is left out."""
    batch = run["batch_size"]
    return run["seconds"] / ceil((1024 - 1024 % batch) / 2 / batch)


def fsdp_step(gpu: str, method: str, batch: int) -> Step:
    """Return a step under FSDP. Computing takes as long a sample as without it, under DDP."""
    whole = seconds_of_step(published()[gpu, method, "fsdp", batch])
    uncut = {"lora": 4, "qlora": 8}[method]  # samples a pass
    alone = seconds_of_step(published()[gpu, method, "ddp", uncut]) / uncut
    return Step(2048 * batch, whole, alone * batch)


def gathered(method: str) -> float:
    """Return the bytes that each of two ranks gets in a pass over Llama-2 7B's layers."""
    return LAYERS * BYTES[method] / 2


class Ways(NamedTuple):
    """How many times its computing a step of two ranks takes, for the tokens of a rank.

    Attributes:
        token: seconds of computing a token, in samples of 2,048.
        link: bytes per second.
    """

    token: float
    link: float

    def unhidden(self, tokens: float, method: str = "lora") -> float:
        """Return it for FSDP that gathers for both passes while nothing is computed."""
        return 1 + 2 * gathered(method) / self.link / (tokens * self.token)

    def hidden(self, tokens: float) -> float:
        """Return it for FSDP of LoRA that sends and computes at the same time."""
        sending = (self.unhidden(tokens) - 1) / 2
        # With LoRA and checkpointing 2 of 6 operations are of the forward pass.
        return max(1 / 3, sending) + max(2 / 3, sending)

    def tensor(self, tokens: float) -> float:
        """Return it for tensor parallel, whose sums wait: five a layer with checkpointing."""
        # An all-reduce of two ranks sends as much as it adds up; the ranks share all tokens.
        sums = 5 * 32 * 2 * tokens * 2 * 4096
        return 1 + sums / self.link / (tokens * self.token)

    def pipeline(self, tokens: float) -> float:
        """Return it for two stages with as many micro-batches of one sample as there are samples.

        The ranks share all tokens; a sample's activations take 17 MB, so sending is left out.
        """
        return 1 + 2048 / (2 * tokens)
