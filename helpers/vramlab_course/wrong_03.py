"""Answers to chapter 03's exercises, right ones and those with a reader's mistakes: what tests the judges."""

from torch import cat, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from vramlab import Recipe, find_gpu, predict

from .judges_03 import make_it_fit


def accumulating(weigh=True, clear=True, graph=False, joined=False, sums=False, loss="mean"):
    """An answer to 03.1."""

    def accumulate(model, parts):
        if clear:
            model.zero_grad()
        if joined:
            parts = [tuple(map(cat, zip(*parts, strict=True)))]
        total, rows = 0.0, sum(len(x) for x, _ in parts)
        for x, y in parts:
            part = F.mse_loss(model(x), y, reduction="sum" if sums else "mean")
            part = part / (rows * y.shape[1]) if sums else part * (len(x) / rows if weigh else 1 / len(parts))
            part.backward(retain_graph=graph)
            total = (part if graph else part.item()) + (0 if loss == "last" else total)
        return total

    return accumulate


def checkpointing(reentrant=False, every=None, rest=True, own=False):
    """An answer to 03.2."""

    def run(layers, x, size):
        size = size if every is None else every
        if not size:
            return nn.Sequential(*layers)(x)
        for start in range(0, len(layers) if rest else len(layers) // size * size, size):
            segment = layers[start : start + size]
            if own:
                x = checkpoint(lambda x, segment=segment: nn.Sequential(*segment)(x), x, use_reentrant=False)
            else:
                x = checkpoint(nn.Sequential(*segment), x, use_reentrant=reentrant)
        return x

    return run


def fitting(mistake: str):
    """An answer to 03.6 that compares the peak or the upper end, loses micro-batches, or checkpoints first."""

    def within(recipe: Recipe, gpu: str) -> bool:
        report = predict(recipe, gpu=gpu)
        return {"peak": report.peak.total, "high": report.process.high}[mistake] <= find_gpu(gpu).total

    def fit(recipe: Recipe, gpu: str) -> Recipe | None:
        if mistake in ("peak", "high"):
            return make_it_fit(recipe, gpu, within)
        if mistake == "eagerly":
            return make_it_fit(recipe.replace(gradient_checkpointing=True), gpu)
        found = make_it_fit(recipe, gpu)
        return found and found.replace(gradient_accumulation_steps=1)

    return fit
