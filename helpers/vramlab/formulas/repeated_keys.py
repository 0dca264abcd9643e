"""Attention in the ledger with keys and values repeated before the kernel (`training/repeated_keys.py`)."""

from functools import cache

from .ledger import Tensor
from .model import Model


@cache
def repeating(kind: type[Model]) -> type[Model]:
    """Return `kind`, a ledger of a model, with such attention."""

    class Repeating(kind):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.implementation = "sdpa"

        def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, sinks: bool = False) -> Tensor:
            heads = q.shape[1]
            k, v = self.repeat(k, heads), self.repeat(v, heads)
            return super().attend(q, k, v, mask, p, sinks)

    return Repeating
