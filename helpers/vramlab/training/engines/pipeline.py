"""Pipeline parallel (Huang et al. 2019; Narayanan et al. 2021): each rank holds some of the layers.

`torch.distributed.pipelining` runs it: a `PipelineStage` on each rank, and `ScheduleGPipe` or
`Schedule1F1B`, which cut the batch into `sharding.micro_batches` parts and send hidden states on
and their gradients back. The first stage has the embeddings, the last one the final norm, the head
and the loss. Both hold a weight that embeddings and head share, and sum its gradient before the
update, as Megatron-LM does.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from ...private.of_distributed import static_inference
from ...private.of_torch import submodules_of
from ...private.patched import plain, replaced
from ...recipe.recipe import Recipe
from ..engine import Model, ShardedEngine, Training, autocast
from ..models import real_tensors
from ..process_group import is_fake_group

NORMS = ("norm", "final_layernorm", "final_layer_norm")  # names of the final norm


class Pipeline(ShardedEngine):
    """One stage on each rank."""

    is_first: bool
    is_last: bool
    stage: "Stage"
    schedule: Any
    until_waited: bool  # how long what is sent is held: `sends_held`
    ends: Any  # the group of the first and the last rank

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.shared: Any = None  # the weight that the first and the last stage both hold

    def wrap(self, model: Model) -> Model:
        """Return `model` with this rank's layers only."""
        rank = dist.get_rank()
        stages = dist.get_world_size()
        self.is_first = rank == 0
        self.is_last = rank == stages - 1
        embedding = model.get_input_embeddings()
        head = model.get_output_embeddings()
        if embedding.weight is head.weight and stages > 1:
            with real_tensors():
                self.ends = dist.new_group([0, stages - 1])
            self.shared = embedding.weight if self.is_first or self.is_last else None
        keep_stage(model, rank, stages)
        return model

    def start(self, training: Training) -> None:
        """Make the stage and its schedule."""
        micro_batches = self.sharding.micro_batches
        loss_of = training.model.loss_function
        vocab_size = training.model.config.vocab_size
        parts = micro_batches * training.accumulation

        def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            """Return the model's loss, as a part of the mean over the whole batch."""
            return loss_of(logits=logits, labels=labels, vocab_size=vocab_size) / parts

        self.stage = self._stage(training, self.recipe.batch_size // micro_batches)
        kind = ScheduleGPipe if self.sharding.schedule == "gpipe" else Schedule1F1B
        self.schedule = kind(self.stage, micro_batches, loss_fn=loss, scale_grads=False)
        self.until_waited = training.device.type == "cuda"

    def _stage(self, training: Training, samples: int) -> "Stage":
        """Return this rank's stage; what it takes and gives is described by meta tensors.

        So torch infers nothing. The last stage's outputs are sent nowhere: any description will do.
        """
        shape = (samples, self.recipe.seq_len)
        matrices = (each for each in training.model.parameters() if each.dim() > 1)
        dtype = next(matrices).dtype
        with real_tensors():
            ids = torch.empty(shape, dtype=torch.int64, device="meta")
            hidden = torch.empty(
                *shape,
                self.recipe.shape.hidden_size,
                dtype=dtype,
                device="meta",
                requires_grad=True,
            )
        return Stage(
            Part(training, self.is_first, self.is_last),
            dist.get_rank(),
            dist.get_world_size(),
            training.device,
            input_args=ids if self.is_first else hidden,
            output_args=hidden,
        )

    def run_micro_batches(self, training: Training, on_phase: Callable[[str], None]) -> bool:
        """Run the schedule once for each accumulated batch.

        `training.loss` is None but on the last rank.
        """
        batches = [training.batch, *training.further]
        losses: list[torch.Tensor] = []
        self.stage.on_phase = on_phase
        # the first backward pass is somewhere in the schedule
        if training.loop.zero_grad == "before_backward":
            self.zero_grad(training)
        for step in range(training.accumulation):
            losses += self._run_schedule(training, batches[step % len(batches)])
        training.loss = torch.stack(losses).sum() if losses else None
        if self.shared is not None:
            dist.all_reduce(self.shared.grad, group=self.ends)
        return True

    def _run_schedule(self, training: Training, batch: Any) -> list[torch.Tensor]:
        """Run the schedule on one batch, and return its parts' losses."""
        inputs = (batch["input_ids"],) if self.is_first else ()
        losses: list[torch.Tensor] = []
        with sends_held(self.until_waited) if is_fake_group() else contextlib.nullcontext():
            training.outputs = self.schedule.step(
                *inputs,
                target=batch["labels"] if self.is_last else None,
                losses=losses,
                return_outputs=training.loop.keep_outputs in ("step", True),
            )
        return [loss.detach() for loss in losses]

    @contextlib.contextmanager
    def follow(self, training: Training, tracker: Any) -> Iterator[None]:
        """Claim the buffers that the stage receives into, which stay from step to step."""
        self.until_waited = tracker.round_to > 1 or tracker.device == "cuda"
        yield
        received = [*self.stage.args_recv_info.values(), *self.stage.grad_recv_info.values()]
        buffers = []
        for infos in received:
            buffers += [getattr(info, "buffer", None) for info in infos]
        # the first stage's has none
        tracker.claim(filter(torch.is_tensor, buffers), "workspace")

    def clip(self, training: Training, norm: float) -> None:
        """Clip by the norm over all stages, in which the shared weight counts once."""
        parameters = list(training.model.parameters())
        gradients = []
        for parameter in parameters:
            is_counted_here = self.is_first or parameter is not self.shared
            if parameter.grad is not None and is_counted_here:
                gradients.append(parameter.grad)
        foreach = training.multi_tensor
        total = torch.nn.utils.get_total_norm(gradients, foreach=foreach) ** 2
        dist.all_reduce(total)
        torch.nn.utils.clip_grads_with_norm_(parameters, norm, total**0.5, foreach=foreach)


def keep_stage(model: Model, rank: int, stages: int) -> None:
    """Remove from `model` what is not of stage `rank` of `stages`. Names of parameters stay."""
    decoder = model.get_decoder()
    depth = len(decoder.layers)
    # the first stages have one more
    mine = np.array_split(range(depth), stages)[rank]
    for i in range(depth):
        if i not in mine:
            del submodules_of(decoder.layers)[str(i)]
    kinds = getattr(decoder.config, "layer_types", None)
    if kinds:
        decoder.config.layer_types = [kinds[i] for i in mine]
    if rank > 0:
        decoder.set_input_embeddings(None)
    if rank < stages - 1:
        model.set_output_embeddings(None)
        norm = next(name for name in NORMS if hasattr(decoder, name))
        setattr(decoder, norm, torch.nn.Identity())


class Part(torch.nn.Module):
    """A stage's module.

    It takes token ids (first) or hidden states, and gives hidden states or (last) logits.
    """

    def __init__(self, training: Training, first: bool, last: bool) -> None:
        super().__init__()
        self.model = training.model if last else training.model.get_decoder()
        self.given = "input_ids" if first else "inputs_embeds"
        self.gives = "logits" if last else "last_hidden_state"
        self.device_type = training.device.type
        self.precision = training.precision

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Run the stage's layers under autocast."""
        with autocast(self.device_type, self.precision):
            outputs = self.model(**{self.given: inputs}, use_cache=False)
        return outputs[self.gives]


class Stage(PipelineStage):
    """A stage that calls `on_phase` when a chunk's forward or backward pass begins."""

    on_phase: Callable[[str], None]

    @property
    def _inference_mode(self) -> Any:
        """That of a stage which is described, so that ranks need not vote."""
        return static_inference()

    @_inference_mode.setter
    def _inference_mode(self, voted: Any) -> None:
        # in a fake group no vote comes (torch 2.11 has none)
        pass

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Run a chunk's forward pass."""
        self.on_phase("forward")
        return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Run a chunk's backward pass."""
        self.on_phase("backward")
        return super().backward_one_chunk(*args, **kwargs)

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """Skip torch 2.11's check of the last stage's outputs.

        They are sent nowhere and have no description.
        """
        if not self.is_last:
            super()._validate_fwd_outputs(outputs)  # type: ignore[misc]


@contextlib.contextmanager
def sends_held(until_waited: bool) -> Iterator[None]:
    """Keep what is sent alive as real ranks do; a fake group's transfers hold nothing.

    That is as long as the transfer lives, as gloo's works do, or until it is waited for, as NCCL's.
    """
    send = plain(dist, "isend")

    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> SimpleNamespace:
        work = send(tensor, *args, **kwargs)
        kept = [tensor]

        def wait() -> None:
            work.wait()
            if until_waited:
                kept.clear()

        return SimpleNamespace(wait=wait, kept=kept)

    # P2POp compares with the one, schedules with the other
    with replaced((dist, dist.distributed_c10d), "isend", isend):
        yield
