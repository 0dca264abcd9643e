"""One stage of a pipeline, made by hand of a causal model from transformers: its layers, and what stands before or after."""

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from ...recipe.parallel_limits import stage_layers
from ..engine import Training, autocast
from ..models import real_tensors

NORMS = ("norm", "final_layernorm", "final_layer_norm")  # what the families of `cuts.FAMILIES` call it


def keep_stage(model: torch.nn.Module, rank: int, stages: int) -> None:
    """Take from `model` what is not of stage `rank` of `stages`. What stays keeps its name."""
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
    """Token ids (first stage) or hidden states to hidden states, or to logits (last stage)."""

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
    """A stage that says when a chunk's forward or backward pass begins, by `on_phase`."""

    on_phase: Callable[[str], None]

    def forward_one_chunk(self, *args, **kwargs):
        self.on_phase("forward")
        return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args, **kwargs):
        self.on_phase("backward")
        return super().backward_one_chunk(*args, **kwargs)

    def _validate_fwd_outputs(self, outputs):
        """Torch 2.11 compares outputs with their description here; the last stage's are sent nowhere and have none."""
        if not self.is_last:
            super()._validate_fwd_outputs(outputs)


def make_stage(training: Training, rank: int, stages: int, shape: tuple[int, int, int]) -> Stage:
    """The stage of this rank. `shape` is that of a micro-batch's hidden states: samples, tokens, channels.

    What passes between stages is told beforehand, so that nothing is run to find it out.
    """
    weight = next(p for p in training.model.parameters() if p.dim() > 1)
    with real_tensors():
        ids = torch.empty(shape[:2], dtype=torch.int64, device="meta")
        hidden = torch.empty(shape, dtype=weight.dtype, device="meta", requires_grad=True)
    part = Part(training, first=rank == 0, last=rank == stages - 1)
    # the last stage's outputs are sent nowhere, so any description will do
    return Stage(part, rank, stages, training.device, input_args=hidden if rank else ids, output_args=hidden)


def agree(schedule: PipelineScheduleSingle) -> None:
    """Let the stages' vote, whether all were told their shapes, come to what it comes to among real ranks.

    In a fake process group nobody answers. Up to torch 2.11 there is no vote.
    """
    if not hasattr(schedule, "_warmup_p2p"):
        return
    from torch.distributed.pipelining._utils import InferenceMode

    vote, stage = schedule._warmup_p2p, schedule._stage

    def warm_up(*args) -> None:
        vote(*args)
        stage._inference_mode = InferenceMode.STATIC

    schedule._warmup_p2p = warm_up


class _Sent:
    """A transfer that holds what it sends: to its own end, as gloo's works do, or until it was waited for, as NCCL's."""

    def __init__(self, work: dist.Work, tensor: torch.Tensor, until_waited: bool):
        self.work, self.tensor, self.until_waited = work, tensor, until_waited

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        if self.until_waited:
            self.tensor = None


@contextlib.contextmanager
def sends_held(until_waited: bool) -> Iterator[None]:
    """While entered, what is sent stays alive as it does among real ranks; a fake group's transfers hold nothing."""
    plain = dist.isend

    def isend(tensor, *args, **kwargs):
        return _Sent(plain(tensor, *args, **kwargs), tensor, until_waited)

    # P2POp compares with the one, schedules with the other
    dist.isend = dist.distributed_c10d.isend = isend
    try:
        yield
    finally:
        dist.isend = dist.distributed_c10d.isend = plain
