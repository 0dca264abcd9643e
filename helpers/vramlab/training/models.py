"""Build `transformers` models from named shapes, without downloads.

The model, its quantized layers and adapters are built on the meta device, which costs nothing. Then each parameter gets a
storage on the wanted device, one tensor at a time, as `from_pretrained` loads a checkpoint; fake under `FakeTensorMode`.
"""

import contextlib
import dataclasses
import math
import sys

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ..recipe import lora_modules
from ..recipe.configuration import reason
from ..recipe.families import TASKS
from ..recipe.from_transformers import make
from ..recipe.liger import kernels
from ..recipe.options import REPEATED
from ..recipe.recipe import Recipe
from ..report.errors import RecipeError, needing
from . import trl_trainers
from .default_dtype import own_default_dtype
from .engine import makes_fakes
from .patched import caught
from .quiet import unheard
from .repeated_keys import repeat_shared_keys


def weight_dtype(recipe: Recipe) -> torch.dtype:
    """The dtype in which weights that are not quantized are loaded."""
    return getattr(torch, recipe.weights_dtype)


def build_model(recipe: Recipe, device: str | torch.device = "cpu") -> torch.nn.Module:
    """The model of `recipe` in training mode on `device`, with random weights; fake if a FakeTensorMode is active.

    Raises RecipeError if transformers has no such architecture, or it lacks the wanted attention.
    """
    restore_after_liger()
    with real_tensors():
        model = _prepared(meta_model(recipe), recipe)
    materialise(model, torch.device(device))
    if kernels(recipe):
        apply_liger(model, recipe)
    return model.train()


real_tensors = unset_fake_temporarily  # leaves an active FakeTensorMode: adapters and code tables cannot be fake


def _prepared(model: torch.nn.Module, recipe: Recipe) -> torch.nn.Module:
    """`model` with the recipe's cache setting, quantized layers, checkpointing, trainer's head and adapters."""
    if recipe.loop.use_cache is not None:
        model.config.use_cache = recipe.loop.use_cache
    if recipe.quantization:
        quantize_layers(model, recipe)
        if recipe.quantization.prepare:
            from peft import prepare_model_for_kbit_training

            prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if recipe.gradient_checkpointing:
        model.config.use_cache = False  # the Trainer and every model's forward do the same
        # transformers renamed the method in 5.2x; the old name warns there, the new one is missing before
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        if recipe.lora:
            model.enable_input_require_grads()
    if recipe.trainer != "transformers":
        trl_trainers.prepare(model, recipe.trainer)
    return _adapters(model, recipe) if recipe.lora else model


def meta_model(recipe: Recipe) -> torch.nn.Module:
    """The recipe's model on the meta device, in its weights' dtype, neither quantized nor adapted."""
    dtype = weight_dtype(recipe)
    if recipe.attn_implementation == REPEATED:
        repeat_shared_keys()
    with own_default_dtype():
        model = make(recipe.shape, dtype=dtype, attn_implementation=recipe.attn_implementation)
    kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:  # T5's `wo`
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, parameter in model.named_parameters():
        if dtype != torch.float32 and kept.intersection(name.split(".")):
            parameter.data = parameter.data.float()
    return model


def quantize_layers(model: torch.nn.Module, recipe: Recipe) -> None:
    """Replace linear layers but the head by bitsandbytes' ones, as `from_pretrained(quantization_config=...)` does."""
    from transformers import BitsAndBytesConfig
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.modeling_utils import local_torch_dtype
    from transformers.quantizers.base import get_keys_to_not_convert

    quantization, dtype = recipe.quantization, weight_dtype(recipe)
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantization.quant_type,
        bnb_4bit_use_double_quant=quantization.double,
        bnb_4bit_compute_dtype=recipe.implied_dtype,
    )
    # weights and biases have the loading dtype, like a checkpoint's before they are quantized
    with own_default_dtype(), torch.device("meta"), local_torch_dtype(dtype):
        # transformers names the bias of a head that has one; the head is trained, so it must not be quantized
        keep = [*get_keys_to_not_convert(model), *(getattr(model, "_keep_in_fp32_modules", None) or ())]
        keep += [n for n, m in model.named_modules() if f"{n}.bias" in keep and isinstance(m, torch.nn.Linear)]
        replace_with_bnb_linear(model, modules_to_not_convert=keep, quantization_config=config)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.is_loaded_in_4bit = model.is_quantized = True
    model.quantization_method = "bitsandbytes"
    model.config.quantization_config = config


def _take_base_dtype(model: torch.nn.Module) -> None:
    """Give each adapter its layer's dtype, which PEFT does not where the adapter is on the meta device."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in model.modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        dtype = getattr(module.get_base_layer(), "weight", torch.empty(0)).dtype
        for name in module.adapter_layer_names:
            held = getattr(module, name, None)
            if isinstance(held, torch.nn.Module):
                held.to(dtype)


def _adapters(model: torch.nn.Module, recipe: Recipe) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    values = dataclasses.asdict(recipe.lora)
    cast = values.pop("autocast_adapter_dtype")
    for name in ("modules_to_save", "target_parameters"):
        values[name] = list(values[name]) if values[name] else None
    # by name, so that PEFT adapts what the shape says (its "all-linear" would take Mixtral's experts whole)
    values["target_modules"] = [name for name, _, _ in lora_modules.adapted(recipe.shape, recipe.lora)]
    values["task_type"] = TASKS[recipe.shape.task].peft
    with unheard(".*fan_in_fan_out.*"):  # GPT-2's Conv1D; PEFT sets it right itself
        # adapters take their layer's dtype unless it is quantized, which it will be
        cast = cast or recipe.quantization is not None
        try:
            with torch.device("meta"):  # PEFT would draw values, of the process's generator, and drop them
                model = get_peft_model(model, LoraConfig(**values), autocast_adapter_dtype=cast)
        except (TypeError, ValueError) as error:  # layers and names that PEFT does not adapt
            rest = f"PEFT refuses it for {recipe.name}: {reason(error)}"
            raise RecipeError("lora.target_modules", recipe.lora.target_modules, rest) from error
        except ImportError as error:  # of what is there beside it, such as Colab's torchao 0.10
            raise RecipeError("lora", recipe.lora, f"PEFT makes no adapters here: {reason(error)}") from error
    if not cast:
        _take_base_dtype(model)
    if recipe.trainer != "transformers" and recipe.quantization:
        for name, parameter in model.named_parameters():  # TRL converts what is trained beside a quantized base
            if parameter.requires_grad and "lora_magnitude_vector" not in name:
                parameter.data = parameter.data.to(torch.bfloat16)
    return model


def materialise(model: torch.nn.Module, device: torch.device) -> None:
    """Give every meta parameter and buffer of `model` a storage on `device`; tied ones stay tied, 4-bit ones are packed."""
    done: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, old in held.items():
                if old is None or not old.is_meta:
                    continue
                if id(old) not in done:
                    done[id(old)] = _made(name, old, device)
                held[name] = done[id(old)]
                if hasattr(held[name], "quant_state"):
                    module.quant_state = held[name].quant_state
    if not makes_fakes():
        _start_values(model)


def _made(name: str, old: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Make the buffer or parameter `old` on `device`: matrices normal with deviation 0.02, biases 0, scales 1."""
    if not isinstance(old, torch.nn.Parameter):
        return torch.zeros_like(old, device=device)
    data = torch.empty(old.shape, dtype=old.dtype, device=device)  # fake modes of torch 2.11 take no subclass's .data
    if not makes_fakes() and data.is_floating_point():
        data.normal_(0, 0.02) if data.dim() > 1 else data.fill_(0.0 if "bias" in name else 1.0)
    if type(old).__name__ == "Params4bit":
        return quantized_parameter(old, data)
    return torch.nn.Parameter(data, requires_grad=old.requires_grad)


def quantized_parameter(old: torch.nn.Parameter, data: torch.Tensor) -> torch.nn.Parameter:
    """`data` quantized by bitsandbytes; a fake one in a plain parameter with the same storages and attributes."""
    import bitsandbytes as bnb

    options = {k: getattr(old, k) for k in ("compress_statistics", "quant_type", "quant_storage")}
    if not makes_fakes():
        return bnb.nn.Params4bit(data, requires_grad=False, **options)._quantize(data.device)
    make_code_table()
    packed, state = bnb.functional.quantize_4bit(data, blocksize=old.blocksize, **options)
    new = torch.nn.Parameter(packed, requires_grad=False)
    new.quant_state, new.bnb_quantized, new.module = state, True, None
    return new


def make_code_table() -> None:
    """Compute the code table of double quantization, which bitsandbytes keeps, from values."""
    from bitsandbytes import functional

    if "dynamic" not in functional.name2qmap:
        with real_tensors():
            functional.name2qmap["dynamic"] = functional.create_dynamic_map()


def _start_values(model: torch.nn.Module) -> None:
    """Compute the values of buffers (rotary frequencies, position ids, scales) and the start values of adapters."""
    from transformers import PreTrainedModel

    owner = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    with torch.no_grad():
        for module in owner.modules():
            # together with its weight: Gemma's embedding has its scale as a buffer
            if any(buffer is not None for buffer in module._buffers.values()):
                owner._init_weights(module)
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                torch.nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
            elif "lora_B" in name:
                parameter.zero_()


_liger = contextlib.ExitStack()  # undoes what Liger replaced


@needing("use_liger_kernel")
def apply_liger(model: torch.nn.Module, recipe: Recipe) -> None:
    """Do what `Trainer.train` does to `model`; under SFTTrainer Liger leaves the head alone. What Liger replaces in modules
    (classes, rotary positions, the loss) is so for this thread, until `restore_after_liger`."""
    from transformers.integrations.liger import apply_liger_kernel
    from transformers.trainer_utils import unwrap_peft_model

    home = sys.modules[type(unwrap_peft_model(model)).__module__]
    config = {"fused_linear_cross_entropy": False} if recipe.trainer == "sft" else {}
    import liger_kernel.transformers  # noqa: F401 — transformers says in other words that it is missing

    with caught(_liger, home, torch.nn.functional):
        apply_liger_kernel(model, config)


def restore_after_liger() -> None:
    """Undo what Liger replaced."""
    _liger.close()
