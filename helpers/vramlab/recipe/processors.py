"""Processors of images, made without a download, and what they make of a sample.

Of pixels the sizes alone count, so that what they become are meta tensors. Whatever a model reads
of them besides, such as how they are cut, are real numbers.
"""

from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
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
        from PIL import Image
    own = processor(shape, max_pixels)
    if READERS[shape.family].get("tiles"):
        return _tiled(own, sides)
    pictures = [Image.new("RGB", (width, height)) for height, width in sides]
    made = {}
    # The images of one sample stand together, as TRL's collator hands them on.
    for name, value in own(images=[pictures], return_tensors="pt").items():
        if hasattr(value, "dtype"):
            made[name] = value.to("meta") if value.is_floating_point() else value
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
    """Return for each of a sample's images the ids that the processor writes in its place.

    It writes special tokens, and a tokenizer of nothing else reads them.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    reader = READERS[shape.family]
    ids = {}
    for token, name in reader["ids"].items():
        ids[token] = shape.settings[name] if name else UNKNOWN
    # Tokens of one id need numbers of their own.
    words = list(ids)
    rows = {token: number for number, token in enumerate(words)}
    inner = Tokenizer(WordLevel(rows, unk_token=words[0]))
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=inner)
    tokenizer.add_tokens(words, special_tokens=True)
    made = processed(shape, max_pixels, sides)
    kind = _class(reader["writer"])
    # It asks for its video processor's class too, which transformers lacks without torchvision.
    unasked = {"check_argument_for_proper_class": lambda *unused: None}
    writer = type(kind.__name__, (kind,), unasked)(
        processor(shape, max_pixels),
        tokenizer,
        **_values(shape, reader["said"]),
    )
    texts = [writer.replace_image_token(made, index) for index in range(len(sides))]
    found = []
    for text in texts:
        found.append(tuple(ids[words[row]] for row in tokenizer(text).input_ids))
    return tuple(found)
