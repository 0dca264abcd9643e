"""Fine-tune the base model, by one loop for full training and for adapters.

The records of long runs are read here too.

Chapters train a few steps live. Scripts in `data/base_model` ran this loop for what takes an hour
on a CPU: `quality.py` wrote `quality.json`, `quality_4bit.py` wrote `quality_4bit.json`.
"""

import json
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vramlab.base.errors import RecordError

from .base_model import CONTEXT, base_model_path, load_base_model, load_base_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

ALPHA = 32  # lora_alpha of every adapter, as in source B: at rank r an update is scaled by 32 / r


def adapted(
    model: "PreTrainedModel", r: int, targets: str | Sequence[str] = "all-linear", **options: Any
):
    """`model` with LoRA adapters of rank `r` in `targets` and all else frozen, a `PeftModel`."""
    from peft import LoraConfig, get_peft_model

    # PEFT takes one word or a list; from a record it may be a tuple.
    targets = targets if isinstance(targets, str) else list(targets)
    options = {"lora_alpha": ALPHA, "target_modules": targets, "task_type": "CAUSAL_LM", **options}
    return get_peft_model(model, LoraConfig(r=r, **options)).train(model.training)


def batches(
    texts: Sequence[str],
    steps: int,
    batch_size: int,
    context: int,
    seed: int = 0,
) -> "Iterator[torch.Tensor]":
    """`steps` tensors of `batch_size` × `context` tokens.

    They are cut at offsets that depend on the seed alone.
    """
    import torch

    tokenizer = load_base_tokenizer()
    # verbose=False: texts longer than the context are wanted here, and the tokenizer would warn of
    # each.
    rows = [
        [tokenizer.bos_token_id, *tokenizer(text, verbose=False)["input_ids"]] for text in texts
    ]
    # All texts one after the other, as pre-training has them.
    tokens = torch.tensor([token for row in rows for token in row])
    offsets = torch.arange(context)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        # A column of offsets plus a row of positions indexes a whole batch.
        yield tokens[
            torch.randint(len(tokens) - context, (batch_size, 1), generator=generator) + offsets
        ]


def finetune(
    model: "torch.nn.Module",
    texts: Sequence[str],
    steps: int,
    learning_rate: float,
    batch_size: int = 4,
    context: int = CONTEXT,
    seed: int = 0,
    autocast: bool = False,
) -> list[float]:
    """Train the parameters of `model` that require gradients.

    Return the loss of each step in nats per token.

    AdamW without weight decay, gradients clipped at 1, linear warm-up over a tenth of the steps and
    linear decay to 0. `autocast` computes in bf16.
    """
    import torch

    device = next(model.parameters()).device
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.0)
    warm = max(1, steps // 10)

    def share_of_rate(step: int) -> float:
        rising = (step + 1) / warm
        falling = (steps - step) / max(1, steps - warm)
        # One line rises to 1 over the warm-up, the other falls to 0 at the end, and the lower
        # counts.
        return min(rising, falling)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_rate)
    losses = []
    training = model.training
    model.train()
    for batch in batches(texts, steps, batch_size, context, seed):
        batch = batch.to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    model.train(training)
    return losses


def recorded_sweep() -> SimpleNamespace:
    """Full fine-tuning against LoRA by rank and by target, recorded.

    `base`: bits per byte before tuning; `runs`: r (None: full), targets, scale (α / r), trained
    parameters, best learning_rate and those tried, means over the seeds of the bits per byte of
    `documentation` (trained on) and `programs` (the base's domain), the standard deviation of the
    documentation's, and each seed's; `lower`: some of them at the next lower rate; `where`:
    hardware, versions, date, recipe; `run(r, targets)`: one of the runs. Raises RecordError if it
    has not been run.
    """
    facts = _record("quality")
    base = facts.pop("base")
    runs = [SimpleNamespace(**run) for run in facts.pop("runs")]
    lower = [SimpleNamespace(**run) for run in facts.pop("lower")]

    def run(r: int | None, targets: str | None = None) -> SimpleNamespace:
        targets = targets or ("all" if r is None else "all-linear")
        for each in runs:
            if (each.r, each.targets) == (r, targets):
                return each
        raise RecordError(f"The recorded sweep has no run with r={r} and targets {targets!r}.")

    return SimpleNamespace(base=base, runs=runs, lower=lower, run=run, where=facts)


def recorded_quality() -> dict[str, Any]:
    """LoRA and QLoRA of the base model, on bases in 16 and 4 bits.

    Raises RecordError if it has not been run.
    """
    return _record("quality_4bit")


def recorded_formats() -> dict[str, Any]:
    """The base model in other formats: by how many per cent each piece's bits per byte grow.

    Raises RecordError if it has not been run.
    """
    return _record("formats")


def _record(name: str) -> dict[str, Any]:
    path = base_model_path(f"{name}.json")
    if not path.exists():
        raise RecordError(
            f"{path.name} is missing: run data/base_model/{name}.py, which takes up to half an "
            f"hour."
        )
    return json.loads(path.read_text(encoding="utf-8"))


def fresh(
    r: int | None, targets: str | Sequence[str] = "all-linear", seed: int = 0, **options: Any
) -> "torch.nn.Module":
    """The base model to train: whole (`r` None), or with adapters.

    The adapters' initial values depend on the seed alone.

    `options` are those of PEFT's LoraConfig.
    """
    import torch

    # PEFT draws A from the global generator; the base's weights come from the file.
    torch.manual_seed(seed)
    model = load_base_model()
    return model if r is None else adapted(model, r, targets, **options)
