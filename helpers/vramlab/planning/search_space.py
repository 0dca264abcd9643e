"""What `plan` is asked, and the space of recipes that answer it.

A family is one way to train. Its recipes differ in the micro-batch only: a divisor of one GPU's share of the global
batch, so that micro-batch × accumulation × GPUs is always the global batch.
"""

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from operator import lt

from ..formulas import model_states, shards
from ..hardware.gpu import Chip, Gpu, find_gpu, gpu_names
from ..recipe.knobs import documented, knob, knobs
from ..recipe.options import LoRA, Quantization, Sharding
from ..recipe.recipe import ATTENTION, OPTIMIZERS, PRECISIONS, Recipe
from ..report.errors import RecipeError
from .step_time import walk
from .step_traffic import paged_bytes

METHODS = ("full", "lora", "qlora")
OPTIMS = ("adamw_torch_fused", "adamw_torch", "adamw_bnb_8bit", "paged_adamw_8bit")  # AdamW in four implementations
SHARDED_OPTIMS = ("adamw_torch_fused", "adamw_torch")  # bitsandbytes does not update shards
# Precisions to try by method, "half" being the card's. Full training in fp16-true only on request: there AdamW's
# epsilon of 1e-8 is zero, and small gradients are too.
PRECISIONS_OF = {
    "full": ("half-true", "half-mixed", "tf32", "fp32"),
    "lora": ("half-true", "half-mixed", "fp32"),
    "qlora": ("half-true", "half-mixed"),
}
# (stage, offload) by engine: on one GPU only what takes bytes off it.
ON_ONE_GPU = {"deepspeed": ((2, "optimizer"), (3, "parameters"))}
ON_SEVERAL = {
    "ddp": ((0, None),),
    "fsdp": ((2, None), (3, None), (3, "parameters")),
    "deepspeed": ((1, None), (2, None), (3, None), (2, "optimizer"), (3, "optimizer"), (3, "parameters")),
}
ENGINES = tuple(ON_SEVERAL)
RANK = LoRA(r=16, lora_alpha=32, target_modules="all-linear")  # all linear layers: Dettmers et al. 2023, section 4
SURE = 0.98  # of the saved activations interpolated from two micro-batches: rounding of blocks is not affine


@documented
@dataclass
class Question:
    """What `plan` is asked: GPUs, batch, and what to try. `model`, `seq_len`, `task` and `num_layers` as in `Recipe`.

    Raises RecipeError or GpuError, one sentence that names the wrong argument.
    """

    model: object
    gpu: str | Gpu
    gpus: int = knob(1, "how many of them", most=1024)
    global_batch: int = knob(16, "samples of one optimizer step over all GPUs")
    seq_len: int | None = None
    method: str = knob("any", "full training or adapters", choices=("any", *METHODS))
    precisions: tuple[str, ...] | None = knob(
        None, "to try; None for those that the card computes in and that are safe", choices=PRECISIONS
    )
    optims: tuple[str, ...] = knob(OPTIMS, "to try", choices=OPTIMIZERS)
    attention: tuple[str, ...] = knob(ATTENTION, "to try", choices=ATTENTION)
    checkpointing: tuple[bool, ...] = knob((False, True), "to try", choices=(False, True))
    engines: tuple[str, ...] = knob(ENGINES, "to try", choices=ENGINES)
    offload: bool = knob(True, "whether to try it")
    lora: LoRA = knob(RANK, "rank and targets of adapters")
    task: str | None = None
    num_layers: int | None = None
    memory: int | None = knob(None, "usable bytes of one card, in place of the table's")
    host_memory: int | None = knob(None, "bytes of the host that all ranks may offload or page to; None does not ask")
    tier: str = knob("process", "which predicted figure has to fit", choices=("process", "reserved", "allocated"))
    link: float | None = knob(
        None,
        "bytes per second between GPUs, in place of the table's",
        bounds=("of bytes a second, over 0", partial(lt, 0)),
    )

    def __post_init__(self):
        self.gpu = find_gpu(self.gpu)
        for name, said in knobs(Question).items():
            value = getattr(self, name)
            if isinstance(said.default, tuple) or (name == "precisions" and value is not None):  # a list of what to try
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
        self.plain = Recipe(self.model, seq_len=self.seq_len, task=self.task, num_layers=self.num_layers)
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


def micro_batches(question: Question) -> tuple[int, ...]:
    """Possible micro-batches, largest first."""
    samples = question.samples_per_gpu
    return tuple(n for n in range(samples, 0, -1) if samples % n == 0)


def families(question: Question, method: str) -> Iterator[Recipe]:
    """Every way to train by `method`, with the largest micro-batch."""
    options = {
        "precision": question.precisions or _precisions(question.gpu, method),
        "optim": question.optims,
        "gradient_checkpointing": question.checkpointing,
        "attn_implementation": _kernels(question),
        "quantization": _bases(question) if method == "qlora" else (None,),
        "sharding": tuple(_shardings(question)),
    }
    fixed = {"batch_size": question.samples_per_gpu, "lora": None if method == "full" else question.lora}
    for values in itertools.product(*options.values()):
        chosen = dict(zip(options, values, strict=True))
        if not _runs(chosen["optim"], chosen["quantization"], chosen["sharding"]):
            continue
        try:
            family = question.plain.replace(**fixed, **chosen)
        except RecipeError:  # the model or the base cannot have it
            continue
        if question.host_memory is None or host_bytes(family) <= question.host_memory:
            yield family


def with_micro_batch(family: Recipe, size: int) -> Recipe:
    """The family's recipe with micro-batches of `size` samples; not validated again, for speed."""
    found = copy.copy(family)
    steps = family.batch_size * family.gradient_accumulation_steps // size
    object.__setattr__(found, "batch_size", size)
    object.__setattr__(found, "gradient_accumulation_steps", steps)
    return found


def method_of(recipe: Recipe) -> str:
    """ "full", "lora" or "qlora"."""
    return "qlora" if recipe.quantization else "lora" if recipe.lora else "full"


def described(recipe: Recipe) -> str:
    """The recipe in one line, and whether its 4-bit base is not prepared for k-bit training."""
    return f"{recipe} · not prepared" if recipe.quantization and not recipe.quantization.prepare else str(recipe)


def host_bytes(recipe: Recipe) -> int:
    """Bytes that all ranks together offload to the host's memory or may page there."""
    if not (recipe.sharding and recipe.sharding.offload):
        return paged_bytes(recipe)
    moved = model_states.optimizer_state_bytes(recipe) + model_states.gradient_bytes(recipe)
    return moved + (model_states.parameter_bytes(recipe) if recipe.sharding.offload == "parameters" else 0)


def least_bytes(recipe: Recipe) -> int:
    """A lower bound of the predicted peak: one rank's weights, gradients and states when the optimizer steps."""
    rank = shards.of_rank(recipe)
    return rank.parameters + rank.gradients + rank.optimizer_states


def held_bytes(recipe: Recipe, chip: Chip) -> int:
    """A closer lower bound: at the end of forward the saved activations are there instead of gradients."""
    rank = shards.of_rank(recipe)
    saved = int(SURE * walk(model_states.compute_recipe(recipe), chip).kept)
    return rank.parameters + rank.optimizer_states + max(rank.gradients, saved)


def _precisions(card: Gpu, method: str) -> list[str]:
    """Precisions to try: bf16 where the card computes in it, else fp16."""
    half = "bf16" if card.supports("bf16") else "fp16"
    names = [name.replace("half", half) for name in PRECISIONS_OF[method]]
    return [name for name in names if card.supports(name) and not (method == "full" and name == "fp16-true")]


def _kernels(question: Question) -> list[str]:
    """Attention to try: sdpa takes the kernel of flash_attention_2 by itself, without the package."""
    flash = "sdpa" not in question.attention and question.gpu.compute_capability >= (8, 0)
    return [name for name in question.attention if name != "flash_attention_2" or flash]


def _bases(question: Question) -> list[Quantization]:
    """4-bit bases. Shards are not prepared for k-bit training, which would put two dtypes into one unit."""
    prepares = (True, False) if question.gpus == 1 else (False,)
    return [Quantization("nf4", double, prepare=prepare) for prepare in prepares for double in (False, True)]


def _shardings(question: Question) -> Iterator[Sharding | None]:
    if question.gpus == 1:
        yield None
    for engine, ways in (ON_ONE_GPU if question.gpus == 1 else ON_SEVERAL).items():
        for stage, offload in ways:
            if engine in question.engines and (question.offload or not offload):
                yield Sharding(stage, question.gpus, engine, offload)


def _runs(optim: str, base: Quantization | None, sharding: Sharding | None) -> bool:
    """Whether a combination runs, and is not another one under a second name."""
    if sharding is None:
        return True
    if sharding.offload:  # DeepSpeed updates by its own CPU Adam, FSDP on the CPU; DeepSpeed moves no packed weights
        return optim == "adamw_torch" and not (base and sharding.engine == "deepspeed")
    return sharding.stage == 0 or optim in SHARDED_OPTIMS
