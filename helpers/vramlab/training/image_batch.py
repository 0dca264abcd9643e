"""One micro-batch of random samples with images, as a processor and its collator make it."""

from typing import Any

import torch

from ..base.errors import needing
from ..recipe import images
from ..recipe.recipe import Recipe

NO_LABEL = -100  # images have none


def image_batch(recipe: Recipe, generator: torch.Generator | None) -> dict[str, Any]:
    """Return ids, masks, labels and pixels, real tensors on the CPU.

    A sample begins with its images; the text after them is random.
    """
    reader = images.READERS[recipe.shape.family]
    settings = recipe.shape.settings
    image = settings[reader["image"]]
    # Ids that stand for the images, with those around them, in the order of the images.
    shown = [number for ids in images.marked(recipe) for number in ids]
    size = (recipe.batch_size, recipe.seq_len - len(shown))
    # ids of images are the vocabulary's last; text has none of them
    names = {reader["image"], *reader["around"], *filter(None, reader.get("ids", {}).values())}
    special = [settings[name] for name in names]
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
    if reader["types"]:
        batch[reader["types"]] = marked.long()
    if recipe.trainer == "sft":
        return _by_trl(batch)
    return batch | {"labels": ids.masked_fill(ids == image, NO_LABEL)}


@needing("trainer='sft'")
def _by_trl(processed: dict[str, Any]) -> dict[str, Any]:
    """Return what TRL's collator makes of what a processor made: images have labels there."""
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    def processor(**unused: Any) -> dict[str, Any]:
        return processed

    own: Any = processor
    collator = DataCollatorForVisionLanguageModeling(own)
    return collator([{"text": "", "images": []}])
