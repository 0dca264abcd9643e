"""Experiments on numbers and training.

They are of quantizers, formats, small runs, gradients, and the records of longer runs.
"""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F
from vramlab.base.errors import RecordError

from vramlab_course.base_model import (
    base_model_path,
    bits_per_byte,
    finetuning_texts,
    held_out,
    load_base_model,
)
from vramlab_course.finetuning import batches, fresh
from vramlab_course.number_formats import FORMATS, rounded
from vramlab_course.quantizers import absmax, quantile

from ..chapters.chapter_01 import deep_network, guessing
from .expressions import Facts

STEPS = 8
BATCH = 4
TOKENS = 64
RATES = (1e-4, 1e-3)  # a run without a rate of its own takes the better one


def recorded(file: str, names: Mapping[str, list[str]]) -> Facts:
    """Values of a record in `data/base_model`, each found by its keys.

    In a list of runs "r=8" is the first whose r is 8.

    Raises RecordError where there is no such record.
    """
    path = base_model_path(file)
    if not path.exists():
        raise RecordError(f"Waits for {file}: its script in data/base_model has not been run.")
    stored = json.loads(path.read_text(encoding="utf-8"))
    where = ", ".join(stored[key] for key in ("recipe", "hardware", "date"))
    return Facts(
        {name: _walk(stored, keys) for name, keys in names.items()},
        "recorded",
        where,
    )


def _walk(stored: Any, keys: list[str]) -> Any:
    for key in keys:
        if isinstance(stored, list):
            # Compared as JSON text, so that r=8 finds the number 8 and not "8".
            field, _, wanted = key.partition("=")
            stored = next(entry for entry in stored if json.dumps(entry[field]) == wanted)
        else:
            stored = stored[key]
    return stored


def quantized(
    method: str,
    bits: int,
    outlier: bool = False,
    block_size: int | None = None,
) -> Facts:
    """4,096 normal numbers, one of them 100 with an `outlier`, quantized and back.

    `error`: the root of the mean squared difference; `middle` and `edge` of a table by quantiles:
    the distances between neighbours there.
    """
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    if outlier:
        values[2048] = 100.0
    small = absmax(values, bits, block_size) if method == "absmax" else quantile(values, bits)
    off = small.dequantize() - values
    names = {"error": float(off.square().mean().sqrt())}
    if method == "quantile":
        table = small.table
        half = 2 ** (bits - 1)
        names["middle"] = float(table[half] - table[half - 1])
        names["edge"] = float(table[-1] - table[-2])
    return Facts(
        names,
        "measured",
        f"4,096 normal numbers, {method}, {bits} bits, blocks of {block_size}",
    )


@cache
def _bits(format: str | None, limit: int) -> float:
    model = load_base_model()
    if format:
        number = next(f for f in FORMATS if f.name == format)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(rounded(parameter, number))
    return bits_per_byte(model, held_out(limit), stride=256)


def rounded_weights(format: str, limit: int = 8000) -> Facts:
    """`ratio`: the base model's bits per byte with its weights rounded to a format.

    It is relative to what they were.
    """
    there = _bits(format, limit)
    before = _bits(None, limit)
    said = f"the base model on {limit:,} held-out bytes: {there:.3f} and {before:.3f} bits per byte"
    return Facts({"ratio": there / before}, "measured", said)


@cache
def _loss(
    dtype: str,
    scaled: bool,
    layers: int,
    steps: int,
) -> tuple[float, float]:
    """(lowest loss of the last ten steps, loss of guessing) of chapter 01's net in autocast."""
    network, x, labels = deep_network(layers)
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    # Disabled it passes losses and steps through unchanged.
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", dtype=getattr(torch, dtype)):
            loss = F.cross_entropy(network(x).float(), labels)  # in fp32, as autocast does on a GPU
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    # The lowest of ten, since a loss still jumps at this rate.
    return min(losses[-10:]), guessing(labels)


def learns(dtype: str, layers: int = 20, steps: int = 150) -> Facts:
    """Whether chapter 01's network gets a tenth below the loss of guessing.

    `plain` says it without loss scaling, `scaled` with it.
    """
    names = {}
    losses = []
    for name, is_scaled in (("plain", False), ("scaled", True)):
        loss, guess = _loss(dtype, is_scaled, layers, steps)
        names[name] = bool(loss < 0.9 * guess)
        losses.append(f"{name} {loss:.2f}")
    said = ", ".join(losses)
    return Facts(
        names,
        "measured",
        f"{layers} layers, {steps} steps of Adam under autocast to {dtype}: loss {said}",
    )


@cache
def loss_after(
    learning_rate: float,
    precision: str = "fp32",
    optim: str = "adamw",
    steps: int = STEPS,
    batch_size: int = BATCH,
) -> float:
    """Nats a token of the base model on 16 unseen sequences after `steps` steps.

    `precision`: "fp32", "mixed" (bf16 under autocast, weights and update in fp32) or "bf16"
    (everything).
    """
    from transformers.optimization import Adafactor

    # Loaded anew for each run, since training changes it.
    model = fresh(None).to(torch.bfloat16 if precision == "bf16" else torch.float32)
    weights = list(model.parameters())
    if optim == "adafactor":  # as the Trainer makes it
        optimizer = Adafactor(weights, lr=learning_rate, scale_parameter=False, relative_step=False)
    else:
        optimizer = torch.optim.AdamW(weights, lr=learning_rate, weight_decay=0.0)

    def loss_of(rows: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "mixed"):
            return model(input_ids=rows, labels=rows, use_cache=False).loss

    for rows in batches(finetuning_texts("train", 200_000), steps, batch_size, TOKENS):
        loss_of(rows).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        (unseen,) = batches(finetuning_texts("held_out", 20_000), 1, 16, TOKENS)
        return loss_of(unseen).item()


def trained(runs: Mapping[str, Mapping[str, Any]]) -> Facts:
    """The loss of each run of the base model on unseen text after a few steps.

    It is that at the better of two rates if none is given.

    Raises RecordError for more steps than a CPU should be asked for.
    """
    if any(run.get("steps", STEPS) > 100 for run in runs.values()):
        raise RecordError("Waits for a GPU, for thousands of steps.")
    names = {}
    for name, run in runs.items():
        rates = [run["learning_rate"]] if "learning_rate" in run else RATES
        losses = [loss_after(**{**run, "learning_rate": rate}) for rate in rates]
        names[name] = min(losses)
    said = ", ".join(f"{name} {loss:.3f}" for name, loss in names.items())
    return Facts(
        names,
        "measured",
        f"the base model, {STEPS} steps of {BATCH} × {TOKENS} tokens, loss: {said}",
    )


def accumulated(
    lengths: list[int],
    by: str = "micro-batches",
    layer: str = "",
    parts: int = 4,
) -> Facts:
    """`error`: how far accumulated gradients are from those of the whole batch, relative.

    They are accumulated over `parts` micro-batches.

    A linear layer, behind a `layer` of torch.nn if one is named, guesses tokens; `lengths` are each
    sequence's tokens, the rest is padding. A micro-batch's loss is its mean ("micro-batches") or
    its sum over the "tokens" of all.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(len(lengths), max(lengths), 32, generator=generator)
    tokens = torch.randint(50, x.shape[:2], generator=generator)
    for row, length in enumerate(lengths):
        # The label that cross_entropy leaves out.
        tokens[row, length:] = -100
    last = torch.nn.Linear(32, 50)
    with torch.no_grad():
        # Weights from this generator, not the global one, so that other claims do not move them.
        last.weight.copy_(torch.randn(50, 32, generator=generator) / 8)
    first = getattr(torch.nn, layer)(32) if layer else torch.nn.Identity()

    def gradient(rows: list[slice], divide: bool) -> torch.Tensor:
        last.zero_grad()
        for part in rows:
            total = F.cross_entropy(
                last(first(x[part].flatten(0, 1))),
                tokens[part].flatten(),
                reduction="sum",
            )
            # Divided by the micro-batch's own tokens, or by those of all.
            counted = tokens[part] if divide else tokens
            count = (counted != -100).sum()
            if divide:
                count = count * len(rows)
            (total / count).backward()
        return last.weight.grad.clone()

    size = len(lengths) // parts
    whole = gradient([slice(None)], divide=False)
    slices = [slice(i * size, (i + 1) * size) for i in range(parts)]
    pieces = gradient(slices, divide=by == "micro-batches")
    error = ((pieces - whole).norm() / whole.norm()).item()
    kind = "equal" if len(set(lengths)) == 1 else "different"
    return Facts(
        {"error": error},
        "measured",
        f"{parts} × {size} for {len(lengths)}, {kind} lengths, by {by} {layer}",
    )
