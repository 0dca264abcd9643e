"""What `plan` is asked: the GPUs, the batch, and what to try.

The command line reads its options from the fields.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..base.errors import RecipeError, needing
from ..formulas.fused_head import with_its_adapters
from ..hardware.gpu import Gpu, current_device, find_gpu, usable_memory
from ..hardware.nvml import held_by_others
from ..recipe import images, liger, lora_modules, peft_methods
from ..recipe.knobs import FilledIn, documented, knob, knobs, same_knob, unchecked
from ..recipe.optimizers import OPTIMIZERS, SIMULATED
from ..recipe.options import GENERATING, PRECISION_RULES, LoRA, Rollouts, Sharding
from ..recipe.peft_methods import Peft
from ..recipe.recipe import (
    ATTENTION,
    LEAST_BATCH,
    Recipe,
    refuse_generating,
)
from ..recipe.samples import check_lengths
from ..report.report import TIERS
from ..simulation.colocated import colocated
from .data_rows import DataRows
from .sizes import card_with, size_of

METHODS = ("full", "lora", "qlora")
# AdamW in four implementations
OPTIMS = ("adamw_torch_fused", "adamw_torch", "adamw_bnb_8bit", "paged_adamw_8bit")
# Triton's README, "Supported Hardware": NVIDIA GPUs of compute capability 8.0 and more, since
# Triton 3.3 (torch 2.7)
LIGER_SINCE = (8, 0)
UNNAMED: Any = None  # this machine's card, or the least with so much memory
SIZES = ("memory", "host_memory", "other_memory")
FLASH_SINCE = (8, 0)  # flash-attn's README, "NVIDIA CUDA Support"
ENGINES = ("ddp", "fsdp", "deepspeed")
# All linear layers: Dettmers et al. 2023, section 4.
RANK = LoRA(r=16, lora_alpha=32, target_modules="all-linear")


def without_rollouts(recipe: Recipe) -> Recipe:
    """Return the recipe of SFTTrainer, by which formulas count the training of one that samples."""
    if recipe.rollouts is None:
        return recipe
    return unchecked(recipe, trainer="sft", rollouts=None)


@documented
@dataclass
class Question:
    """What `plan` is asked: GPUs, batch, and what to try.

    `model`, `seq_len`, `task`, `num_layers` and `trainer` as in `Recipe`. Raises RecipeError or
    GpuError, one sentence that names the wrong argument.
    """

    # What is trained, on what.
    model: Any
    gpu: FilledIn[str | Gpu | None, Gpu] = UNNAMED
    gpus: int = knob(
        1,
        most=1024,
        help="How many of them.",
        option=True,
    )
    global_batch: int = knob(
        16,
        help="Samples in one optimizer step, over all GPUs.",
        option=True,
    )
    seq_len: int | None = same_knob(Recipe, "seq_len")
    # What may be tried.
    method: str = knob(
        "any",
        choices=("any", *METHODS),
        help="Full training or adapters.",
        option=True,
    )
    precisions: tuple[str, ...] | None = knob(
        None,
        **PRECISION_RULES,
        many=True,
        help="To try; None for those that the card computes in and that are safe.",
        option="precision",
    )
    optims: tuple[str, ...] = knob(
        OPTIMS,
        choices=(*OPTIMIZERS, *SIMULATED),
        many=True,
        help="To try.",
        option="optim",
    )
    attention: tuple[str, ...] = knob(
        ATTENTION,
        choices=ATTENTION,
        many=True,
        help="To try.",
        option="attn_implementation",
    )
    checkpointing: tuple[bool, ...] = knob(
        (False, True),
        choices=(False, True),
        many=True,
        help="To try.",
    )
    engines: tuple[str, ...] = knob(
        ENGINES,
        choices=ENGINES,
        many=True,
        help="To try.",
        option="engine",
    )
    offload: bool = knob(
        True,
        help="Whether optimizer and parameters may go to the host.",
        option=True,
    )
    liger: bool = knob(
        True,
        help=(
            "Whether a fused loss may be used, which makes no logits: Liger's kernels "
            "(liger-kernel has to be installed), or TRL's SFTTrainer where they do not run."
        ),
        option=True,
    )
    # What is the same in all that is tried.
    lora: LoRA = knob(
        RANK,
        help="Rank and targets of adapters.",
    )
    peft: Peft | None = same_knob(Recipe, "peft")
    rollouts: Rollouts | None = knob(
        None,
        help=(
            "What trainer grpo and rloo sample; of a mapping that does not say vLLM's share of the "
            "card, that is found."
        ),
    )
    task: str | None = same_knob(Recipe, "task")
    num_layers: int | None = None
    trainer: str = same_knob(Recipe, "trainer")
    # What room there is, and how sure it has to be.
    memory: FilledIn[str | int | None, int | None] = knob(
        None,
        help="Usable memory of one card, in place of the table's: 24GiB, or bytes.",
        option=True,
    )
    host_memory: FilledIn[str | int | None, int | None] = knob(
        None,
        help=(
            "Memory of the host for all ranks to load, offload or page to: 64GiB, or bytes; by "
            "itself any."
        ),
        option=True,
    )
    other_memory: FilledIn[str | int | None, int] = knob(
        None,
        help=(
            "Memory of the card that a display or other processes hold: 1GiB, or bytes; by itself "
            "what NVML says of this machine's."
        ),
        option=True,
    )
    tier: str | None = knob(
        None,
        choices=tuple(TIERS),
        help="How sure it must be that it fits; by itself the surest that there is.",
        option=True,
    )
    expandable_segments: bool = knob(
        True,
        help="Whether the allocator has expandable segments, which fragment less.",
        option=True,
    )
    lengths: tuple[int, ...] | None = knob(
        None,
        help="Tokens of each sample of the data set.",
    )
    packing: bool = knob(
        False,
        help=(
            "Fill rows of seq_len tokens with several samples. With known lengths SFTTrainer's "
            "packing is tried by itself."
        ),
        option=True,
    )
    link: float | None = knob(
        None,
        help="Bytes per second between GPUs, in place of the table's.",
    )
    images: int | None = same_knob(Recipe, "images")
    image_size: FilledIn[Any, tuple[str, ...] | None] = same_knob(Recipe, "image_size")
    max_pixels: int | None = same_knob(Recipe, "max_pixels")
    video_frames: int | None = same_knob(Recipe, "video_frames")
    video_size: str | None = same_knob(Recipe, "video_size")

    def __post_init__(self) -> None:
        # Sizes first, for the card may be found by its memory.
        self._read_sizes()
        self.assumed = self.memory is not None and self.gpu is None
        self.said_gpu = self.gpu if isinstance(self.gpu, str) else ""
        self.gpu = find_gpu(self.gpu) if self.gpu is not None else self._card()
        if isinstance(self.lora, Mapping):  # of what differs from RANK
            # lora_alpha follows the rank at RANK's own ratio unless it is said.
            fields = {"lora_alpha": 2 * self.lora.get("r", RANK.r), **self.lora}
            self.lora = dataclasses.replace(RANK, **fields)
        method = peft_methods.read(self.peft)
        if isinstance(method, LoRA):
            self.peft = None
            self.lora = method
        else:
            self.peft = method
        self.finds_share = False
        self.may_sleep = False
        self.sleeps_to_fit = False
        if isinstance(self.rollouts, Mapping):
            says_share = "vllm_gpu_memory_utilization" in self.rollouts
            says_sleep = "vllm_enable_sleep_mode" in self.rollouts
            self.rollouts = Rollouts(**self.rollouts)
            self.finds_share = self.rollouts.is_colocated and not says_share
            self.may_sleep = self.rollouts.is_colocated and not says_sleep
        if self.rollouts and self.rollouts.is_colocated:
            # The pool of a vLLM that sleeps can't have them (PyTorch issue 147851). Until its
            # pull request 40812 (April 2026) vLLM refused them. Now it switches them off for
            # its pool, but looks at PYTORCH_CUDA_ALLOC_CONF only: under the new name sleep may
            # free nothing (vllm/device_allocator/cumem.py).
            self.expandable_segments = False
        if self.lengths is not None:
            self.lengths = tuple(sorted(check_lengths("lengths", list(self.lengths))))
        refuse_generating(self.trainer)
        # Sizes, lengths and images have checks of their own, which say more.
        for name in knobs(Question).keys() - {*SIZES, "lengths", "image_size"}:
            self._check_knob(name)
        if self.global_batch % self.gpus:
            rest = f"{self.gpus} GPUs share it: take a multiple"
            raise RecipeError("global_batch", self.global_batch, rest)
        self.samples_per_gpu = self.global_batch // self.gpus
        self.methods = METHODS if self.method == "any" else (self.method,)
        # Those in which an answer is looked for, in this order.
        self.tiers = (self.tier,) if self.tier else tuple(TIERS)
        self.usable = self._usable()  # bytes of one card that a process can have
        self.plain = self._plain()
        self.data = DataRows(self.lengths or (), self.plain.seq_len)
        self._check_together()

    def _check_together(self) -> None:
        """Refuse what is allowed by itself but not with the rest of the question."""
        _check_optims(self.optims)
        if self.reads_images:
            if self.gpus > 1:
                rest = "samples with images are modelled on one device"
                raise RecipeError("gpus", self.gpus, rest)
        else:
            # Raises RecipeError for what the formulas do not know of the trainer.
            with_its_adapters(without_rollouts(self.plain))
        if self.plain.sharding and "ddp" not in self.engines:
            rest = (
                f"with trainer={self.trainer!r} plans are made for 'ddp', whose ranks sample whole"
            )
            raise RecipeError("engines", self.engines, rest)
        if not self.finds_share:
            try:  # whether vLLM's weights have room in the share that was said
                colocated(self.plain, self.gpu)
            except RecipeError as error:
                rest = f"{error.allowed}, or leave it out, and plan finds it"
                raise RecipeError(error.field, error.value, rest) from None
        if self.peft and self.gpus > 1:
            rest = "PEFT's methods other than LoRA are modelled on one device"
            raise RecipeError("gpus", self.gpus, rest)
        if self.method != "full":
            lora_modules.adapted(self.plain.shape, self.lora)
        precisions = self.precisions or ()
        for precision in precisions:
            self.gpu.require(precision)
        in_half = [precision.endswith("-true") for precision in precisions]
        if self.gpus > 1 and self.engines == ("deepspeed",) and in_half and all(in_half):
            rest = "DeepSpeed keeps fp32 copies of such weights: take '-mixed', or another engine"
            raise RecipeError("precisions", self.precisions, rest)

    def _read_sizes(self) -> None:
        """Read what may be said as "24GiB".

        Of this machine's card NVML says what others hold.
        """
        for name in SIZES:
            setattr(self, name, size_of(name, getattr(self, name)))
        if self.other_memory is None:
            is_this_machine = self.gpu is None and self.memory is None
            self.other_memory = held_by_others() if is_this_machine else 0

    def _usable(self) -> int:
        """Return the bytes of one card that a process can have."""
        usable = (self.memory or usable_memory(self.gpu)) - self.other_memory
        if usable <= 0:
            rest = f"it leaves nothing of {self.gpu.name}"
            raise RecipeError("other_memory", self.other_memory, rest)
        return usable

    def _check_knob(self, name: str) -> None:
        """Check a field; one that takes many values may be given one."""
        knob = knobs(Question)[name]
        value = getattr(self, name)
        if knob.many and value is not None:
            value = tuple(value) if isinstance(value, list | tuple | set) else (value,)
            setattr(self, name, value)
            if not value:
                raise RecipeError(name, value, "at least one is needed")
        knob.check(name, value)

    def _plain(self) -> Recipe:
        """Return the recipe of the least micro-batch, from which all others are made."""
        least = LEAST_BATCH.get(self.trainer, 1)
        if self.samples_per_gpu < least:
            rest = "KTOTrainer compares samples of a micro-batch: take 2"
            raise RecipeError("global_batch", self.global_batch, rest)
        seq_len = self.seq_len
        # No row is longer than the longest sample, or than the model takes.
        if self.lengths and seq_len is None:
            longest = self.lengths[-1]
            positions = Recipe(self.model, task=self.task).shape.max_positions
            seq_len = min(longest, positions or longest)
        size = images.read_sizes(self.image_size)
        precision = "fp32"  # of no answer: each has its own
        if self.images:
            shape = Recipe(self.model, task=self.task).shape
            size = size or images.largest(shape)
            precision = images.with_pixels(shape, precision)
        self.image_size = size
        samples = self.trainer in GENERATING
        # A group's completions are those of all ranks.
        shares = samples and self.gpus > 1
        return Recipe(
            self.model,
            batch_size=least,
            gradient_accumulation_steps=self.samples_per_gpu if samples else 1,
            rollouts=self.rollouts,
            sharding=Sharding(0, self.gpus, "ddp") if shares else None,
            seq_len=seq_len,
            task=self.task,
            num_layers=self.num_layers,
            precision=precision,
            trainer=self.trainer,
            packing=self.packing and self.trainer == "sft",
            images=self.images,
            image_size=size,
            max_pixels=self.max_pixels,
            video_frames=self.video_frames,
            video_size=self.video_size,
        )

    @property
    def reads_images(self) -> bool:
        """Whether the model has a tower, which formulas do not know."""
        return images.reader_of(self.plain.shape) is not None

    def _card(self) -> Gpu:
        """Return the GPU of this machine, or without one the table's least that has `memory`."""
        if self.memory is None:
            with needing("a plan for this machine's GPU"):
                card = current_device().gpu
            if card is None:
                rest = "this machine has no GPU: name one (T4) or say its memory (24GiB)"
                raise RecipeError("gpu", None, rest)
            return card
        return card_with(self.memory)

    def liger_is_possible(self) -> bool:
        """Tell whether Liger's kernels are known for the model and run on the card.

        TRL's trainers make no logits without them, and deprecate them (trl 1.16). On several cards
        they are DDP's: see `search_space._is_tried`.
        """
        shape = self.plain.shape
        is_known = liger.FAMILIES.get(shape.family) and shape.task == "causal-lm"
        is_plain = self.plain.trainer == "transformers"
        runs = self.gpu.compute_capability >= LIGER_SINCE
        return bool(self.liger and is_known and is_plain and runs)

    def trainers(self) -> tuple[str, ...]:
        """Return the trainers to try.

        SFTTrainer, whose loss makes no logits, is tried too where Liger's kernels do not run, as
        under FSDP and DeepSpeed, and where it can put several samples into a row. It launches
        kernels of Triton's too (trl/kernels/chunked_logprob.py).
        """
        trainer = self.plain.trainer
        if trainer == "sft" or not (self.liger and self.may_use_sft()):
            return (trainer,)
        return trainer, "sft"

    def may_use_sft(self) -> bool:
        """Tell whether SFTTrainer trains what is asked, and its loss's kernels run on the card."""
        if self.plain.trainer == "sft":
            return True
        is_text = self.plain.shape.task == "causal-lm" and not self.plain.shape.image_tokens
        runs = self.gpu.compute_capability >= LIGER_SINCE
        is_known = is_text or images.sft_reads(self.plain)
        return is_known and runs and self.plain.trainer == "transformers"

    def liger_replaces_trl(self, sharding: Sharding | None) -> bool:
        """Tell whether Liger's kernels are tried where SFTTrainer's loss would be."""
        return sharding is None and self.liger_is_possible()

    def can_be_joined(self) -> bool:
        """Tell whether the samples of a micro-batch may become one row.

        They are of several lengths, none of which is cut, which SFTTrainer does not do then, and
        FlashAttention keeps them apart.
        """
        if not self.lengths or self.packing:
            return False
        if not self.lengths[0] < self.lengths[-1] <= self.plain.seq_len:
            return False
        has_flash = self.gpu.compute_capability >= FLASH_SINCE
        return has_flash and self.plain.shape.task == "causal-lm"

    def can_share_rows(self) -> bool:
        """Tell whether SFTTrainer may put several samples into one row, unasked."""
        return self.can_be_joined() or self.can_be_packed()

    def can_be_packed(self) -> bool:
        """Tell whether packing, which is not asked for, would make fewer rows.

        FlashAttention keeps the samples of a row apart: TRL tells it where they end.
        """
        shape = self.plain.shape
        is_sft = self.plain.trainer in ("transformers", "sft")
        if not self.lengths or self.packing or not is_sft or shape.image_tokens:
            return False
        has_flash = self.gpu.compute_capability >= FLASH_SINCE
        is_causal = has_flash and shape.task == "causal-lm"
        return is_causal and self.data.packed_rows < len(self.lengths)

    def lengths_of(self, recipe: Recipe) -> tuple[int, ...] | None:
        """Return the lengths of the samples in the highest micro-batch of `recipe`.

        Of padded rows those are the longest, and a shorter one; of packed rows as many samples as
        any row has. None where none is padded, or what is packed is not known.
        """
        plain = self.plain
        shape = plain.shape
        size = recipe.batch_size
        if recipe.packing and self.lengths:
            return self.data.packed_lengths(size, is_usual=False)
        if size <= 1 or plain.trainer not in ("transformers", "sft"):
            return None
        if self.packing or shape.image_tokens or shape.num_decoder_layers:
            return None
        # Where lengths are unknown a token less is enough to need a mask.
        shortest = self.lengths[0] if self.lengths else plain.seq_len - 1
        if not 0 < shortest < plain.seq_len:
            return None
        return (plain.seq_len,) * (size - 1) + (shortest,)


def _check_optims(optims: tuple[str, ...]) -> None:
    """Raise RecipeError for an optimizer that plan has no figures of."""
    for optim in optims:
        if optim in SIMULATED:
            rest = "no formula knows it, and plan compares by formulas: ask simulate"
            raise RecipeError("optims", optim, rest)
