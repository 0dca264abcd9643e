"""Processors of images and videos, made without a download, and what they make of a sample.

Of pixels the sizes alone count, so that what they become are meta tensors. Whatever a model reads
of them besides, such as how they are cut, are real numbers.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import Any

from ..base.errors import needing
from ..private.of_transformers import counting_module
from .configuration import READERS
from .model_sizes import Sizes

Sides = tuple[tuple[int, int], ...]  # height and width of each of a sample's images
UNKNOWN = 0  # the id of a token that only a tokenizer knows; memory does not depend on it


def _class(path: str) -> Any:
    """Return a class of transformers by its path in `transformers.models`."""
    module, _, name = path.rpartition(".")
    with needing("images"):
        return getattr(counting_module(f"transformers.models.{module}"), name)


def _value(shape: Sizes, said: Any) -> Any:
    """Return what a record says: a number, a setting of the tower, or ".…" one of the model."""
    settings = shape.settings
    tower = settings["vision_config"]
    if said == "patches":  # of what the tower sees at once
        return (tower["image_size"] // tower["patch_size"]) ** 2
    if not isinstance(said, str):
        return said
    return settings[said[1:]] if said.startswith(".") else tower[said]


def _values(shape: Sizes, said: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _value(shape, value) for name, value in said.items()}


@lru_cache(maxsize=32)
def processor(shape: Sizes, max_pixels: int | None) -> Any:
    """Return the image processor of a model."""
    reader = READERS[shape.family]
    size = _values(shape, reader["size"])
    if reader["tokens"]:  # every image becomes one of that side
        side = shape.settings["vision_config"]["image_size"]
        size = {"height": side, "width": side}
    if max_pixels:
        size["longest_edge"] = max_pixels
    arguments = _values(shape, reader["arguments"])
    if size:
        arguments["size"] = size
    return _class(reader["processor"])(**arguments)


@lru_cache(maxsize=32)
def processed(shape: Sizes, max_pixels: int | None, sides: Sides) -> dict[str, Any]:
    """Return what the processor makes of a sample's images; of pixels the size alone."""
    with needing("images"):
        import torch
        from PIL import Image
    own = processor(shape, max_pixels)
    if READERS[shape.family].get("tiles"):
        return _tiled(own, sides)
    pictures = [Image.new("RGB", (width, height)) for height, width in sides]
    # The images of one sample stand together, as TRL's collator hands them on.
    # Values are dropped, so they are not scaled either, which takes seconds of a large photo.
    unscaled = {"do_rescale": False, "do_normalize": False}
    made = dict(own(images=[pictures], return_tensors="pt", **unscaled))
    made["pixel_values"] = made["pixel_values"].to("meta", torch.float32)  # as when scaled
    return made


def _tiled(own: Any, sides: Sides) -> dict[str, Any]:
    """Return what Llama 4's processor makes of images: tiles of one size, and all of each smaller.

    `Llama4ImageProcessor._preprocess` is that, but it resizes with torchvision.
    """
    import torch

    module = counting_module(type(own).__module__)
    resolutions = module.find_supported_resolutions(own.max_patches, own.size)
    ratios = []
    tiles = 0
    for each in sides:
        best = module.get_best_fit(each, torch.tensor(resolutions), own.resize_to_max_canvas)
        rows = int(best[0]) // own.size.height
        columns = int(best[1]) // own.size.width
        ratios.append([rows, columns])
        # An image of one tile is not there once more.
        tiles += rows * columns + (rows * columns > 1)
    shape = (tiles, 3, own.size.height, own.size.width)
    pixels = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return {"pixel_values": pixels, "aspect_ratios": torch.tensor(ratios)}


@lru_cache(maxsize=128)
def written(shape: Sizes, max_pixels: int | None, sides: Sides) -> tuple[tuple[int, ...], ...]:
    """Return for each of a sample's images the ids that the processor writes in its place."""
    reader = READERS[shape.family]
    made = processed(shape, max_pixels, sides)
    writer, read = _writer(shape, reader, image_processor=processor(shape, max_pixels))
    texts = [writer.replace_image_token(made, index) for index in range(len(sides))]
    return tuple(map(read, texts))


def _writer(
    shape: Sizes,
    record: Mapping[str, Any],
    **parts: Any,
) -> tuple[Any, Callable[[str], tuple[int, ...]]]:
    """Return a processor that writes special tokens, and what reads them as ids.

    It is a tokenizer of nothing else.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    ids = {}
    for token, name in record["ids"].items():
        ids[token] = shape.settings[name] if name else UNKNOWN
    # Tokens of one id need numbers of their own.
    words = list(ids)
    rows = {token: number for number, token in enumerate(words)}
    inner = Tokenizer(WordLevel(rows, unk_token=words[0]))
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=inner)
    tokenizer.add_tokens(words, special_tokens=True)

    def read(text: str) -> tuple[int, ...]:
        return tuple(ids[words[row]] for row in tokenizer(text).input_ids)

    kind = _class(record["writer"])
    # It asks for its video processor's class too, which transformers lacks without torchvision.
    unasked = {"check_argument_for_proper_class": lambda *unused: None}
    own = type(kind.__name__, (kind,), unasked)
    said = _values(shape, record.get("said", {}))
    return own(tokenizer=tokenizer, **parts, **said), read


@lru_cache(maxsize=8)
def video_processor(shape: Sizes) -> Any:
    """Return the video processor of a model."""
    reader = READERS[shape.family]
    record = reader["video"]
    size = _values(shape, record["size"])
    arguments = _values(shape, reader["arguments"])
    return _class(record["processor"])(**arguments, size=size)


@lru_cache(maxsize=32)
def filmed(
    shape: Sizes,
    frames: int,
    height: int,
    width: int,
) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return what the processor makes of a video, and the ids that it writes in its place.

    The frames are those that it samples, at its own rate. Raises ValueError where it refuses them.
    """
    import torch

    reader = READERS[shape.family]
    record = reader["video"]
    if "fps" not in record:  # every frame becomes one of the tower's side
        side = shape.settings["vision_config"]["image_size"]
        pixels = torch.empty((1, frames, 3, side, side), device="meta")
        made = {"pixel_values_videos": pixels}
        writer, read = _writer(shape, reader)
        return made, read(writer.replace_video_token(made, 0))
    own = video_processor(shape)
    made = _patched(own, frames, height, width)
    times = VideoTimes(fps=record["fps"], frames_indices=list(range(frames)))
    writer, read = _writer(shape, record, video_processor=own)
    ids = read(writer.replace_video_token(made | {"video_metadata": [times]}, 0))
    if record.get("seconds"):
        made["second_per_grid_ts"] = torch.tensor([own.temporal_patch_size / record["fps"]])
    return made, ids


@dataclass
class VideoTimes:
    """When the frames of a video were: transformers' `VideoMetadata`, which it also writes to."""

    fps: float
    frames_indices: list[int]


def _patched(own: Any, frames: int, height: int, width: int) -> dict[str, Any]:
    """Return what Qwen's processor makes of a video: `_preprocess` resizes with torchvision."""
    import torch

    resize = counting_module(type(own).__module__).smart_resize
    arguments = {
        "height": height,
        "width": width,
        "factor": own.patch_size * own.merge_size,
        "min_pixels": own.size["shortest_edge"],
        "max_pixels": own.size["longest_edge"],
    }
    if "num_frames" in signature(resize).parameters:  # its pixels are those of all frames
        arguments |= {"num_frames": frames, "temporal_factor": own.temporal_patch_size}
    rows, columns = (side // own.patch_size for side in resize(**arguments))
    patches = own.get_num_of_video_patches(frames, height, width, {})
    grid = [patches // (rows * columns), rows, columns]
    if math.prod(grid) != patches:
        raise ValueError(f"a video of {patches} patches is no grid of {rows} × {columns}")
    values = 3 * own.temporal_patch_size * own.patch_size**2
    return {
        "pixel_values_videos": torch.empty((patches, values), device="meta"),
        "video_grid_thw": torch.tensor([grid]),
    }
