"""Build `transformers` models from named shapes, without downloads.

The model, its quantized layers and adapters are built on the meta device, which costs nothing. Then
each parameter gets a storage on the wanted device, one tensor at a time, as `from_pretrained` loads
a checkpoint; fake under `FakeTensorMode`.
"""

import contextlib
import dataclasses
import math
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.utils.parametrize import ParametrizationList

from ..base.errors import RecipeError, needing
from ..private import of_transformers
from ..private.of_bitsandbytes import quantized
from ..private.of_torch import buffers_of, parameters_of, unset_fake_temporarily
from ..private.patched import caught
from ..recipe import lora_modules
from ..recipe.configuration import reason
from ..recipe.families import TASKS
from ..recipe.from_transformers import make
from ..recipe.liger import HEAD, kernels
from ..recipe.options import INT8, REPEATED, LoRA, Quantization
from ..recipe.peft_methods import Peft
from ..recipe.recipe import Recipe
from . import trl_trainers
from .cut_cross_entropy import cut_cross_entropy
from .default_dtype import own_default_dtype
from .engine import Model, makes_fakes
from .int8 import INT8_CLASS, int8_parameter, mark_int8
from .quiet import unheard
from .repeated_keys import repeat_shared_keys

INITIAL_DEVIATION = 0.02  # of the values of matrices, as most architectures initialize them
# Leaves an active FakeTensorMode: adapters and code tables cannot be fake.
real_tensors: Callable[[], contextlib.AbstractContextManager] = unset_fake_temporarily


def weight_dtype(recipe: Recipe) -> torch.dtype:
    """Return the dtype in which weights that are not quantized are loaded."""
    return getattr(torch, recipe.weights_dtype)


def build_model(recipe: Recipe, device: str | torch.device = "cpu") -> Model:
    """Return the model of `recipe` in training mode on `device`, with random weights.

    It is fake if a FakeTensorMode is active. Raises RecipeError if transformers has no such
    architecture, or it lacks the wanted attention.
    """
    # What Liger replaced for the model before would be in this one too.
    restore_after_liger()
    # The meta device needs no fake tensors, and PEFT and bitsandbytes do not work with them.
    with real_tensors():
        model = _prepared(meta_model(recipe), recipe)
    materialise(model, torch.device(device))
    # LoRA's adapters were made on the meta device; other methods compute on their layer's values.
    if recipe.peft:
        model = _with_method(model, recipe, recipe.peft)
    if kernels(recipe):
        apply_liger(model, recipe)
    if recipe.cut_cross_entropy:
        cut_cross_entropy(model)
    return model.train()


def _prepared(model: Model, recipe: Recipe) -> Model:
    """Return `model` with all that the recipe changes of it.

    That is the cache setting, quantized layers, checkpointing, the trainer's head and adapters.
    """
    if recipe.loop.use_cache is not None:
        model.config.use_cache = recipe.loop.use_cache
    if recipe.quantization:
        quantize_layers(model, recipe)
        mark_int8(model)
        pack_experts(model, recipe.quantization)
        if recipe.quantization.prepare:
            from peft import prepare_model_for_kbit_training

            # Checkpointing is the recipe's own field, which is read below.
            prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if recipe.gradient_checkpointing:
        _checkpoint(model, recipe.use_reentrant)
        if recipe.adapters:
            # Frozen embeddings give hidden states without a gradient, through which no checkpoint
            # would go back.
            model.enable_input_require_grads()
    for name, parameter in model.named_parameters():
        if any(part in name.split(".") for part in recipe.freeze or ()):
            parameter.requires_grad_(False)
    if recipe.trainer != "transformers":
        trl_trainers.prepare(model, recipe.trainer)
    return _adapted(model, recipe, recipe.lora) if recipe.lora else model


def _checkpoint(model: Model, use_reentrant: bool) -> None:
    """Let `model` recompute its layers in the backward pass."""
    # the Trainer and every model's forward do the same
    model.config.use_cache = False
    # transformers renamed the method in 5.2x; the old name warns there, the new one is missing
    # before
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is None:
        enable = model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})


def meta_model(recipe: Recipe) -> Model:
    """Return the recipe's model on the meta device, in its weights' dtype.

    It is neither quantized nor adapted.
    """
    dtype = weight_dtype(recipe)
    if recipe.attn_implementation == REPEATED:
        repeat_shared_keys()
    with own_default_dtype():
        model = make(recipe.shape, dtype=dtype, attn_implementation=recipe.attn_implementation)
    if dtype == torch.float32:
        return model
    # transformers keeps these modules in fp32 whatever dtype is asked for, the second list for fp16
    # alone.
    kept = of_transformers.always_kept_in_fp32(model)
    if dtype == torch.float16:  # T5's `wo`
        kept += of_transformers.kept_in_fp32(model)
    for name, parameter in model.named_parameters():
        if any(re.search(part, name) for part in kept):
            parameter.data = parameter.data.float()
    return model


def quantize_layers(model: Model, recipe: Recipe) -> None:
    """Replace linear layers but the head by bitsandbytes' ones.

    `from_pretrained(quantization_config=...)` does the same.
    """
    from transformers import BitsAndBytesConfig
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.modeling_utils import local_torch_dtype

    quantization = recipe.quantization
    assert quantization is not None  # the caller has asked
    skipped = list(quantization.skip_modules) if quantization.skip_modules else None
    if quantization.quant_type == INT8:
        config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skipped)
    else:
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=quantization.quant_type,
            bnb_4bit_use_double_quant=quantization.double,
            bnb_4bit_compute_dtype=recipe.implied_dtype,
            llm_int8_skip_modules=skipped,
        )
    # weights and biases have the loading dtype, like a checkpoint's before they are quantized
    loading_dtype = local_torch_dtype(weight_dtype(recipe))
    with own_default_dtype(), torch.device("meta"), loading_dtype:
        replace_with_bnb_linear(
            model,
            modules_to_not_convert=_never_quantized(model, skipped),
            quantization_config=config,
        )
    # A quantized base is not trained; adapters come later and are.
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    # What the Trainer and PEFT look at.
    model.is_loaded_in_4bit = config.load_in_4bit
    model.is_loaded_in_8bit = config.load_in_8bit
    model.is_quantized = True
    model.quantization_method = "bitsandbytes"
    model.config.quantization_config = config


def pack_experts(model: Model, quantization: Quantization) -> None:
    """Quantize a model's fused experts too if the recipe says so."""
    if quantization.experts:
        for _ in quantize_experts(model, quantization):
            pass


def quantize_experts(model: Model, quantization: Quantization) -> Iterator[str]:
    """Quantize what `bitsandbytes` leaves of a model's experts, and yield the name of each before.

    From then on each pass of their module unpacks them whole.
    """
    # Copies of the lists, since parametrizing changes both.
    for owner, module in list(model.named_modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if is_fused_expert(f"{owner}.{name}", parameter):
                yield f"{owner}.{name}"
                quantize_expert(module, name, quantization)


def is_fused_expert(name: str, parameter: torch.Tensor) -> bool:
    """Tell whether a parameter holds a matrix for each expert, as axolotl tells."""
    return parameter.dim() >= 3 and "expert" in name.lower()


def quantize_expert(module: torch.nn.Module, name: str, quantization: Quantization) -> None:
    """Quantize the parameter `name` of `module` as bitsandbytes does outside of linear layers."""
    from bitsandbytes.nn import parametrize

    make_code_table()
    replace: Any = parametrize.replace_parameter_4bit
    replace(
        module,
        name,
        compress_statistics=quantization.double,
        quant_type=quantization.quant_type,
    )


def _never_quantized(model: Model, skipped: list[str] | None) -> list[str]:
    """Return the names of modules that stay as they are: the head, and what is kept in fp32.

    `skipped` stands in place of the head: `HfQuantizer.get_modules_to_not_convert`.
    """
    from transformers.quantizers.base import get_keys_to_not_convert

    if skipped is not None:
        return skipped + of_transformers.kept_in_fp32(model)
    names = list(get_keys_to_not_convert(model))
    names += of_transformers.kept_in_fp32(model)
    # transformers names the bias of a head that has one; the head is trained, so it must not be
    # quantized
    heads = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and f"{name}.bias" in names:
            heads.append(name)
    return names + heads


def _adapted(model: Model, recipe: Recipe, lora: LoRA) -> Model:
    """Return `model` with PEFT's adapters, on the meta device."""
    from peft import LoraConfig, get_peft_model

    # adapters take their layer's dtype unless it is quantized, which it will be
    in_fp32 = lora.autocast_adapter_dtype or recipe.quantization is not None
    config = LoraConfig(**_lora_arguments(recipe, lora))
    with unheard(".*fan_in_fan_out.*"):  # GPT-2's Conv1D; PEFT sets it right itself
        try:
            # elsewhere PEFT would draw values, of the process's generator, and drop them
            with torch.device("meta"):
                model = get_peft_model(model, config, autocast_adapter_dtype=in_fp32)
        except (TypeError, ValueError) as error:  # layers and names that PEFT does not adapt
            rest = f"PEFT refuses it for {recipe.name}: {reason(error)}"
            raise RecipeError("lora.target_modules", lora.target_modules, rest) from error
        except ImportError as error:  # of what else is installed, such as Colab's torchao 0.10
            rest = f"PEFT makes no adapters here: {reason(error)}"
            raise RecipeError("lora", lora, rest) from error
    if not in_fp32:
        take_base_dtype(model)
    if recipe.trainer != "transformers" and recipe.quantization:
        _train_in_bfloat16(model)
    return model


def _with_method(model: Model, recipe: Recipe, method: Peft) -> Model:
    """Return `model` with what another of PEFT's methods adds, made on its device."""
    from peft import get_peft_model

    config = method.config(TASKS[recipe.shape.task].peft)
    refused = (TypeError, ValueError, NotImplementedError, ImportError)
    with unheard(".*fan_in_fan_out.*"), making_adapters():
        try:
            model = get_peft_model(model, config)
        except refused as error:  # layers, dtypes and models that the method does not take
            rest = f"PEFT refuses {method.peft_type} for {recipe.name}: {reason(error)}"
            raise RecipeError("peft", method.to_dict(), rest) from error
    if recipe.trainer != "transformers" and recipe.quantization:
        _train_in_bfloat16(model)
    return model


def making_adapters() -> contextlib.AbstractContextManager:
    """While entered, PEFT makes adapters; a simulation puts in how it does among fake tensors."""
    return contextlib.nullcontext()


def _lora_arguments(recipe: Recipe, lora: LoRA) -> dict[str, Any]:
    """Return the arguments of PEFT's `LoraConfig`."""
    arguments = dataclasses.asdict(lora)
    del arguments["autocast_adapter_dtype"]
    for name in ("modules_to_save", "target_parameters"):
        arguments[name] = list(arguments[name]) if arguments[name] else None
    # by name, so that PEFT adapts what the shape says (its "all-linear" would take Mixtral's
    # experts whole)
    modules = lora_modules.adapted(recipe.shape, lora)
    arguments["target_modules"] = [name for name, _, _ in modules]
    arguments["task_type"] = TASKS[recipe.shape.task].peft
    return arguments


def take_base_dtype(model: Model) -> None:
    """Give each adapter its layer's dtype.

    PEFT does not where the adapter is on the meta device.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in model.modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        dtype = getattr(module.get_base_layer(), "weight", torch.empty(0)).dtype
        for name in module.adapter_layer_names:
            part = getattr(module, name, None)
            if isinstance(part, torch.nn.Module):
                part.to(dtype)


def _train_in_bfloat16(model: Model) -> None:
    """Convert what is trained beside a quantized base, as TRL does."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_magnitude_vector" not in name:
            parameter.data = parameter.data.to(torch.bfloat16)


def materialise(model: Model, device: torch.device) -> None:
    """Give every meta parameter and buffer of `model` a storage on `device`.

    Tied ones stay tied, 4-bit ones are packed.
    """
    made: dict[int, Any] = {}  # by the id of the meta tensor
    for module in model.modules():
        if isinstance(module, ParametrizationList) and module.original.is_meta:
            _fill_packed(module, device)
        for tensors in (parameters_of(module), buffers_of(module)):
            for name, meta in tensors.items():
                if meta is None or not meta.is_meta:
                    continue
                if id(meta) not in made:
                    made[id(meta)] = _made(name, meta, device)
                real = made[id(meta)]
                tensors[name] = real
                if hasattr(real, "quant_state"):
                    # bitsandbytes' layers look for the state in themselves when their weight has
                    # lost it.
                    module.quant_state = real.quant_state
    if not makes_fakes():
        _start_values(model)


def _made(name: str, meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the buffer or parameter `meta` on `device`.

    Matrices are normal, biases 0, scales 1.
    """
    if not isinstance(meta, torch.nn.Parameter):
        return torch.zeros_like(meta, device=device)
    kind = type(meta).__name__
    # what a weight is rounded to before it is int8 (`Int8Params._quantize`)
    dtype = torch.float16 if kind == INT8_CLASS else meta.dtype
    # fake modes of torch 2.11 take no subclass's .data
    data = torch.empty(meta.shape, dtype=dtype, device=device)
    # Fake tensors have no values to fill in.
    if not makes_fakes() and data.is_floating_point():
        if data.dim() > 1:
            data.normal_(0, INITIAL_DEVIATION)
        else:
            data.fill_(0.0 if "bias" in name else 1.0)
    if kind == "Params4bit":
        return quantized_parameter(meta, data)
    if kind == INT8_CLASS:
        return int8_parameter(data)
    return torch.nn.Parameter(data, requires_grad=meta.requires_grad)


def _fill_packed(packed: Any, device: torch.device) -> None:
    """Give a parameter that was quantized outside of linear layers a storage on `device`."""
    from bitsandbytes.functional import quantize_4bit

    (own,) = packed
    state = own.quant_state
    data = torch.empty(state.shape, dtype=state.dtype, device=device)
    if not makes_fakes():
        data.normal_(0, INITIAL_DEVIATION)
    codes, own.quant_state = quantize_4bit(
        data,
        blocksize=state.blocksize,
        compress_statistics=state.nested,
        quant_type=state.quant_type,
    )
    packed.original = torch.nn.Parameter(codes, requires_grad=False)


def quantized_parameter(meta: Any, data: torch.Tensor) -> torch.nn.Parameter:
    """Return `data` quantized by bitsandbytes, as the parameter `meta` says.

    A fake one is a plain parameter with the same storages and attributes.
    """
    import bitsandbytes as bnb

    options = {
        "compress_statistics": meta.compress_statistics,
        "quant_type": meta.quant_type,
        "quant_storage": meta.quant_storage,
    }
    if not makes_fakes():
        plain = bnb.nn.Params4bit(data, requires_grad=False, **options)
        return quantized(plain, data.device)
    make_code_table()
    packed, state = bnb.functional.quantize_4bit(data, blocksize=meta.blocksize, **options)
    parameter: Any = torch.nn.Parameter(packed, requires_grad=False)
    parameter.quant_state = state
    parameter.bnb_quantized = True
    # An attribute of bitsandbytes' own class, which its layers set.
    parameter.module = None
    # as PEFT copies them to the layers that it makes
    parameter.compress_statistics = meta.compress_statistics
    parameter.quant_type = meta.quant_type
    parameter.quant_storage = meta.quant_storage
    return parameter


def make_code_table() -> None:
    """Compute the code table of double quantization, which bitsandbytes keeps, from values."""
    from bitsandbytes import functional

    if "dynamic" not in functional.name2qmap:
        with real_tensors():
            functional.name2qmap["dynamic"] = functional.create_dynamic_map()


def _start_values(model: Model) -> None:
    """Compute the values of buffers (rotary frequencies, position ids, scales) and of adapters."""
    from transformers import PreTrainedModel

    # diffusers' models have no such owner, and keep the zeros
    own = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    owner = next(own, None)
    modules = () if owner is None else owner.modules()
    with torch.no_grad():
        for module in modules:
            # together with its weight: Gemma's embedding has its scale as a buffer
            if any(buffer is not None for buffer in buffers_of(module).values()):
                of_transformers.start_values(owner, module)
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                # PEFT's own initial values of LoRA: A as a linear layer's weight, B zero.
                torch.nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
            elif "lora_B" in name:
                parameter.zero_()


@needing("use_liger_kernel")
def apply_liger(model: Model, recipe: Recipe) -> None:
    """Do what `Trainer.train` does to `model`; where another has the head Liger leaves it alone.

    What Liger replaces in modules (classes, rotary positions, the loss) is so for this thread,
    until `restore_after_liger`.
    """
    from transformers.integrations.liger import apply_liger_kernel
    from transformers.trainer_utils import unwrap_peft_model

    # Liger replaces classes in the module that defines the model's.
    home = sys.modules[type(unwrap_peft_model(model)).__module__]
    config = {} if HEAD in kernels(recipe) else {HEAD: False}
    # transformers says in other words that it is missing
    import liger_kernel.transformers  # noqa: F401

    with caught(_liger.undo, home, torch.nn.functional):
        apply_liger_kernel(model, config)


def restore_after_liger() -> None:
    """Undo what Liger replaced."""
    _liger.undo.close()


class _Liger(threading.local):
    """What Liger replaced, which is so for one thread."""

    def __init__(self) -> None:
        self.undo = contextlib.ExitStack()


_liger = _Liger()
