"""The parts of a recipe: adapters, quantization, sharding and the loop."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from ..base.errors import RecipeError
from .knobs import Refusals, check, documented, knob, refuse

PRECISIONS = ("fp32", "tf32", "fp16-mixed", "bf16-mixed", "fp16-true", "bf16-true")
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
QUANT_TYPES = ("nf4", "fp4")
# When fused experts are packed: as each one is loaded (axolotl's `quantize_moe_experts`), or once
# all are on the device (bitsandbytes' `replace_parameter_4bit`).
PACKED_EXPERTS = ("loading", "loaded")
STAGES = {
    "ddp": (0, 1),
    "fsdp": (2, 3),
    "deepspeed": (0, 1, 2, 3),
    "tensor": (0,),
    "pipeline": (0,),
}
OFFLOADS = {"fsdp": ("parameters",), "deepspeed": ("optimizer", "parameters")}
# Fields that one engine alone knows.
OF_ENGINE = {
    "schedule": "pipeline",
    "micro_batches": "pipeline",
    "wrap": "fsdp",
    "reshard_root": "fsdp",
    "dp_replicate_size": "fsdp",
    "cp_size": "fsdp",
    "memory_efficient_linear": "deepspeed",
}
AT_STAGE_3 = ("reshard_root", "memory_efficient_linear")


@documented
@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters (Hu et al. 2021). Fields and defaults are those of `peft.LoraConfig`."""

    r: int = knob(8)
    lora_alpha: float = knob(8)
    lora_dropout: float = knob(0.0, share=True)
    target_modules: tuple[str, ...] | str | None = knob(None)
    bias: str = knob("none", choices=("none", "all", "lora_only"))
    use_rslora: bool = knob(False)
    modules_to_save: tuple[str, ...] | None = knob(None)
    autocast_adapter_dtype: bool = knob(True)
    use_dora: bool = knob(False)
    lora_bias: bool = knob(False)
    target_parameters: tuple[str, ...] | None = knob(None)

    def __post_init__(self) -> None:
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
    """A frozen base in few bits (Dettmers et al. 2023).

    `transformers.BitsAndBytesConfig` makes it so.
    """

    quant_type: str = knob("nf4", choices=QUANT_TYPES)
    double: bool = knob(False)
    compute_dtype: str | None = knob(None, choices=DTYPES)
    prepare: bool = knob(True)
    experts: str | None = knob(None, choices=PACKED_EXPERTS)

    def __post_init__(self) -> None:
        check(self, "quantization.")

    def words(self) -> str:
        """Return its part of `str(recipe)`."""
        double = " double" if self.double else ""
        experts = " with experts" if self.experts else ""
        return f"{self.quant_type}{double}{experts}"


@documented
@dataclass(frozen=True)
class Sharding:
    """Who holds what among `world_size` ranks (Rajbhandari et al. 2020).

    Engines "ddp" (stages 0, 1), "fsdp" (2, 3) and "deepspeed" (0 to 3) divide the batch; "tensor"
    and "pipeline" (0) give each rank a slice of every layer, or some of the layers, and all work on
    the same batch. Offloaded parameters take the optimizer with them.
    """

    stage: int = knob(3, choices=(0, 1, 2, 3))
    world_size: int = knob(1, most=2**20)
    engine: str = knob("fsdp", choices=tuple(STAGES))
    offload: str | None = knob(None, choices=("optimizer", "parameters"))
    rank: int = knob(0, least=0)
    wrap: str = knob("layers", choices=("layers", "model"))
    reshard_root: bool = knob(False)
    memory_efficient_linear: bool = knob(True)
    schedule: str = knob("1f1b", choices=("gpipe", "1f1b"))
    micro_batches: int = knob(1, most=2**16)
    dp_replicate_size: int = knob(1, most=2**20)
    cp_size: int = knob(1, most=2**20)

    def __post_init__(self) -> None:
        check(self, "sharding.")
        refuse(self, self._refusals(), "sharding.")

    def _refusals(self) -> Refusals:
        engine = f"engine {self.engine!r}"
        last = self.world_size - 1
        allowed = f"ranks of {self.world_size} go from 0 to {last}"
        yield "rank", self.rank > last, allowed
        copies = self.dp_replicate_size
        allowed = f"copies of the model divide the {self.world_size} ranks into equal groups of 2 "
        allowed += "at least"
        is_uneven = self.world_size % copies or self.world_size == copies
        yield "dp_replicate_size", copies > 1 and is_uneven, allowed
        allowed = f"as many have one sample's tokens: it must divide the {self.shards} ranks that "
        yield "cp_size", self.shards % self.cp_size, allowed + "divide the model"
        allowed = "accelerate divides each of several copies among 2 groups of so many at least"
        yield "cp_size", copies > 1 and self.shards == self.cp_size > 1, allowed
        stages = STAGES[self.engine]
        known = " or ".join(map(str, stages))
        yield "stage", self.stage not in stages, f"{engine} has stage {known}"
        offloads = OFFLOADS.get(self.engine, ())
        known = " or ".join(offloads) or "nothing"
        is_other = self.offload and self.offload not in offloads
        yield "offload", is_other, f"{engine} offloads {known}"
        is_early = self.offload == "parameters" and self.stage < 3
        yield "offload", is_early, "parameters can be offloaded at stage 3 only"
        for name, owner in OF_ENGINE.items():
            is_changed = getattr(self, name) != getattr(type(self), name)
            yield name, is_changed and self.engine != owner, f"only engine {owner!r} knows it"
        for name in AT_STAGE_3:
            is_changed = getattr(self, name) != getattr(type(self), name)
            allowed = "only stage 3 gathers weights for each pass: leave it out"
            yield name, is_changed and self.stage != 3, allowed

    @property
    def shards(self) -> int:
        """The number of ranks that divide one copy of the model."""
        return self.world_size // self.dp_replicate_size

    @property
    def shard(self) -> int:
        """The rank's index among those."""
        return self.rank % self.shards

    @property
    def parallelism(self) -> dict[str, int]:
        """The arguments of accelerate's `ParallelismConfig`; {} where it needs none."""
        sizes = {"dp_replicate_size": self.dp_replicate_size, "cp_size": self.cp_size}
        if self.dp_replicate_size == self.cp_size == 1:
            return {}
        return {**sizes, "dp_shard_size": self.shards // self.cp_size}

    def words(self) -> str:
        """Return its part of `str(recipe)`."""
        ranks = str(self.world_size)
        if self.dp_replicate_size > 1:
            ranks = f"{self.shards} × {self.dp_replicate_size} copies"
        if self.cp_size > 1:
            ranks += f" · context over {self.cp_size}"
        offload = f" · {self.offload} offloaded" if self.offload else ""
        root = " · root resharded" if self.reshard_root else ""
        linear = "" if self.memory_efficient_linear else " · plain linear layers"
        return f"{self.engine} stage {self.stage} × {ranks}{offload}{root}{linear}"


@documented
@dataclass(frozen=True)
class Rollouts:
    """What GRPOTrainer and RLOOTrainer sample from the model, and how they train on it.

    Fields and defaults are those of `trl.GRPOConfig`, and a prompt's length. All prompts have that
    length and all completions the longest one.
    """

    num_generations: int = knob(8, least=2)
    prompt_length: int = knob(256)
    max_completion_length: int = knob(512)
    temperature: float = knob(1.0)
    top_p: float = knob(1.0)
    top_k: int = knob(0, least=0)
    beta: float = knob(0.0, share=True)
    num_iterations: int = knob(1)
    steps_per_generation: int | None = knob(None)
    use_vllm: bool = knob(False)
    vllm_mode: str = knob("colocate", choices=ROLLOUT_ENGINES)
    vllm_gpu_memory_utilization: float = knob(0.3, share=True)
    vllm_enable_sleep_mode: bool = knob(False)

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

    name: str = knob("trainer")
    zero_grad: str = knob("end", choices=("start", "before_backward", "end"))
    set_to_none: bool = knob(True)
    keep_outputs: bool | str = knob(False, choices=(False, "backward", "step", True))
    outputs_to_fp32: bool = knob(True)
    use_cache: bool | None = knob(False)
    max_grad_norm: float | None = knob(1.0)
    foreach: bool | None = knob(None)
    optimizer_in_backward: bool = knob(False)
    empty_cache_steps: int | None = knob(None)

    def __post_init__(self) -> None:
        check(self, "loop.")
        if self.optimizer_in_backward and self.max_grad_norm is not None:
            rest = "clipping needs all gradients at once, which optimizer_in_backward never has: "
            raise RecipeError("loop.max_grad_norm", self.max_grad_norm, rest + "set it to None")

    def words(self) -> str:
        """Return its part of `str(recipe)`."""
        if self == LOOPS["trainer"]:
            return ""
        is_named = self == LOOPS.get(self.name)
        return f"{self.name} loop" + ("" if is_named else " (changed)")

    @classmethod
    def named(cls, name: str, **changes: Any) -> "Loop":
        """Return the loop called `name`, with `changes` applied.

        Names are "trainer", "plain" and "optimizer_in_backward".
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
