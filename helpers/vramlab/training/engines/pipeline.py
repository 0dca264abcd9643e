"""Pipeline parallel (Huang et al. 2019; Narayanan et al. 2021): each rank holds some of the layers.

`torch.distributed.pipelining` runs it: a `PipelineStage` on each rank, and `ScheduleGPipe` or `Schedule1F1B`, which cut the
batch into `sharding.micro_batches` parts and send hidden states on and their gradients back. The first stage has the
embeddings, the last one the final norm, the head and the loss. A weight that embeddings and head share is held by both,
and its gradient is summed over the two before the update, as Megatron-LM does it.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ...recipe.recipe import Recipe
from ..engine import Engine
from ..models import real_tensors
from ..process_group import alone

if TYPE_CHECKING:
    import torch

    from ..engine import Follower, Training


class Pipeline(Engine):
    """One stage on each rank: `wrap` leaves of the model what is this rank's."""

    ranks_differ = True

    def __init__(self, recipe: Recipe):
        self.recipe, self.stages = recipe, recipe.sharding.world_size
        self.shared: Any = None  # the weight that the first and the last stage both hold
        self.ends: Any = None  # the group of the two

    def wrap(self, model: "torch.nn.Module") -> "torch.nn.Module":
        import torch.distributed as dist

        from .stages import keep_stage

        self.rank = dist.get_rank()
        first, last = model.get_input_embeddings(), model.get_output_embeddings()
        if first.weight is last.weight and self.stages > 1:
            with real_tensors():
                self.ends = dist.new_group([0, self.stages - 1])
            self.shared = first.weight if self.rank in (0, self.stages - 1) else None
        keep_stage(model, self.rank, self.stages)
        return model

    def start(self, training: "Training") -> None:
        from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

        from .stages import agree, make_stage

        recipe, micro_batches = self.recipe, self.recipe.sharding.micro_batches
        shape = (recipe.batch_size // micro_batches, recipe.seq_len, recipe.shape.hidden_size)
        loss_of, size = training.model.loss_function, training.model.config.vocab_size
        parts = micro_batches * training.accumulation

        def loss(logits: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
            """The model's own, of a micro-batch's share: their sum is the mean over the whole batch."""
            return loss_of(logits=logits, labels=labels, vocab_size=size) / parts

        kind = ScheduleGPipe if recipe.sharding.schedule == "gpipe" else Schedule1F1B
        self.stage = make_stage(training, self.rank, self.stages, shape)
        self.schedule = kind(self.stage, micro_batches, loss_fn=loss, scale_grads=False)
        self.until_waited = training.device.type == "cuda"
        if alone():
            agree(self.schedule)

    def run_micro_batches(self, training: "Training", on_phase: Callable[[str], None]) -> bool:
        """The schedule, once for each accumulated batch. `training.loss` is the last rank's; others have None."""
        import torch

        from .stages import sends_held

        first, last = self.rank == 0, self.rank == self.stages - 1
        batches, found = [training.batch, *training.further], []
        self.stage.on_phase = on_phase
        if training.loop.zero_grad == "before_backward":  # the first backward pass is somewhere in the schedule
            self.zero_grad(training)
        for step in range(training.accumulation):
            batch, losses = batches[step % len(batches)], []
            with sends_held(self.until_waited) if alone() else contextlib.nullcontext():
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
            torch.distributed.all_reduce(self.shared.grad, group=self.ends)
        return True

    @contextlib.contextmanager
    def follow(self, training: "Training", tracker: "Follower") -> Iterator[None]:
        """What is received into stays from step to step, and is known when the first step is over."""
        self.until_waited = tracker.round_to > 1 or tracker.device == "cuda"
        yield
        received = [*self.stage.args_recv_info.values(), *self.stage.grad_recv_info.values()]
        buffers = [getattr(info, "buffer", None) for infos in received for info in infos]  # a batch's has none
        tracker.claim([buffer for buffer in buffers if buffer is not None], "workspace")

    def clip(self, training: "Training", norm: float) -> None:
        """By the norm over all stages; the shared weight counts once."""
        import torch

        parameters = list(training.model.parameters())
        once = [p.grad for p in parameters if p.grad is not None and not (p is self.shared and self.rank)]
        total = torch.nn.utils.get_total_norm(once, foreach=training.multi_tensor) ** 2
        torch.distributed.all_reduce(total)
        torch.nn.utils.clip_grads_with_norm_(parameters, norm, total**0.5, foreach=training.multi_tensor)


def make(recipe: Recipe) -> Engine:
    return Pipeline(recipe)
