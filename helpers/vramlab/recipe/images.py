"""Images and videos of a sample: from pixels to patches and tokens, by the processor's own code.

A processor is built from its class and the model's sizes, so nothing is downloaded (`processors`).
`data/image_readers.json` says of each architecture which class that is, and how a sample shows an
image: the placeholder that is repeated, what stands before and after it, the mask's name, and the
published preprocessor_config.json's least and most pixels. Where a processor writes more than that,
it says which class writes (`writer`) and whose ids the special tokens have that it may write.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from math import isqrt
from typing import Any

from ..base.errors import RecipeError
from .configuration import READERS, reason
from .fields import RecipeFields
from .knobs import Refusals
from .model_sizes import Sizes
from .processors import filmed, processed, processor, written

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


def read_sizes(value: Any, field: str = "image_size") -> tuple[str, ...] | None:
    """Return "width x height" of images, of a side alone too. Raises RecipeError about `field`."""
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
            raise RecipeError(field, one, rest)
        sizes.append(f"{width}x{height}")
    return tuple(sizes)


def frees_late_in_backward(shape: Sizes) -> bool:
    """Tell whether a layer's last gradient is freed by the layer before it.

    Gemma 4's layers end with a product in place.
    """
    reader = reader_of(shape)
    return bool(reader and reader.get("frees_late"))


def largest(shape: Sizes) -> tuple[str, ...] | None:
    """Return the size of an image that becomes as many tokens as an image can."""
    reader = reader_of(shape)
    if reader is None:
        return None
    if "largest" in reader:
        return (reader["largest"],)
    side = isqrt(reader["size"].get("longest_edge", 0))
    side = side or shape.settings["vision_config"]["image_size"]
    return (f"{side}x{side}",)


def cuts(shape: Sizes) -> bool:
    """Tell whether the processor makes images of more than some pixels smaller."""
    return "longest_edge" in READERS[shape.family]["size"]


def most_pixels(recipe: RecipeFields) -> int:
    """Return the pixels to which the processor makes larger images smaller."""
    reader = READERS[recipe.shape.family]
    if reader["tokens"]:
        return recipe.shape.settings["vision_config"]["image_size"] ** 2
    if not cuts(recipe.shape):
        return MOST_SIDE**2
    return recipe.max_pixels or reader["size"]["longest_edge"]


def least_pixels(recipe: RecipeFields) -> int:
    """Return the least `max_pixels` that can be said, 0 where none is left to choose."""
    is_open = recipe.images and not recipe.max_pixels and cuts(recipe.shape)
    return READERS[recipe.shape.family]["size"].get("shortest_edge", 0) if is_open else 0


def rounded(recipe: RecipeFields, pixels: int) -> int:
    """Return the pixels of as many whole tokens, at most `pixels`."""
    own = processor(recipe.shape, None)
    # The model merges merge_size × merge_size patches into one token.
    area = (own.patch_size * own.merge_size) ** 2
    return pixels // area * area


@lru_cache(maxsize=128)
def _tokens(
    shape: Sizes,
    max_pixels: int | None,
    height: int,
    width: int,
) -> int:
    """Return the tokens of one image that is merged of patches.

    Raises RecipeError where the processor refuses it.
    """
    own = processor(shape, max_pixels)
    try:
        patches = own.get_number_of_image_patches(height, width, {})
    except ValueError as error:  # too long and narrow
        raise _refused(height, width, error) from None
    return patches // own.merge_size**2


def _refused(
    height: int,
    width: int,
    error: ValueError,
    field: str = "image_size",
) -> RecipeError:
    rest = f"the processor refuses it: {reason(error)}"
    return RecipeError(field, f"{width}x{height}", rest)


def tokens(recipe: RecipeFields) -> list[int]:
    """Return the tokens of each of a sample's images."""
    reader = READERS[recipe.shape.family]
    image = recipe.shape.settings[reader["image"]]
    return [ids.count(image) for ids in marked(recipe)]


def marked(recipe: RecipeFields) -> list[list[int]]:
    """Return of each image the ids that stand for it, those around and within it included."""
    shape = recipe.shape
    reader = READERS[shape.family]
    settings = shape.settings
    sizes = tuple(sides(recipe))
    if not sizes:
        return []
    if "writer" in reader:
        return [list(ids) for ids in written(shape, recipe.max_pixels, sizes)]
    counts: list[int]
    if reader["tokens"]:
        setting: Any = settings
        for part in reader["tokens"].split("."):
            setting = setting[part]
        counts = [setting] * len(sizes)
    elif "counts" in reader:
        counts = _processed(recipe, sizes)[reader["counts"]].tolist()
    else:
        counts = [_tokens(shape, recipe.max_pixels, *each) for each in sizes]
    around = [settings[name] for name in reader["around"]]
    image = settings[reader["image"]]
    return [[*around[:1], *[image] * count, *around[1:]] for count in counts]


def shown(recipe: RecipeFields) -> list[int]:
    """Return the ids that stand for a sample's images and its video."""
    if not reads(recipe):
        return []
    ids = []
    for of_image in marked(recipe):
        ids += of_image
    if recipe.video_frames:
        reader = READERS[recipe.shape.family]
        around = [recipe.shape.settings[name] for name in reader["around"]]
        _, of_video = _filmed(recipe)
        ids += [*around[:1], *of_video, *around[1:]]
    return ids


def with_pixels(shape: Sizes, precision: str) -> str:
    """Return `precision`, or one whose weights multiply pixels as the processor hands them on."""
    reader = reader_of(shape)
    return "bf16-mixed" if reader and "pixels" in reader else precision


def sft_reads(recipe: RecipeFields) -> bool:
    """Tell whether TRL's SFTTrainer trains on a recipe's samples with images."""
    reader = reader_of(recipe.shape)
    return reader is not None and "without_sft" not in reader and not recipe.video_frames


def special(shape: Sizes) -> list[int]:
    """Return the ids of which a tokenizer makes no text."""
    reader = READERS[shape.family]
    names = {reader["image"], *reader["around"]}
    for record in (reader, reader.get("video", {})):
        names |= set(record.get("ids", {}).values())
    return [shape.settings[name] for name in names if name]


def reads(recipe: RecipeFields) -> bool:
    """Tell whether a sample has images or a video, of which all is said that a model asks."""
    reader = reader_of(recipe.shape)
    if reader is None or (recipe.video_frames and "video" not in reader):
        return False
    is_said = recipe.images is None or recipe.image_size is not None
    is_film_said = recipe.video_frames is None or recipe.video_size is not None
    return is_said and is_film_said


def _filmed(recipe: RecipeFields) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return what the processor makes of a sample's video. Raises RecipeError if it refuses."""
    width, height = map(int, (recipe.video_size or "").split("x"))
    frames = recipe.video_frames or 0
    try:
        return filmed(recipe.shape, frames, height, width)
    except ValueError as error:
        raise _refused(height, width, error, "video_size") from None


def _processed(recipe: RecipeFields, sizes: tuple[tuple[int, int], ...]) -> dict[str, Any]:
    """Return what the processor makes of a sample's images. Raises RecipeError if it refuses."""
    try:
        return processed(recipe.shape, recipe.max_pixels, sizes)
    except ValueError as error:  # too long and narrow
        raise _refused(*max(sizes, key=lambda each: max(each) / min(each)), error) from None


def most_read(recipe: RecipeFields) -> int:
    """Return the elements of the largest tensor whose values a tower reads, as far as known.

    Gemma 4's compares each patch with each token, and drops the tokens that have none; then it
    looks for each channel of them among the embedded text.
    """
    if not recipe.images or "counts" not in READERS[recipe.shape.family]:
        return 0
    own = processor(recipe.shape, None)
    patches = own.max_soft_tokens * own.pooling_kernel_size**2
    compared = recipe.images * patches * own.max_soft_tokens
    return recipe.batch_size * max(compared, recipe.seq_len * recipe.shape.hidden_size)


def pixels(recipe: RecipeFields) -> dict[str, Any]:
    """Return what the processor makes of a micro-batch's images and videos, on the CPU.

    They are real tensors. Images are black, and pixels are zeros then.
    """
    import torch

    of_sample: dict[str, Any] = {}
    if recipe.images:
        of_sample |= _processed(recipe, tuple(sides(recipe)))
    if recipe.video_frames:
        of_sample |= _filmed(recipe)[0]
    made = {}
    samples = recipe.batch_size
    # what only the processor itself reads
    own = (READERS[recipe.shape.family].get("counts"), "aspect_ratios")
    for name, value in of_sample.items():
        if name in own:
            continue
        if value.is_meta:
            made[name] = torch.zeros(samples * value.shape[0], *value.shape[1:], dtype=value.dtype)
        else:
            made[name] = torch.cat([value] * samples)
    return made


def refusals(recipe: Any) -> Refusals:
    """Return images that a model does not read, or not so."""
    shape = recipe.shape
    reader = reader_of(shape)
    for name in ("images", "image_size", "max_pixels"):
        known = ", ".join(READERS)
        allowed = f"{shape.name} reads no images in a recipe: {known} do"
        yield name, reader is None and getattr(recipe, name), allowed
    yield from _video_refusals(recipe, reader or {})
    if reader is None:
        return
    yield "image_size", recipe.image_size and not recipe.images, "say images, how many a sample has"
    allowed = "the processor's tokens depend on it: say width and height, such as '1024x768'"
    yield "image_size", recipe.images and not recipe.image_size, allowed
    allowed = f"{shape.name} makes every image the same size"
    if not reader["tokens"]:
        allowed = f"the processor of {shape.name} cuts an image into pieces by sizes of its own"
    yield "max_pixels", recipe.max_pixels and not cuts(shape), allowed
    least = reader["size"].get("shortest_edge", 1) if cuts(shape) else 1
    is_less = recipe.max_pixels and recipe.max_pixels < least
    yield "max_pixels", is_less, f"the processor makes smaller images {least:,} pixels large"
    fails = reader.get("without_sft", "")
    yield "trainer", fails and recipe.trainer == "sft", fails
    yield from _dtype_refusals(recipe, reader)
    yield "sharding", recipe.sharding, "samples with images are modelled on one device"
    # SFTTrainer itself refuses packing and padding_free for images
    for name in ("lengths", "completion_lengths", "pad_to_multiple_of", "packing", "padding_free"):
        allowed = "samples with images have one length here, and rows of their own"
        yield name, getattr(recipe, name), allowed
    needed = len(shown(recipe))
    what = "images and video" if recipe.video_frames else "images"
    allowed = f"the {what} of a sample are {needed:,} tokens, and text needs some more"
    yield "seq_len", recipe.seq_len <= needed, allowed


def _video_refusals(recipe: Any, reader: Mapping[str, Any]) -> Refusals:
    """Return videos that a model does not read, or not so."""
    frames = recipe.video_frames
    knows = [family for family, each in READERS.items() if "video" in each]
    allowed = f"{recipe.shape.name} reads no video in a recipe: {', '.join(knows)} do"
    for name in ("video_frames", "video_size"):
        yield name, "video" not in reader and getattr(recipe, name), allowed
    allowed = "say video_frames, how many of a video a sample has"
    yield "video_size", recipe.video_size and not frames, allowed
    allowed = "the processor's tokens depend on it: say width and height, such as '640x360'"
    yield "video_size", frames and not recipe.video_size, allowed
    allowed = "SFTTrainer's collator hands on images alone: say 'transformers'"
    yield "trainer", frames and recipe.trainer == "sft", allowed


def _dtype_refusals(recipe: Any, reader: Mapping[str, Any]) -> Refusals:
    """Return weights that cannot be multiplied with the pixels as the processor hands them on."""
    made = reader.get("pixels")
    computes = recipe.weights_dtype
    is_cast = recipe.precision.endswith("-mixed")
    allowed = f"pixels come in {made}: say 'bf16-mixed', 'fp16-mixed' or 'bf16-true'"
    yield "precision", recipe.images and made and not is_cast and computes != made, allowed
