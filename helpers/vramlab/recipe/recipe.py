"""What to train and how: a frozen, validated dataclass that every witness reads and none can change.

Field names are the ecosystem's (`TrainingArguments`, `LoraConfig`, `BitsAndBytesConfig`). A value that cannot be
trained raises `RecipeError` when the recipe is built, before anything is allocated.
"""

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import dropwhile
from typing import Any

from ..report import html
from ..report.errors import RecipeError
from . import liger, lora_modules, parallel_limits, samples
from .configuration import MOST_LAYERS, plain, read_json
from .families import TASKS
from .knobs import Refusals, check, documented, knob, knobs, rebuild, refuse
from .optimizers import ALIASES, OPTIMIZERS, REFUSED, optimizer_arguments
from .options import ATTENTION, DTYPES, HALF, LOOPS, PRECISIONS, REPEATED, TRL, Loop, LoRA, Quantization, Sharding
from .shapes import Shape, read_shape

LEAST_BATCH = {"kto": 2}  # samples
MOST_MICRO_BATCHES = 2**16  # each of them is run
PARTS = {"lora": LoRA, "quantization": Quantization, "sharding": Sharding, "loop": Loop}
# Fields that stored keys of recipes do not know, and LATER, are left out at their defaults.
LATER_OF_LORA = ("use_dora", "lora_bias", "target_parameters")
LATER_OF_PARTS = {**dict.fromkeys(LATER_OF_LORA), "reshard_root": False, "memory_efficient_linear": True}


@documented
@dataclass(frozen=True)
class Recipe:
    """What is trained and how.

    `model` is a name of the catalogue, a path to a `config.json` (or its folder), or a `transformers` config object.
    `precision` ending in "-true" keeps weights, gradients and states in that format, "-mixed" is autocast: over fp32
    weights, or over those of `dtype`. A half-precision `dtype` without autocast ("fp32", "tf32") is its "-true" precision.

    Raises:
        RecipeError: a field has a value that cannot be trained.
    """

    model: Any
    batch_size: int = knob(1)
    seq_len: int | None = knob(None)
    precision: str = knob("fp32", choices=PRECISIONS)
    optim: str = knob("adamw_torch", choices=OPTIMIZERS)
    optim_args: str | None = knob(None)
    task: str | None = knob(None, choices=tuple(TASKS))
    num_layers: int | None = knob(None, most=MOST_LAYERS)
    gradient_accumulation_steps: int = knob(1, most=MOST_MICRO_BATCHES)
    gradient_checkpointing: bool = knob(False)
    attn_implementation: str | None = knob(None, choices=ATTENTION)
    lora: LoRA | None = knob(None, shown=LoRA.words)
    quantization: Quantization | None = knob(None, shown=Quantization.words)
    sharding: Sharding | None = knob(None, shown=Sharding.words)
    dtype: str | None = knob(None, choices=DTYPES)
    torch_compile: bool = knob(False)
    loop: Loop | str = knob("trainer", choices=tuple(LOOPS), shown=Loop.words)
    trainer: str = knob("transformers", choices=("transformers", *TRL), shown=TRL.get)
    precompute_ref_log_probs: bool = knob(False)
    activation_offloading: bool = knob(False)
    packing: bool = knob(False)
    padding_free: bool = knob(False)
    pad_to_multiple_of: int | None = knob(None)
    lengths: tuple[int, ...] | None = knob(None, shown=lambda n: f"{len(n)} samples of {min(n):,} to {max(n):,}")
    completion_lengths: tuple[int, ...] | None = knob(None, shown=lambda n: f"{sum(n):,} tokens with a label")
    use_liger_kernel: bool = knob(False)
    shape: Shape = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        self._set("model", _described(self.model))
        for name, kind in PARTS.items():
            if isinstance(value := getattr(self, name), Mapping):
                self._set(name, rebuild(kind, name, value))
        if isinstance(self.loop, str):
            self._set("loop", Loop.named(self.loop))
        if isinstance(self.optim, str):
            self._set("optim", ALIASES.get(self.optim, self.optim))
            if self.optim in REFUSED:
                rest = f"no recipe models it ({REFUSED[self.optim]}); WatchCallback measures a Trainer that has it"
                raise RecipeError("optim", self.optim, rest)
        if type(self.dtype).__name__ == "dtype":  # torch's
            self._set("dtype", str(self.dtype).removeprefix("torch."))
        refuse_generating(self.trainer)
        check(self)
        for name, value in samples.filled_in(self).items():
            self._set(name, value)
        if self.precision in ("fp32", "tf32") and self.dtype in HALF.values():
            self._set("precision", {"float16": "fp16-true", "bfloat16": "bf16-true"}[self.dtype])
        self.optimizer_arguments()
        if self.trainer == "reward":
            self._set("task", self.task or "sequence-classification")
        labels = 1 if self.trainer == "reward" else None  # the score
        self._set("shape", read_shape(self.model, self.num_layers, self.task, labels))
        self._fit_to_shape()
        refuse(self, self._refusals())

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _fit_to_shape(self) -> None:
        """Fill in what the model decides, and check the sizes against it."""
        shape, longest = self.shape, self.shape.max_positions or math.inf
        if shape.image_tokens and self.seq_len not in (None, shape.image_tokens):
            raise RecipeError("seq_len", self.seq_len, f"an image is {shape.image_tokens} tokens to {shape.name}")
        if self.seq_len is None:
            self._set("seq_len", shape.image_tokens or min(512, longest))
        if self.seq_len > longest:
            raise RecipeError("seq_len", self.seq_len, f"{shape.name} has {longest} positions")
        if self.attn_implementation is None:
            self._set("attn_implementation", shape.attention)
        elif self.attn_implementation in ("sdpa", REPEATED) and shape.attention == "eager":
            allowed = f"transformers has none for a {shape.family}: use 'eager'"
            raise RecipeError("attn_implementation", self.attn_implementation, allowed)
        if self.attn_implementation == REPEATED and not shape.shares_keys:
            allowed = "it repeats keys that query heads share and a known family hands on as they are: use 'sdpa'"
            raise RecipeError("attn_implementation", REPEATED, allowed)
        lora_modules.adapted(shape, self.lora)

    def _refusals(self) -> Refusals:
        """Values that exclude each other, and what the trainer, Liger or the ranks do not train."""
        lora, quantization, trainer = self.lora, self.quantization, self.trainer
        yield "quantization", quantization and not lora, "quantized weights cannot be trained: add lora=LoRA(...)"
        yield "lora.use_dora", quantization and lora.use_dora, "it is modelled for weights that are not quantized only"
        compute = (quantization and quantization.compute_dtype) or self.precision
        flash = self.attn_implementation == "flash_attention_2" and compute in ("fp32", "tf32", "float32")
        yield "precision", flash, "flash_attention_2 computes in fp16 and bf16 only"
        if self.loop.optimizer_in_backward:
            allowed = "with optimizer_in_backward no gradient survives to accumulate: use 1"
            yield "gradient_accumulation_steps", self.gradient_accumulation_steps > 1, allowed
            sharded = self.sharding and (self.sharding.world_size > 1 or self.sharding.engine == "deepspeed")
            yield "loop", sharded, "optimizer_in_backward is modelled for one device only, and not under DeepSpeed"
        yield from self._dtype_refusals()
        yield from samples.refusals(self)
        yield from self._trl_refusals() if trainer != "transformers" else ()
        asks = self.precompute_ref_log_probs and trainer not in ("dpo", "kto")
        yield "precompute_ref_log_probs", asks, "only trainer 'dpo' and 'kto' have a reference model"
        allowed = f"only trainers {', '.join(TRL)} offload activations, and on one device here"
        yield "activation_offloading", self.activation_offloading and (trainer not in TRL or self.sharding), allowed
        yield from liger.refusals(self)
        yield from parallel_limits.refusals(self)

    def _trl_refusals(self) -> Refusals:
        """What TRL's trainers do not train."""
        shape, lora, quantization, name = self.shape, self.lora, self.quantization, TRL[self.trainer]
        task = "sequence-classification" if self.trainer == "reward" else "causal-lm"
        yield "trainer", shape.task != task, f"{name} trains models for {task}, not for {shape.task}"
        usual = dataclasses.replace(self.loop, max_grad_norm=1.0, empty_cache_steps=None)
        yield "loop", usual != LOOPS["trainer"], f"{name} has the Trainer's loop without a cache: use loop='trainer'"
        engine = self.sharding.engine if self.sharding else "ddp"
        allowed = f"{name} is modelled on 'ddp', 'fsdp' and 'deepspeed'"
        yield "sharding.engine", engine not in ("ddp", "fsdp", "deepspeed"), allowed
        whole = self.has_reference or (engine == "deepspeed" and self.precompute_ref_log_probs)
        allowed = f"{name}'s reference model is modelled whole: add lora, which needs none, or take engine 'ddp'"
        yield "sharding.engine", engine != "ddp" and whole, allowed
        third = engine == "deepspeed" and self.sharding.stage == 3 and lora
        yield "sharding.stage", third, f"{name} trains adapters otherwise there: take stage 2, or engine 'fsdp'"
        allowed = "KTOTrainer compares samples of a micro-batch: take at least 2"
        yield "batch_size", self.batch_size < LEAST_BATCH.get(self.trainer, 1), allowed
        keeps_copy = lora and not (quantization or self.trainer in ("sft", "reward"))
        allowed = f"{name} keeps a copy of adapters that it does not make itself, which are in fp32: leave it True"
        yield "lora.autocast_adapter_dtype", keeps_copy and not lora.autocast_adapter_dtype, allowed
        allowed = f"{name} does not call prepare_model_for_kbit_training: say Quantization(prepare=False)"
        yield "quantization.prepare", quantization and quantization.prepare, allowed
        allowed = f"the loss scaler refuses the bfloat16 adapters that {name} makes: take 'bf16-mixed'"
        yield "precision", quantization and self.precision == "fp16-mixed", allowed  # pytorch/pytorch#127176
        fused = lora and self.trainer != "reward" and lora_modules.is_adapted(shape, lora, shape.head)
        allowed = f"{name} refuses an adapter on {shape.head}, whose weight its fused head reads: leave that out"
        yield "lora.target_modules", fused, allowed

    def _dtype_refusals(self) -> Refusals:
        """A `dtype` that the precision contradicts, and trained weights that libraries refuse."""
        dtype, (form, _, kind) = self.weights_dtype, self.precision.partition("-")
        half, engine = HALF.get(form), self.sharding and self.sharding.engine
        allowed = f"precision {self.precision!r} keeps the weights in {half}: '{form}-mixed' computes in it only"
        yield "dtype", kind == "true" and dtype not in (half, self.implied_dtype), allowed
        in_half = kind == "mixed" and self._trains_half()
        allowed = "accelerate casts what FSDP trains in mixed precision to fp32: take 'float32' or fp32 adapters"
        yield "dtype", in_half and engine == "fsdp" and dtype != self.implied_dtype, allowed
        allowed = "the loss scaler of 'fp16-mixed' unscales no half-precision gradients: what is trained has to be fp32"
        yield "dtype", in_half and form == "fp16" and engine != "deepspeed", allowed

    def _trains_half(self) -> bool:
        """Whether trained weights are in half precision; adapters are where PEFT does not cast them to fp32."""
        lora, quantization = self.lora, self.quantization
        if self.weights_dtype == "float32" or (quantization and quantization.prepare):
            return False
        if not lora or lora.bias != "none" or lora.modules_to_save or self.shape.task == "sequence-classification":
            return True
        return not (lora.autocast_adapter_dtype or quantization)

    @property
    def weights_dtype(self) -> str:
        """The format in which weights that are not quantized are loaded."""
        return self.dtype or self.implied_dtype

    @property
    def implied_dtype(self) -> str:
        """`weights_dtype` where no `dtype` is said: what 4-bit layers compute in, half for "-true" precisions, else fp32."""
        if self.quantization and self.quantization.compute_dtype:
            return self.quantization.compute_dtype
        half = self.precision.endswith("-true") or self.quantization
        return HALF.get(self.precision.partition("-")[0], "float32") if half else "float32"

    @property
    def name(self) -> str:
        """The model's short name."""
        return self.shape.name

    @property
    def is_ragged(self) -> bool:
        """Whether a micro-batch is something else than rows of seq_len tokens."""
        return bool(self.lengths or self.joins or self.pad_to_multiple_of or self.completion_lengths)

    @property
    def joins(self) -> bool:
        """Whether a micro-batch is one row, of samples put together whole."""
        return self.padding_free or self.packing

    @property
    def samples(self) -> tuple[int, ...]:
        """Tokens of each sample of a micro-batch; without `lengths` packed rows are full, of two samples each."""
        n = self.seq_len
        return self.lengths or ((n - n // 2, n // 2) if self.packing and n > 1 else (n,)) * self.batch_size

    @property
    def labelled(self) -> int:
        """Tokens of a micro-batch that have a label; a sample's first never has."""
        each = zip(self.completion_lengths or self.samples, self.samples, strict=True)
        return sum(min(count, length - 1) for count, length in each)

    @property
    def rows(self) -> tuple[int, int]:
        """Rows of a micro-batch and tokens in each, as the collator makes them."""
        return samples.shape_of(self.samples, self.joins, self.pad_to_multiple_of)

    @property
    def tokens(self) -> int:
        """Tokens that one optimizer step reads on one device."""
        return math.prod(self.rows) * self.sequences // self.batch_size * self.gradient_accumulation_steps

    @property
    def sequences(self) -> int:
        """Sequences of a micro-batch that are trained on: of pairs both."""
        return self.batch_size * (1 + (self.trainer in ("dpo", "reward")))

    @property
    def has_reference(self) -> bool:
        """Whether a frozen copy of the model stays beside it; adapters are switched off instead."""
        return self.trainer in ("dpo", "kto") and not (self.lora or self.precompute_ref_log_probs)

    @property
    def passes_without_gradients(self) -> int:
        """Forward passes of a micro-batch besides the one that is trained on: KTO's other answers, and the reference's."""
        own = int(self.trainer == "kto")
        return own + (own + 1) * (self.trainer in ("dpo", "kto") and not self.precompute_ref_log_probs)

    def optimizer_arguments(self) -> dict[str, float]:
        """`optim_args` as a dictionary, {} when there are none."""
        return optimizer_arguments(self.optim, self.optim_args)

    def replace(self, **changes) -> "Recipe":
        """A copy with `changes`, validated again."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary; `Recipe(**d)` gives the recipe back."""
        # one recipe with one key, whether its dtype is said or not
        left_out = ("shape", "dtype") if self.dtype in (None, self.implied_dtype) else ("shape",)
        said = {name: value for name, value in vars(self).items() if name not in LATER or value != LATER[name]}
        return {name: value and _as_json(value) for name, value in said.items() if name not in left_out}

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
        values = vars(self) | ({"dtype": None} if self.dtype == self.implied_dtype else {})
        parts = (said.words(values[name]) for name, said in knobs(Recipe).items() if values[name])
        # TRL's trainers never prepare a base
        unprepared = self.quantization and not self.quantization.prepare and self.trainer not in TRL
        return " · ".join([self.name, *filter(None, parts), *["not prepared"] * bool(unprepared)])

    def _repr_html_(self) -> str:
        """Return the recipe as a notebook shows it: what differs from the defaults, and the batch."""
        usual = {name: said.default for name, said in knobs(Recipe).items()}
        rows = [("model", self.name)]
        for name, said in knobs(Recipe).items():
            value = getattr(self, name)
            if name != "model" and (value != usual[name] or name in ("batch_size", "precision", "optim")):
                rows.append((name, said.words(value) or value))
        return html.table(("recipe", ""), rows)

    def training_arguments(self, output_dir: str = "out", **changes):
        """The `transformers.TrainingArguments` that trains the same way; see `vramlab.training_arguments`."""
        from .arguments import to_training_arguments

        return to_training_arguments(self, output_dir, **changes)

    @classmethod
    def from_training_arguments(cls, args, model, **fields) -> "Recipe":
        """The recipe of `args`, a `TrainingArguments` or TRL's `SFTConfig`, `DPOConfig`, …, for `model`.

        `fields` adds what the arguments do not say. A `max_length` is taken for the length of every sample.
        """
        from .arguments import to_recipe

        return to_recipe(cls, args, model, **fields)


# Fields that stored keys of recipes do not know, and their defaults.
LATER = {name: knobs(Recipe)[name].default for name in dropwhile("trainer".__ne__, knobs(Recipe))}


# TRL's trainers that sample answers from the model in each step
GENERATING = ("grpo", "rloo", "ppo", "online_dpo")


def refuse_generating(trainer: str) -> None:
    """Raise RecipeError for a trainer of GENERATING."""
    if trainer in GENERATING:
        rest = "it generates while it trains, which no recipe models yet: WatchCallback() in its Trainer measures it "
        rest += f"on a card, and recipes train as {', '.join(TRL)} do"
        raise RecipeError("trainer", trainer, rest)


def as_recipe(value: Any) -> Recipe:
    """`value` if it is a recipe; else the recipe of the model it names, with every other field at its default."""
    return value if isinstance(value, Recipe) else Recipe(value)


def _as_json(value: Any) -> Any:
    if isinstance(value, (LoRA, Quantization, Sharding, Loop)):
        said = {
            name: one for name, one in vars(value).items() if (one or None) != (LATER_OF_PARTS.get(name, ...) or None)
        }
        return {name: _as_json(one) for name, one in said.items()}
    return list(value) if isinstance(value, tuple) else value


def _described(model: Any) -> Any:
    """The text or the dictionary that says which `model` it is."""
    if isinstance(model, os.PathLike):
        return os.fspath(model)
    if hasattr(model, "to_dict") and not isinstance(model, Recipe):
        model = model.to_dict()
    return plain(model) if isinstance(model, Mapping) else model


def key_of(values: Mapping[str, Any]) -> str:
    """The key of the recipe whose `to_dict` gives `values`, without building it."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
