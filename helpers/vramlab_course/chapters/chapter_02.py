"""Chapter 02: what its page of a Llama's peak reads from a recipe, and what it adds up to."""

from types import SimpleNamespace

from vramlab import GiB, Recipe

MOMENTS = ("1 loss", "2 last layer again", "3 end of backward", "4 update")


def given(recipe: Recipe, layer_bytes) -> SimpleNamespace:
    """Return rows of the page in bytes, `layers` and `logits` for a token.

    `layer_bytes` is the reader's function. LoRA's own weights are left out.
    """
    s = recipe.shape
    e = 4 if recipe.precision == "fp32" else 2
    # bf16=True leaves weights in fp32, if they are loaded so.
    stored = 4 if recipe.precision == "bf16-mixed" and not recipe.dtype else e
    weights = stored * s.num_parameters
    gradients = 0 if recipe.lora else weights
    in_pieces = recipe.trainer == "sft" or recipe.use_liger_kernel
    each = stored * s.hidden_size
    if not recipe.gradient_checkpointing:
        each = layer_bytes(s, e) + 5 * (stored - e) * s.hidden_size  # norms give out fp32
    return SimpleNamespace(
        e=e,
        tokens=recipe.batch_size * recipe.seq_len,
        weights=weights,
        copies=(stored - e) * s.num_parameters,
        gradients=gradients,
        # With accumulation those of the batches before are there from the second one on.
        held=gradients if recipe.gradient_accumulation_steps > 1 else 0,
        # An embedding that is also the head adds its two gradients into a third.
        tied=2 * e * s.vocab_size * s.hidden_size if s.tied and gradients else 0,
        roots=0 if "fused" in recipe.optim else gradients,
        layers=s.num_layers * each,
        logits=0 if in_pieces else 12 * s.vocab_size,
    )


def parts(recipe: Recipe, layer_bytes, always, added) -> dict:
    """Return what is `always` there and what is `added`, in GiB, for each moment that adds."""
    page = given(recipe, layer_bytes)
    layers = page.tokens * page.layers
    base = [layers, layers, page.gradients, page.gradients]
    return {
        moment: (always / GiB, below / GiB, (more - below) / GiB)
        for moment, below, more in zip(MOMENTS, base, added, strict=True)
        if more
    }
