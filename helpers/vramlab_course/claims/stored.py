"""The file of claims, `data/claims.json`, read once."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from vramlab.report.data import data_path


@cache
def stored(part: str) -> Any:
    """A part of the ledger's file: "claims", "sources" (key to name and title), "definitions" (expressions that several
    claims use) or "recipes" (what several start from)."""
    return json.loads(Path(data_path("claims.json")).read_text(encoding="utf-8"))[part]
