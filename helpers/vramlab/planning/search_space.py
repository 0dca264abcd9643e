"""The recipes that `plan` chooses from: what is asked, and every way to train that would answer it.

A family is a recipe without its micro-batch: the global batch is kept exactly, so micro-batch × accumulation × ranks is
always what was asked for, and the micro-batches of a family are the divisors of one rank's part.
"""

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..formulas import model_states as stored
from ..formulas import shards
from ..formulas.fsdp import computed
from ..hardware.gpu import Chip, Gpu, find_gpu, gpu_names
from ..recipe.knobs import choice, flag, whole
from ..recipe.recipe import ATTENTION, OPTIMIZERS, PRECISIONS, LoRA, Quantization, Recipe, Sharding
from ..report.errors import RecipeError
from .step_time import walk
from .step_traffic import paged_bytes

METHODS = ("full", "lora", "qlora")
ENGINES = ("ddp", "fsdp", "deepspeed")
TIERS = ("process", "reserved", "allocated")
OPTIMS = ("adamw_torch_fused", "adamw_torch", "adamw_bnb_8bit", "paged_adamw_8bit")  # one algorithm, four ways
# With divided states: bitsandbytes does not update a rank's part of a tensor.
SHARDED_OPTIMS = ("adamw_torch_fused", "adamw_torch")
# Not proposed for full training unless asked for: AdamW's ε of 1e-8 is zero in fp16, and small gradients are too.
PROPOSED = {"full": ("{half}-true", "{half}-mixed", "tf32", "fp32"), "lora": ("{half}-true", "{half}-mixed", "fp32")}
PROPOSED["qlora"] = PROPOSED["lora"][:2]
RANK = LoRA(r=16, lora_alpha=32, target_modules="all-linear")  # all linear layers: Dettmers et al. 2023, section 4
MOST_GPUS = 1024
SURE = 0.98  # of what layers keep by two micro-batches: the rounding of blocks is not affine


@dataclass(frozen=True)
class Question:
    """What `plan` is asked; checked when it is made. See `plan` for the fields.

    Raises:
        RecipeError, GpuError: a value that cannot be, in one sentence.
    """

    model: object
    gpu: Gpu
    gpus: int = 1
    global_batch: int = 16
    seq_len: int | None = None
    method: str = "any"
    precisions: tuple[str, ...] | None = None
    optims: tuple[str, ...] = OPTIMS
    attention: tuple[str, ...] = ATTENTION
    checkpointing: tuple[bool, ...] = (False, True)
    engines: tuple[str, ...] = ENGINES
    offload: bool = True
    lora: LoRA = RANK
    task: str | None = None
    num_layers: int | None = None
    memory: int | None = None
    host_memory: int | None = None
    tier: str = "process"
    link: float | None = None
    plain: Recipe = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        set_ = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        set_("gpu", find_gpu(self.gpu))
        for name in ("gpus", "global_batch"):
            whole(name, getattr(self, name))
        if self.gpus > MOST_GPUS:
            raise RecipeError("gpus", self.gpus, f"plans are made for up to {MOST_GPUS:,} GPUs")
        if self.global_batch % self.gpus:
            near = max(1, round(self.global_batch / self.gpus)) * self.gpus
            raise RecipeError(
                "global_batch", self.global_batch, f"{self.gpus} GPUs share it equally: take a multiple, such as {near}"
            )
        for name in ("memory", "host_memory"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name))
        if self.link is not None and not (isinstance(self.link, int | float) and self.link > 0):
            raise RecipeError("link", self.link, "it must be bytes a second, over 0")
        choice("method", self.method, ("any", *METHODS))
        choice("tier", self.tier, TIERS)
        flag("offload", self.offload)
        known = {"optims": OPTIMIZERS, "attention": ATTENTION, "engines": ENGINES, "precisions": PRECISIONS}
        for name, allowed in {**known, "checkpointing": (False, True)}.items():
            values = getattr(self, name)
            if values is None:
                continue
            set_(name, tuple(values) if isinstance(values, list | tuple | set) else (values,))
            if not getattr(self, name):
                raise RecipeError(name, values, "at least one is needed")
            for value in getattr(self, name):
                flag(name, value) if name == "checkpointing" else choice(name, value, allowed)
        if not isinstance(self.lora, LoRA):
            raise RecipeError("lora", self.lora, "it must be a LoRA")
        plain = Recipe(self.model, seq_len=self.seq_len, task=self.task, num_layers=self.num_layers)
        set_("plain", plain)
        if self.method != "full":
            plain.shape.check_lora(self.lora.target_modules, self.lora.r)
        for precision in self.precisions or ():
            self.gpu.require(precision)

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that are searched."""
        return METHODS if self.method == "any" else (self.method,)

    @property
    def each(self) -> int:
        """Samples of the global batch that one GPU gets."""
        return self.global_batch // self.gpus

    @property
    def usable(self) -> int:
        """Bytes of one card that a process can have: `memory`, or what the card reports, or a cautious part of its box."""
        return self.memory or usable_memory(self.gpu)


def usable_memory(card: Gpu) -> int:
    """What torch reports as the card's total; where no reading is known, the least part of its box that any card reports."""
    if card.total_known:
        return card.total
    known = [gpu for gpu in map(find_gpu, gpu_names()) if gpu.total_known]
    return int(card.total * min(gpu.total / (gpu.memory_gb << 30) for gpu in known))


def micro_batches(question: Question) -> tuple[int, ...]:
    """What one rank's samples can be cut into, largest first."""
    return tuple(n for n in range(question.each, 0, -1) if question.each % n == 0)


def families(question: Question, method: str) -> Iterator[Recipe]:
    """Every way to train by `method`, with the largest micro-batch."""
    precisions = question.precisions or _proposed(question.gpu, method)
    bases = _bases(question) if method == "qlora" else (None,)
    parts = (precisions, question.optims, question.checkpointing, question.attention, bases, _shardings(question))
    for precision, optim, checkpointing, attention, base, sharding in itertools.product(*parts):
        if _left_out(question, precision, optim, attention, base, sharding):
            continue
        try:
            found = question.plain.replace(
                batch_size=question.each,
                precision=precision,
                optim=optim,
                gradient_checkpointing=checkpointing,
                attn_implementation=attention,
                lora=None if method == "full" else question.lora,
                quantization=base,
                sharding=sharding,
            )
        except RecipeError:  # what the model or the base cannot have
            continue
        if question.host_memory is None or host_bytes(found) <= question.host_memory:
            yield found


def with_micro_batch(family: Recipe, size: int) -> Recipe:
    """The family's recipe with micro-batches of `size` samples and the same global batch.

    Nothing else changes, so nothing is checked again: that would take ten times as long as the rest.
    """
    found = copy.copy(family)
    object.__setattr__(found, "batch_size", size)
    object.__setattr__(
        found, "gradient_accumulation_steps", family.batch_size * family.gradient_accumulation_steps // size
    )
    return found


def method_of(recipe: Recipe) -> str:
    """ "full", "lora" or "qlora"."""
    return "qlora" if recipe.quantization else "lora" if recipe.lora else "full"


def host_bytes(recipe: Recipe) -> int:
    """Bytes that all ranks together hold in the host's memory: what is offloaded, and paged states."""
    if not (recipe.sharding and recipe.sharding.offload):
        return paged_bytes(recipe)
    moved = stored.optimizer_state_bytes(recipe) + stored.gradient_bytes(recipe)
    return moved + (stored.parameter_bytes(recipe) if recipe.sharding.offload == "parameters" else 0)


def described(recipe: Recipe) -> str:
    """The recipe's line, with what it leaves out: whether a 4-bit base is prepared for k-bit training."""
    return f"{recipe} · not prepared" if recipe.quantization and not recipe.quantization.prepare else str(recipe)


def least_bytes(recipe: Recipe) -> int:
    """A lower bound of the predicted peak that needs no walk through the model: what is there when the optimizer steps.

    Weights, gradients and states, a rank's part of those that are divided, none of what is offloaded.
    """
    return sum(_held(recipe))


def held_bytes(recipe: Recipe, chip: Chip) -> int:
    """A better lower bound: at the end of forward, weights, states and what the layers keep are there together."""
    weights, gradients, states = _held(recipe)
    return weights + states + max(gradients, int(SURE * walk(computed(recipe), chip).kept))


def _held(recipe: Recipe) -> tuple[int, int, int]:
    """Bytes of weights, gradients and states, of one rank where they are divided."""
    if recipe.sharding is None:
        sizes = stored.parameter_bytes, stored.gradient_bytes, stored.optimizer_state_bytes
        return tuple(size(recipe) for size in sizes)
    rank = shards.of_rank(recipe)
    return rank.parameters, rank.gradients, rank.optimizer_states


def _proposed(card: Gpu, method: str) -> list[str]:
    """Precisions to try: bf16 where the card computes in it, else fp16 (never untried: fp16 loses small gradients)."""
    half = "bf16" if card.supports("bf16") else "fp16"
    names = [name.format(half=half) for name in PROPOSED[method]]
    return [name for name in names if card.supports(name) and not (method == "full" and name == "fp16-true")]


def _bases(question: Question) -> list[Quantization]:
    """4-bit bases. Divided among ranks they are not prepared for k-bit training, which would make two dtypes of one unit."""
    prepares = (True, False) if question.gpus == 1 else (False,)
    return [Quantization("nf4", double, prepare=prepare) for prepare in prepares for double in (False, True)]


def _shardings(question: Question) -> list[Sharding | None]:
    n, found = question.gpus, []
    if n == 1:
        found.append(None)
        if question.offload and "deepspeed" in question.engines:
            found += [Sharding(2, 1, "deepspeed", "optimizer"), Sharding(3, 1, "deepspeed", "parameters")]
        return found
    for engine, stages in (("ddp", (0,)), ("fsdp", (2, 3)), ("deepspeed", (1, 2, 3))):
        if engine in question.engines:
            found += [Sharding(stage, n, engine) for stage in stages]
    if question.offload and "fsdp" in question.engines:
        found.append(Sharding(3, n, "fsdp", "parameters"))
    if question.offload and "deepspeed" in question.engines:
        found += [Sharding(stage, n, "deepspeed", "optimizer") for stage in (2, 3)]
        found.append(Sharding(3, n, "deepspeed", "parameters"))
    return found


def _left_out(question, precision, optim, attention, base, sharding) -> bool:
    """Combinations that do not run, or that another one of the space is equal to."""
    divided = sharding and (sharding.stage or sharding.offload)
    if divided and optim not in SHARDED_OPTIMS:
        return True
    if sharding and sharding.offload and optim != "adamw_torch":
        return True  # DeepSpeed puts its own CPU Adam in place, FSDP updates on the CPU
    if base and sharding and sharding.engine == "deepspeed" and sharding.offload:
        return True  # packed weights that DeepSpeed's host copies know nothing of
    if attention == "flash_attention_2":
        half = precision[:4] in ("fp16", "bf16")
        usable = half and question.gpu.compute_capability >= (8, 0)
        return not usable or "sdpa" in question.attention  # sdpa takes the same kernel there, without the package
    return False
