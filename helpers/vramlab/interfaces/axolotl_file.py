"""What axolotl makes of its YAML: the fields of a recipe.

The places named are in its source, `data/configurations.json` says of which version.
"""

import dataclasses
import math
from typing import Any

from ..recipe.options import ATTENTION, Loop
from ..recipe.shapes import read_shape
from .configuration_file import (
    IN_INT8,
    MIXED,
    RUN_IT,
    TRUE,
    Configuration,
    names_in,
    note_others,
    take_ranks,
    take_reentrant,
    take_sharding,
)

# What `use_liger_kernel` puts in place, as axolotl names it; others of its switches are not Liger's
# default for a causal model.
LIGER_PARTS = (
    "liger_rope",
    "liger_rms_norm",
    "liger_glu_activation",
    "liger_fused_linear_cross_entropy",
)
# Without it queries and keys are turned by PyTorch's own operators, whose results die in the layer:
# `predict` has the same peak either way, which a test holds.
MOVES_NOTHING = "liger_rope"
CUT = "CutCrossEntropyPlugin"
# The last two only log and evaluate, so they move no bytes of a step.
PLUGINS = ("LigerPlugin", CUT, "SwanLabPlugin", "LMEvalPlugin")
KERNELS = "not modelled: the fused LoRA kernels that axolotl turns on; these are PEFT's layers"
RING = (
    "not modelled: ring-flash-attn's ring; these figures are of accelerate's, by sdpa, whose ranks "
    "hold as many tokens"
)
# flash-attn's `mha_varlen_bwd` sums up dQ in fp32 over `total_q + 128 * batch_size` rows.
PACKED = (
    "each packed row is taken as one sample; the backward pass of flash-attn has 128 rows of "
    "fp32 queries more for each further one (2 MiB with 32 heads of 128 channels)"
)
# `utils/__init__.py`, `set_pytorch_cuda_alloc_conf`; of requests that are no 16th of a power of two
# the allocator takes up to a 16th more
SEGMENTS = (
    "axolotl sets expandable segments, so the tier is with them; not modelled: that it also "
    "rounds each request up to a sixteenth of a power of two (roundup_power2_divisions:16)"
)
# Its own mixin (`core/trainers/mixins/activation_checkpointing.py`) calls TRL's code with patches,
# and whether layers of an adapted model are checkpointed as well is said in two ways:
# `_apply_activation_checkpointing` says no, after the loader has enabled it.
OFFLOADS = (
    "axolotl offloads activations in ways of its own: without it these figures are of checkpoints "
    "on the GPU; simulate MODEL --trainer sft --gradient-checkpointing --activation-offloading is "
    "the nearest, TRL's SFTTrainer by TRL's own code"
)
# `utils/schemas/enums.py`: kernels for which axolotl casts embeddings and norms back to 16 bits
KEEPS_FP32 = ("eager", "sdpa")
OLD_ATTENTION = {
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
    "flex_attention": "flex_attention",
    "xformers_attention": "xformers",
    "sage_attention": "sage",
}
# From axolotl's `rl` to the recipe's trainer; IPO is another loss over the same tensors as DPO's.
PREFERENCES = {"dpo": "dpo", "ipo": "dpo", "kto": "kto", "reward": "reward"}


def read_axolotl(configuration: Configuration) -> None:
    """Fill in what `core/builders/base.py` and `loaders/model.py` make of a configuration."""
    get = configuration.get
    configuration.model = get("base_model")
    configuration.notes.append(SEGMENTS)
    fields = configuration.fields
    fields["optim"] = get("optimizer", "adamw_torch_fused")
    optim_args = get("optim_args")
    if isinstance(optim_args, dict):
        # A recipe's `optim_args` is one text, as in TrainingArguments; YAML may hold a mapping.
        optim_args = ",".join(f"{name}={value}" for name, value in optim_args.items())
    fields["optim_args"] = optim_args
    fields["batch_size"] = get("micro_batch_size", 1)
    steps = get("gradient_accumulation_steps")
    # axolotl's `batch_size` is that of one rank's whole step: micro-batch times accumulation.
    if steps is None and get("batch_size"):
        steps = get("batch_size") // fields["batch_size"]
    fields["gradient_accumulation_steps"] = steps or 1
    fields["seq_len"] = get("sequence_len", 512)
    fields["torch_compile"] = bool(get("torch_compile"))
    # The order counts: precision reads the adapter, the kernel and the sharding that the others
    # have filled in.
    _take_loop(configuration)
    _take_attention(configuration)
    _take_trainer(configuration)
    _take_adapter(configuration)
    _take_checkpointing(configuration)
    _take_liger(configuration)
    take_sharding(configuration)
    if get("use_ray"):
        take_ranks(configuration, "ray_num_workers")
    _take_mesh(configuration)
    _take_precision(configuration)
    _take_rows(configuration)
    note_others(configuration)


def _take_rows(configuration: Configuration) -> None:
    """Refuse new rows of embeddings (`loaders/model.py`, `_resize_token_embeddings`).

    There are none where the model's own are as many as that already.
    """
    rows = read_shape(configuration.model).vocab_size
    if configuration.get("resize_token_embeddings_to_32x") and rows % 32:
        rest = f"it may add to the model's {rows} rows, which no recipe does: leave it out"
        raise configuration.refuse("resize_token_embeddings_to_32x", rest)


def _take_mesh(configuration: Configuration) -> None:
    """Take copies of the model and rings (`utils/distributed.py`, `build_parallelism_config`)."""
    sizes = {}
    for name in ("context_parallel_size", "dp_replicate_size", "dp_shard_size"):
        sizes[name] = configuration.get(name) or 1
    said = [name for name, size in sizes.items() if size > 1]
    if not said:
        return
    sharding = configuration.fields.get("sharding", {})
    if sharding.get("engine") != "fsdp":
        rest = f"it is modelled over FSDP2: say fsdp_config, {RUN_IT}"
        raise configuration.refuse(said[0], rest)
    sharding["cp_size"] = sizes["context_parallel_size"]
    sharding["dp_replicate_size"] = sizes["dp_replicate_size"]
    if configuration.get("dp_shard_size"):
        sharding["world_size"] = math.prod(sizes.values())
    if sharding["cp_size"] > 1:
        configuration.fields["attn_implementation"] = "sdpa"
        configuration.notes.append(RING)


def _take_loop(configuration: Configuration) -> None:
    clip = configuration.get("max_grad_norm", 1.0)
    empties = configuration.get("torch_empty_cache_steps")
    # Left out where nothing differs, so that the recipe keeps the loop by its name.
    if clip != 1.0 or empties:
        loop = {"max_grad_norm": clip or None, "empty_cache_steps": empties}
        configuration.fields["loop"] = dataclasses.replace(Loop.named("trainer"), **loop)


def _take_attention(configuration: Configuration) -> None:
    """Take the kernel, and packed samples where they make no mask."""
    if configuration.get("attention"):
        # A branch of axolotl had it in its examples, no release does.
        rest = "axolotl has no such setting: say attn_implementation, such as flash_attention_2"
        raise configuration.refuse("attention", rest)
    kernel = configuration.get("attn_implementation")
    # These switches are older than `attn_implementation`, which counts where both are said.
    for name, old in OLD_ATTENTION.items():
        if kernel is None and configuration.get(name):
            kernel = old
    if kernel not in (None, *ATTENTION):
        name = "attn_implementation"
        raise configuration.refuse(name, f"recipes have {', '.join(ATTENTION)}")
    configuration.fields["attn_implementation"] = kernel
    if not configuration.get("sample_packing"):
        # Without packing rows have the samples' own lengths, which the file does not tell.
        configuration.notes.append("each sample is taken as long as sequence_len")
    elif kernel != "flash_attention_2":
        rest = "packed samples get a mask of tokens × tokens without flash_attention_2, which no "
        raise configuration.refuse("sample_packing", rest + "recipe models: take that kernel")
    else:
        configuration.notes.append(PACKED)


def _take_checkpointing(configuration: Configuration) -> None:
    value = configuration.get("gradient_checkpointing", False)
    # `check_gradient_checkpointing_w_offload` of its schemas makes the second of the first.
    if not isinstance(value, bool) or configuration.get("activation_offloading"):
        says_it = "gradient_checkpointing" if isinstance(value, str) else "activation_offloading"
        raise configuration.refuse(says_it, OFFLOADS)
    configuration.fields["gradient_checkpointing"] = value
    # `utils/config/__init__.py`, `normalize_config`; its builder's default is the other kind
    usual = {"use_reentrant": not configuration.get("rl")}
    if value and configuration.get("gradient_checkpointing_kwargs", usual).get("use_reentrant"):
        take_reentrant(configuration)


def _take_trainer(configuration: Configuration) -> None:
    """Take whose trainer its own one extends: TRL's for preferences and rewards."""
    asked = configuration.get("rl")
    # A reward model has a switch of its own and no `rl`.
    if configuration.get("reward_model"):
        asked = "reward"
    if asked is None:
        return
    if asked not in PREFERENCES:
        raise configuration.refuse("rl", f"recipes train as {', '.join(PREFERENCES)} do")
    if configuration.get("dpo_use_liger_kernel"):
        rest = "Liger's own loss of preferences is not modelled: leave it out"
        raise configuration.refuse("dpo_use_liger_kernel", rest)
    fields = configuration.fields
    fields["trainer"] = PREFERENCES[asked]
    fields["padding_free"] = bool(configuration.get("dpo_padding_free"))
    fields["precompute_ref_log_probs"] = bool(configuration.get("precompute_ref_log_probs"))


def _take_adapter(configuration: Configuration) -> None:
    """Take LoRA, and its base in few bits (`loaders/adapter.py`, `_set_quantization_config`)."""
    get = configuration.get
    adapter = get("adapter")
    if adapter is None:
        if get("load_in_4bit") or get("load_in_8bit"):
            raise configuration.refuse("adapter", "a quantized base is trained by an adapter")
        return
    if adapter not in ("lora", "qlora"):
        raise configuration.refuse("adapter", "recipes have lora and qlora")
    targets: Any = get("lora_target_modules")
    if get("lora_target_linear"):
        # PEFT's own word, which the recipe's LoRA understands too.
        targets = "all-linear"
    lora = {
        "r": get("lora_r", 8),
        "lora_alpha": get("lora_alpha", 8),
        "lora_dropout": get("lora_dropout", 0.0),
        "target_modules": targets,
        "target_parameters": names_in(get("lora_target_parameters")),
        "modules_to_save": names_in(get("lora_modules_to_save")),
        "use_dora": bool(get("peft_use_dora")),
        "autocast_adapter_dtype": get("peft_autocast_adapter_dtype", True),
    }
    configuration.fields["lora"] = lora
    in_int8 = adapter == "lora" and get("load_in_8bit")
    # axolotl turns its kernels on by itself, but not where the file names one, trains by
    # preferences, has a base in 8 bits or runs a model's own code.
    kernels = [name for name in configuration.values if name.endswith("_kernel")]
    if not (kernels or get("rl") or get("trust_remote_code") or in_int8):
        configuration.notes.append(KERNELS)  # `check_auto_enable_lora_kernels`
    base: dict[str, Any] = dict(IN_INT8) if in_int8 else {}
    if adapter == "qlora" and get("load_in_4bit"):
        said = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        said |= get("bnb_config_kwargs", {})
        base["quant_type"] = said["bnb_4bit_quant_type"]
        base["double"] = said["bnb_4bit_use_double_quant"]
    if base:
        if get("quantize_moe_experts"):
            base["experts"] = "loading"
        # It is prepared, and norms, embeddings and head are cast back to 16 bits after it.
        configuration.fields["quantization"] = base | {"prepare": False}


def _take_liger(configuration: Configuration) -> None:
    """Take Liger's kernels where all of them are asked for that a Trainer would put in place."""
    get = configuration.get
    plugins = get("plugins", [])
    # A plugin is named by its whole path, such as axolotl.integrations.liger.LigerPlugin.
    others = [name for name in plugins if name.rpartition(".")[2] not in PLUGINS]
    if others:
        rest = f"recipes know {', '.join(PLUGINS)}: leave the others out, {RUN_IT}"
        raise configuration.refuse("plugins", rest)
    said = {part: bool(get(part)) for part in LIGER_PARTS}
    # `integrations/cut_cross_entropy/args.py`: on unless it is switched off; both heads are refused
    # by `utils/schemas/validation.py`
    if get("cut_cross_entropy", True) and any(name.endswith(CUT) for name in plugins):
        configuration.fields["cut_cross_entropy"] = True
        said["liger_fused_linear_cross_entropy"] = any(said.values())
    # An older name of the same switch.
    said["liger_glu_activation"] |= bool(get("liger_swiglu"))
    # Without the plugin the switches stand in the file and nobody reads them.
    is_loaded = any(name.endswith("LigerPlugin") for name in plugins)
    if not is_loaded or not any(said.values()):
        return
    missing = [part for part, is_on in said.items() if not is_on]
    if missing == [MOVES_NOTHING]:
        missing = []
        configuration.notes.append(f"{MOVES_NOTHING} is off, which leaves the peak as it is")
    # A part of Liger's kernels would change the peak in a way that only the sum of all is modelled
    # for.
    if missing or get("liger_cross_entropy"):
        rest = f"a recipe has Liger's kernels as the Trainer puts them in place: {', '.join(said)}"
        lacks = f"here lacks {', '.join(missing)}: " if missing else "take them all, "
        raise configuration.refuse("plugins", f"{rest}; {lacks}{RUN_IT}")
    configuration.fields["use_liger_kernel"] = True


def _take_precision(configuration: Configuration) -> None:
    """Take the weights' format and autocast's (`utils/config/__init__.py`, `resolve_dtype`)."""
    get = configuration.get
    fields = configuration.fields
    bf16 = get("bf16")
    dtype = "float32"
    if bf16 or get("bfloat16"):
        dtype = "bfloat16"
    elif get("fp16") or get("float16") or get("load_in_8bit"):
        dtype = "float16"
    # `float16` or a base in 8 bits without `fp16` loads in 16 bits and turns no autocast on.
    is_true = bf16 == "full" or (dtype == "float16" and not get("fp16"))
    if is_true:
        fields["precision"] = TRUE[dtype]
        return
    fields["precision"] = MIXED[dtype]
    # tf32 changes how products of fp32 are computed, not what is stored.
    if dtype == "float32" and get("tf32"):
        fields["precision"] = "tf32"
    trains_all = "lora" not in fields
    engine = fields.get("sharding", {}).get("engine")
    keeps: bool = fields["attn_implementation"] in (None, *KEEPS_FP32)
    # `loaders/model.py`, _configure_embedding_dtypes: cut cross-entropy casts them back as well
    keeps &= not fields.get("cut_cross_entropy")
    if trains_all and keeps and dtype != "float32" and engine is None:
        rest = (
            "without an adapter axolotl keeps embeddings, head and norms in fp32 and the rest in "
            "16 bits unless the kernel is flash_attention_2, which no recipe has: take that one"
        )
        raise configuration.refuse("attn_implementation", rest)
    if engine is None or not trains_all:
        fields["dtype"] = dtype
