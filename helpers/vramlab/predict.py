"""Pencil and paper: the bytes of a training step from the model's shape alone. No torch, no model, under a millisecond.

    held       parameters + buffers + inputs + gradients + optimizer states + cuBLAS's workspaces    (`formulas`, `zero`)
    forward    + what each layer keeps × layers + the last one's temporaries, then logits and loss    (`account`)
    backward   + gradients of the loss, then per layer what it keeps less and the gradients it makes  (`account`)
    step       + the optimizer's temporaries                                                          (`updates`)

The peak is the highest of these moments. `account` enters the operators of two layers in a ledger (`ledger`,
`operators`, `decoders`, …) and counts the rest of the stack by multiplication.
"""

from collections import Counter

from . import formulas, reserve, updates, zero
from .account import Account
from .formulas import parameter_bytes  # noqa: F401 (part of the public page)
from .gpu import Gpu, find_gpu
from .overhead import cublas_workspace
from .recipe import Recipe
from .report import CATEGORIES, Bytes, Phase, Report, Tensor

LISTED = 8
DTYPES = {8: "int64", 4: "float32", 1: "bool"}


def predict(recipe: Recipe, gpu: str | Gpu | None = None) -> Report:
    """What `recipe` needs in memory on a CUDA device, by formula.

    Args:
        gpu: a name of the GPU table, for what depends on the card; None takes one of compute capability 8.0.
    Returns:
        A report with source "predicted": bytes by category at the peak and end of each phase of a steady step, the peak
        and its phase, the largest tensors there, `reserved` and `process` as intervals.
    Raises:
        GpuError: no such card.
    """
    card = find_gpu(gpu) if gpu else None
    capability = card.compute_capability if card else (8, 0)
    loop, many = recipe.loop, recipe.gradient_accumulation_steps > 1
    exist = many or not loop.set_to_none
    account = Account(recipe, capability, gradients_exist=exist)
    held = zero.shares(
        recipe,
        Counter(
            parameters=formulas.parameter_bytes(recipe),
            gradients=formulas.gradient_bytes(recipe),
            optimizer_states=formulas.optimizer_state_bytes(recipe),
            buffers=formulas.buffer_bytes(recipe),
            inputs=formulas.input_bytes(recipe),
            workspace=2 * (card.cublas_workspace if card else cublas_workspace(capability)),
            **{f"{category} slack": n for category, n in formulas.slack_bytes(recipe).items()},
        ),
    )
    gradients = Counter(gradients=held.pop("gradients"), workspace=held.pop("gradients slack", 0))
    if loop.optimizer_in_backward:
        gradients.clear()
    loaded = Counter(
        parameters=held["parameters"],
        buffers=held["buffers"],
        inputs=held["inputs"],
        workspace=held.pop("parameters slack"),
    )
    held["workspace"] += loaded["workspace"] + held.pop("optimizer_states slack", 0)
    phases, moments = _phases(recipe, account, loaded, held, gradients, exist)
    name = max(phases, key=lambda phase: phases[phase].peak.total)
    peak = phases[name].peak
    groups, places = _groups(recipe, account, moments.get(name), name, peak)
    inside = reserve.reserved(_blocks(recipe, groups, peak), peak.total)
    return Report(
        source="predicted",
        recipe=recipe.to_dict(),
        title=str(recipe),
        target="cuda",
        phases=phases,
        peak=peak,
        peak_phase=name,
        largest=_largest(groups, places),
        reserved=inside,
        process=reserve.process(inside, card),
        notes=_notes(recipe, card),
    )


def _phases(recipe: Recipe, account: Account, loaded: Counter, held: Counter, gradients: Counter, exist: bool):
    """Each phase's split at peak and end, and the ledger's events of the peaks."""
    loop = recipe.loop
    moments = {"forward": account.peak("forward"), "backward": account.peak("backward")}
    ends = [account.last("forward"), account.last("backward")]
    forward, backward, forward_end, backward_end = account.splits([*moments.values(), *ends])
    kept = Counter(activations=sum(n for category, n in backward_end.items() if category != "gradients"))
    before = gradients if exist or loop.zero_grad == "before_backward" else Counter()
    during = gradients if exist else Counter()
    step = held + gradients + kept
    rest = held + kept + (gradients if loop.zero_grad != "end" or not loop.set_to_none else Counter())
    temporaries = Counter(temporaries=updates.step_temporaries(recipe))
    phases = {
        "load": (loaded, loaded),
        "forward": (held + before + kept + forward, held + during + forward_end),
        "backward": (held + during + backward, held + during + backward_end),
        "step": (step + temporaries, rest),
        "between_steps": (rest, rest),
    }
    return {name: Phase(_bytes(peak), _bytes(end)) for name, (peak, end) in phases.items()}, moments


def _bytes(split: Counter) -> Bytes:
    return Bytes(**{category: split[category] for category in CATEGORIES})


def _groups(recipe: Recipe, account: Account, moment, phase: str, peak: Bytes) -> tuple[Counter, dict]:
    """The blocks alive at the peak: (bytes, category, shape, dtype, what made it) to how many, and where one of them is."""
    half = "float16" if recipe.precision.startswith("fp16") else "bfloat16"
    groups: Counter = Counter()
    places: dict[tuple, str] = {}
    for row in formulas.held(recipe):
        stored = "uint8" if row.quantized else half if row.width == 2 else "float32"
        found = [(formulas.row_bytes(row), "parameters", row.shape, stored, "loaded")]
        if row.trained and peak.optimizer_states:
            found.append((formulas.state_bytes(row, recipe), "optimizer_states", row.shape, stored, recipe.optim))
        if row.trained and peak.gradients and (phase == "step" or moment is None):
            found.append((row.size, "gradients", row.shape, stored, "backward"))
        for key in found:
            groups[key] += row.count
            places.setdefault(key, row.name)
    if moment:
        for times, entry in account.alive(moment[0]):
            key = (entry.size, entry.category, entry.shape, half if entry.width == 2 else DTYPES[entry.width], entry.op)
            groups[key] += times
            places.setdefault(key, entry.where)
    return groups, places


def _blocks(recipe: Recipe, groups: Counter, peak: Bytes) -> Counter:
    """Sizes of the blocks alive at the peak, to how many: states come as one block for each state."""
    blocks: Counter = Counter()
    states = max(1, formulas.STATES[recipe.optim][0])
    for (size, category, *_), count in groups.items():
        if category == "optimizer_states":
            size, count = size // states, count * states
        blocks[size] += count
    rest = peak.total - sum(size * count for size, count in blocks.items())
    if rest > 0:  # the optimizer step's temporaries, cuBLAS's workspaces, gradients of layers already done
        blocks[rest] += 1
    return blocks


def _largest(groups: Counter, places: dict) -> list[Tensor]:
    ranked = sorted(groups.items(), key=lambda item: -item[0][0] * item[1])[:LISTED]
    return [Tensor(*key, where=places[key], count=count) for key, count in ranked]


def _notes(recipe: Recipe, card: Gpu | None) -> list[str]:
    notes = zero.notes(recipe)
    if recipe.torch_compile:
        notes.append("torch_compile: activations and temporaries are those of the eager step")
    if card and (why := card.why_not(recipe.precision)):
        notes.append(why)
    return notes
