"""Training a diffusion model's denoiser as diffusers' scripts do: what is trained, and how.

`data/diffusion_models.json` says of each published model its denoiser's configuration, the script
that trains it (of diffusers, for Wan of finetrainers), and what stays on the GPU besides: VAE and
text encoders.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..base.errors import RecipeError
from .configuration import read_json_file
from .denoisers import MODELS, config_file, is_of, published_like
from .knobs import Refusals, check, documented, knob, knobs, refuse

# accelerate's names to those of a recipe
PRECISIONS = {"no": "fp32", "fp16": "fp16-mixed", "bf16": "bf16-mixed"}
WEIGHTS = {"no": "float32", "fp16": "float16", "bf16": "bfloat16"}
RESOLUTION = 1024  # pixels of a side, which all of these models are published for
FACTOR = 8  # pixels of a latent's side: the VAEs have three halvings
MOST_PIXELS = 2**13
VIDEO = ("frames", "height", "width")


@documented
@dataclass(frozen=True)
class Diffusion:
    """Training of an image or video model's denoiser on latents, with AdamW.

    Names are those of diffusers' scripts where they have them. `model` is a name of
    `data/diffusion_models.json`, a published one, or the path of a pipeline's folder, of its
    denoiser's or of that one's config.json.
    """

    model: str
    method: str = knob(
        "lora",
        choices=("lora", "full"),
        help="Train adapters on a frozen denoiser, or all of it (in fp32; Wan as it is stored).",
        option=True,
        shown="{}",
    )
    resolution: int | None = knob(
        None,
        least=FACTOR,
        most=MOST_PIXELS,
        help="Pixels of an image's side, 1,024 unless said.",
        option=True,
    )
    frames: int | None = knob(
        None,
        most=2**12,
        help="Frames of a video, 4 n + 1; those it is published for.",
        option=True,
    )
    height: int | None = knob(
        None,
        least=FACTOR,
        most=MOST_PIXELS,
        help="Pixels of a video's height; those it is published for.",
        option=True,
    )
    width: int | None = knob(
        None,
        least=FACTOR,
        most=MOST_PIXELS,
        help="Pixels of a video's width; those it is published for.",
        option=True,
    )
    batch_size: int = knob(
        1,
        help="Images or videos of a micro-batch.",
        option=True,
        shown="batch {}",
    )
    gradient_accumulation_steps: int = knob(
        1,
        help="Micro-batches of a step.",
        option=True,
        shown="{} micro-batches",
        quiet=(1,),
    )
    mixed_precision: str = knob(
        "bf16",
        choices=tuple(PRECISIONS),
        help="As in accelerate; what is frozen is stored so too.",
        option=True,
        shown="mixed_precision={}",
    )
    rank: int = knob(
        4,
        most=2**14,
        help="Rank of the adapters.",
        option=True,
        shown="r={}",
    )
    gradient_checkpointing: bool = knob(
        False,
        help="Recompute the denoiser's blocks in the backward pass.",
        option=True,
        shown="checkpointing",
    )
    use_8bit_adam: bool = knob(
        False,
        help="bitsandbytes' AdamW with states of 8 bits.",
        option=True,
        shown="8-bit AdamW",
    )
    latents: str | None = knob(
        None,
        choices=("encoded", "cached"),
        help="The VAE encodes each micro-batch, or did so before and is gone; as the script does.",
        option=True,
    )
    text_encoders: str | None = knob(
        None,
        choices=("resident", "cached"),
        help="They encode each micro-batch's prompts, or are gone; as the script does.",
        option=True,
    )

    def __post_init__(self) -> None:
        check(self)
        refuse(self, self._refusals())

    def _refusals(self) -> Refusals:
        pixels = self.record["pixels"]
        others = ("resolution",) if self.is_video else VIDEO
        for name in others:
            rest = "say frames, height and width" if self.is_video else "say resolution"
            yield name, getattr(self, name) is not None, f"{self.model} has none: {rest}"
        allowed = f"of {self.model} it must be a multiple of {pixels} pixels"
        for name, value in self.sides.items():
            yield name, value % pixels, allowed
        step = self.record.get("frames_step", 1)
        allowed = f"of {self.model} it must be a multiple of {step}, and one more"
        yield "frames", (self.number_of_frames - 1) % step, allowed
        most = self.config.get("pos_embed_max_size", 0) * pixels
        allowed = f"{self.model} has positions for {most} pixels"
        yield "resolution", most and self.sides.get("resolution", 0) > most, allowed
        lacks = self.has_text_encoders and not self.record["encoders"]
        allowed = f"the script frees that of {self.model} before it trains: say 'cached'"
        yield "text_encoders", lacks, allowed
        is_unlike = self.has_text_encoders and not is_of(self.record, self.config)
        allowed = "those of another configuration are not known: say 'cached'"
        yield "text_encoders", is_unlike, allowed

    @cached_property
    def _known(self) -> tuple[dict[str, Any], Mapping[str, Any]]:
        return _record(self.model)  # once: it may read a file

    @property
    def record(self) -> dict[str, Any]:
        """What is known of the model, or of the published one of its architecture."""
        return self._known[0]

    @property
    def config(self) -> Mapping[str, Any]:
        """The denoiser's configuration."""
        return self._known[1]

    @property
    def script(self) -> Mapping[str, Any]:
        """What diffusers' script of this method does."""
        return self.record[self.method]

    @property
    def encodes(self) -> bool:
        """Whether the VAE is there and encodes each micro-batch."""
        return (self.latents or self.script["latents"]) == "encoded"

    @property
    def has_text_encoders(self) -> bool:
        """Whether the text encoders are there and encode each micro-batch's prompts."""
        return (self.text_encoders or self.script["text_encoders"]) == "resident"

    @property
    def autocasts(self) -> bool:
        """Whether the step runs under autocast, and what is trained whole is fp32."""
        return self.record.get("autocasts", True)

    @property
    def precision(self) -> str:
        """The precision, as a recipe calls it."""
        named = PRECISIONS[self.mixed_precision]
        return named if self.autocasts else named.replace("mixed", "true")

    @property
    def frozen_dtype(self) -> str:
        """The format of what is not trained: the scripts' `weight_dtype`."""
        return WEIGHTS[self.mixed_precision]

    @property
    def weights_dtype(self) -> str:
        """The format in which the denoiser is loaded."""
        is_frozen = self.method == "lora"
        return self.frozen_dtype if is_frozen or not self.autocasts else "float32"

    @property
    def is_video(self) -> bool:
        """Whether the model makes videos."""
        return "frames" in self.record

    @property
    def number_of_frames(self) -> int:
        """Frames of a sample: 1 of an image."""
        return self.frames or self.record.get("frames", 1)

    @property
    def sides(self) -> dict[str, int]:
        """Pixels of a sample by the name of the field: of an image's side, or height and width."""
        if not self.is_video:
            return {"resolution": self.resolution or RESOLUTION}
        names = VIDEO[1:]
        return {name: getattr(self, name) or self.record[name] for name in names}

    @property
    def latent_side(self) -> int:
        """Elements of the side of an image's latents."""
        return self.sides["resolution"] // FACTOR

    def __str__(self) -> str:
        return " · ".join(self._words())

    def _words(self) -> Iterator[str]:
        yield self.model
        pixels = tuple(self.sides.values())
        yield f"{pixels[0]} × {pixels[-1]} pixels"
        if self.is_video:
            yield f"{self.number_of_frames} frames"
        for name, said in knobs(Diffusion).items():
            is_adapters = name != "rank" or self.method == "lora"
            words = said.words(getattr(self, name)) if is_adapters else ""
            if words:
                yield words
        yield "VAE encodes" if self.encodes else "latents cached"
        yield "text encoders resident" if self.has_text_encoders else "prompts cached"


def _record(model: str) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Return what is known of a model, and its denoiser's configuration. Raises RecipeError."""
    for name, record in MODELS.items():
        if model in (name, record["published"]):
            return record, record["config"]
    known = ", ".join(MODELS)
    runs = "vramlab run --gpu CARD -- python train.py runs any script"
    file = config_file(str(model))
    if file is None:
        rest = (
            f"known are {known}, and the folder of a pipeline or of a denoiser of their "
            f"architectures (unet or transformer, with its config.json); {runs}"
        )
        raise RecipeError("model", model, rest)
    config = read_json_file("model", file)
    like = published_like(config) if isinstance(config, dict) else None
    if like is None:
        rest = f"it must be the configuration of a denoiser like that of {known}; {runs}"
        raise RecipeError("model", model, rest)
    return like, config
