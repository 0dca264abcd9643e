"""One stage of a pipeline, cut from a causal model of transformers."""

import contextlib
from collections.abc import Callable, Iterator
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from ...recipe.parallel_limits import stage_layers
from ..engine import Training, autocast
from ..models import real_tensors

NORMS = ("norm", "final_layernorm", "final_layer_norm")  # names of the final norm


def keep_stage(model: torch.nn.Module, rank: int, stages: int) -> None:
    """Remove from `model` what is not of stage `rank` of `stages`. Names of parameters stay."""
    decoder, embedding, head = model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()
    mine = stage_layers(len(decoder.layers), stages)[rank]
    for i in range(len(decoder.layers)):
        if i not in mine:
            del decoder.layers._modules[str(i)]
    if kinds := getattr(decoder.config, "layer_types", None):
        decoder.config.layer_types = [kinds[i] for i in mine]
    if rank > 0:
        _take(decoder, embedding)
    if rank < stages - 1:
        _take(model, head)
        norm = next(name for name in NORMS if hasattr(decoder, name))
        setattr(decoder, norm, torch.nn.Identity())


def _take(owner: torch.nn.Module, part: torch.nn.Module) -> None:
    setattr(owner, next(name for name, module in owner.named_children() if module is part), None)


class Part(torch.nn.Module):
    """A stage's module: token ids (first) or hidden states to hidden states, or to logits (last)."""

    def __init__(self, training: Training, first: bool, last: bool):
        super().__init__()
        self.model = training.model if last else training.model.get_decoder()
        self.given = "input_ids" if first else "inputs_embeds"
        self.gives = "logits" if last else "last_hidden_state"
        self.device_type, self.precision = training.device.type, training.precision

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with autocast(self.device_type, self.precision):
            return self.model(**{self.given: inputs}, use_cache=False)[self.gives]


class Stage(PipelineStage):
    """A stage that calls `on_phase` when a chunk's forward or backward pass begins."""

    on_phase: Callable[[str], None]

    def forward_one_chunk(self, *args, **kwargs):
        self.on_phase("forward")
        return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args, **kwargs):
        self.on_phase("backward")
        return super().backward_one_chunk(*args, **kwargs)

    def _validate_fwd_outputs(self, outputs):
        """Skip torch 2.11's check of the last stage's outputs, which are sent nowhere and have no description."""
        if not self.is_last:
            super()._validate_fwd_outputs(outputs)


def make_stage(training: Training, rank: int, stages: int, shape: tuple[int, int, int]) -> Stage:
    """The stage of this rank; hidden states have `shape` (samples, tokens, channels), so that torch infers nothing."""
    weight = next(p for p in training.model.parameters() if p.dim() > 1)
    with real_tensors():
        ids = torch.empty(shape[:2], dtype=torch.int64, device="meta")
        hidden = torch.empty(shape, dtype=weight.dtype, device="meta", requires_grad=True)
    part = Part(training, first=rank == 0, last=rank == stages - 1)
    # the last stage's outputs are sent nowhere, so any description will do
    return Stage(part, rank, stages, training.device, input_args=hidden if rank else ids, output_args=hidden)


def force_static_shapes(schedule: PipelineScheduleSingle) -> None:
    """Force static shape inference, on which real ranks vote; a fake group cannot vote. Torch 2.11 has no vote."""
    if not hasattr(schedule, "_warmup_p2p"):
        return
    from torch.distributed.pipelining._utils import InferenceMode

    vote, stage = schedule._warmup_p2p, schedule._stage

    def warm_up(*args) -> None:
        vote(*args)
        stage._inference_mode = InferenceMode.STATIC

    schedule._warmup_p2p = warm_up


class _Sent:
    """A transfer that holds what it sends: as long as it lives, as gloo's works do, or until waited for, as NCCL's."""

    def __init__(self, work: dist.Work, tensor: torch.Tensor, until_waited: bool):
        self.work, self.tensor, self.until_waited = work, tensor, until_waited

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        if self.until_waited:
            self.tensor = None


@contextlib.contextmanager
def sends_held(until_waited: bool) -> Iterator[None]:
    """Keep what is sent alive as real ranks do; a fake group's transfers hold nothing."""
    plain = dist.isend

    def isend(tensor, *args, **kwargs):
        return _Sent(plain(tensor, *args, **kwargs), tensor, until_waited)

    # P2POp compares with the one, schedules with the other
    with patch.object(dist, "isend", isend), patch.object(dist.distributed_c10d, "isend", isend):
        yield
