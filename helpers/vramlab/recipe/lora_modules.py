"""Which modules LoRA adapts, by the rules of PEFT 0.21, and which a 4-bit base leaves.

Neither PEFT nor a model is needed.
"""

import re
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Protocol

from ..base.errors import RecipeError, needing
from .families import FAMILIES
from .options import INT8, LoRA, Quantization, Sharding
from .weights import ModelWeights, Weight

Module = tuple[str, int, int]  # name, inputs, outputs
Targets = tuple[str, ...] | list[str] | set[str] | str

# What PEFT takes to mean a mixture's fused experts (`transformers_weight_conversion.py`,
# _MOE_TARGET_MODULE_MAPPING).
FUSED = {"gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3"}
# The gradient of a frozen product's input needs its weight (`_grouped_mm`, saved by autograd).
KEPT_EXPERTS = (
    "packed experts are unpacked whole in each forward pass and kept for the backward one: "
    "gradient_checkpointing keeps one layer's at a time"
)
# `MatMul8bitLt` of bitsandbytes 0.50 (autograd/_functions.py): its `ctx.tensors` are no saved
# tensors, so no hook of checkpointing sees them, and autograd frees them with the graph.
OUTLIERS = (
    "an int8 layer keeps a copy of each column of its input in which some token reaches 6.0: these "
    "figures are without, as random weights have none; at most what int8 layers keep doubles"
)
KEPT_INPUTS = (
    "int8 layers keep their inputs past gradient_checkpointing until the backward pass is over "
    "(bitsandbytes 0.50); re-entrant checkpointing keeps none"
)
ON_HOST = (
    "4-bit parameters that FSDP offloads are loaded in host memory, by each rank all of them: "
    "from_pretrained(device_map={'': 'cpu'}); by itself it loads all of them on each card"
)
ADAPTABLE = ("linear", "conv1d", "embedding", "conv")  # kinds of weights
LANGUAGE = "language_model"  # what transformers calls it in a model that reads images
BILLION = 1e9


class WithAdapters(Protocol):
    """What of a recipe decides which matrices are adapted and which quantized."""

    @property
    def shape(self) -> ModelWeights: ...
    @property
    def lora(self) -> LoRA | None: ...
    @property
    def quantization(self) -> Quantization | None: ...
    @property
    def gradient_checkpointing(self) -> bool: ...
    @property
    def use_reentrant(self) -> bool: ...
    @property
    def group(self) -> Sharding: ...


@lru_cache(maxsize=512)
def modules(shape: ModelWeights) -> dict[str, tuple[str, int, int]]:
    """Return every module that PEFT can adapt: its name to (kind, inputs, outputs).

    A shared output head is one too. An adapter has r × (inputs + outputs) numbers; an embedding's
    inputs are its rows, a convolution's are channels × kernel.
    """
    adaptable = {}
    for weight in shape.weights():
        name, _, part = weight.name.rpartition(".")
        if part != "weight" or weight.kind not in ADAPTABLE:
            continue
        # a convolution's rest is channels × kernel
        first = weight.shape[0]
        rest = weight.size // first
        if weight.kind in ("conv1d", "embedding"):  # stored transposed
            adaptable[name] = (weight.kind, first, rest)
        else:
            adaptable[name] = (weight.kind, rest, first)
    if shape.tied and shape.head not in adaptable:
        adaptable[shape.head] = ("linear", shape.hidden_size, shape.vocab_size)
    return adaptable


def of_language(shape: ModelWeights) -> str:
    """Return PEFT's expression for all linear layers but those of what reads images."""
    names = [name for name, *_ in adapted(shape, LoRA(target_modules="all-linear"))]
    ends = {name.rpartition(".")[2] for name in names if LANGUAGE in name}
    return rf".*{LANGUAGE}.*\.({'|'.join(sorted(ends))})"


def find(
    shape: ModelWeights,
    target_modules: Targets | None,
    modules_to_save: tuple[str, ...] | None = None,
) -> list[Module]:
    """Return the (name, inputs, outputs) of what `peft.get_peft_model` adapts.

    It is empty when nothing matches. `target_modules`: None takes PEFT's default for the
    architecture; "all-linear" every linear layer but the output head, and no routers and fused
    experts; other text is a regular expression for the whole name; a list holds names or their last
    parts. `modules_to_save` are trained whole, as a sequence classifier's head always is (task type
    SEQ_CLS). Raises RecipeError where PEFT has no default for this architecture, or the regular
    expression is not one.
    """
    candidates = modules(shape)
    if target_modules is None:
        target_modules = _default(shape)
    if _is_everywhere(target_modules):
        names = _linear_layers(shape)
    elif isinstance(target_modules, str):
        names = _matching(candidates, target_modules)
    else:
        endings = tuple(f".{target}" for target in target_modules)
        names = {name for name in candidates if name in target_modules or name.endswith(endings)}
    # PEFT wraps these whole, and adapts nothing inside them.
    for saved in trained_whole(shape, modules_to_save):
        is_saved = re.compile(rf"(^|.*\.){saved}($|\..*)")
        names = {name for name in names if not is_saved.match(name)}
    return [(name, inside, out) for name, (_, inside, out) in candidates.items() if name in names]


def _linear_layers(shape: ModelWeights) -> set[str]:
    """Return what "all-linear" means."""
    names = set()
    for name, (kind, _, _) in modules(shape).items():
        if kind in ("linear", "conv1d"):
            names.add(name)
    # for PEFT an image classifier's head is a layer like any other
    if shape.task != "image-classification":
        names.discard(shape.head)
    return names


def _matching(names: Iterable[str], expression: str) -> set[str]:
    """Return the names that a regular expression matches. Raises RecipeError if it is none."""
    try:
        return {name for name in names if re.fullmatch(expression, name)}
    except re.error as error:
        rest = f"it is not a regular expression: {error}"
        raise RecipeError("lora.target_modules", expression, rest) from None


def _is_everywhere(target_modules: Targets | None) -> bool:
    return str(target_modules).lower() == "all-linear"


def trains_bias(name: str, bias: str, adapted: set[str]) -> bool:
    """Tell whether `LoRA.bias` trains the tensor `name`, norms' biases too.

    Source: peft, _mark_only_adapters_as_trainable.
    """
    module, _, part = name.rpartition(".")
    if part != "bias":
        return False
    return bias == "all" or (bias == "lora_only" and module in adapted)


def trained_whole(shape: ModelWeights, modules_to_save: Iterable[str] | None) -> tuple[str, ...]:
    """Return the names of modules that PEFT trains whole, in a copy.

    They are those to save, and a sequence classifier's head.
    """
    heads = ("classifier", "score") if shape.task == "sequence-classification" else ()
    return (*(modules_to_save or ()), *heads)


def notes(recipe: WithAdapters) -> list[str]:
    """Return what a report has to say of a recipe's matrices.

    Notes are on matrices that stay whole, and on adapters that PEFT places otherwise.
    """
    said = unquantized(recipe)
    lora = recipe.lora
    if lora and _is_everywhere(lora.target_modules) and has_experts(recipe.shape):
        note = "all-linear adapts attention here; PEFT 0.21's own also adapts routers and fused "
        said.append(note + "experts, and needs more")
    return said


def has_experts(shape: ModelWeights) -> bool:
    """Tell whether a model's experts are fused in parameters that are no linear layers."""
    return any(weight.kind == "expert" for weight in shape.weights())


@lru_cache(maxsize=512)
def adapted(shape: ModelWeights, lora: LoRA | None) -> tuple[Module, ...]:
    """Return what `lora` adapts, as `find` does; () without one.

    Raises RecipeError unless it fits something of `shape`.
    """
    if not lora:
        return ()
    wanted = lora.target_modules
    targets = find(shape, wanted, lora.modules_to_save)
    if wanted is not None and not isinstance(wanted, str) and has_experts(shape):
        adapted_parts = {name.rpartition(".")[2] for name, _, _ in targets}
        # A name that linear layers have too, of a shared expert or a dense layer, is not lost.
        lost = FUSED.intersection(wanted) - adapted_parts
        if lost:
            names = ", ".join(sorted(lost))
            rest = f"{names} are fused experts of {shape.name}, which no adapter takes here"
            raise RecipeError("lora.target_modules", wanted, rest)
    if not targets:
        rest = f"nothing in {shape.name} matches; it has {_endings(shape)}"
        raise RecipeError("lora.target_modules", wanted, rest)
    return tuple(targets)


def is_adapted(shape: ModelWeights, lora: LoRA | None, module: str) -> bool:
    """Tell whether the module of that name gets an adapter."""
    return any(name == module for name, _, _ in adapted(shape, lora))


def adapted_beside_experts(shape: ModelWeights, lora: LoRA | None) -> list[str]:
    """Return the names by which PEFT adapts what "all-linear" means here in a mixture of experts.

    Its own also takes routers and fused experts. It is empty elsewhere, and where linear layers
    have experts' names.
    """
    if not lora or not _is_everywhere(lora.target_modules) or not has_experts(shape):
        return []
    parts = {name.rpartition(".")[2] for name, _, _ in adapted(shape, lora)}
    return [] if parts & FUSED else sorted(parts)


def adapts_experts(shape: ModelWeights, lora: LoRA | None) -> bool:
    """Tell whether a linear layer beside fused experts is adapted under a name of theirs.

    PEFT gives these the same name.
    """
    if not shape.num_experts:
        return False
    return any(name.rpartition(".")[2] in FUSED for name, _, _ in adapted(shape, lora))


@lru_cache(maxsize=512)
def differ_by_layer(shape: ModelWeights, lora: LoRA | None) -> bool:
    """Tell whether some layers get other adapters than the rest.

    A pattern with a layer's number asks for that.
    """
    # Modules that differ only by the layer's number play one role; a role with fewer adapters than
    # modules has them in some layers alone.
    every = Counter(map(_without_number, modules(shape)))
    some = Counter(_without_number(name) for name, _, _ in adapted(shape, lora))
    return any(count < every[role] for role, count in some.items())


def _without_number(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def unquantized(recipe: WithAdapters) -> list[str]:
    """Return notes on what a quantized base keeps in 16 or 32 bits, and on sharding it.

    `transformers.integrations.bitsandbytes.replace_with_bnb_linear` takes modules whose type is
    `nn.Linear` or `Conv1D`.
    """
    if not recipe.quantization:
        return []
    in_int8 = recipe.quantization.quant_type == INT8
    notes = [OUTLIERS] if in_int8 else []
    if recipe.group.engine == "fsdp":
        # accelerate 1.15, utils/fsdp_utils.py: fsdp2_prepare_model
        stored = "if bnb_4bit_quant_storage is a floating dtype, as here, not uint8"
        notes.append(f"accelerate's FSDP shards 4-bit weights {stored}")
        if recipe.group.offload == "parameters":
            notes.append(ON_HOST)
    if in_int8 and recipe.gradient_checkpointing and not recipe.use_reentrant:
        notes.append(KEPT_INPUTS)
    shape = recipe.shape
    packs = recipe.quantization.experts is not None
    if packs and not recipe.gradient_checkpointing:
        notes.append(KEPT_EXPERTS)
    has_own_class = shape.layout is not None and not shape.layout.quantizable
    left = [weight for weight in shape.weights() if _is_left(weight, has_own_class)]
    if packs or not left:
        return notes
    what = "transformers 5 fuses experts in 3-D parameters"
    if has_own_class:
        what = "Falcon's own linear class is none"
    if recipe.quantization.prepare:
        what += ", and prepare_model_for_kbit_training casts them to fp32"
    kept = sum(weight.size for weight in left)
    sizes = _share(kept, shape.num_parameters)
    note = f"{sizes} weights are not quantized: transformers' loader takes nn.Linear layers, {what}"
    if has_experts(shape) and not in_int8:
        note += "; quantization.experts says how to pack them too"
    return [*notes, note]


def _is_left(weight: Weight, has_own_class: bool) -> bool:
    """Tell whether bitsandbytes leaves a matrix as it is."""
    is_own_linear = has_own_class and weight.kind == "linear" and weight.layer is not None
    return weight.kind == "expert" or is_own_linear


def _share(count: int, total: int) -> str:
    """Say how many of how many."""
    if total >= BILLION:
        return f"{count / BILLION:,.1f} of {total / BILLION:,.1f} billion"
    return f"{count:,} of {total:,}"


def _default(shape: ModelWeights) -> Targets:
    """Return PEFT's choice for the architecture. Raises RecipeError where it has none."""
    targets: Targets | None
    if shape.family in FAMILIES:
        targets = FAMILIES[shape.family].lora
    else:
        # it takes seconds to load
        with needing(f"PEFT's default for {shape.family}"):
            from peft.utils import constants

        known: Any = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
        targets = known.get(shape.family)
    if not targets:
        rest = f"PEFT has no default for {shape.family}: name modules ({_endings(shape)}) or say "
        raise RecipeError("lora.target_modules", None, rest + "'all-linear'")
    return targets


def _endings(shape: ModelWeights) -> str:
    """Return the last parts of the names that can be adapted."""
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in modules(shape)))
