"""The fields of a recipe, and what follows from them alone.

`recipe.Recipe` adds what may not be. The modules that say so read these fields.
"""

import math
from dataclasses import field
from typing import Any

from . import samples
from .configuration import MOST_LAYERS, READERS
from .families import TASKS
from .knobs import FilledIn, frozen, knob
from .optimizers import OPTIMIZERS, SIMULATED, optimizer_arguments
from .options import (
    ATTENTION,
    DTYPES,
    HALF,
    LOOPS,
    PRECISION_RULES,
    TRL,
    Loop,
    LoRA,
    Quantization,
    Rollouts,
    Sharding,
)
from .peft_methods import Peft
from .shapes import Shape

MOST_MICRO_BATCHES = 2**16  # each of them is run
WITH_PAIRS = ("dpo", "reward")  # trainers of which a sample is a pair of sequences
WITH_REFERENCE = ("dpo", "kto")  # trainers that hold the model against a frozen one

# How one rank alone works, which divides nothing.
ALONE = Sharding(stage=0, engine="ddp")


def _frozen_in_words(names: tuple[str, ...]) -> str:
    return f"{' and '.join(names)} frozen"


@frozen
class RecipeFields:
    """What is trained and how, with every field filled in."""

    model: Any
    batch_size: int = knob(
        1,
        help=(
            "Samples in one micro-batch on one device; of trainer dpo and reward a sample is a "
            "pair, two sequences."
        ),
        option=True,
        label="Batch size",
        elsewhere="per_device_train_batch_size",
        shown="batch {}",
    )
    seq_len: FilledIn[int | None, int] = knob(
        None,
        help="Tokens per sample; 512 or the model's longest if less.",
        option=True,
        label="Tokens a sample",
        shown="{} tokens",
    )
    precision: str = knob(
        "fp32",
        **PRECISION_RULES,
        help="Number format of weights and computation.",
        option=True,
        label="Precision",
        elsewhere=("fp16", "bf16", "tf32"),
        shown="{}",
    )
    optim: str = knob(
        "adamw_torch",
        choices=(*OPTIMIZERS, *SIMULATED),
        help="The optimizer.",
        option=True,
        label="Optimizer",
        elsewhere=True,
        shown="{}",
    )
    optim_args: str | None = knob(
        None,
        help="As in TrainingArguments: momentum=0.9,…",
        option=True,
        elsewhere=True,
        shown="{}",
    )
    task: str | None = knob(
        None,
        choices=tuple(TASKS),
        help="Which head; the architecture's usual one when left out.",
        option=True,
        label="Task",
        shown="{}",
    )
    num_layers: int | None = knob(
        None,
        most=MOST_LAYERS,
        help="A depth other than the model's own.",
        option=True,
        shown="{} layers",
    )
    gradient_accumulation_steps: int = knob(
        1,
        most=MOST_MICRO_BATCHES,
        help="Micro-batches in one optimizer step.",
        option=True,
        label="Accumulation",
        elsewhere=True,
        shown="accumulate ×{}",
        quiet=(1,),
    )
    gradient_checkpointing: bool = knob(
        False,
        help="Recompute layers in the backward pass.",
        option=True,
        label="Checkpointing",
        elsewhere=("activation_checkpointing", "gradient_checkpointing"),
        shown="checkpointing",
    )
    attn_implementation: FilledIn[str | None, str] = knob(
        None,
        choices=ATTENTION,
        help=(
            "Attention's kernel; sdpa when left out, where the architecture has it. sdpa_repeated "
            "repeats shared keys, for cards before Ampere."
        ),
        option=True,
        label="Attention",
        shown="{}",
        quiet=("sdpa",),
    )
    lora: LoRA | None = knob(
        None,
        shown=LoRA.words,
        help="Adapters to train.",
    )
    quantization: Quantization | None = knob(
        None,
        shown=Quantization.words,
        help="A frozen base in few bits.",
    )
    sharding: Sharding | None = knob(
        None,
        shown=Sharding.words,
        help="Ranks and what each holds.",
        elsewhere=("fsdp", "fsdp_config", "deepspeed"),
    )
    dtype: str | None = knob(
        None,
        choices=DTYPES,
        help="The weights' format as loaded; what the precision implies when left out.",
        option=True,
        label="Weights",
        shown="{} weights",
    )
    torch_compile: bool = knob(
        False,
        help="Compile the model.",
        option=True,
        elsewhere=True,
        shown="compiled",
    )
    loop: FilledIn[Loop | str, Loop] = knob(
        "trainer",
        choices=tuple(LOOPS),
        shown=Loop.words,
        help="The training loop.",
        option=True,
        label="Loop",
    )
    trainer: str = knob(
        "transformers",
        choices=("transformers", *TRL),
        shown=TRL.get,
        help="Whose Trainer computes the loss: transformers', or TRL's, which make no logits.",
        option=True,
        label="Trainer",
    )
    precompute_ref_log_probs: bool = knob(
        False,
        help=(
            "Ask the reference model of trainer dpo and kto before training, and keep it no longer."
        ),
        option=True,
        label="Reference first",
        elsewhere=True,
        shown="reference precomputed",
    )
    activation_offloading: bool = knob(
        False,
        help="Keep what backward needs in host memory until then, as TRL's trainers do.",
        option=True,
        elsewhere=True,
        shown="activations offloaded",
    )
    cut_cross_entropy: bool = knob(
        False,
        help="Compute the loss without logits, by cut cross-entropy, as axolotl's plugin does.",
        option=True,
        shown="cut cross-entropy",
    )
    use_reentrant: bool = knob(
        False,
        help="Checkpoint re-entrantly: the first pass of each layer is made without a graph.",
        option=True,
        shown="re-entrant",
    )
    packing: bool = knob(
        False,
        help="Fill samples of seq_len tokens with short ones (SFTTrainer).",
        option=True,
        label="Packing",
        elsewhere=True,
        shown="packed",
    )
    padding_free: bool = knob(
        False,
        help="Join the samples of a micro-batch to one long row (SFTTrainer).",
        option=True,
        label="Padding-free",
        elsewhere=True,
        shown="padding-free",
    )
    pad_to_multiple_of: int | None = knob(
        None,
        help="Pad rows to a multiple of so many tokens.",
        option=True,
        elsewhere=True,
        shown="padded to a multiple of {}",
    )
    lengths: tuple[int, ...] | None = knob(
        None,
        shown=samples.lengths_in_words,
        help=(
            "Tokens of each sample of a micro-batch, which is padded to the longest; all have "
            "seq_len when left out."
        ),
    )
    completion_lengths: tuple[int, ...] | None = knob(
        None,
        shown=samples.labels_in_words,
        help=(
            "Tokens of each sample, its last, that have a label (SFTTrainer); all when left out."
        ),
        elsewhere=("completion_only_loss", "assistant_only_loss"),
    )
    use_liger_kernel: bool = knob(
        False,
        help="Liger's kernels in the model and its loss.",
        option=True,
        label="Liger",
        elsewhere=True,
        shown="Liger kernels",
    )
    peft: Peft | None = knob(
        None,
        shown=Peft.words,
        help=("Another of PEFT's methods: its name (ia3), configuration as JSON, or a file of it."),
        option=True,
    )
    label_smoothing_factor: float = knob(
        0.0,
        share=True,
        help="Share of each label that goes to all tokens alike.",
        option=True,
        elsewhere=True,
        shown="labels smoothed by {}",
        quiet=(0.0,),
    )
    neftune_noise_alpha: float | None = knob(
        None,
        help="Noise on the embeddings (Jain et al. 2023).",
        option=True,
        elsewhere=True,
        shown="NEFTune {}",
    )
    images: int | None = knob(
        None,
        most=2**10,
        help="Images in each sample, for a vision-language model.",
        option=True,
        shown="images: {} a sample",
    )
    image_size: FilledIn[Any, tuple[str, ...] | None] = knob(
        None,
        shown=", ".join,
        help="Their width and height in pixels, as 1024x768; several for unlike images.",
        option=True,
    )
    max_pixels: int | None = knob(
        None,
        help="The most pixels of an image before the processor makes it smaller (Qwen's).",
        option=True,
        shown="at most {:,} pixels",
    )
    video_frames: int | None = knob(
        None,
        most=2**14,
        help="Frames of the video in each sample, as many as the processor samples of it.",
        option=True,
        shown="a video of {} frames a sample",
    )
    video_size: str | None = knob(
        None,
        shown="{}",
        help="Its width and height in pixels, as 640x360.",
        option=True,
    )
    freeze: tuple[str, ...] | None = knob(
        None,
        shown=_frozen_in_words,
        help="Modules that are not trained, by a part of their names: visual, vision_tower.",
        option=True,
    )
    rollouts: Rollouts | None = knob(
        None,
        shown=Rollouts.words,
        help="What trainer grpo and rloo sample.",
    )
    shape: Shape = field(init=False, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The model's short name."""
        return self.shape.name

    @property
    def adapters(self) -> LoRA | Peft | None:
        """What is trained beside a frozen base: LoRA's, or another method's."""
        return self.lora or self.peft

    @property
    def weights_dtype(self) -> str:
        """The format in which weights that are not quantized are loaded."""
        return self.dtype or self.implied_dtype

    @property
    def implied_dtype(self) -> str:
        """`weights_dtype` where no `dtype` is said.

        That is what 4-bit layers compute in, half for "-true" precisions, else fp32.
        """
        if self.quantization and self.quantization.compute_dtype:
            return self.quantization.compute_dtype
        form, _, kind = self.precision.partition("-")
        if kind == "true" or self.quantization:
            return HALF.get(form, "float32")
        return "float32"

    @property
    def is_ragged(self) -> bool:
        """Whether a micro-batch is something else than rows of seq_len tokens."""
        is_cut = self.lengths or self.completion_lengths
        return bool(is_cut or self.joins or self.pad_to_multiple_of)

    @property
    def reads_values(self) -> bool:
        """Whether sizes in the model follow from values of a micro-batch.

        They are lengths, images or, of a part of the tokens, positions and labels.
        """
        has_images = self.shape.family in READERS
        return self.is_ragged or has_images or self.ranks_of_sample > 1

    @property
    def group(self) -> Sharding:
        """How ranks divide the work: `sharding`, or that of one rank alone."""
        return self.sharding or ALONE

    @property
    def ranks_of_sample(self) -> int:
        """The number of ranks that have one sample's tokens together."""
        return self.group.ranks_of_sample

    @property
    def pieces(self) -> int:
        """The number of equal pieces into which a row is divided among ranks; a ring's have two."""
        return self.ranks_of_sample * (2 if self.group.cp_size > 1 else 1)

    @property
    def joins(self) -> bool:
        """Whether a micro-batch is one row, of samples put together whole."""
        return self.padding_free or self.packing

    @property
    def samples(self) -> tuple[int, ...]:
        """Tokens of each sample of a micro-batch.

        Without `lengths` packed rows are full, of two samples each.
        """
        if self.lengths:
            return self.lengths
        row: tuple[int, ...] = (self.seq_len,)
        if self.packing and self.seq_len > 1:
            half = self.seq_len // 2
            row = (self.seq_len - half, half)
        return row * self.batch_size

    @property
    def labelled(self) -> int:
        """Tokens of a micro-batch that have a label; a sample's first never has."""
        counts = self.completion_lengths or self.samples
        pairs = zip(counts, self.samples, strict=True)
        return sum(min(count, length - 1) for count, length in pairs)

    @property
    def rows(self) -> tuple[int, int]:
        """Rows of a micro-batch and tokens in each, as the collator makes them."""
        return samples.shape_of(self.samples, self.joins, self.pad_to_multiple_of)

    @property
    def tokens(self) -> int:
        """Tokens that one optimizer step reads on one device."""
        # `rows` has one row a sample, and a pair is two sequences of that length.
        micro_batch = math.prod(self.rows) * self.sequences // self.batch_size
        return micro_batch * self.gradient_accumulation_steps

    @property
    def sequences(self) -> int:
        """Sequences of a micro-batch that are trained on: of pairs both."""
        return 2 * self.batch_size if self.trainer in WITH_PAIRS else self.batch_size

    @property
    def has_reference(self) -> bool:
        """Whether a frozen copy of the model stays beside it.

        A model with adapters needs no copy: they are switched off.
        """
        is_needed = self.trainer in WITH_REFERENCE or bool(self.rollouts and self.rollouts.beta)
        return is_needed and not (self.lora or self.precompute_ref_log_probs)

    @property
    def passes_without_gradients(self) -> int:
        """Forward passes of a micro-batch besides the one that is trained on.

        They are of KTO's other answers, and the reference's.
        """
        # KTO also runs each prompt with another sample's answer; the reference runs both as the
        # policy does.
        own = 1 if self.trainer == "kto" else 0
        if self.trainer in WITH_REFERENCE and not self.precompute_ref_log_probs:
            return own + own + 1
        return own

    def optimizer_arguments(self) -> dict[str, float]:
        """Return `optim_args` as a dictionary, {} when there are none."""
        return optimizer_arguments(self.optim, self.optim_args)
