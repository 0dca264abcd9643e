"""One micro-batch of random samples with images or videos, as a processor makes it."""

from typing import Any

import torch

from ..base.errors import needing
from ..recipe import images
from ..recipe.recipe import Recipe

NO_LABEL = -100  # images have none
VIDEO = 2  # the type of its tokens, where those of images are 1


def image_batch(recipe: Recipe, generator: torch.Generator | None) -> dict[str, Any]:
    """Return ids, masks, labels and pixels, real tensors on the CPU.

    A sample begins with its images and its video; the text after them is random.
    """
    reader = images.READERS[recipe.shape.family]
    settings = recipe.shape.settings
    image = settings[reader["image"]]
    # Ids that stand for the images, with those around them, then those of a video.
    shown = images.shown(recipe)
    size = (recipe.batch_size, recipe.seq_len - len(shown))
    # ids of images are the vocabulary's last; text has none of them
    special = images.special(recipe.shape)
    text = torch.randint(min(special), size, generator=generator)
    before = torch.tensor(shown, dtype=torch.int64).expand(recipe.batch_size, -1)
    ids = torch.cat([before, text], dim=1)
    # PaliGemma's say which tokens are an answer, which is all text here
    marked = ids != image if reader.get("types_of_text") else ids == image
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        **images.pixels(recipe),
    }
    labels = ids.masked_fill(ids == image, NO_LABEL)
    types = marked.long()
    if recipe.video_frames:
        is_film = ids == settings[reader["video"]["token"]]
        labels = labels.masked_fill(is_film, NO_LABEL)
        types = types.masked_fill(is_film, VIDEO)
    if reader["types"]:
        batch[reader["types"]] = types
    if recipe.trainer == "sft":
        return _by_trl(batch)
    return batch | {"labels": labels}


@needing("trainer='sft'")
def _by_trl(processed: dict[str, Any]) -> dict[str, Any]:
    """Return what TRL's collator makes of what a processor made: images have labels there."""
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    def processor(**unused: Any) -> dict[str, Any]:
        return processed

    own: Any = processor
    collator = DataCollatorForVisionLanguageModeling(own)
    return collator([{"text": "", "images": []}])
