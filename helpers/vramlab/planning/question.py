"""What `plan` is asked: the GPUs, the batch, and what to try. The command line reads its options from the fields."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..formulas.fused_head import with_its_adapters
from ..hardware.gpu import Gpu, find_gpu, gpu_names
from ..recipe.knobs import documented, knob, knobs, same_knob
from ..recipe.options import LoRA
from ..recipe.recipe import ATTENTION, OPTIMIZERS, PRECISIONS, Recipe
from ..report.errors import RecipeError

METHODS = ("full", "lora", "qlora")
OPTIMS = ("adamw_torch_fused", "adamw_torch", "adamw_bnb_8bit", "paged_adamw_8bit")  # AdamW in four implementations
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
    gpu: str | Gpu
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
    lora: LoRA = knob(RANK)
    task: str | None = same_knob(Recipe, "task")
    num_layers: int | None = None
    trainer: str = same_knob(Recipe, "trainer")
    memory: int | None = knob(None)
    host_memory: int | None = knob(None)
    tier: str = knob("process", choices=("process", "reserved", "allocated"))
    link: float | None = knob(None, bounds="of bytes a second, over 0")

    def __post_init__(self):
        self.gpu = find_gpu(self.gpu)
        if isinstance(self.lora, Mapping):  # of what differs from RANK
            self.lora = dataclasses.replace(RANK, **{"lora_alpha": 2 * self.lora.get("r", RANK.r), **self.lora})
        for name, said in knobs(Question).items():
            value = getattr(self, name)
            if said.many and value is not None:
                value = tuple(value) if isinstance(value, list | tuple | set) else (value,)
                setattr(self, name, value)
                if not value:
                    raise RecipeError(name, value, "at least one is needed")
            for one in value if isinstance(value, tuple) else (value,):
                said.check(name, one)
        if self.global_batch % self.gpus:
            near = max(1, round(self.global_batch / self.gpus)) * self.gpus
            rest = f"{self.gpus} GPUs share it equally: take a multiple, such as {near}"
            raise RecipeError("global_batch", self.global_batch, rest)
        if self.trainer == "kto":
            raise RecipeError("trainer", "kto", "plan tries micro-batches of one sample too, which KTOTrainer refuses")
        same = ("seq_len", "task", "num_layers", "trainer")
        self.plain = Recipe(self.model, **{name: getattr(self, name) for name in same})
        with_its_adapters(self.plain)
        if self.trainer != "transformers" and self.gpus > 1:
            raise RecipeError("gpus", self.gpus, f"with trainer={self.trainer!r} one device is modelled so far")
        if self.method != "full":
            self.plain.shape.check_lora(self.lora.target_modules, self.lora.r)
        for precision in self.precisions or ():
            self.gpu.require(precision)

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods to search."""
        return METHODS if self.method == "any" else (self.method,)

    @property
    def samples_per_gpu(self) -> int:
        """Samples of the global batch that one GPU gets."""
        return self.global_batch // self.gpus

    @property
    def usable(self) -> int:
        """Bytes of one card that a process can have."""
        return self.memory or usable_memory(self.gpu)


def usable_memory(card: Gpu) -> int:
    """Bytes that torch reports as the card's total; if unknown, its nominal size times the least known such share."""
    if card.total_known:
        return card.total
    known = [gpu for gpu in map(find_gpu, gpu_names()) if gpu.total_known]
    return int(card.total * min(gpu.total / (gpu.memory_gb << 30) for gpu in known))
