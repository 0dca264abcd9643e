"""Private parts of diffusers."""

from typing import Any


def klein_latents() -> tuple[Any, Any, Any]:
    """Return FLUX.2 klein's functions that join, pack and unpack latents."""
    from diffusers import Flux2KleinPipeline as Klein

    return Klein._patchify_latents, Klein._pack_latents, Klein._unpack_latents_with_ids


def klein_positions() -> tuple[Any, Any]:
    """Return FLUX.2 klein's functions that give the positions of text and of latents."""
    from diffusers import Flux2KleinPipeline as Klein

    return Klein._prepare_text_ids, Klein._prepare_latent_ids


def kept_in_fp32(model: Any) -> frozenset[str]:
    """Return the parts of parameters' names by which `from_pretrained` leaves them in fp32."""
    return frozenset(getattr(model, "_keep_in_fp32_modules", None) or ())


def moments_of(vae: Any, video: Any) -> Any:
    """Return the moments of a video's latents, which `encode` gives inside a distribution."""
    return vae._encode(video)
