"""Other ways to train by the same method: an answer with one switch turned, and what it comes to.

Each has the micro-batch and the checkpointing with which it is fastest, all by formula.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..base.errors import RecipeError
from ..formulas.fused_head import with_its_adapters
from ..recipe.recipe import Recipe
from ..report.report import GiB
from .candidate import SURE, Candidate, epoch_of
from .question import Question
from .search_space import micro_batches, sizes_of, with_micro_batch
from .step_time import step_time

MOST = 3  # alternatives of an answer


@dataclass(frozen=True)
class Alternative:
    """An answer with one switch turned.

    Attributes:
        switch: what is other than in the answer, such as "without Liger's kernels"; with it
            "checkpointing" may be needed too, or no longer.
        tier: the surest in which it fits.
        high: bytes of the process at most.
        tokens_per_second: likely ones.
        epoch: seconds of one over the data set, where its lengths are known.
    """

    switch: str
    recipe: Recipe
    tier: str
    high: float
    tokens_per_second: float
    epoch: float | None = None

    def __str__(self) -> str:
        size = f"{self.tier}, at most {self.high / GiB:.2f}"
        rate = f"{self.tokens_per_second:,.0f} tokens/s"
        epoch = f", an epoch {self.epoch / 3600:,.2g} h" if self.epoch else ""
        return f"{self.switch}: {size}, {rate}, batch {self.recipe.batch_size}{epoch}"


def alternatives(answer: Candidate) -> Iterator[Alternative]:
    """Yield at most MOST alternatives of an answer, in the order of `_turned`."""
    count = 0
    # Of these no formula says whether they fit.
    if answer.must_be_simulated:
        return
    for switch, fields in _turned(answer.question, answer.recipe):
        found = _fastest(answer, fields)
        if found is None:
            continue
        # It is said only where the switch brings it along.
        again = found.recipe.gradient_checkpointing
        if again != answer.recipe.gradient_checkpointing and "checkpointing" not in switch:
            switch += f", {'with' if again else 'without'} checkpointing"
        time = step_time(found.timed, found.question.gpu, found.question.link)
        yield Alternative(
            switch,
            found.recipe,
            next(tier for tier in SURE if found.fits(tier)),
            found.interval.high,
            time.tokens_per_second,
            epoch_of(found.question, found.timed, time.parts),
        )
        count += 1
        if count == MOST:
            return


def _turned(question: Question, recipe: Recipe) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each switch that can be turned, and the fields that turn it."""
    plain = {"use_liger_kernel": False}
    offloads = bool(recipe.group.offload)
    # Without fp32 weights and states nothing has to go to the host.
    half = "bf16-true" if question.gpu.supports("bf16") else ""
    if offloads and question.gpus == 1 and half and not question.precisions:
        alone: dict[str, Any] = {"sharding": None, "precision": half}
        alone["optim"] = "paged_adamw_8bit"
        alone["use_liger_kernel"] = question.liger_is_possible()
        yield f"on the card alone (--no-offload) in {half}, which rounds small updates away", alone
    if recipe.packing and not question.packing:
        joins = question.can_be_joined()
        yield "without packing", {"packing": False, "padding_free": joins}
    is_on_request = question.plain.trainer != "transformers"
    if recipe.trainer == "transformers" and question.may_use_sft():
        yield "with TRL's SFTTrainer", {**plain, "trainer": "sft", "packing": question.packing}
    elif recipe.trainer == "sft" and not is_on_request:
        yield "without TRL", {"trainer": "transformers", "packing": False, "padding_free": False}
    if recipe.use_liger_kernel:
        yield "without Liger's kernels", plain
    if recipe.gradient_checkpointing and False in question.checkpointing:
        yield "without checkpointing", {"gradient_checkpointing": False}
    # Adapters have small states, and DeepSpeed updates what is offloaded with its own Adam.
    if recipe.adapters or offloads:
        return
    if "8bit" in recipe.optim and "adamw_torch_fused" in question.optims:
        # PyTorch's states have the format of what is trained (`torch.zeros_like`).
        bits = 16 if recipe.precision.endswith("-true") else 32
        yield f"with {bits}-bit states", {"optim": "adamw_torch_fused"}
    elif "8bit" not in recipe.optim and "adamw_bnb_8bit" in question.optims:
        yield "with 8-bit states", {"optim": "adamw_bnb_8bit"}


def _fastest(answer: Candidate, fields: dict[str, Any]) -> Candidate | None:
    """Return the fastest recipe with these fields that is safe or likely to fit."""
    question = answer.question
    if answer.recipe.packing and not fields.get("packing", True):
        # A sample is a row again.
        whole = {"batch_size": question.samples_per_gpu, "gradient_accumulation_steps": 1}
        fields = fields | whole
    possible = []
    for checkpointing in question.checkpointing:
        turned = {"gradient_checkpointing": checkpointing} | fields
        try:
            # Lengths belong to a micro-batch, so `with_micro_batch` and `Candidate` fill them in
            # again.
            family = answer.recipe.replace(lengths=None, **turned)
            with_its_adapters(family)
        except RecipeError:
            continue
        for size in sizes_of(family, micro_batches(question)):
            recipe = with_micro_batch(family, size)
            possible.append(Candidate(question, recipe, int(checkpointing)))
    room = question.usable
    # Two lower bounds spare most predictions, as in a search.
    possible = [one for one in possible if one.least <= room and one.bound(SURE[-1]) <= room]
    # The fastest first, so the first that fits is the answer.
    for candidate in sorted(possible, key=lambda one: one.rank):
        if any(candidate.fits(tier) for tier in SURE):
            return candidate
    return None
