"""The parts of a recipe: adapters, quantization, sharding, the loop; and the checks that name a bad value."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from ..report.errors import RecipeError

PRECISIONS = ("fp32", "tf32", "fp16-mixed", "bf16-mixed", "fp16-true", "bf16-true")
ATTENTION = ("eager", "sdpa", "flash_attention_2")
TASKS = (
    "causal-lm",
    "masked-lm",
    "sequence-classification",
    "seq2seq-lm",
    "image-classification",
)
# Names of `transformers.training_args.OptimizerNames` whose memory this package models.
OPTIMIZERS = (
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_bnb_8bit",
    "paged_adamw_32bit",
    "paged_adamw_8bit",
    "lion_32bit",
    "lion_8bit",
    "paged_lion_32bit",
    "paged_lion_8bit",
    "sgd",
    "adagrad",
    "rmsprop",
    "adafactor",
)
ALIASES = {
    "adamw_8bit": "adamw_bnb_8bit",
    "adamw": "adamw_torch",
    "paged_adamw": "paged_adamw_32bit",
    "lion": "lion_32bit",
}


QUANT_TYPES = ("nf4", "fp4", "int8")
LARGEST = 1e300  # of numbers that a recipe may have, so that each is one for torch too
STAGES = {"ddp": (0, 1), "fsdp": (2, 3), "deepspeed": (0, 1, 2, 3), "tensor": (0,), "pipeline": (0,)}


def words(text: str) -> frozenset[str]:
    """The words of `text`, for long lists of names."""
    return frozenset(text.split())


def choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise RecipeError(name, value, "allowed are " + ", ".join(map(repr, allowed)))


def whole(name: str, value: object, least: int = 1, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise RecipeError(name, value, f"it must be a whole number of at least {least}")
    if most is not None and value > most:
        raise RecipeError(name, value, f"it must be {most:,} at most")


def flag(name: str, value: object, allow_none: bool = False) -> None:
    if not (isinstance(value, bool) or (allow_none and value is None)):
        raise RecipeError(name, value, "it must be True or False" + (" or None" if allow_none else ""))


def number(name: str, value: object, allowed: str, fits: Callable[[float], bool]) -> None:
    """Raise RecipeError unless `value` is a number that `fits`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not (abs(value) < LARGEST and fits(value)):
        raise RecipeError(name, value, f"it must be a number {allowed}")


# What each optimizer takes (its signature in torch, transformers or bitsandbytes) of what the package models.
_TORCH, _BNB = ("lr", "weight_decay", "eps"), ("lr", "weight_decay")
OPTIMIZER_ARGUMENTS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused"), (*_TORCH, "amsgrad")),
    **dict.fromkeys(("adamw_bnb_8bit", "paged_adamw_32bit", "paged_adamw_8bit"), _TORCH),
    **dict.fromkeys(("lion_32bit", "lion_8bit", "paged_lion_32bit", "paged_lion_8bit"), _BNB),
    "sgd": (*_BNB, "momentum", "dampening", "nesterov"),
    "adagrad": (*_TORCH, "lr_decay", "initial_accumulator_value"),
    "rmsprop": (*_TORCH, "momentum", "alpha", "centered"),
    "adafactor": (*_BNB, "clip_threshold", "decay_rate"),
}
SWITCHES = ("nesterov", "centered", "amsgrad")
ANY_SIGN = ("dampening", "decay_rate")
FLAGS = {"true": 1.0, "yes": 1.0, "1": 1.0, "1.0": 1.0, "false": 0.0, "no": 0.0, "0": 0.0, "0.0": 0.0}


@lru_cache(maxsize=512)
def _optimizer_arguments(optim: str, text: str) -> tuple[tuple[str, float], ...]:
    found: dict[str, float] = {}
    for pair in text.split(","):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not value:
            raise RecipeError("optim_args", text, "it must read like 'momentum=0.9,weight_decay=0.01'")
        if name not in OPTIMIZER_ARGUMENTS[optim]:
            allowed = ", ".join(OPTIMIZER_ARGUMENTS[optim])
            raise RecipeError("optim_args", text, f"{optim} has no {name!r} here; it takes {allowed}")
        try:
            number = FLAGS[value.lower()] if name in SWITCHES else float(value)
        except (KeyError, ValueError):
            kind = "True or False" if name in SWITCHES else "a number"
            raise RecipeError("optim_args", text, f"{name} must be {kind}") from None
        if not math.isfinite(number) or (number < 0 and name not in ANY_SIGN):
            allowed = "a finite number" + ("" if name in ANY_SIGN else " of at least 0")
            raise RecipeError("optim_args", text, f"{name} must be {allowed}")
        found[name] = number
    if found.get("nesterov") and (not found.get("momentum") or found.get("dampening")):
        raise RecipeError("optim_args", text, "nesterov needs a momentum over 0 and no dampening")
    return tuple(found.items())


def optimizer_arguments(optim: str, text: str | None) -> dict[str, float]:
    """`optim_args` as a dictionary, {} when there are none.

    Raises:
        RecipeError: it is no text of that form, or names or values are not the optimizer's.
    """
    if text in (None, ""):
        return {}
    if not isinstance(text, str):
        raise RecipeError("optim_args", text, "it must be text like 'momentum=0.9,weight_decay=0.01'")
    return dict(_optimizer_arguments(optim, text))


def rebuild(kind, name: str, values: Mapping):
    """`kind(**values)` with an error that names the unknown field."""
    known = [f.name for f in dataclasses.fields(kind) if f.init]
    for key in values:
        if key not in known:
            raise RecipeError(f"{name}.{key}", values[key], "no such field exists; known are " + ", ".join(known))
    return kind(**values)


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters (Hu et al. 2021). Fields and defaults are those of `peft.LoraConfig`.

    `target_modules`: None (PEFT's default for the architecture), "all-linear", or module names.
    `autocast_adapter_dtype` is `get_peft_model`'s argument: fp16/bf16 adapters are kept in fp32 when True.
    """

    r: int = 8
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    target_modules: tuple[str, ...] | str | None = None
    bias: str = "none"
    use_rslora: bool = False
    modules_to_save: tuple[str, ...] | None = None
    autocast_adapter_dtype: bool = True

    def __post_init__(self):
        whole("lora.r", self.r)
        choice("lora.bias", self.bias, ("none", "all", "lora_only"))
        for name in ("target_modules", "modules_to_save"):
            value = getattr(self, name)
            if value is None or isinstance(value, str):
                continue
            if not isinstance(value, list | tuple | set | frozenset) or not all(isinstance(n, str) for n in value):
                raise RecipeError(f"lora.{name}", value, "it must be None, a name or a list of module names")
            object.__setattr__(self, name, tuple(sorted(value) if isinstance(value, set | frozenset) else value))
        number("lora.lora_dropout", self.lora_dropout, "of at least 0 and under 1", lambda p: 0 <= p < 1)
        number("lora.lora_alpha", self.lora_alpha, "over 0", lambda a: a > 0)
        for name in ("use_rslora", "autocast_adapter_dtype"):
            flag(f"lora.{name}", getattr(self, name))
        for name in ("lora_alpha", "lora_dropout"):  # 8 and 8.0 are one recipe, with one key
            object.__setattr__(self, name, float(getattr(self, name)))


@dataclass(frozen=True)
class Quantization:
    """A frozen base in few bits (Dettmers et al. 2023), as `transformers.BitsAndBytesConfig` makes it.

    `double` is `bnb_4bit_use_double_quant`; `compute_dtype` is `bnb_4bit_compute_dtype` (None: the recipe's);
    `prepare` says whether `peft.prepare_model_for_kbit_training` is called, which puts what is not quantized in fp32.
    """

    quant_type: str = "nf4"
    double: bool = False
    compute_dtype: str | None = None
    prepare: bool = True

    def __post_init__(self):
        choice("quantization.quant_type", self.quant_type, QUANT_TYPES)
        flag("quantization.double", self.double)
        flag("quantization.prepare", self.prepare)
        if self.compute_dtype is not None:
            choice("quantization.compute_dtype", self.compute_dtype, ("float32", "float16", "bfloat16"))
        if self.quant_type == "int8" and self.double:
            raise RecipeError("quantization.double", True, "double quantization exists for 'nf4' and 'fp4' only")


@dataclass(frozen=True)
class Sharding:
    """Who holds what among `world_size` ranks.

    Attributes:
        stage: ZeRO's, 0 (plain data parallel, or no data parallelism at all) to 3 (Rajbhandari et al. 2020).
        engine: "ddp" (stages 0, 1), "fsdp" (2, 3), "deepspeed" (0 to 3), "tensor" or "pipeline" (0: each rank has a
            slice of every layer, or some of the layers, and all work on the same batch).
        offload: "optimizer" or "parameters" (and optimizer) live in host memory.
        rank: whose bytes are described; ranks differ where a size does not divide, and between pipeline stages.
        wrap: FSDP's units, one for each of the "layers" and the rest, or one for the "model".
        schedule, micro_batches: how the pipeline runs the parts of a batch, "gpipe" or "1f1b".
    """

    stage: int = 3
    world_size: int = 1
    engine: str = "fsdp"
    offload: str | None = None
    rank: int = 0
    wrap: str = "layers"
    schedule: str = "1f1b"
    micro_batches: int = 1

    def __post_init__(self):
        if self.stage not in (0, 1, 2, 3) or isinstance(self.stage, bool):
            raise RecipeError("sharding.stage", self.stage, "allowed are 0, 1, 2 and 3")
        whole("sharding.world_size", self.world_size, most=2**20)
        whole("sharding.rank", self.rank, 0)
        if self.rank >= self.world_size:
            raise RecipeError(
                "sharding.rank", self.rank, f"ranks of {self.world_size} go from 0 to {self.world_size - 1}"
            )
        whole("sharding.micro_batches", self.micro_batches, most=2**16)
        choice("sharding.engine", self.engine, tuple(STAGES))
        choice("sharding.wrap", self.wrap, ("layers", "model"))
        choice("sharding.schedule", self.schedule, ("gpipe", "1f1b"))
        if self.stage not in STAGES[self.engine]:
            allowed = " or ".join(map(str, STAGES[self.engine]))
            raise RecipeError("sharding.stage", self.stage, f"engine {self.engine!r} has stage {allowed}")
        if self.offload is not None:
            choice("sharding.offload", self.offload, ("optimizer", "parameters"))
            if self.engine not in ("fsdp", "deepspeed"):
                raise RecipeError("sharding.offload", self.offload, "engines 'fsdp' and 'deepspeed' offload")
        if self.offload == "parameters" and self.stage < 3:
            raise RecipeError("sharding.offload", self.offload, "parameters can be offloaded at stage 3 only")
        for name, engine in (("schedule", "pipeline"), ("micro_batches", "pipeline"), ("wrap", "fsdp")):
            if getattr(self, name) != getattr(type(self), name) and self.engine != engine:
                raise RecipeError(f"sharding.{name}", getattr(self, name), f"only engine {engine!r} knows it")


@dataclass(frozen=True)
class Loop:
    """The training loop as far as memory sees it; the same object drives the run and the prediction.

    The loop named "trainer" also has all micro-batches of a step on the device at once, as `Trainer` fetches them.

    Attributes:
        zero_grad: where gradients are cleared: "start" of the step, "before_backward", or "end" after the update.
        set_to_none: free the gradients (True) or fill them with zeros (False).
        keep_outputs: how long the model's outputs (logits, keys and values) stay referenced: False, until the loss is
            computed; "backward", to the end of the backward pass; "step", of the step (a function around it returns);
            True, until the next forward pass gives their variable new values.
        outputs_to_fp32: half-precision outputs are copied to fp32 after an autocast forward, as accelerate does.
        use_cache: what `config.use_cache` is set to; None leaves the model's default.
        max_grad_norm: gradients are clipped to this norm before the update; None does not clip.
        foreach: the multi-tensor optimizer implementation; None takes torch's default for the device.
        optimizer_in_backward: each parameter is updated and its gradient freed as soon as it is complete.
        empty_cache_steps: `torch.cuda.empty_cache()` every so many steps; None never.
    """

    name: str = "trainer"
    zero_grad: str = "end"
    set_to_none: bool = True
    keep_outputs: bool | str = False
    outputs_to_fp32: bool = True
    use_cache: bool | None = False
    max_grad_norm: float | None = 1.0
    foreach: bool | None = None
    optimizer_in_backward: bool = False
    empty_cache_steps: int | None = None

    def __post_init__(self):
        if not isinstance(self.name, str):
            raise RecipeError("loop.name", self.name, "it must be text")
        choice("loop.zero_grad", self.zero_grad, ("start", "before_backward", "end"))
        for name in ("set_to_none", "outputs_to_fp32", "optimizer_in_backward"):
            flag(f"loop.{name}", getattr(self, name))
        if not isinstance(self.keep_outputs, bool):
            choice("loop.keep_outputs", self.keep_outputs, (False, "backward", "step", True))
        for name in ("use_cache", "foreach"):
            flag(f"loop.{name}", getattr(self, name), allow_none=True)
        if self.max_grad_norm is not None:
            number("loop.max_grad_norm", self.max_grad_norm, "over 0, or None for no clipping", lambda norm: norm > 0)
        if self.empty_cache_steps is not None:
            whole("loop.empty_cache_steps", self.empty_cache_steps)
        if self.optimizer_in_backward and self.max_grad_norm is not None:
            raise RecipeError(
                "loop.max_grad_norm",
                self.max_grad_norm,
                "clipping needs all gradients at once, which optimizer_in_backward never has: set it to None",
            )

    @classmethod
    def named(cls, name: str, **changes) -> "Loop":
        """The loop called `name`: "trainer", "plain" or "optimizer_in_backward", with `changes` applied."""
        if name not in LOOPS:
            raise RecipeError("loop", name, "allowed are " + ", ".join(map(repr, LOOPS)) + " or a Loop")
        return dataclasses.replace(LOOPS[name], **changes)


_PLAIN = Loop("plain", zero_grad="start", keep_outputs=True, outputs_to_fp32=False, use_cache=None, max_grad_norm=None)
LOOPS = {
    "trainer": Loop(),
    "plain": _PLAIN,
    "optimizer_in_backward": dataclasses.replace(_PLAIN, name="optimizer_in_backward", optimizer_in_backward=True),
}
