"""The command on diffusion models: `diffusion`."""

from typing import Any

import typer

from ..base.errors import RecipeError
from ..recipe.diffusion import Diffusion
from ..recipe.knobs import options
from ..training.quiet import no_collection
from .command_options import JSON, Expandable, GpuName, OtherMemory, Target, takes
from .command_output import card_of, finish, granted_to, say
from .recipe_options import Options, fields_of

OPTIONS: Options = {knob.option: (path, knob) for path, knob in options(Diffusion)}


def asked_of(model: str, given: dict[str, Any]) -> Diffusion:
    """Return the training of `given` options. Raises RecipeError."""
    return Diffusion(model, **fields_of(OPTIONS, given))


@takes(OPTIONS, asked_of)
def diffusion(
    asked: Diffusion,
    target: Target = "cuda",
    gpu: GpuName = None,
    other_memory: OtherMemory = None,
    expandable_segments: Expandable = False,
    as_json: JSON = False,
) -> None:
    with no_collection(before=False):
        from ..simulation.simulate_diffusion import simulate_diffusion

    if asked.config is not asked.record["config"]:
        known = asked.record["published"]
        say(f"note: a denoiser like that of {known}, with its script, VAE and encoders", err=True)
    card = card_of(gpu) if gpu else None
    why = card.why_not(asked.precision) if card else ""
    if why:
        rest = f"{why.rpartition(': take ')[0]}: take --mixed-precision fp16"
        raise RecipeError("mixed_precision", asked.mixed_precision, rest)
    granted = granted_to(card, other_memory, expandable_segments)
    found = simulate_diffusion(asked, target=target, gpu=card, **granted)
    finish(found, card, as_json)


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        help="Memory of diffusers' training step (for Wan of finetrainers') on fake tensors: LoRA "
        "or full training of an image or video model's denoiser, with VAE and text encoders where "
        "they stay.",
    )(diffusion)
