"""Experiments of chapter 03 that train: the course's base model, for a few steps on a CPU, told apart by the loss on text
that it has not seen."""

from functools import cache

from ..claims import Finding
from ..errors import RecordError

STEPS, BATCH, TOKENS = 16, 4, 64
RATES = (1e-4, 1e-3)  # of which each run may take the better one


@cache
def loss_after(
    learning_rate: float,
    precision: str = "fp32",
    optim: str = "adamw",
    steps: int = STEPS,
    batch_size: int = BATCH,
    device: str = "cpu",
) -> float:
    """Nats a token on 16 unseen sequences after so many steps.

    `precision`: "fp32", "mixed" (bf16 under autocast, weights and update in fp32) or "bf16" (everything).
    """
    import torch
    from transformers.optimization import Adafactor

    from ..base_model import finetuning_texts
    from ..finetuning import batches, fresh

    model = fresh(None).to(device, torch.bfloat16 if precision == "bf16" else torch.float32)
    weights = list(model.parameters())
    if optim == "adafactor":  # as the Trainer makes it
        optimizer = Adafactor(weights, lr=learning_rate, scale_parameter=False, relative_step=False)
    else:
        optimizer = torch.optim.AdamW(weights, lr=learning_rate, weight_decay=0.0)

    def loss_of(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.to(device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=precision == "mixed"):
            return model(input_ids=rows, labels=rows, use_cache=False).loss

    for rows in batches(finetuning_texts("train", 200_000), steps, batch_size, TOKENS):
        loss_of(rows).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        (unseen,) = batches(finetuning_texts("held_out", 20_000), 1, 16, TOKENS)
        return loss_of(unseen).item()


def _said(losses: list[float]) -> str:
    return f"the base model, loss {' and '.join(f'{loss:.3f}' for loss in losses)}"


def keeps_the_loss(precision: str, learning_rate: float) -> Finding:
    """Whether a run ends with the loss of an fp32 run, to one per cent."""
    losses = [loss_after(learning_rate, of) for of in (precision, "fp32")]
    return Finding(abs(losses[0] / losses[1] - 1) < 0.01, "measured", f"{_said(losses)}, {STEPS} steps of AdamW")


def update_in_fp32_helps(learning_rate: float) -> Finding:
    """Whether weights and updates in fp32 end with a loss lower by one per cent than with everything in bf16."""
    losses = [loss_after(learning_rate, of) for of in ("mixed", "bf16")]
    return Finding(losses[0] < 0.99 * losses[1], "measured", f"{_said(losses)}, {STEPS} steps of AdamW")


def best_loss(**changes) -> float:
    """The loss of a run at the better one of RATES."""
    return min(loss_after(rate, **changes) for rate in RATES)


def adafactor_is_slower(steps: int = STEPS) -> Finding:
    """Whether Adafactor ends with a higher loss than AdamW, by one per cent. Raises RecordError where so many steps take too
    long without a GPU."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if steps > 100 and device == "cpu":
        raise RecordError(f"Waits for a GPU, for {steps:,} steps.")
    more = {"steps": steps, "device": device} if steps != STEPS else {}
    losses = [best_loss(optim=optim, **more) for optim in ("adafactor", "adamw")]
    return Finding(losses[0] > 1.01 * losses[1], "measured", f"{_said(losses)}, {steps:,} steps")


def larger_batch_ends_lower(steps: int) -> Finding:
    """Whether BATCH sequences a step for STEPS steps end with a loss lower by one per cent than one a step for `steps`."""
    losses = [best_loss(), best_loss(steps=steps, batch_size=1)]
    return Finding(losses[0] < 0.99 * losses[1], "measured", f"{_said(losses)}, {STEPS} and {steps} steps of AdamW")
