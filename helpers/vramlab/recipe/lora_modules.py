"""Which modules LoRA adapts, by the rules of PEFT 0.21, and which a 4-bit base leaves; without PEFT or a model."""

import re
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from ..report.errors import RecipeError, needing
from .families import FAMILIES
from .options import LoRA

Module = tuple[str, int, int]
Targets = tuple[str, ...] | list[str] | set[str] | str | None

# What PEFT takes to mean a mixture's fused experts (`transformers_weight_conversion.py`, _MOE_TARGET_MODULE_MAPPING).
FUSED = {"gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3"}


@lru_cache(maxsize=512)
def modules(shape: Any) -> dict[str, tuple[str, int, int]]:
    """Return every module that PEFT can adapt, a shared output head too: its name to (kind, inputs, outputs). An adapter has
    r × (inputs + outputs) numbers; an embedding's inputs are its rows, a convolution's are channels × kernel."""
    found = {}
    for weight in shape.weights():
        name, _, part = weight.name.rpartition(".")
        if part != "weight" or weight.kind not in ("linear", "conv1d", "embedding", "conv"):
            continue
        first, rest = weight.shape[0], weight.size // weight.shape[0]
        transposed = weight.kind in ("conv1d", "embedding")
        found[name] = (weight.kind, first, rest) if transposed else (weight.kind, rest, first)
    if shape.tied and shape.head not in found:
        found[shape.head] = ("linear", shape.hidden_size, shape.vocab_size)
    return found


def find(shape: Any, target_modules: Targets, modules_to_save: tuple[str, ...] | None = None) -> list[Module]:
    """Return the (name, inputs, outputs) of what `peft.get_peft_model` adapts; empty when nothing matches.

    `target_modules`: None takes PEFT's default for the architecture; "all-linear" every linear layer but the output head,
    and no routers and fused experts; other text is a regular expression for the whole name; a list holds names or their
    last parts. `modules_to_save` are trained whole, as a sequence classifier's head always is (task type SEQ_CLS).
    Raises RecipeError where PEFT has no default for this architecture, or the regular expression is not one.
    """
    candidates, target_modules = modules(shape), _default(shape) if target_modules is None else target_modules
    if _is_everywhere(target_modules):
        names = {name for name, (kind, _, _) in candidates.items() if kind in ("linear", "conv1d")}
        if shape.task != "image-classification":  # for PEFT an image classifier's head is a layer like any other
            names.discard(shape.head)
    elif isinstance(target_modules, str):
        try:
            names = {name for name in candidates if re.fullmatch(target_modules, name)}
        except re.error as error:
            rest = f"it is not a regular expression: {error}"
            raise RecipeError("lora.target_modules", target_modules, rest) from None
    else:
        endings = tuple(f".{target}" for target in target_modules)
        names = {name for name in candidates if name in target_modules or name.endswith(endings)}
    for saved in trained_whole(shape, modules_to_save):
        names = {name for name in names if not re.match(rf"(^|.*\.){saved}($|\..*)", name)}
    return [(name, inside, out) for name, (_, inside, out) in candidates.items() if name in names]


def _is_everywhere(target_modules: Targets) -> bool:
    return str(target_modules).lower() == "all-linear"


def trains_bias(name: str, bias: str, adapted: set[str]) -> bool:
    """Tell whether `LoRA.bias` trains the tensor `name` (peft, _mark_only_adapters_as_trainable): norms' biases too."""
    module, _, part = name.rpartition(".")
    return part == "bias" and (bias == "all" or (bias == "lora_only" and module in adapted))


def trained_whole(shape: Any, modules_to_save: Iterable[str] | None) -> tuple[str, ...]:
    """Return the names of modules that PEFT trains whole, in a copy: those to save, and a sequence classifier's head."""
    heads = ("classifier", "score") if shape.task == "sequence-classification" else ()
    return (*(modules_to_save or ()), *heads)


def notes(recipe: Any) -> list[str]:
    """Return what a report has to say of matrices that stay whole, and of adapters that PEFT places otherwise."""
    if not (recipe.lora and _is_everywhere(recipe.lora.target_modules) and _has_experts(recipe.shape)):
        return unquantized(recipe)
    note = "all-linear adapts attention here; PEFT 0.21's own also adapts routers and fused experts, and needs more"
    return [*unquantized(recipe), note]


def _has_experts(shape: Any) -> bool:
    return any(weight.kind == "expert" for weight in shape.weights())


@lru_cache(maxsize=512)
def adapted(shape: Any, lora: LoRA | None) -> tuple[Module, ...]:
    """Return what `lora` adapts, as `find` does; () without one. Raises RecipeError unless it fits something of `shape`."""
    if not lora:
        return ()
    wanted, targets = lora.target_modules, find(shape, lora.target_modules, lora.modules_to_save)
    names = FUSED.intersection(() if isinstance(wanted, str | None) else wanted)
    if _has_experts(shape) and (lost := names - {name.rpartition(".")[2] for name, _, _ in targets}):
        rest = f"{', '.join(sorted(lost))} are fused experts of {shape.name}, which no adapter takes here"
        raise RecipeError("lora.target_modules", wanted, rest)
    if not targets:
        raise RecipeError("lora.target_modules", wanted, f"nothing in {shape.name} matches; it has {_endings(shape)}")
    return tuple(targets)


def is_adapted(shape: Any, lora: LoRA | None, module: str) -> bool:
    """Return whether the module of that name gets an adapter."""
    return any(name == module for name, _, _ in adapted(shape, lora))


def adapts_experts(shape: Any, lora: LoRA | None) -> bool:
    """Return whether a linear layer beside fused experts is adapted under a name that PEFT gives to these too."""
    return bool(shape.num_experts) and any(name.rpartition(".")[2] in FUSED for name, _, _ in adapted(shape, lora))


@lru_cache(maxsize=512)
def differ_by_layer(shape: Any, lora: LoRA | None) -> bool:
    """Return whether some layers get other adapters than the rest, as a pattern with a layer's number asks for."""
    found = [name for name, _, _ in adapted(shape, lora)]
    some, every = (Counter(re.sub(r"\.\d+\.", ".*.", name) for name in names) for names in (found, modules(shape)))
    return any(count < every[role] for role, count in some.items())


def unquantized(recipe: Any) -> list[str]:
    """Return notes on matrices that a 4-bit base keeps in 16 or 32 bits, and on sharding it.

    `transformers.integrations.bitsandbytes.replace_with_bnb_linear` takes modules whose type is `nn.Linear` or `Conv1D`.
    """
    if not recipe.quantization:
        return []
    shape, own = recipe.shape, bool(recipe.shape.layout) and not recipe.shape.layout.quantizable
    left = [w for w in shape.weights() if w.kind == "expert" or (own and w.kind == "linear" and w.layer is not None)]
    notes = []
    if recipe.sharding and recipe.sharding.engine == "fsdp":
        # accelerate 1.15, utils/fsdp_utils.py: fsdp2_prepare_model
        stored = "if bnb_4bit_quant_storage is a floating dtype, as here, not uint8"
        notes = [f"accelerate's FSDP shards 4-bit weights {stored}"]
    if not left:
        return notes
    what = "Falcon's own linear class is none" if own else "transformers 5 fuses experts in 3-D parameters"
    cast = ", and prepare_model_for_kbit_training casts them to fp32" if recipe.quantization.prepare else ""
    kept, total = sum(w.size for w in left), shape.num_parameters
    sizes = f"{kept / 1e9:,.1f} of {total / 1e9:,.1f} billion" if total >= 1e9 else f"{kept:,} of {total:,}"
    return [*notes, f"{sizes} weights are not quantized: transformers' loader takes nn.Linear layers, {what}{cast}"]


def _default(shape: Any) -> Targets:
    """Return PEFT's choice for the architecture."""
    if shape.family in FAMILIES:
        found = FAMILIES[shape.family].lora
    else:
        with needing(f"PEFT's default for {shape.family}"):  # it takes seconds to load
            from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as mapping

        found = mapping.get(shape.family)
    if not found:
        rest = f"PEFT has no default for {shape.family}: name modules ({_endings(shape)}) or say 'all-linear'"
        raise RecipeError("lora.target_modules", None, rest)
    return found


def _endings(shape: Any) -> str:
    """Return the last parts of the names that can be adapted."""
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in modules(shape)))
