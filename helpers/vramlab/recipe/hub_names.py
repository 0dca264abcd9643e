"""Names of the Hugging Face hub: which architecture one shares, what the local cache has.

Nothing here asks the network but `download`, which is called where the user says so.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..base.data import data_path
from ..base.errors import RecipeError, needing

KNOWN = json.loads(data_path("hub_names.json").read_text(encoding="utf-8"))
ENDING = re.compile(f"(?:{'|'.join(map(re.escape, KNOWN['suffixes']))}|{KNOWN['dates']})$")
LONGEST = 192  # letters of a name: huggingface_hub's 96 for each half (utils/_validators.py)
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")  # organisation/model


def stems(name: str) -> Iterator[str]:
    """Yield a model's name without organisation, then without one ending after the other.

    The names are in lower case.
    """
    stem = name.lower().rpartition("/")[2]
    yield stem
    while match := ENDING.search(stem):
        stem = stem[: match.start()]
        yield stem


def shared_entry(name: str, spellings: Mapping[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Return the catalogue's entry whose architecture `name` shares, and the settings that differ.

    It is None where none does. A name with an ending of KNOWN's only is taken for one of the entry
    without it.
    """
    name_stems = list(stems(name))
    for stem in name_stems:
        listed = KNOWN["names"].get(stem)
        if listed:
            return spellings[listed["entry"]], listed.get("differs", {})
    for stem in name_stems:
        if stem in spellings:
            return spellings[stem], {}
    return None


def published_name(name: str, entry: Mapping[str, Any]) -> str:
    """Return the hub's name of what `name` says: as it is, or under the entry's organisation."""
    organisation = entry["hub_id"].partition("/")[0]
    return name if "/" in name else f"{organisation}/{name}"


def cache_folder() -> Path:
    """Return the hub's local cache, as huggingface_hub finds it."""
    home = os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser()
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")


def cached_config(name: str) -> Path | None:
    """Return the path of the config.json in the local cache of a hub's name.

    Its main revision comes first.
    """
    if not HUB_NAME.fullmatch(name) or ".." in name or len(name) > LONGEST:
        return None
    folder = cache_folder() / f"models--{name.replace('/', '--')}"
    snapshots = sorted(folder.glob("snapshots/*/config.json"))
    main = folder / "refs" / "main"
    if main.is_file():
        revision = main.read_text(encoding="utf-8").strip()
        # False sorts before True: the snapshot of the main branch first, the others in their
        # order.
        snapshots.sort(key=lambda path: path.parent.name != revision)
    return snapshots[0] if snapshots else None


@needing("--download")
def download(name: str) -> None:
    """Fetch a model's config.json, and no other file, into the hub's local cache.

    Raises RecipeError where it cannot.
    """
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download(name, "config.json")
    except Exception as error:  # no network, no such model, a gated one, a name that is none
        why = " ".join(str(error).split())[:200].rstrip(".")
        kind = type(error).__name__
        rest = (
            f"its config.json could not be downloaded ({kind}: {why}); a gated model wants "
            "`hf auth login` first, and a folder that has the file works without the hub"
        )
        raise RecipeError("model", name, rest) from error
