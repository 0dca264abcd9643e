"""The published models this package knows by name: `data/models/*.json`, one small file of facts each."""

import difflib
import json
from dataclasses import dataclass
from functools import cache

from ..report.data import data_path


@dataclass(frozen=True)
class Entry:
    """Published facts of one model."""

    name: str
    hub_id: str  # its name on the Hugging Face hub, for those who want the published weights
    task: str  # the head that `parameters` counts
    parameters: int  # shared ones once
    source: str  # where the facts are from
    config: str  # the configuration as JSON text
    aliases: tuple[str, ...] = ()  # hub ids of the same shape, such as the instruction-tuned variant


@cache
def catalogue() -> dict[str, Entry]:
    """Return the published models by name, families together, small ones first."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in data_path("models").glob("*.json")]
    found.sort(key=lambda d: (d["config"]["model_type"], d["parameters"]))
    entries = [Entry(**d | {"config": json.dumps(d["config"]), "aliases": tuple(d.get("aliases", ()))}) for d in found]
    return {entry.name: entry for entry in entries}


def model_names() -> list[str]:
    """Return the names of the catalogue, families together, small models first."""
    return list(catalogue())


@cache
def _spellings() -> dict[str, Entry]:
    """Return every spelling that finds an entry, in lower case: name, hub id and aliases, with and without organisation."""
    found = {}
    for entry in catalogue().values():
        for spelling in (*entry.aliases, entry.hub_id, entry.name):
            found[spelling.lower()] = found[spelling.lower().rpartition("/")[2]] = entry
    return found


def find(model: str) -> Entry | None:
    """Return the entry that `model` names in any spelling, None if there is none."""
    return _spellings().get(model.lower())


def closest(model: str) -> str | None:
    """Return the spelling in the catalogue that is most like `model`, None if nothing is near."""
    texts = (model.lower(), model.lower().rpartition("/")[2])
    return next((near for text in texts for near in difflib.get_close_matches(text, _spellings(), n=1)), None)
