"""Pipeline parallel (Huang et al. 2019; Narayanan et al. 2021): each rank holds some of the layers.

`torch.distributed.pipelining` runs it: a `PipelineStage` on each rank, and `ScheduleGPipe` or `Schedule1F1B`, which cut the
batch into `sharding.micro_batches` parts and send hidden states on and their gradients back. The first stage has the
embeddings, the last one the final norm, the head and the loss. Both hold a weight that embeddings and head share, and sum
its gradient before the update, as Megatron-LM does.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from ...recipe.recipe import Recipe
from ..engine import Engine, Training
from ..models import real_tensors
from ..process_group import is_fake_group
from .stages import force_static_shapes, keep_stage, make_stage, sends_held


class Pipeline(Engine):
    """One stage on each rank."""

    def __init__(self, recipe: Recipe):
        super().__init__(recipe)
        self.stages = recipe.sharding.world_size
        self.shared: Any = None  # the weight that the first and the last stage both hold
        self.ends: Any = None  # the group of these two

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        self.rank = dist.get_rank()
        first, last = model.get_input_embeddings(), model.get_output_embeddings()
        if first.weight is last.weight and self.stages > 1:
            with real_tensors():
                self.ends = dist.new_group([0, self.stages - 1])
            self.shared = first.weight if self.rank in (0, self.stages - 1) else None
        keep_stage(model, self.rank, self.stages)
        return model

    def start(self, training: Training) -> None:
        recipe, micro_batches = self.recipe, self.recipe.sharding.micro_batches
        shape = (recipe.batch_size // micro_batches, recipe.seq_len, recipe.shape.hidden_size)
        loss_of, size = training.model.loss_function, training.model.config.vocab_size
        parts = micro_batches * training.accumulation

        def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            """The model's loss, as a part of the mean over the whole batch."""
            return loss_of(logits=logits, labels=labels, vocab_size=size) / parts

        kind = ScheduleGPipe if recipe.sharding.schedule == "gpipe" else Schedule1F1B
        self.stage = make_stage(training, self.rank, self.stages, shape)
        self.schedule = kind(self.stage, micro_batches, loss_fn=loss, scale_grads=False)
        self.until_waited = training.device.type == "cuda"
        if is_fake_group():
            force_static_shapes(self.schedule)

    def run_micro_batches(self, training: Training, on_phase: Callable[[str], None]) -> bool:
        """Run the schedule once for each accumulated batch. `training.loss` is None but on the last rank."""
        first, last = self.rank == 0, self.rank == self.stages - 1
        batches, found = [training.batch, *training.further], []
        self.stage.on_phase = on_phase
        if training.loop.zero_grad == "before_backward":  # the first backward pass is somewhere in the schedule
            self.zero_grad(training)
        for step in range(training.accumulation):
            batch, losses = batches[step % len(batches)], []
            with sends_held(self.until_waited) if is_fake_group() else contextlib.nullcontext():
                training.outputs = self.schedule.step(
                    *((batch["input_ids"],) if first else ()),
                    target=batch["labels"] if last else None,
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
        buffers = [getattr(info, "buffer", None) for infos in received for info in infos]  # the first stage's has none
        tracker.claim([buffer for buffer in buffers if buffer is not None], "workspace")

    def clip(self, training: Training, norm: float) -> None:
        """Clip by the norm over all stages, in which the shared weight counts once."""
        parameters = list(training.model.parameters())
        once = [p.grad for p in parameters if p.grad is not None and not (p is self.shared and self.rank)]
        total = torch.nn.utils.get_total_norm(once, foreach=training.multi_tensor) ** 2
        dist.all_reduce(total)
        torch.nn.utils.clip_grads_with_norm_(parameters, norm, total**0.5, foreach=training.multi_tensor)
