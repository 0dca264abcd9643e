"""Images of a sample: from pixels to patches and tokens, by the processor's own code.

A processor is built from its class and the model's sizes, so nothing is downloaded.
`data/image_readers.json` says of each architecture which class that is, and how a sample shows an
image: the placeholder that is repeated, what stands before and after it, the mask's name, and the
published preprocessor_config.json's least and most pixels.
"""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from math import isqrt
from typing import Any

from ..base.errors import RecipeError, needing
from .configuration import READERS, reason
from .fields import RecipeFields
from .knobs import Refusals
from .model_sizes import Sizes

MOST_SIDE = 2**14  # pixels


def reader_of(shape: Sizes) -> Mapping[str, Any] | None:
    """Return how an architecture reads images, None where it reads text alone."""
    return READERS.get(shape.family)


def windows_of(shape: Sizes) -> str | None:
    """Return how the names of modules end that attend within windows, None where none does."""
    reader = reader_of(shape)
    return reader.get("windows") if reader else None


def sides(recipe: RecipeFields) -> list[tuple[int, int]]:
    """Return height and width of each of a sample's images."""
    # Fewer sizes than images are gone through again and again.
    said = recipe.image_size or ()
    sizes = []
    for number in range(recipe.images or 0):
        width, height = said[number % len(said)].split("x")
        sizes.append((int(height), int(width)))
    return sizes


def read_sizes(value: Any) -> tuple[str, ...] | None:
    """Return "width x height" of images, of a side alone too. Raises RecipeError."""
    if value is None:
        return None
    values = value if isinstance(value, list | tuple) else (value,)
    sizes = []
    for one in values:
        found = re.fullmatch(r"(\d+)(?:[x×](\d+))?", str(one).replace(" ", ""))
        width = int(found[1]) if found else 0
        height = int(found[2] or found[1]) if found else 0
        if not (0 < width <= MOST_SIDE and 0 < height <= MOST_SIDE):
            rest = f"it must be width and height, such as '1024x768', of up to {MOST_SIDE:,} pixels"
            raise RecipeError("image_size", one, rest)
        sizes.append(f"{width}x{height}")
    return tuple(sizes)


def largest(shape: Sizes) -> tuple[str, ...] | None:
    """Return the size of the largest square that the processor does not make smaller."""
    reader = reader_of(shape)
    if reader is None:
        return None
    side = isqrt(reader["size"].get("longest_edge", 0))
    side = side or shape.settings["vision_config"]["image_size"]
    return (f"{side}x{side}",)


def most_pixels(recipe: RecipeFields) -> int:
    """Return the pixels to which the processor makes larger images smaller."""
    reader = READERS[recipe.shape.family]
    if reader["tokens"]:
        return recipe.shape.settings["vision_config"]["image_size"] ** 2
    return recipe.max_pixels or reader["size"]["longest_edge"]


def least_pixels(recipe: RecipeFields) -> int:
    """Return the least `max_pixels` that can be said, 0 where none is left to choose."""
    is_open = recipe.images and not recipe.max_pixels
    return READERS[recipe.shape.family]["size"].get("shortest_edge", 0) if is_open else 0


def rounded(recipe: RecipeFields, pixels: int) -> int:
    """Return the pixels of as many whole tokens, at most `pixels`."""
    processor = _processor(recipe.shape, None)
    # The model merges merge_size × merge_size patches into one token.
    area = (processor.patch_size * processor.merge_size) ** 2
    return pixels // area * area


@lru_cache(maxsize=32)
def _processor(shape: Sizes, max_pixels: int | None) -> Any:
    """Return the image processor of a model."""
    reader = READERS[shape.family]
    module, _, name = reader["processor"].rpartition(".")
    with needing("images"):
        kind = getattr(import_module(f"transformers.models.{module}"), name)
    sizes = shape.settings["vision_config"]
    arguments = {key: sizes[said] for key, said in reader["arguments"].items()}
    size = dict(reader["size"])
    if reader["tokens"]:  # every image becomes one of that side
        size = {"height": sizes["image_size"], "width": sizes["image_size"]}
    if max_pixels:
        size["longest_edge"] = max_pixels
    return kind(**arguments, size=size)


@lru_cache(maxsize=128)
def _tokens(
    shape: Sizes,
    max_pixels: int | None,
    height: int,
    width: int,
) -> int:
    """Return the tokens of one image. Raises RecipeError where the processor refuses it."""
    reader = READERS[shape.family]
    if reader["tokens"]:
        setting: Any = shape.settings
        for part in reader["tokens"].split("."):
            setting = setting[part]
        return setting
    processor = _processor(shape, max_pixels)
    try:
        patches = processor.get_number_of_image_patches(height, width, {})
    except ValueError as error:  # too long and narrow
        rest = f"the processor refuses it: {reason(error)}"
        raise RecipeError("image_size", f"{width}x{height}", rest) from None
    return patches // processor.merge_size**2


def tokens(recipe: RecipeFields) -> list[int]:
    """Return the tokens of each of a sample's images."""
    counts = []
    for height, width in sides(recipe):
        counts.append(_tokens(recipe.shape, recipe.max_pixels, height, width))
    return counts


def marked(recipe: RecipeFields) -> Iterator[list[int]]:
    """Yield of each image the ids that stand for it, those around it included."""
    reader = READERS[recipe.shape.family]
    settings = recipe.shape.settings
    around = [settings[name] for name in reader["around"]]
    for count in tokens(recipe):
        yield [*around[:1], *[settings[reader["image"]]] * count, *around[1:]]


def pixels(recipe: RecipeFields) -> dict[str, Any]:
    """Return what the processor makes of a micro-batch's images, real tensors on the CPU.

    They are black, and pixels are zeros then.
    """
    if not recipe.images:
        return {}
    import torch

    made = {}
    samples = recipe.batch_size
    of_sample = _processed(recipe.shape, recipe.max_pixels, tuple(sides(recipe)))
    for name, value in of_sample.items():
        if value.is_floating_point():
            made[name] = torch.zeros(samples * value.shape[0], *value.shape[1:], dtype=value.dtype)
        else:
            made[name] = torch.cat([value] * samples)
    return made


@lru_cache(maxsize=32)
def _processed(
    shape: Sizes,
    max_pixels: int | None,
    sides: tuple[tuple[int, int], ...],
) -> dict[str, Any]:
    """Return what the processor makes of a sample's images; of pixels the size alone."""
    with needing("images"):
        from PIL import Image
    pictures = [Image.new("RGB", (width, height)) for height, width in sides]
    made = {}
    for name, value in _processor(shape, max_pixels)(images=pictures, return_tensors="pt").items():
        if hasattr(value, "dtype"):
            made[name] = value.to("meta") if value.is_floating_point() else value
    return made


def refusals(recipe: Any) -> Refusals:
    """Return images that a model does not read, or not so."""
    shape = recipe.shape
    reader = reader_of(shape)
    for name in ("images", "image_size", "max_pixels"):
        known = ", ".join(READERS)
        allowed = f"{shape.name} reads no images in a recipe: {known} do"
        yield name, reader is None and getattr(recipe, name), allowed
    if reader is None:
        return
    yield "image_size", recipe.image_size and not recipe.images, "say images, how many a sample has"
    allowed = "the processor's tokens depend on it: say width and height, such as '1024x768'"
    yield "image_size", recipe.images and not recipe.image_size, allowed
    allowed = f"{shape.name} makes every image the same size"
    yield "max_pixels", recipe.max_pixels and reader["tokens"], allowed
    least = reader["size"].get("shortest_edge", 1)
    is_less = recipe.max_pixels and recipe.max_pixels < least
    yield "max_pixels", is_less, f"the processor makes smaller images {least:,} pixels large"
    yield "sharding", recipe.sharding, "samples with images are modelled on one device"
    # SFTTrainer itself refuses packing and padding_free for images
    for name in ("lengths", "completion_lengths", "pad_to_multiple_of", "packing", "padding_free"):
        allowed = "samples with images have one length here, and rows of their own"
        yield name, getattr(recipe, name), allowed
    needed = sum(map(len, marked(recipe))) if recipe.images else 0
    allowed = f"the images of a sample are {needed:,} tokens, and text needs some more"
    yield "seq_len", recipe.seq_len <= needed, allowed
