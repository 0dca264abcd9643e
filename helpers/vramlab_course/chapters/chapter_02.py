"""Chapter 02: the rows that its page of a Llama's peak reads from a recipe."""

from types import SimpleNamespace

from vramlab import Recipe


def given(recipe: Recipe, layer_bytes) -> SimpleNamespace:
    """Return rows of the page in bytes, `layers` and `logits` for a token.

    `layer_bytes` is the reader's function. LoRA's own weights are left out.
    """
    s = recipe.shape
    e = 4 if recipe.precision == "fp32" else 2
    weights = e * s.num_parameters
    gradients = 0 if recipe.lora else weights
    in_pieces = recipe.trainer == "sft" or recipe.use_liger_kernel
    each = e * s.hidden_size if recipe.gradient_checkpointing else layer_bytes(s, e)
    return SimpleNamespace(
        e=e,
        tokens=recipe.batch_size * recipe.seq_len,
        weights=weights,
        gradients=gradients,
        # An embedding that is also the head adds its two gradients into a third.
        tied=2 * e * s.vocab_size * s.hidden_size if s.tied and gradients else 0,
        roots=0 if "fused" in recipe.optim else gradients,
        layers=s.num_layers * each,
        logits=0 if in_pieces else 12 * s.vocab_size,
    )
