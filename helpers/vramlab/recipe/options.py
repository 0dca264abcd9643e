"""The parts of a recipe: adapters, quantization, what is sampled, and the loop."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from ..base.errors import RecipeError, needing
from .knobs import check, documented, knob
from .sharding import AT_STAGE_3, OFFLOADS, STAGES, Sharding  # noqa: F401 — with the other parts

PRECISIONS = ("fp32", "tf32", "fp16-mixed", "bf16-mixed", "fp16-true", "bf16-true")
# What is said of formats that others train in.
IN_FEWER_BITS = (
    "training in 8 or 4 bits (accelerate's fp8, Transformer Engine's formats) multiplies in them, "
    "and keeps weights, gradients and states as 'bf16-mixed' does: take that, and WatchCallback() "
    "in its Trainer measures what differs"
)
PRECISION_RULES: dict[str, Any] = {  # of `knob`
    "choices": PRECISIONS,
    "instead": dict.fromkeys(("fp8", "mxfp8", "mxfp4", "nvfp4"), IN_FEWER_BITS),
}
MXFP4 = (
    "transformers trains nothing over weights in MXFP4 (gpt-oss's): leave it out, say dtype "
    "'bfloat16', and load them with Mxfp4Config(dequantize=True)"
)
REPEATED = "sdpa_repeated"  # sdpa on keys that are repeated for the query heads which share them
ATTENTION = ("eager", "sdpa", REPEATED, "flash_attention_2")
# TRL's, by the name of their Recipe; of dpo and reward a sample is a pair of sequences
TRL = {
    "sft": "SFTTrainer",
    "dpo": "DPOTrainer",
    "kto": "KTOTrainer",
    "reward": "RewardTrainer",
    "grpo": "GRPOTrainer",
    "rloo": "RLOOTrainer",
}
GENERATING = ("grpo", "rloo")  # which sample what they train on from the model itself
FUSED = ("sft", "dpo", "kto", *GENERATING)  # whose head makes no logits
ROLLOUT_ENGINES = ("colocate", "server")  # where vLLM runs: in this process, or elsewhere
# Of a precision's name before "-true" or "-mixed".
HALF = {"fp16": "float16", "bf16": "bfloat16"}
DTYPES = ("float32", "float16", "bfloat16")
INT8 = "int8"  # LLM.int8(), which `load_in_8bit` asks for
QUANT_TYPES = ("nf4", "fp4", INT8)
# When fused experts are packed: as each one is loaded (axolotl's `quantize_moe_experts`), or once
# all are on the device (bitsandbytes' `replace_parameter_4bit`).
PACKED_EXPERTS = ("loading", "loaded")


@documented
@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters (Hu et al. 2021). Fields and defaults are those of `peft.LoraConfig`."""

    r: int = knob(
        8,
        help="Rank of the adapters.",
        option="lora_r",
        label="LoRA rank",
        elsewhere=True,
    )
    lora_alpha: float = knob(
        8,
        help="Adapters are scaled by this over r.",
        option=True,
        elsewhere=True,
    )
    lora_dropout: float = knob(
        0.0,
        share=True,
        help="Dropout before the adapters.",
        option=True,
        elsewhere=True,
    )
    target_modules: tuple[str, ...] | str | None = knob(
        None,
        help="Module names, or all-linear; None: PEFT's default.",
        option="lora_target",
        label="LoRA targets",
        elsewhere=True,
    )
    bias: str = knob(
        "none",
        choices=("none", "all", "lora_only"),
        help="Which biases are trained.",
        elsewhere=True,
    )
    use_rslora: bool = knob(
        False,
        help="Scale by the square root of r instead.",
        elsewhere=True,
    )
    modules_to_save: tuple[str, ...] | None = knob(
        None,
        help="Modules trained whole.",
        elsewhere=True,
    )
    autocast_adapter_dtype: bool = knob(
        True,
        help="Keep fp16 and bf16 adapters in fp32, as `get_peft_model` does.",
    )
    use_dora: bool = knob(
        False,
        help="Train the magnitude of each output apart (Liu et al. 2024).",
        option=True,
        elsewhere=True,
    )
    lora_bias: bool = knob(
        False,
        help="Give the second matrix of each adapter a bias.",
        elsewhere=True,
    )
    target_parameters: tuple[str, ...] | None = knob(
        None,
        help="Parameters that no module holds, such as fused experts.",
        elsewhere=True,
    )

    def __post_init__(self) -> None:
        # PEFT takes lists and sets; a recipe keeps tuples, which hash, and sorts what has no order
        # so that equal adapters are equal.
        for name in ("target_modules", "modules_to_save", "target_parameters"):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
            elif isinstance(value, set | frozenset):
                object.__setattr__(self, name, tuple(sorted(value)))
            elif isinstance(value, str) and name != "target_modules":
                rest = f"it must be a list of names, such as [{value!r}]"
                raise RecipeError(f"lora.{name}", value, rest)
        check(self, "lora.")
        # 8 and 8.0 are one recipe, with one key
        for name in ("lora_alpha", "lora_dropout"):
            object.__setattr__(self, name, float(getattr(self, name)))

    def words(self) -> str:
        """Return its part of `str(recipe)`, as the other parts' `words` do."""
        kind = "DoRA" if self.use_dora else "LoRA"
        return f"{kind} r={self.r}"


@documented
@dataclass(frozen=True)
class Quantization:
    """A frozen base in few bits (Dettmers et al. 2023; int8: Dettmers et al. 2022).

    `transformers.BitsAndBytesConfig` makes it so.
    """

    quant_type: str = knob(
        "nf4",
        choices=QUANT_TYPES,
        instead={"mxfp4": MXFP4},
        help="Format of the frozen base.",
        option="quantization",
        label="Frozen base",
        elsewhere="bnb_4bit_quant_type",
    )
    double: bool = knob(
        False,
        help="Quantize the block scales too.",
        option="double_quant",
        label="Double quant",
        elsewhere="bnb_4bit_use_double_quant",
    )
    compute_dtype: str | None = knob(
        None,
        choices=DTYPES,
        help="What 4-bit layers compute in; None takes the recipe's format.",
        elsewhere="bnb_4bit_compute_dtype",
    )
    prepare: bool = knob(
        True,
        help="Call `prepare_model_for_kbit_training`: what is not quantized goes to fp32.",
        option=True,
    )
    experts: str | None = knob(
        None,
        choices=PACKED_EXPERTS,
        help="Put fused experts in 4 bits too, as each is loaded (axolotl's quantize_moe_experts) "
        "or once all are (bitsandbytes' replace_parameter_4bit).",
        option="quantize_experts",
        label="Experts in 4 bits",
    )
    skip_modules: tuple[str, ...] | None = knob(
        None,
        help="Modules that stay as they are, in place of the loader's own choice, the head: "
        "model.visual,lm_head.",
        option=True,
        elsewhere="llm_int8_skip_modules",
    )

    def __post_init__(self) -> None:
        said = self.skip_modules
        if said:
            names = said.split(",") if isinstance(said, str) else said
            object.__setattr__(self, "skip_modules", tuple(names))
        check(self, "quantization.")
        for name in ("double", "compute_dtype", "experts"):
            value = getattr(self, name)
            if value and self.quant_type == INT8:
                rest = "an int8 base has one scale a row, computes in its input's format and packs "
                raise RecipeError(f"quantization.{name}", value, rest + "linear layers alone")

    def words(self) -> str:
        """Return its part of `str(recipe)`."""
        double = " double" if self.double else ""
        experts = " with experts" if self.experts else ""
        skipped = f" without {' and '.join(self.skip_modules)}" if self.skip_modules else ""
        return f"{self.quant_type}{double}{experts}{skipped}"

    def skips(self, module: str) -> bool:
        """Tell whether transformers' loader leaves a module of that name as it is."""
        with needing("quantization.skip_modules"):
            from transformers.quantizers.quantizers_utils import should_convert_module
        return not should_convert_module(module, list(self.skip_modules or ()))


@documented
@dataclass(frozen=True)
class Rollouts:
    """What GRPOTrainer and RLOOTrainer sample from the model, and how they train on it.

    Fields and defaults are those of `trl.GRPOConfig`, and a prompt's length. All prompts have that
    length and all completions the longest one.
    """

    num_generations: int = knob(
        8,
        least=2,
        help="Completions of a prompt, which are held against each other.",
        option=True,
        elsewhere=True,
    )
    prompt_length: int = knob(
        256,
        help="Tokens of each prompt.",
        option="prompt",
    )
    max_completion_length: int = knob(
        512,
        help="Tokens of each completion.",
        option="completion",
        elsewhere=True,
    )
    temperature: float = knob(
        1.0,
        help="What logits are divided by before a token is drawn.",
        elsewhere=True,
    )
    top_p: float = knob(
        1.0,
        help="Draw among the likeliest tokens that have this share together.",
        elsewhere=True,
    )
    top_k: int = knob(
        0,
        least=0,
        help="Draw among so many tokens; 0: among all.",
        elsewhere=True,
    )
    beta: float = knob(
        0.0,
        share=True,
        help="Weight of the distance to the reference model; 0 needs none.",
        option=True,
        elsewhere=True,
    )
    num_iterations: int = knob(
        1,
        help="How often completions are trained on.",
        option=True,
        elsewhere=True,
    )
    steps_per_generation: int | None = knob(
        None,
        help=(
            "Micro-batches that are sampled at once; as many as an optimizer step has when left "
            "out."
        ),
        option=True,
        elsewhere=True,
    )
    use_vllm: bool = knob(
        False,
        help="Let vLLM sample them instead of transformers.",
        option=True,
        elsewhere=True,
    )
    vllm_mode: str = knob(
        "colocate",
        choices=ROLLOUT_ENGINES,
        help="Where vLLM runs: on this card, or on a server's.",
        option=True,
        elsewhere=True,
    )
    vllm_gpu_memory_utilization: float = knob(
        0.3,
        share=True,
        help="Share of the card that vLLM takes; plan finds it where it is left out.",
        option=True,
        elsewhere=True,
    )
    vllm_enable_sleep_mode: bool = knob(
        False,
        help="vLLM gives its memory back while the model trains.",
        option=True,
        elsewhere=True,
    )

    def __post_init__(self) -> None:
        check(self, "rollouts.")
        # 1 and 1.0 are one recipe, with one key
        for name in ("temperature", "top_p", "beta", "vllm_gpu_memory_utilization"):
            object.__setattr__(self, name, float(getattr(self, name)))

    @property
    def is_colocated(self) -> bool:
        """Whether vLLM samples on the trainer's own card."""
        return self.use_vllm and self.vllm_mode == "colocate"

    def words(self) -> str:
        """Return its part of `str(recipe)`."""
        lengths = f"{self.prompt_length} + {self.max_completion_length} tokens"
        said = [f"{self.num_generations} generations of {lengths}"]
        if self.beta:
            said.append(f"beta {self.beta:g}")
        if self.num_iterations > 1:
            said.append(f"{self.num_iterations} iterations")
        if self.steps_per_generation:
            said.append(f"{self.steps_per_generation} steps a generation")
        if self.use_vllm and self.vllm_mode == "server":
            said.append("vLLM elsewhere")
        elif self.use_vllm:
            sleeps = ", asleep while it trains" if self.vllm_enable_sleep_mode else ""
            said.append(f"vLLM in {self.vllm_gpu_memory_utilization:.0%} of the card{sleeps}")
        return " · ".join(said)


@documented
@dataclass(frozen=True)
class Loop:
    """The training loop as far as memory sees it.

    The same object drives the run and the prediction. The loop named "trainer" also has all
    micro-batches of a step on the device at once, as `Trainer` fetches them.
    """

    name: str = knob(
        "trainer",
        help="What the loop is called.",
    )
    zero_grad: str = knob(
        "end",
        choices=("start", "before_backward", "end"),
        help="When gradients are cleared; end is after the update.",
    )
    set_to_none: bool = knob(
        True,
        help="Free the gradients, or fill them with zeros.",
    )
    keep_outputs: bool | str = knob(
        False,
        choices=(False, "backward", "step", True),
        help=(
            "How long logits, keys and values stay: until the loss (False), to the end of a "
            "phase, the next forward (True)."
        ),
    )
    outputs_to_fp32: bool = knob(
        True,
        help="Copy half-precision outputs to fp32 after autocast, as accelerate does.",
    )
    use_cache: bool | None = knob(
        False,
        help="`config.use_cache`; None leaves the model's default.",
        elsewhere=True,
    )
    max_grad_norm: float | None = knob(
        1.0,
        help="Gradients are clipped to this norm; None does not clip.",
        elsewhere=True,
    )
    foreach: bool | None = knob(
        None,
        help="The multi-tensor optimizer; None takes torch's default for the device.",
    )
    optimizer_in_backward: bool = knob(
        False,
        help="Update each parameter as soon as its gradient is complete.",
    )
    empty_cache_steps: int | None = knob(
        None,
        help="`torch.cuda.empty_cache()` every so many steps.",
        elsewhere="torch_empty_cache_steps",
    )

    def __post_init__(self) -> None:
        check(self, "loop.")
        if self.optimizer_in_backward and self.max_grad_norm is not None:
            rest = "clipping needs all gradients at once, which optimizer_in_backward never has: "
            raise RecipeError("loop.max_grad_norm", self.max_grad_norm, rest + "set it to None")

    def words(self) -> str:
        """Return its part of `str(recipe)`."""
        if self == LOOPS["trainer"]:
            return ""
        if self == IN_BACKWARD:
            return "updates in the backward pass"
        is_named = self == LOOPS.get(self.name)
        return f"{self.name} loop" + ("" if is_named else " (changed)")

    @classmethod
    def named(cls, name: str, **changes: Any) -> "Loop":
        """Return the loop called `name`, with `changes` applied.

        Names are "trainer", "plain" and "optimizer_in_backward". Raises RecipeError for others.
        """
        if name not in LOOPS:
            known = ", ".join(map(repr, LOOPS))
            raise RecipeError("loop", name, f"allowed are {known} or a Loop")
        return dataclasses.replace(LOOPS[name], **changes) if changes else LOOPS[name]


# What PyTorch's tutorials do.
_PLAIN = Loop(
    "plain",
    zero_grad="start",
    keep_outputs=True,
    outputs_to_fp32=False,
    use_cache=None,
    max_grad_norm=None,
)
LOOPS = {
    "trainer": Loop(),
    "plain": _PLAIN,
    "optimizer_in_backward": dataclasses.replace(
        _PLAIN,
        name="optimizer_in_backward",
        optimizer_in_backward=True,
    ),
}
# The Trainer's, whose weights are updated as their gradients come, as a program of `plan` does it.
IN_BACKWARD = Loop(max_grad_norm=None, optimizer_in_backward=True)
