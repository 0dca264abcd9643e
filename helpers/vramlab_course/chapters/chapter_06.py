"""Chapter 06: the recorded quality of training on a base in 4 bits."""

import json
from contextlib import suppress
from functools import cache

from vramlab.report.errors import RecordError

from ..base_model import base_model_path


@cache
def recorded_quality() -> dict:
    """LoRA and QLoRA of the base model, as `data/base_model/quality_4bit.py` recorded them.

    Raises:
        RecordError: it has not been run.
    """
    with suppress(FileNotFoundError):
        return json.loads(base_model_path("quality_4bit.json").read_text(encoding="utf-8"))
    raise RecordError("quality_4bit.json is missing: run data/base_model/quality_4bit.py, which takes some minutes.")
