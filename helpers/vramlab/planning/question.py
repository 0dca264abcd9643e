"""What `plan` is asked: the GPUs, the batch, and what to try. The command line reads its options from the fields."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..formulas.fused_head import with_its_adapters
from ..hardware.gpu import Gpu, current_device, find_gpu, gpu_names, usable_memory
from ..hardware.nvml import held_by_others
from ..recipe import liger, lora_modules
from ..recipe.knobs import documented, knob, knobs, same_knob
from ..recipe.options import LoRA
from ..recipe.recipe import ATTENTION, LEAST_BATCH, OPTIMIZERS, PRECISIONS, Recipe, refuse_generating
from ..recipe.samples import check_lengths
from ..report.errors import RecipeError, needing
from ..report.report import TIERS

METHODS = ("full", "lora", "qlora")
UNITS = {"": 1, "mb": 10**6, "gb": 10**9, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
OPTIMS = ("adamw_torch_fused", "adamw_torch", "adamw_bnb_8bit", "paged_adamw_8bit")  # AdamW in four implementations
# Triton's README, "Supported Hardware": NVIDIA GPUs of compute capability 8.0 and more, since Triton 3.3 (torch 2.7)
LIGER_SINCE = (8, 0)
SIZES = ("memory", "host_memory", "other_memory")
FLASH_SINCE = (8, 0)  # flash-attn's README, "NVIDIA CUDA Support"
ENGINES = ("ddp", "fsdp", "deepspeed")
RANK = LoRA(r=16, lora_alpha=32, target_modules="all-linear")  # all linear layers: Dettmers et al. 2023, section 4


@documented
@dataclass
class Question:
    """What `plan` is asked: GPUs, batch, and what to try. `model`, `seq_len`, `task`, `num_layers` and `trainer` as in
    `Recipe`.

    Raises RecipeError or GpuError, one sentence that names the wrong argument.
    """

    model: Any
    gpu: str | Gpu | None = None
    gpus: int = knob(1, most=1024)
    global_batch: int = knob(16)
    seq_len: int | None = same_knob(Recipe, "seq_len")
    method: str = knob("any", choices=("any", *METHODS))
    precisions: tuple[str, ...] | None = knob(None, choices=PRECISIONS, many=True)
    optims: tuple[str, ...] = knob(OPTIMS, choices=OPTIMIZERS, many=True)
    attention: tuple[str, ...] = knob(ATTENTION, choices=ATTENTION, many=True)
    checkpointing: tuple[bool, ...] = knob((False, True), choices=(False, True), many=True)
    engines: tuple[str, ...] = knob(ENGINES, choices=ENGINES, many=True)
    offload: bool = knob(True)
    liger: bool = knob(True)
    lora: LoRA = knob(RANK)
    task: str | None = same_knob(Recipe, "task")
    num_layers: int | None = None
    trainer: str = same_knob(Recipe, "trainer")
    memory: str | int | None = knob(None)
    host_memory: str | int | None = knob(None)
    other_memory: str | int | None = knob(None)
    tier: str | None = knob(None, choices=tuple(TIERS))
    expandable_segments: bool = knob(True)
    lengths: tuple[int, ...] | None = knob(None)
    packing: bool = knob(False)
    link: float | None = knob(None)

    def __post_init__(self):
        self._read_sizes()
        self.assumed = self.memory is not None and self.gpu is None
        self.gpu = find_gpu(self.gpu) if self.gpu is not None else self._card()
        if isinstance(self.lora, Mapping):  # of what differs from RANK
            self.lora = dataclasses.replace(RANK, **{"lora_alpha": 2 * self.lora.get("r", RANK.r), **self.lora})
        if self.lengths is not None:
            self.lengths = tuple(sorted(check_lengths("lengths", list(self.lengths))))
        refuse_generating(self.trainer)
        for name in knobs(Question).keys() - {*SIZES, "lengths"}:
            self._check_knob(name)
        if self.global_batch % self.gpus:
            raise RecipeError("global_batch", self.global_batch, f"{self.gpus} GPUs share it: take a multiple")
        self.samples_per_gpu = self.global_batch // self.gpus
        self.methods = METHODS if self.method == "any" else (self.method,)
        self.tiers = (self.tier,) if self.tier else tuple(TIERS)  # in which an answer is looked for, in this order
        self.usable = self._usable()  # bytes of one card that a process can have
        self._widths: dict[int, float] = {}
        self.plain = self._plain()
        with_its_adapters(self.plain)
        if self.trainer not in ("transformers", "sft") and self.gpus > 1:
            raise RecipeError("gpus", self.gpus, f"with trainer={self.trainer!r} one device is modelled so far")
        if self.method != "full":
            lora_modules.adapted(self.plain.shape, self.lora)
        for precision in self.precisions or ():
            self.gpu.require(precision)
        halves = [precision.endswith("-true") for precision in self.precisions or ("",)]
        if self.gpus > 1 and self.engines == ("deepspeed",) and all(halves):
            rest = "DeepSpeed keeps fp32 copies of such weights: take '-mixed', or another engine"
            raise RecipeError("precisions", self.precisions, rest)

    def _read_sizes(self) -> None:
        """Read what may be said as "24GiB"; of this machine's card NVML says what others hold."""
        for name in SIZES:
            setattr(self, name, size_of(name, getattr(self, name)))
        if self.other_memory is None:
            self.other_memory = held_by_others() if self.gpu is None and self.memory is None else 0

    def _usable(self) -> int:
        found = (self.memory or usable_memory(self.gpu)) - self.other_memory
        if found <= 0:
            raise RecipeError("other_memory", self.other_memory, f"it leaves nothing of {self.gpu.name}")
        return found

    def _check_knob(self, name: str) -> None:
        said, value = knobs(Question)[name], getattr(self, name)
        if said.many and value is not None:
            value = tuple(value) if isinstance(value, list | tuple | set) else (value,)
            setattr(self, name, value)
            if not value:
                raise RecipeError(name, value, "at least one is needed")
        said.check(name, value)

    def _plain(self) -> Recipe:
        """The recipe of the least micro-batch, from which all others are made."""
        same = {"batch_size": LEAST_BATCH.get(self.trainer, 1)}
        if self.samples_per_gpu < same["batch_size"]:
            raise RecipeError("global_batch", self.global_batch, "KTOTrainer compares samples of a micro-batch: take 2")
        same |= {name: getattr(self, name) for name in ("seq_len", "task", "num_layers", "trainer")}
        if self.lengths and self.seq_len is None:
            longest = Recipe(self.model, task=self.task).shape.max_positions
            same["seq_len"] = min(self.lengths[-1], longest or self.lengths[-1])
        return Recipe(self.model, **same, packing=self.packing and self.trainer == "sft")

    def _card(self) -> Gpu:
        """The GPU of this machine, or without one the table's least that has `memory`."""
        if self.memory is None:
            with needing("a plan for this machine's GPU"):
                found = current_device().gpu
            if found is None:
                raise RecipeError("gpu", None, "this machine has no GPU: name one (T4) or say its memory (24GiB)")
            return found
        return card_with(self.memory)

    def liger_is_possible(self) -> bool:
        """Whether Liger's kernels are known for the model and run on the card. TRL's trainers make no logits without
        them, and deprecate them (trl 1.16); on several cards the formulas do not know them."""
        known = liger.FAMILIES.get(self.plain.shape.family) and self.plain.shape.task == "causal-lm"
        alone = self.gpus == 1 and self.plain.trainer == "transformers"
        return bool(self.liger and known and alone and self.gpu.compute_capability >= LIGER_SINCE)

    def trainers(self) -> tuple[str, ...]:
        """The trainers to try: SFTTrainer too, whose loss makes no logits, where Liger's kernels do not run. It launches
        kernels of Triton's too (trl/kernels/chunked_logprob.py)."""
        plain = self.plain
        if self.gpu.compute_capability < LIGER_SINCE:
            return (plain.trainer,)
        is_possible = self.liger and plain.trainer == "transformers" and plain.shape.task == "causal-lm"
        also = is_possible and not self.liger_is_possible() and not plain.shape.image_tokens
        return (plain.trainer, "sft") if also else (plain.trainer,)

    def can_be_joined(self) -> bool:
        """Whether the samples of a micro-batch may become one row: of several lengths, none of which is cut, which
        SFTTrainer does not do then, and FlashAttention to keep them apart."""
        fits = self.lengths and self.lengths[0] < self.lengths[-1] <= self.plain.seq_len and not self.packing
        return bool(fits and self.gpu.compute_capability >= FLASH_SINCE and self.plain.shape.task == "causal-lm")

    def mean_width(self, drawn: int) -> float:
        """Mean tokens of the longest of `drawn` samples of the data set, drawn at random."""
        if drawn not in self._widths:
            longest, count = self.plain.seq_len, len(self.lengths)
            kept = enumerate(min(length, longest) for length in self.lengths)
            parts = (n * (((i + 1) / count) ** drawn - (i / count) ** drawn) for i, n in kept)
            self._widths[drawn] = sum(parts)
        return self._widths[drawn]

    def lengths_of(self, size: int) -> tuple[int, ...] | None:
        """The highest padded micro-batch of `size` samples: the longest, and a shorter one; None where none is padded."""
        plain, shape = self.plain, self.plain.shape
        shortest = self.lengths[0] if self.lengths else plain.seq_len - 1
        pads = size > 1 and plain.trainer in ("transformers", "sft")
        pads = pads and not (self.packing or shape.image_tokens or shape.num_decoder_layers)
        return (plain.seq_len,) * (size - 1) + (shortest,) if pads and 0 < shortest < plain.seq_len else None


def card_with(memory: int) -> Gpu:
    """Return the table's least card of at least `memory` bytes. Raises RecipeError where there is none."""
    enough = [card for card in map(find_gpu, gpu_names()) if card.memory_gb << 30 >= memory]
    if not enough:
        raise RecipeError("memory", memory, "no card of the table has so much: name the GPU")
    return min(enough, key=lambda card: (card.memory_gb, card.total, card.name))


def size_of(name: str, value: str | int | None) -> int | None:
    """Bytes of "24GiB", "64 GB" or a number of bytes; None of None. Raises RecipeError, which calls it `name`."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d+\.?\d*) *([a-z]*)", str(value).strip().lower())
    size = int(float(found[1]) * UNITS.get(found[2], 0)) if found else -1
    if size < (0 if name == "other_memory" else UNITS["mib"]):
        raise RecipeError(name, value, "it must be a size such as '24GiB', or bytes, a MiB at least")
    return size
