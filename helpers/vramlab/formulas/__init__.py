"""`predict`: the bytes of a training step from formulas. No torch, no model."""
