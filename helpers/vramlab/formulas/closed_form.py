"""The formulas a reader asks for by name: what a layer keeps, what the logits cost, the largest batch that fits.

For one layer of a GPT-like model in half precision with attention written out, Korthikanti et al. (2022, equations 1
and 2) have s·b·h · (34 + 5·a·s/h) bytes. The figures here are of the layers that transformers really runs: GPT-2 writes its
GELU out in four tensors instead of one, RMSNorm keeps an fp32 copy, a fused kernel keeps no scores at all.
"""

from ..recipe.recipe import Recipe
from .account import Account
from .model_states import FP32, HALF

ENOUGH = 1 << 20  # samples; nobody asks for more


def activation_bytes_per_layer(recipe: Recipe) -> dict[str, int]:
    """What one layer keeps for the backward pass: "module · operator" to bytes, in the order of the forward pass.

    Their sum times the layers is the forward pass's growth, linear in batch size and, with a fused attention kernel, in
    tokens; written-out attention adds terms with tokens². Under gradient checkpointing only the layer's input is left.
    With autocast a layer also keeps the half-precision copies of its weights, which no batch size changes.
    """
    account = Account(recipe)
    section = account.m.sections[0]
    if recipe.gradient_checkpointing:
        return {"input": section.taken}
    found: dict[str, int] = {}
    for _, entry in account.alive((account.forward_end, ())):
        if section.begin <= entry.birth < section.end:
            module = entry.where.removeprefix(section.name).strip(".")
            key = f"{module} · {entry.op}" if module else entry.op
            found[key] = found.get(key, 0) + entry.size
    return found


def logits_bytes(recipe: Recipe) -> dict[str, int]:
    """The output head's tensors, each tokens × vocabulary: forward's logits, the fp32 copy, log-softmax; backward's two.

    With T tokens, vocabulary V and w bytes a hidden number: logits w·T·V, copy 4·T·V (none in fp32), log-softmax 4·T·V
    kept for backward, and there 4·T·V twice, so the loss peaks at 12·T·V. A classifier has no such term.
    """
    shape, precision = recipe.shape, recipe.precision
    if "classification" in shape.task:
        return {}
    size = recipe.batch_size * recipe.seq_len * shape.vocab_size
    half = precision.endswith(("-true", "-mixed"))
    loss = HALF if precision.endswith("-true") and shape.task == "seq2seq-lm" else FP32
    return {
        "logits": size * (HALF if half else FP32),
        "fp32 copy": size * FP32 if half and loss == FP32 else 0,
        "log_softmax": size * loss,
        "gradient of nll_loss": size * loss,
        "gradient of log_softmax": size * loss,
    }


def largest_batch(recipe: Recipe, budget_bytes: int, gpu=None) -> int:
    """The most samples in a micro-batch whose predicted allocated peak is within `budget_bytes`; 0 if none is.

    Peaks grow with the batch, so doubling and halving find it in about 2·log₂ predictions. Leave room for the rest:
    `predict(…).process.high` less `peak.total` says how much. `gpu` is as in `predict`.
    """
    from .predict import predict

    low, high = 0, 1  # low fits, high does not
    while high <= ENOUGH and predict(recipe.replace(batch_size=high), gpu).peak.total <= budget_bytes:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        fits = predict(recipe.replace(batch_size=middle), gpu).peak.total <= budget_bytes
        low, high = (middle, high) if fits else (low, middle)
    return low
