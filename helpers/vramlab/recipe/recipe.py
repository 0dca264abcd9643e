"""What to train and how: a frozen, validated dataclass that every witness reads and none can change.

Field names are the ecosystem's (`TrainingArguments`, `LoraConfig`, `BitsAndBytesConfig`). A value that cannot be
trained raises `RecipeError` when the recipe is built, before anything is allocated.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..report.errors import RecipeError
from . import parallel_limits as cuts
from .families import MOST_LAYERS
from .options import (
    ALIASES,
    ATTENTION,
    LOOPS,
    OPTIMIZERS,
    PRECISIONS,
    TASKS,
    Loop,
    LoRA,
    Quantization,
    Sharding,
    choice,
    flag,
    optimizer_arguments,
    rebuild,
    whole,
)
from .shapes import Shape, plain, read_json, read_shape

MOST = 2**24  # samples or tokens
MOST_MICRO_BATCHES = 2**16  # each of them is run
MOST_BYTES = 2**62  # of one tensor: PyTorch counts bytes in signed 64 bits


@dataclass(frozen=True)
class Recipe:
    """What is trained and how; see the module docstring.

    Attributes:
        model: a name of the catalogue, a path to a `config.json` (or its folder), or a `transformers` config object.
        batch_size: samples in one micro-batch on one device.
        seq_len: tokens per sample; None takes 512 or the model's longest, whichever is less (images have their own).
        precision: one of PRECISIONS; "-true" keeps weights, gradients and states in that format, "-mixed" is autocast.
        optim: one of OPTIMIZERS, the names of `TrainingArguments.optim`.
        optim_args: as in `TrainingArguments`, for example "momentum=0.9".
        task: which head is trained; None takes the usual one of the architecture.
        attn_implementation: one of ATTENTION; None takes "sdpa" where the architecture has it, else "eager".
        num_layers: a depth other than the model's own.
    Raises:
        RecipeError: a field has a value that cannot be trained.
    """

    model: Any
    batch_size: int = 1
    seq_len: int | None = None
    precision: str = "fp32"
    optim: str = "adamw_torch"
    optim_args: str | None = None
    gradient_checkpointing: bool = False
    gradient_accumulation_steps: int = 1
    attn_implementation: str | None = None
    torch_compile: bool = False
    lora: LoRA | None = None
    quantization: Quantization | None = None
    sharding: Sharding | None = None
    loop: Loop | str = "trainer"
    num_layers: int | None = None
    task: str | None = None
    shape: Shape = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        set_ = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        set_("model", _described(self.model))
        for name, kind in (("lora", LoRA), ("quantization", Quantization), ("sharding", Sharding)):
            value = getattr(self, name)
            if isinstance(value, Mapping):
                value = rebuild(kind, name, value)
                set_(name, value)
            if value is not None and not isinstance(value, kind):
                raise RecipeError(name, value, f"it must be a {kind.__name__} or None")
        if isinstance(self.loop, str):
            set_("loop", Loop.named(self.loop))
        elif isinstance(self.loop, Mapping):
            set_("loop", rebuild(Loop, "loop", self.loop))
        elif not isinstance(self.loop, Loop):
            raise RecipeError("loop", self.loop, "allowed are " + ", ".join(map(repr, LOOPS)) + " or a Loop")
        if isinstance(self.optim, str):
            set_("optim", ALIASES.get(self.optim, self.optim))
        choice("precision", self.precision, PRECISIONS)
        choice("optim", self.optim, OPTIMIZERS)
        if self.attn_implementation is not None:
            choice("attn_implementation", self.attn_implementation, ATTENTION)
        whole("batch_size", self.batch_size, most=MOST)
        whole("gradient_accumulation_steps", self.gradient_accumulation_steps, most=MOST_MICRO_BATCHES)
        if self.seq_len is not None:
            whole("seq_len", self.seq_len, most=MOST)
        for name in ("gradient_checkpointing", "torch_compile"):
            flag(name, getattr(self, name))
        if self.num_layers is not None:
            whole("num_layers", self.num_layers, most=MOST_LAYERS)
        if self.task is not None:
            choice("task", self.task, TASKS)
        self.optimizer_arguments()
        set_("shape", read_shape(self.model, num_layers=self.num_layers, task=self.task))
        self._check_against_shape(set_)

    def _check_against_shape(self, set_) -> None:
        shape = self.shape
        if shape.task == "image-classification":
            if self.seq_len not in (None, shape.image_tokens):
                raise RecipeError(
                    "seq_len",
                    self.seq_len,
                    f"an image is always {shape.image_tokens} tokens to {shape.name}: leave it out",
                )
            set_("seq_len", shape.image_tokens)
        elif self.seq_len is None:
            set_("seq_len", min(512, shape.max_positions or 512))
        if shape.max_positions and self.seq_len > shape.max_positions and shape.task != "image-classification":
            raise RecipeError("seq_len", self.seq_len, f"{shape.name} has {shape.max_positions} positions")
        tokens = self.batch_size * self.seq_len
        widest = max(shape.vocab_size, shape.intermediate_size, shape.hidden_size, shape.num_heads * self.seq_len)
        if tokens * widest * 8 > MOST_BYTES:
            rest = (
                f"with {self.seq_len:,} tokens a sample one tensor would have {tokens * widest:.1e} numbers: too many"
            )
            raise RecipeError("batch_size", self.batch_size, rest)
        if self.quantization and not self.lora:
            raise RecipeError(
                "quantization", self.quantization.quant_type, "quantized weights cannot be trained: add lora=LoRA(...)"
            )
        if self.quantization and self.precision.endswith("-mixed") and self.quantization.quant_type == "int8":
            raise RecipeError("precision", self.precision, "int8 bases are trained with a '-true' precision or 'fp32'")
        if self.attn_implementation is None:
            set_("attn_implementation", shape.attention)
        elif self.attn_implementation == "sdpa" and shape.attention == "eager":
            raise RecipeError(
                "attn_implementation", "sdpa", f"transformers has no sdpa for a {shape.family}: use 'eager'"
            )
        compute = (self.quantization and self.quantization.compute_dtype) or self.precision
        if self.attn_implementation == "flash_attention_2" and compute in ("fp32", "tf32", "float32"):
            allowed = "flash_attention_2 computes in fp16 and bf16 only: take a half precision, or 'sdpa'"
            raise RecipeError("precision", self.precision, allowed)
        if self.lora:
            shape.check_lora(self.lora.target_modules, self.lora.r)
        if self.loop.optimizer_in_backward and self.gradient_accumulation_steps > 1:
            raise RecipeError(
                "gradient_accumulation_steps",
                self.gradient_accumulation_steps,
                "with optimizer_in_backward no gradient survives to accumulate: use 1",
            )
        if self.sharding and self.sharding.world_size > 1 and self.loop.optimizer_in_backward:
            raise RecipeError("loop", self.loop.name, "optimizer_in_backward is modelled for one device only")
        cuts.check(self)

    @property
    def name(self) -> str:
        """The model's short name."""
        return self.shape.name

    @property
    def tokens(self) -> int:
        """Tokens that one optimizer step reads on one device."""
        return self.batch_size * self.seq_len * self.gradient_accumulation_steps

    def optimizer_arguments(self) -> dict[str, float]:
        """`optim_args` as a dictionary, {} when there are none."""
        return optimizer_arguments(self.optim, self.optim_args)

    def replace(self, **changes) -> "Recipe":
        """A copy with `changes`, validated again."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        if ("model" in changes or "task" in changes) and self.shape.task == "image-classification":
            values["seq_len"] = None
        return Recipe(**{**values, **changes})

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary; `Recipe(**d)` gives the recipe back."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        for name, value in values.items():
            if dataclasses.is_dataclass(value):
                values[name] = dataclasses.asdict(value)
        return json.loads(json.dumps(values, default=str))

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Recipe":
        """The recipe that `to_json` wrote. Raises RecipeError if `text` is no JSON of a recipe."""
        values = read_json("recipe", text)
        if not isinstance(values, dict) or "model" not in values:
            raise RecipeError("recipe", text, "it must be a JSON object with a 'model', as to_json() writes it")
        return rebuild(cls, "recipe", values)

    @property
    def key(self) -> str:
        """A short stable identifier: equal recipes have equal keys, on every machine."""
        return key_of(self.to_dict())

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other) -> bool:
        return isinstance(other, Recipe) and self.to_json() == other.to_json()

    def __str__(self) -> str:
        """One line that names everything a number depends on."""
        parts = [self.name, f"batch {self.batch_size}", f"{self.seq_len} tokens", self.precision, self.optim]
        if self.optim_args:
            parts.append(self.optim_args)
        if self.task is not None:
            parts.append(self.task)
        if self.num_layers is not None:
            parts.append(f"{self.num_layers} layers")
        if self.gradient_accumulation_steps > 1:
            parts.append(f"accumulate ×{self.gradient_accumulation_steps}")
        if self.gradient_checkpointing:
            parts.append("checkpointing")
        if self.attn_implementation != "sdpa":
            parts.append(self.attn_implementation)
        if self.lora:
            parts.append(f"LoRA r={self.lora.r}")
        if self.quantization:
            parts.append(self.quantization.quant_type + (" double" if self.quantization.double else ""))
        if self.sharding:
            parts.append(f"{self.sharding.engine} stage {self.sharding.stage} × {self.sharding.world_size}")
            if self.sharding.offload:
                parts.append(f"{self.sharding.offload} offloaded")
        if self.torch_compile:
            parts.append("compiled")
        if self.loop.name != "trainer" or self.loop != LOOPS["trainer"]:
            parts.append(f"{self.loop.name} loop" + ("" if self.loop == LOOPS.get(self.loop.name) else " (changed)"))
        return " · ".join(parts)

    def training_arguments(self, output_dir: str = "out", **changes):
        """The `transformers.TrainingArguments` that trains the same way; see `vramlab.training_arguments`."""
        from .arguments import to_training_arguments

        return to_training_arguments(self, output_dir, **changes)

    @classmethod
    def from_training_arguments(cls, args, model, **fields) -> "Recipe":
        """The recipe of `args` (a `TrainingArguments`) for `model`; `fields` adds what the arguments do not say."""
        from .arguments import recipe_fields

        return cls(**recipe_fields(args, model, **fields))


def as_recipe(value: Any) -> Recipe:
    """`value` if it is a recipe; else the recipe of the model it names, with every other field at its default.

    Raises:
        RecipeError: `value` is neither a recipe nor a model.
    """
    return value if isinstance(value, Recipe) else Recipe(value)


def _described(model: Any) -> str | dict[str, Any]:
    """The text or the dictionary that says which `model` it is."""
    if isinstance(model, str | os.PathLike):
        return os.fspath(model)
    if hasattr(model, "to_dict") and not isinstance(model, Mapping | Recipe):
        model = model.to_dict()
    if isinstance(model, Mapping):
        return plain(model)
    rest = "it must be a name, a path to a config.json or a transformers config object"
    if hasattr(model, "named_parameters"):
        rest += "; a module goes to simulate(model=...)"
    raise RecipeError("model", model, rest)


def key_of(values: Mapping[str, Any]) -> str:
    """The key of the recipe whose `to_dict` gives `values`, without building it."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
