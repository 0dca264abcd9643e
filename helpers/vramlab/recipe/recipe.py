"""What to train and how: a frozen, validated dataclass.

Every witness reads it and none can change it. Field names are the ecosystem's
(`TrainingArguments`, `LoraConfig`, `BitsAndBytesConfig`). A value that cannot be trained raises
`RecipeError` when the recipe is built, before anything is allocated.
"""

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping
from typing import Any

from ..base import html
from ..base.errors import RecipeError
from . import (
    cut_head,
    images,
    liger,
    lora_modules,
    method_limits,
    parallel_limits,
    peft_methods,
    rollouts,
    sample_limits,
    trl_limits,
)
from .configuration import plain, read_json
from .fields import WITH_REFERENCE, RecipeFields
from .knobs import Refusals, check, documented, frozen, knobs, rebuild, refuse
from .optimizers import ALIASES, OPTIMIZERS, REFUSED
from .options import (
    ATTENTION,
    GENERATING,
    HALF,
    INT8,
    PRECISIONS,
    REPEATED,
    TRL,
    Loop,
    LoRA,
    Quantization,
    Rollouts,
    Sharding,
)
from .shapes import read_shape
from .trl_limits import LEAST_BATCH

# What a reader of recipes needs beside them comes from here too.
__all__ = [
    "ATTENTION",
    "LATER_OF_LORA",
    "LEAST_BATCH",
    "OPTIMIZERS",
    "PRECISIONS",
    "LoRA",
    "Loop",
    "Quantization",
    "Recipe",
    "Rollouts",
    "Sharding",
    "as_recipe",
    "key_of",
]
USUAL_LENGTH = 512  # tokens of a sample, where a recipe does not say
PARTS: dict[str, type] = {
    "lora": LoRA,
    "quantization": Quantization,
    "sharding": Sharding,
    "loop": Loop,
    "rollouts": Rollouts,
}
TRUE_PRECISION = {"float16": "fp16-true", "bfloat16": "bf16-true"}
WITHOUT_AUTOCAST = ("fp32", "tf32")
ALWAYS_SHOWN = ("batch_size", "precision", "optim")  # in a notebook
# Fields that stored keys of recipes do not know, and LATER, are left out at their defaults.
LATER_OF_LORA = ("use_dora", "lora_bias", "target_parameters")
LATER_OF_PARTS = {
    **dict.fromkeys(LATER_OF_LORA),
    "experts": None,
    "skip_modules": None,
    "reshard_root": False,
    "memory_efficient_linear": True,
    "dp_replicate_size": 1,
    "cp_size": 1,
    "sp_size": 1,
}


@documented
@frozen
class Recipe(RecipeFields):
    """What is trained and how.

    `model` is a name of the catalogue, a path to a `config.json` (or its folder), or a
    `transformers` config object. `precision` ending in "-true" keeps weights, gradients and states
    in that format, "-mixed" is autocast: over fp32 weights, or over those of `dtype`. A
    half-precision `dtype` without autocast ("fp32", "tf32") is its "-true" precision.

    Raises:
        RecipeError: a field has a value that cannot be trained.
    """

    def __post_init__(self) -> None:
        # In this order, since each line rests on those before: other spellings, each field by
        # itself, fields that follow from others, the model, and at last what excludes each other.
        self._take_parts()
        refuse_generating(self.trainer)
        check(self)
        for fill in (rollouts.filled_in, sample_limits.filled_in):
            for name, value in fill(self).items():
                self._set(name, value)
        if self.precision in WITHOUT_AUTOCAST and self.dtype in TRUE_PRECISION:
            self._set("precision", TRUE_PRECISION[self.dtype])
        # Called for its error: the text has to be arguments of this optimizer.
        self.optimizer_arguments()
        labels = None
        if self.trainer == "reward":
            self._set("task", self.task or "sequence-classification")
            labels = 1  # the score
        self._set("shape", read_shape(self.model, self.num_layers, self.task, labels))
        self._fit_to_shape()
        refuse(self, self._refusals())

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _take_parts(self) -> None:
        """Take parts given as mappings or names, and the spellings of others for names."""
        self._set("model", _described(self.model))
        for name, kind in PARTS.items():
            value = getattr(self, name)
            if isinstance(value, Mapping):
                self._set(name, rebuild(kind, name, value))
        if isinstance(self.loop, str):
            self._set("loop", Loop.named(self.loop))
        self._set("image_size", images.read_sizes(self.image_size))
        of_video = images.read_sizes(self.video_size, "video_size")
        self._set("video_size", of_video[0] if of_video else None)
        if isinstance(self.freeze, str | list):
            names = self.freeze.split(",") if isinstance(self.freeze, str) else self.freeze
            self._set("freeze", tuple(name.strip() for name in names))
        self._take_method(peft_methods.read(self.peft))
        if isinstance(self.optim, str):
            self._set("optim", ALIASES.get(self.optim, self.optim))
            if self.optim in REFUSED:
                rest = f"no recipe models it ({REFUSED[self.optim]}); WatchCallback measures a "
                raise RecipeError("optim", self.optim, rest + "Trainer that has it")
        if type(self.dtype).__name__ == "dtype":  # torch's
            self._set("dtype", str(self.dtype).removeprefix("torch."))

    def _take_method(self, method: peft_methods.Peft | LoRA | None) -> None:
        """Take one of PEFT's methods, plain LoRA as `lora`."""
        if method and self.lora:
            rest = "lora gives the model its adapters already: say one of the two"
            raise RecipeError("peft", self.peft, rest)
        is_lora = isinstance(method, LoRA)
        self._set("peft", None if is_lora else method)
        if is_lora:
            self._set("lora", method)

    def _fit_to_shape(self) -> None:
        """Fill in what the model decides. Raises RecipeError for sizes that do not fit it."""
        shape = self.shape
        longest = shape.max_positions or math.inf
        if shape.image_tokens and self.seq_len not in (None, shape.image_tokens):
            rest = f"an image is {shape.image_tokens} tokens to {shape.name}"
            raise RecipeError("seq_len", self.seq_len, rest)
        if self.seq_len is None:
            shown = len(images.shown(self))
            self._set("seq_len", shape.image_tokens or min(USUAL_LENGTH + shown, longest))
        if self.seq_len > longest:
            rest = shape.too_few_positions(self.seq_len)
            raise RecipeError("seq_len", self.seq_len, rest)
        if self.attn_implementation is None:
            self._set("attn_implementation", shape.attention)
        elif self.attn_implementation in ("sdpa", REPEATED) and shape.attention == "eager":
            rest = f"transformers has none for a {shape.family}: use 'eager'"
            raise RecipeError("attn_implementation", self.attn_implementation, rest)
        if self.attn_implementation == REPEATED and not shape.shares_keys:
            rest = "it is for known families of models that hand shared keys to the "
            rest += f"kernel, and {shape.name} is none: use 'sdpa'"
            raise RecipeError("attn_implementation", REPEATED, rest)
        # Called for its error too: the targets have to match something of this model.
        lora_modules.adapted(shape, self.lora)

    def _refusals(self) -> Refusals:
        """Return values that exclude each other.

        They are also those that the trainer, Liger or the ranks do not train.
        """
        yield from self._quantization_refusals()
        if self.loop.optimizer_in_backward:
            yield from self._backward_refusals()
        yield from self._dtype_refusals()
        yield from rollouts.refusals(self)
        yield from sample_limits.refusals(self)
        if self.trainer != "transformers":
            yield from trl_limits.refusals(self)
        precomputes = self.precompute_ref_log_probs and self.trainer not in WITH_REFERENCE
        allowed = "only trainer 'dpo' and 'kto' have a reference model"
        yield "precompute_ref_log_probs", precomputes, allowed
        able = [trainer for trainer in TRL if trainer not in GENERATING]
        offloads = self.activation_offloading and (self.trainer not in able or self.sharding)
        known = ", ".join(able)
        allowed = f"only trainers {known} offload activations, and on one device here"
        yield "activation_offloading", offloads, allowed
        engine = self.group.engine
        whole = self.gradient_checkpointing and engine == "ddp" and not self.rollouts
        allowed = "it says how gradient_checkpointing recomputes: on one device or ranks of 'ddp', "
        yield "use_reentrant", self.use_reentrant and not whole, allowed + "without rollouts"
        yield from liger.refusals(self)
        yield from cut_head.refusals(self)
        yield from method_limits.refusals(self)
        yield from images.refusals(self)
        yield from parallel_limits.refusals(self)

    def _quantization_refusals(self) -> Refusals:
        """Return quantized bases and formats that cannot be trained so."""
        lora = self.lora
        quantization = self.quantization
        allowed = "quantized weights cannot be trained: add lora=LoRA(...) (--lora-r 16)"
        yield "quantization", quantization and not self.adapters, allowed
        is_dora = quantization and lora and lora.use_dora
        allowed = "it is modelled for weights that are not quantized only"
        yield "lora.use_dora", is_dora, allowed
        compute = self.precision
        if quantization and quantization.compute_dtype:
            compute = quantization.compute_dtype
        is_flash = self.attn_implementation == "flash_attention_2"
        is_wide = compute in (*WITHOUT_AUTOCAST, "float32")
        allowed = "flash_attention_2 computes in fp16 and bf16 only"
        yield "precision", is_flash and is_wide, allowed
        engine = self.group.engine
        in_int8 = quantization and quantization.quant_type == INT8
        allowed = "bases in int8 are modelled on one device, and on ranks of 'ddp'"
        yield "quantization.quant_type", in_int8 and engine != "ddp", allowed
        if quantization and quantization.experts:
            yield from self._expert_refusals()
        if quantization and quantization.skip_modules:
            modules = [weight.name.removesuffix(".weight") for weight in self.shape.weights()]
            allowed = "transformers looks for it where a module's name begins or ends, and no "
            allowed += f"weight's does: {modules[-1]} and others"
            is_lost = not any(map(quantization.skips, modules))
            yield "quantization.skip_modules", is_lost, allowed

    def _expert_refusals(self) -> Refusals:
        """Return where fused experts are not put in 4 bits."""
        name = "quantization.experts"
        allowed = f"{self.shape.name} has no fused experts: leave it out"
        yield name, not lora_modules.has_experts(self.shape), allowed
        # ParamWrapper._remove_parametrizations leaves _LoraFactorsProxy, and requires_grad_ of the
        # codes fails in the next pass
        targets = self.lora and self.lora.target_parameters
        allowed = (
            "PEFT 0.21 fails in the second step with adapters on packed experts: adapt linear "
        )
        yield name, targets, allowed + "layers"
        allowed = "packed experts are modelled where weights are whole: one device, or 'ddp'"
        yield name, self.group.engine != "ddp", allowed

    def _backward_refusals(self) -> Refusals:
        """Return what updates in the backward pass exclude."""
        allowed = "with optimizer_in_backward no gradient survives to accumulate: use 1"
        accumulates = self.gradient_accumulation_steps > 1
        yield "gradient_accumulation_steps", accumulates, allowed
        is_sharded = self.group.world_size > 1 or self.group.engine == "deepspeed"
        allowed = "optimizer_in_backward is modelled for one device only, and not under DeepSpeed"
        yield "loop", is_sharded, allowed

    def _dtype_refusals(self) -> Refusals:
        """Return a `dtype` that the precision contradicts, and weights that libraries refuse."""
        dtype = self.weights_dtype
        form, _, kind = self.precision.partition("-")
        half = HALF.get(form)
        engine = self.group.engine
        is_other = kind == "true" and dtype not in (half, self.implied_dtype)
        allowed = f"precision {self.precision!r} keeps the weights in {half}: '{form}-mixed' "
        yield "dtype", is_other, allowed + "computes in it only"
        in_half = kind == "mixed" and self._trains_half()
        is_cast = in_half and engine == "fsdp" and dtype != self.implied_dtype
        allowed = "accelerate casts what FSDP trains in mixed precision to fp32: take 'float32' or "
        yield "dtype", is_cast, allowed + "fp32 adapters"
        is_scaled = in_half and form == "fp16" and engine != "deepspeed"
        allowed = "the loss scaler of 'fp16-mixed' unscales no half-precision gradients: what is "
        yield "dtype", is_scaled, allowed + "trained has to be fp32"

    def _trains_half(self) -> bool:
        """Tell whether trained weights are in half precision.

        Adapters are where PEFT does not cast them to fp32.
        """
        lora = self.lora
        quantization = self.quantization
        is_prepared = quantization and quantization.prepare
        if self.weights_dtype == "float32" or is_prepared:
            return False
        if self.peft:  # whose layers PEFT casts to fp32
            return bool(self.peft.arguments.get("modules_to_save"))
        if not lora or self.shape.task == "sequence-classification":
            return True
        if lora.bias != "none" or lora.modules_to_save:
            return True
        return not (lora.autocast_adapter_dtype or quantization)

    def replace(self, **changes: Any) -> "Recipe":
        """Return a copy with `changes`, validated again."""
        if "rollouts" in changes and self.rollouts:
            changes.setdefault("seq_len", None)  # which they say
        own: Any = self  # a dataclass, which `frozen` does not tell type checkers
        return dataclasses.replace(own, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary; `Recipe(**d)` gives the recipe back."""
        values = {}
        for name, value in vars(self).items():
            is_later = name in LATER and value == LATER[name]
            if name != "shape" and not is_later:
                values[name] = value and _as_json(value)
        # one recipe with one key, whether its dtype is said or not
        if self.dtype in (None, self.implied_dtype):
            values.pop("dtype", None)
        return values

    def to_json(self) -> str:
        """Return the recipe as JSON text; `Recipe.from_json` reads it back."""
        return json.dumps(self.to_dict(), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Recipe":
        """Return the recipe that `to_json` wrote.

        Raises RecipeError if `text` is no JSON of a recipe.
        """
        values = read_json("recipe", text)
        if not isinstance(values, dict) or "model" not in values:
            rest = "it must be a JSON object with a 'model', as to_json() writes it"
            raise RecipeError("recipe", text, rest)
        return rebuild(cls, "recipe", values)

    @property
    def key(self) -> str:
        """A short stable identifier: equal recipes have equal keys, on every machine."""
        return key_of(self.to_dict())

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self.to_json() == other.to_json()

    def __str__(self) -> str:
        """One line that names everything a number depends on."""
        values = dict(vars(self))
        if self.dtype == self.implied_dtype:
            values["dtype"] = None
        parts = [self.name]
        for name, said in knobs(Recipe).items():
            words = said.words(values[name]) if values[name] else ""
            if words:
                parts.append(words)
        # TRL's trainers never prepare a base
        if self.quantization and not self.quantization.prepare and self.trainer not in TRL:
            parts.append("not prepared")
        return " · ".join(parts)

    def _repr_html_(self) -> str:
        """Return the recipe as a notebook shows it.

        It is what differs from the defaults, and the batch.
        """
        rows: list[tuple[str, Any]] = [("model", self.name)]
        for name, said in knobs(Recipe).items():
            value = getattr(self, name)
            is_shown = value != said.default or name in ALWAYS_SHOWN
            if name != "model" and is_shown:
                rows.append((name, said.words(value) or value))
        return html.table(("recipe", ""), rows)

    def training_arguments(self, output_dir: str = "out", **changes: Any) -> Any:
        """Return the `transformers.TrainingArguments` that trains the same way.

        See `vramlab.training_arguments`.
        """
        from .arguments import to_training_arguments

        return to_training_arguments(self, output_dir, **changes)

    @classmethod
    def from_training_arguments(cls, args: Any, model: Any, **fields: Any) -> "Recipe":
        """Return the recipe of `args` for `model`.

        They are a `TrainingArguments` or TRL's `SFTConfig`, `DPOConfig`, … `fields` adds what they
        do not say. A `max_length` is taken for the length of every sample.
        """
        from .arguments import to_recipe

        return to_recipe(cls, args, model, **fields)


def _later() -> dict[str, Any]:
    """Return the fields that stored keys of recipes do not know, and their defaults."""
    defaults = {name: said.default for name, said in knobs(Recipe).items()}
    names = list(defaults)
    return {name: defaults[name] for name in names[names.index("trainer") :]}


LATER = _later()


# other trainers of TRL that sample answers from the model in each step
NOT_MODELLED = ("ppo", "online_dpo")


def refuse_generating(trainer: str) -> None:
    """Raise RecipeError for a trainer of NOT_MODELLED."""
    if trainer in NOT_MODELLED:
        known = ", ".join(TRL)
        rest = "it generates while it trains, which no recipe models yet: WatchCallback() in its "
        rest += f"Trainer measures it on a card, and recipes train as {known} do"
        raise RecipeError("trainer", trainer, rest)


def as_recipe(value: Any) -> Recipe:
    """Return `value` if it is a recipe, else the recipe of the model that it names.

    Every other field is at its default.
    """
    return value if isinstance(value, Recipe) else Recipe(value)


def _as_json(value: Any) -> Any:
    if isinstance(value, peft_methods.Peft):
        return value.to_dict()
    if isinstance(value, tuple(PARTS.values())):
        fields = {}
        for name, one in vars(value).items():
            is_usual = name in LATER_OF_PARTS and (one or None) == (LATER_OF_PARTS[name] or None)
            if not is_usual:
                fields[name] = _as_json(one)
        return fields
    return list(value) if isinstance(value, tuple) else value


def _described(model: Any) -> Any:
    """Return the text or the dictionary that says which `model` it is."""
    if isinstance(model, os.PathLike):
        return os.fspath(model)
    if hasattr(model, "to_dict") and not isinstance(model, Recipe):
        parallel_limits.check_division(getattr(model, "distributed_config", None))
        model = model.to_dict()
    return plain(model) if isinstance(model, Mapping) else model


def key_of(values: Mapping[str, Any]) -> str:
    """Return the key of the recipe whose `to_dict` gives `values`, without building it."""
    # Keys of stored records are of this text, so it may not change for a recipe that could be
    # stored before: see LATER.
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
