"""Pipeline parallel (Huang et al. 2019; Narayanan et al. 2021): each rank holds some of the layers.

`torch.distributed.pipelining` runs it: a `PipelineStage` on each rank, and `ScheduleGPipe` or `Schedule1F1B`, which cut the
batch into `sharding.micro_batches` parts and send hidden states on and their gradients back. The first stage has the
embeddings, the last one the final norm, the head and the loss. Both hold a weight that embeddings and head share, and sum
its gradient before the update, as Megatron-LM does.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, _utils

from ...recipe.recipe import Recipe
from ..engine import Engine, Training, autocast
from ..models import real_tensors
from ..patched import plain, replaced
from ..process_group import is_fake_group

NORMS = ("norm", "final_layernorm", "final_layer_norm")  # names of the final norm


class Pipeline(Engine):
    """One stage on each rank."""

    def __init__(self, recipe: Recipe):
        super().__init__(recipe)
        self.shared: Any = None  # the weight that the first and the last stage both hold

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        rank, stages = dist.get_rank(), dist.get_world_size()
        self.is_first, self.is_last = rank == 0, rank == stages - 1
        first, last = model.get_input_embeddings(), model.get_output_embeddings()
        if first.weight is last.weight and stages > 1:
            with real_tensors():
                self.ends = dist.new_group([0, stages - 1])  # the group of these two
            self.shared = first.weight if self.is_first or self.is_last else None
        keep_stage(model, rank, stages)
        return model

    def start(self, training: Training) -> None:
        recipe, micro_batches = self.recipe, self.recipe.sharding.micro_batches
        loss_of, size = training.model.loss_function, training.model.config.vocab_size
        parts = micro_batches * training.accumulation

        def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            """The model's loss, as a part of the mean over the whole batch."""
            return loss_of(logits=logits, labels=labels, vocab_size=size) / parts

        kind = ScheduleGPipe if recipe.sharding.schedule == "gpipe" else Schedule1F1B
        # described, so that torch infers nothing; the last stage's outputs are sent nowhere: any description will do
        shape = (recipe.batch_size // micro_batches, recipe.seq_len)
        dtype = next(p for p in training.model.parameters() if p.dim() > 1).dtype
        with real_tensors():
            ids = torch.empty(shape, dtype=torch.int64, device="meta")
            hidden = torch.empty(*shape, recipe.shape.hidden_size, dtype=dtype, device="meta", requires_grad=True)
        sizes = {"input_args": ids if self.is_first else hidden, "output_args": hidden}
        part = Part(training, self.is_first, self.is_last)
        self.stage = Stage(part, dist.get_rank(), dist.get_world_size(), training.device, **sizes)
        self.schedule = kind(self.stage, micro_batches, loss_fn=loss, scale_grads=False)
        self.until_waited = training.device.type == "cuda"

    def run_micro_batches(self, training: Training, on_phase: Callable[[str], None]) -> bool:
        """Run the schedule once for each accumulated batch. `training.loss` is None but on the last rank."""
        batches, found = [training.batch, *training.further], []
        self.stage.on_phase = on_phase
        if training.loop.zero_grad == "before_backward":  # the first backward pass is somewhere in the schedule
            self.zero_grad(training)
        for step in range(training.accumulation):
            batch, losses = batches[step % len(batches)], []
            with sends_held(self.until_waited) if is_fake_group() else contextlib.nullcontext():
                training.outputs = self.schedule.step(
                    *((batch["input_ids"],) if self.is_first else ()),
                    target=batch["labels"] if self.is_last else None,
                    losses=losses,
                    return_outputs=training.loop.keep_outputs in ("step", True),
                )
            found += [loss.detach() for loss in losses]
            del losses
        training.loss = torch.stack(found).sum() if found else None
        if self.shared is not None:
            dist.all_reduce(self.shared.grad, group=self.ends)
        return True

    @contextlib.contextmanager
    def follow(self, training: Training, tracker: Any) -> Iterator[None]:
        """Claim the buffers that the stage receives into, which stay from step to step."""
        self.until_waited = tracker.round_to > 1 or tracker.device == "cuda"
        yield
        received = [*self.stage.args_recv_info.values(), *self.stage.grad_recv_info.values()]
        buffers = [getattr(info, "buffer", None) for infos in received for info in infos]
        tracker.claim(filter(torch.is_tensor, buffers), "workspace")  # the first stage's has none

    def clip(self, training: Training, norm: float) -> None:
        """Clip by the norm over all stages, in which the shared weight counts once."""
        parameters = list(training.model.parameters())
        once = [p.grad for p in parameters if p.grad is not None and (self.is_first or p is not self.shared)]
        total = torch.nn.utils.get_total_norm(once, foreach=training.multi_tensor) ** 2
        dist.all_reduce(total)
        torch.nn.utils.clip_grads_with_norm_(parameters, norm, total**0.5, foreach=training.multi_tensor)


def keep_stage(model: torch.nn.Module, rank: int, stages: int) -> None:
    """Remove from `model` what is not of stage `rank` of `stages`. Names of parameters stay."""
    decoder = model.get_decoder()
    mine = np.array_split(range(len(decoder.layers)), stages)[rank]  # the first stages have one more
    for i in range(len(decoder.layers)):
        if i not in mine:
            del decoder.layers._modules[str(i)]
    if kinds := getattr(decoder.config, "layer_types", None):
        decoder.config.layer_types = [kinds[i] for i in mine]
    if rank > 0:
        decoder.set_input_embeddings(None)
    if rank < stages - 1:
        model.set_output_embeddings(None)
        norm = next(name for name in NORMS if hasattr(decoder, name))
        setattr(decoder, norm, torch.nn.Identity())


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
    # every rank describes what it takes and gives, and so votes for it; in a fake group no vote comes (torch 2.11 has none)
    _inference_mode = property(lambda stage: _utils.InferenceMode.STATIC, lambda stage, voted: None)

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


@contextlib.contextmanager
def sends_held(until_waited: bool) -> Iterator[None]:
    """Keep what is sent alive as real ranks do: as long as the transfer lives, as gloo's works do, or until it is waited
    for, as NCCL's; a fake group's transfers hold nothing."""
    send = plain(dist, "isend")

    def isend(tensor, *args, **kwargs):
        work, held = send(tensor, *args, **kwargs), [tensor]

        def wait() -> None:
            work.wait()
            if until_waited:
                held.clear()

        return SimpleNamespace(wait=wait, held=held)

    # P2POp compares with the one, schedules with the other
    with replaced((dist, dist.distributed_c10d), "isend", isend):
        yield
