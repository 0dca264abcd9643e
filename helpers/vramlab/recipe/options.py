"""The parts of a recipe: adapters, quantization, sharding and the loop."""

import dataclasses
from dataclasses import dataclass
from functools import partial

from ..report.errors import RecipeError
from .knobs import check, documented, knob

PRECISIONS = ("fp32", "tf32", "fp16-mixed", "bf16-mixed", "fp16-true", "bf16-true")
ATTENTION = ("eager", "sdpa", "flash_attention_2")
# TRL's, by the name of their Recipe; of dpo and reward a sample is a pair of sequences
TRL = {"sft": "SFTTrainer", "dpo": "DPOTrainer", "kto": "KTOTrainer", "reward": "RewardTrainer"}
FUSED = ("sft", "dpo", "kto")  # whose head makes no logits
PACKING = ("bfd", "bfd_split", "wrapped")
HALF = {"fp16": "float16", "bf16": "bfloat16"}  # of a precision's name before "-true" or "-mixed"
DTYPES = ("float32", "float16", "bfloat16")
QUANT_TYPES = ("nf4", "fp4", "int8")
_peft = partial(knob, elsewhere=True)
STAGES = {"ddp": (0, 1), "fsdp": (2, 3), "deepspeed": (0, 1, 2, 3), "tensor": (0,), "pipeline": (0,)}


def words(text: str) -> frozenset[str]:
    """Return the words of `text`, for long lists of names."""
    return frozenset(text.split())


@documented
@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters (Hu et al. 2021). Fields and defaults are those of `peft.LoraConfig`."""

    r: int = _peft(8, "Rank of the adapters.", option="lora_r", label="LoRA rank")
    lora_alpha: float = _peft(8, "Adapters are scaled by this over r.", bounds=("over 0", lambda a: a > 0), option=True)
    lora_dropout: float = _peft(
        0.0, "Dropout before the adapters.", bounds=("of at least 0 and under 1", lambda p: 0 <= p < 1), option=True
    )
    target_modules: tuple[str, ...] | str | None = _peft(
        None, "Module names, or all-linear; None: PEFT's default.", option="lora_target", label="LoRA targets"
    )
    bias: str = _peft("none", "Which biases are trained.", choices=("none", "all", "lora_only"))
    use_rslora: bool = _peft(False, "Scale by the square root of r instead.")
    modules_to_save: tuple[str, ...] | None = _peft(None, "Modules trained whole.")
    autocast_adapter_dtype: bool = knob(True, "Keep fp16 and bf16 adapters in fp32, as `get_peft_model` does.")
    use_dora: bool = _peft(False, "Train the magnitude of each output apart (Liu et al. 2024).", option=True)
    lora_bias: bool = _peft(False, "Give the second matrix of each adapter a bias.")
    target_parameters: tuple[str, ...] | None = _peft(None, "Parameters that no module holds, such as fused experts.")

    def __post_init__(self):
        for name in ("target_modules", "modules_to_save", "target_parameters"):
            value = getattr(self, name)
            if value is None or isinstance(value, str):
                continue
            if not isinstance(value, list | tuple | set | frozenset) or not all(isinstance(n, str) for n in value):
                raise RecipeError(f"lora.{name}", value, "it must be None, a name or a list of module names")
            object.__setattr__(self, name, tuple(sorted(value) if isinstance(value, set | frozenset) else value))
        check(self, "lora.")
        for name in ("lora_alpha", "lora_dropout"):  # 8 and 8.0 are one recipe, with one key
            object.__setattr__(self, name, float(getattr(self, name)))


@documented
@dataclass(frozen=True)
class Quantization:
    """A frozen base in few bits (Dettmers et al. 2023), as `transformers.BitsAndBytesConfig` makes it."""

    quant_type: str = knob(
        "nf4",
        "Format of the frozen base.",
        choices=QUANT_TYPES,
        elsewhere="bnb_4bit_quant_type",
        option="quantization",
        label="Frozen base",
    )
    double: bool = knob(
        False,
        "Quantize the block scales too.",
        elsewhere="bnb_4bit_use_double_quant",
        option="double_quant",
        label="Double quant",
    )
    compute_dtype: str | None = knob(
        None,
        "What 4-bit layers compute in; None takes the recipe's format.",
        choices=DTYPES,
        elsewhere="bnb_4bit_compute_dtype",
    )
    prepare: bool = knob(True, "Call `prepare_model_for_kbit_training`: what is not quantized goes to fp32.")

    def __post_init__(self):
        check(self, "quantization.")
        if self.quant_type == "int8" and self.double:
            raise RecipeError("quantization.double", True, "double quantization exists for 'nf4' and 'fp4' only")


@documented
@dataclass(frozen=True)
class Sharding:
    """Who holds what among `world_size` ranks (Rajbhandari et al. 2020).

    Engines "ddp" (stages 0, 1), "fsdp" (2, 3) and "deepspeed" (0 to 3) divide the batch; "tensor" and "pipeline" (0) give
    each rank a slice of every layer, or some of the layers, and all work on the same batch. Offloaded parameters take the
    optimizer with them.
    """

    stage: int = knob(3, "ZeRO stage, 0 to 3.", choices=(0, 1, 2, 3), option=True, label="ZeRO stage")
    world_size: int = knob(1, "Ranks that share the model.", most=2**20, option=True, label="GPUs")
    engine: str = knob("fsdp", "What divides the model.", choices=tuple(STAGES), option=True, label="Engine")
    offload: str | None = knob(None, "What lives in host memory.", choices=("optimizer", "parameters"), option=True)
    rank: int = knob(0, "Whose bytes are described; ranks differ where a size does not divide.", least=0)
    wrap: str = knob("layers", "FSDP's units: one a layer and the rest, or the model.", choices=("layers", "model"))
    schedule: str = knob("1f1b", "How a pipeline runs the parts of a batch.", choices=("gpipe", "1f1b"))
    micro_batches: int = knob(1, "Parts into which a pipeline divides a batch.", most=2**16)

    def __post_init__(self):
        check(self, "sharding.")
        if self.rank >= self.world_size:
            rest = f"ranks of {self.world_size} go from 0 to {self.world_size - 1}"
            raise RecipeError("sharding.rank", self.rank, rest)
        if self.stage not in STAGES[self.engine]:
            allowed = " or ".join(map(str, STAGES[self.engine]))
            raise RecipeError("sharding.stage", self.stage, f"engine {self.engine!r} has stage {allowed}")
        if self.offload and self.engine not in ("fsdp", "deepspeed"):
            raise RecipeError("sharding.offload", self.offload, "engines 'fsdp' and 'deepspeed' offload")
        if self.offload == "parameters" and self.stage < 3:
            raise RecipeError("sharding.offload", self.offload, "parameters can be offloaded at stage 3 only")
        for name, engine in (("schedule", "pipeline"), ("micro_batches", "pipeline"), ("wrap", "fsdp")):
            if getattr(self, name) != getattr(type(self), name) and self.engine != engine:
                raise RecipeError(f"sharding.{name}", getattr(self, name), f"only engine {engine!r} knows it")


@documented
@dataclass(frozen=True)
class Loop:
    """The training loop as far as memory sees it; the same object drives the run and the prediction.

    The loop named "trainer" also has all micro-batches of a step on the device at once, as `Trainer` fetches them.
    """

    name: str = knob("trainer", "What the loop is called.")
    zero_grad: str = knob(
        "end", "When gradients are cleared; end is after the update.", choices=("start", "before_backward", "end")
    )
    set_to_none: bool = knob(True, "Free the gradients, or fill them with zeros.")
    keep_outputs: bool | str = knob(
        False,
        "How long logits, keys and values stay: until the loss (False), to the end of a phase, the next forward (True).",
        choices=(False, "backward", "step", True),
    )
    outputs_to_fp32: bool = knob(True, "Copy half-precision outputs to fp32 after autocast, as accelerate does.")
    use_cache: bool | None = knob(False, "`config.use_cache`; None leaves the model's default.", elsewhere=True)
    max_grad_norm: float | None = knob(
        1.0,
        "Gradients are clipped to this norm; None does not clip.",
        bounds=("over 0, or None for no clipping", lambda norm: norm > 0),
        elsewhere=True,
    )
    foreach: bool | None = knob(None, "The multi-tensor optimizer; None takes torch's default for the device.")
    optimizer_in_backward: bool = knob(False, "Update each parameter as soon as its gradient is complete.")
    empty_cache_steps: int | None = knob(
        None, "`torch.cuda.empty_cache()` every so many steps.", elsewhere="torch_empty_cache_steps"
    )

    def __post_init__(self):
        check(self, "loop.")
        if self.optimizer_in_backward and self.max_grad_norm is not None:
            rest = "clipping needs all gradients at once, which optimizer_in_backward never has: set it to None"
            raise RecipeError("loop.max_grad_norm", self.max_grad_norm, rest)

    @classmethod
    def named(cls, name: str, **changes) -> "Loop":
        """Return the loop called `name`: "trainer", "plain" or "optimizer_in_backward", with `changes` applied."""
        if name not in LOOPS:
            raise RecipeError("loop", name, "allowed are " + ", ".join(map(repr, LOOPS)) + " or a Loop")
        return dataclasses.replace(LOOPS[name], **changes) if changes else LOOPS[name]


_PLAIN = Loop("plain", zero_grad="start", keep_outputs=True, outputs_to_fp32=False, use_cache=None, max_grad_norm=None)
LOOPS = {
    "trainer": Loop(),
    "plain": _PLAIN,
    "optimizer_in_backward": dataclasses.replace(_PLAIN, name="optimizer_in_backward", optimizer_in_backward=True),
}
