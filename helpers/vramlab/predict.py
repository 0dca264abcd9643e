"""Pencil and paper: the bytes of a training step from the model's shape alone. No torch, no model, about a millisecond.

    held       parameters + buffers + inputs + gradients + optimizer states + workspaces   (`formulas`, `states`, `zero`)
    forward    + what a layer keeps × layers + the last one's temporaries, then logits and loss (`account`)
    backward   + the loss's gradients, then layer by layer what is kept less, and gradients more (`account`)
    step       + the optimizer's temporaries                                                  (`updates`)

The peak is the highest of these moments. `account` enters the operators of a layer or two in a ledger (`ledger`,
`operators`, `decoders`, …) and counts the rest of the stack by multiplication.
"""

from collections import Counter

from . import formulas, reserve, states, updates, zero
from .account import Account
from .gpu import Gpu, find_gpu
from .overhead import cublas_workspace
from .recipe import Recipe
from .report import CATEGORIES, Bytes, Phase, Report, Tensor

LISTED = 8
DTYPES = {8: "int64", 4: "float32", 1: "bool"}
USUAL = (8, 0)  # compute capability, when no card is named


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
    account = Account(recipe, card.compute_capability if card else USUAL, gradients_exist=_gradients_exist(recipe))
    share = zero.shares(recipe)
    phases, moments = _phases(recipe, account, _held(recipe, card), share)
    name = max(phases, key=lambda phase: phases[phase].peak.total)
    peak = phases[name].peak
    groups, places = _groups(recipe, account, moments.get(name), name, peak)
    inside = reserve.reserved(_blocks(recipe, groups, peak), peak.total, account.approximate)
    return Report(
        source="predicted",
        recipe=recipe.to_dict(),
        title=str(recipe),
        target="cuda",
        phases=phases,
        peak=peak,
        peak_phase=name,
        largest=_largest(groups, places, share),
        reserved=inside,
        process=reserve.process(inside, card),
        notes=_notes(recipe, account, card),
    )


def _gradients_exist(recipe: Recipe) -> bool:
    """Whether backward finds gradients already there: an earlier micro-batch's, or zeros."""
    return recipe.gradient_accumulation_steps > 1 or not recipe.loop.set_to_none


def _held(recipe: Recipe, card: Gpu | None) -> dict[str, Counter]:
    """Bytes by category of what was loaded, of what stays beside it between steps, and of all gradients."""
    slack = states.slack_bytes(recipe)
    workspace = card.cublas_workspace if card else cublas_workspace(USUAL)
    gradients = Counter(gradients=formulas.gradient_bytes(recipe), workspace=slack["gradients"])
    return {
        "loaded": Counter(
            parameters=formulas.parameter_bytes(recipe),
            buffers=formulas.buffer_bytes(recipe),
            inputs=formulas.input_bytes(recipe),
            workspace=slack["parameters"],
        ),
        "kept": Counter(
            optimizer_states=states.optimizer_state_bytes(recipe),
            workspace=2 * workspace + slack["optimizer_states"],  # one handle in forward's thread, one in backward's
        ),
        "gradients": Counter() if recipe.loop.optimizer_in_backward else gradients,
    }


def _phases(recipe: Recipe, account: Account, held: dict[str, Counter], share: zero.Shares):
    """Each phase's split at peak and end, and the ledger's events of the peaks."""
    loop, exist = recipe.loop, _gradients_exist(recipe)
    moments = {phase: account.peak(phase) for phase in ("forward", "backward")}
    ends = [account.last("forward"), account.last("backward")]
    forward, backward, forward_end, backward_end = account.splits([*moments.values(), *ends])
    loaded, gradients = held["loaded"], held["gradients"]
    always = loaded + held["kept"]
    outputs = Counter({category: n for category, n in backward_end.items() if category != "gradients"})
    before = gradients if exist or loop.zero_grad == "before_backward" else Counter()
    during = gradients if exist else Counter()
    after = always + outputs
    rest = after + (gradients if loop.zero_grad != "end" or not loop.set_to_none else Counter())
    step = after + gradients + Counter(temporaries=int(updates.step_temporaries(recipe) * share.states))
    splits = {
        "load": (loaded, loaded),
        "forward": (always + before + outputs + forward, always + during + forward_end),
        "backward": (always + during + backward, always + during + backward_end),
        "step": (step, rest),
        "between_steps": (rest, rest),
    }
    phases = {}
    for name, pair in splits.items():
        peak, end = (zero.divide(split, share, name in moments) for split in pair)
        phases[name] = Phase(_bytes(peak), _bytes(end))
    return phases, moments


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
            found.append((states.state_bytes(row, recipe), "optimizer_states", row.shape, stored, recipe.optim))
        if row.trained and peak.gradients and phase not in ("forward", "backward"):
            found.append((row.size, "gradients", row.shape, stored, "backward"))
        for key in found:
            groups[key] += row.count
            places.setdefault(key, row.name)
    if moment:
        for times, entry in account.alive(moment):
            key = (entry.size, entry.category, entry.shape, half if entry.width == 2 else DTYPES[entry.width], entry.op)
            groups[key] += times
            places.setdefault(key, entry.where)
    return groups, places


def _blocks(recipe: Recipe, groups: Counter, peak: Bytes) -> Counter:
    """Sizes of the blocks alive at the peak, to how many: each state is a block of its own."""
    blocks: Counter = Counter()
    several = max(1, formulas.STATES[recipe.optim][0])
    for (size, category, *_), count in groups.items():
        each = several if category == "optimizer_states" else 1
        blocks[size // each] += count * each
    rest = peak.total - sum(size * count for size, count in blocks.items())
    if rest > 0:  # the optimizer step's temporaries, cuBLAS's workspaces, gradients of layers already done
        blocks[rest] += 1
    return blocks


def _largest(groups: Counter, places: dict, share: zero.Shares) -> list[Tensor]:
    """The largest groups of equal tensors; a sharded category's are one rank's share."""
    left = {"parameters": share.parameters, "gradients": share.gradients, "optimizer_states": share.states}
    found = []
    for (size, category, *rest), count in groups.items():
        size_here = int(size * left.get(category, 1.0))
        if size_here:
            found.append(Tensor(size_here, category, *rest, where=places[size, category, *rest], count=count))
    return sorted(found, key=lambda tensor: -tensor.size * tensor.count)[:LISTED]


def _notes(recipe: Recipe, account: Account, card: Gpu | None) -> list[str]:
    notes = zero.notes(recipe)
    if account.approximate:
        notes.append(
            f"{recipe.shape.family}: weights are exact; activations are those of the nearest generic decoder, "
            "simulate(recipe) runs the real one"
        )
    if recipe.torch_compile:
        notes.append("torch_compile: activations and temporaries are those of the eager step")
    if card and (why := card.why_not(recipe.precision)):
        notes.append(why)
    return notes
