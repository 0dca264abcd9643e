"""Which modules LoRA adapts, by the rules of PEFT 0.21, without PEFT or a model."""

import re
from collections.abc import Iterable
from functools import lru_cache

from ..report.errors import RecipeError, needing
from .families import FAMILIES
from .options import LoRA
from .shape import ShapeData

Module = tuple[str, int, int]
Targets = tuple[str, ...] | list[str] | set[str] | str | None

# What PEFT takes to mean a mixture's fused experts (`transformers_weight_conversion.py`, _MOE_TARGET_MODULE_MAPPING).
FUSED = {"gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3"}


def modules(shape: ShapeData) -> dict[str, tuple[str, int, int]]:
    """Return every module that PEFT can adapt, a shared output head too: its name to (kind, inputs, outputs).

    A rank-r adapter has r × (inputs + outputs) numbers; an embedding's inputs are its rows, a convolution's are channels ×
    kernel.
    """
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


def find(shape: ShapeData, target_modules: Targets, modules_to_save: tuple[str, ...] | None = None) -> list[Module]:
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
            raise RecipeError(
                "lora.target_modules", target_modules, f"it is not a regular expression: {error}"
            ) from None
    else:
        endings = tuple(f".{target}" for target in target_modules)
        names = {name for name in candidates if name in target_modules or name.endswith(endings)}
    for saved in trained_whole(shape, modules_to_save):
        names = {name for name in names if not re.match(rf"(^|.*\.){saved}($|\..*)", name)}
    return [(name, inside, out) for name, (_, inside, out) in candidates.items() if name in names]


def _is_everywhere(target_modules: Targets) -> bool:
    return isinstance(target_modules, str) and target_modules.lower() == "all-linear"


def trained_whole(shape: ShapeData, modules_to_save: Iterable[str] | None) -> tuple[str, ...]:
    """Return the names of modules that PEFT trains whole, in a copy: those to save, and a sequence classifier's head."""
    heads = ("classifier", "score") if shape.task == "sequence-classification" else ()
    return (*(modules_to_save or ()), *heads)


def notes(shape: ShapeData, lora: LoRA | None) -> list[str]:
    """Return what a report has to say of adapters that PEFT places otherwise."""
    if not (
        lora and _is_everywhere(lora.target_modules) and any(weight.kind == "expert" for weight in shape.weights())
    ):
        return []
    return ["all-linear adapts attention here; PEFT 0.21's own also adapts routers and fused experts, and needs more"]


@lru_cache(maxsize=512)
def adapted(shape: ShapeData, lora: LoRA | None) -> tuple[Module, ...]:
    """Return what `lora` adapts, as `find` does; () without one."""
    return tuple(find(shape, lora.target_modules, lora.modules_to_save)) if lora else ()


def is_adapted(shape: ShapeData, lora: LoRA | None, module: str) -> bool:
    """Return whether the module of that name gets an adapter."""
    return any(name == module for name, _, _ in adapted(shape, lora))


@lru_cache(maxsize=512)
def adapts_experts(shape: ShapeData, lora: LoRA | None) -> bool:
    """Return whether a linear layer beside fused experts is adapted under a name that PEFT gives to these too."""
    return bool(shape.num_experts) and any(name.rpartition(".")[2] in FUSED for name, _, _ in adapted(shape, lora))


@lru_cache(maxsize=512)
def differ_by_layer(shape: ShapeData, lora: LoRA | None) -> bool:
    """Return whether some layers get other adapters than the rest, as a pattern with a layer's number asks for."""
    found = {name for name, _, _ in adapted(shape, lora)}
    roles = {_role(name) for name in found}
    return bool(found) and any(_role(name) in roles and name not in found for name in modules(shape))


def _role(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def check(shape: ShapeData, target_modules: Targets) -> None:
    """Raise RecipeError unless adapters fit something of `shape`."""
    targets = find(shape, target_modules)
    names = FUSED.intersection(() if isinstance(target_modules, str | None) else target_modules)
    lost = names - {name.rpartition(".")[2] for name, _, _ in targets}
    if lost and any(weight.kind == "expert" for weight in shape.weights()):
        allowed = f"{', '.join(sorted(lost))} are fused experts of {shape.name}, which no adapter takes here"
        raise RecipeError("lora.target_modules", target_modules, allowed)
    if not targets:
        rest = f"nothing in {shape.name} matches; it has {_endings(shape)}"
        raise RecipeError("lora.target_modules", target_modules, rest)


def _default(shape: ShapeData) -> Targets:
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


def _endings(shape: ShapeData) -> str:
    """Return the last parts of the names that can be adapted."""
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in modules(shape)))
