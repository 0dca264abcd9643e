"""The denoisers of diffusers' pipelines: where their configuration lies, and whose it is like."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base.data import data_path
from ..base.errors import RecipeError

# Image and video models by name, whose training `diffusion.py` describes.
MODELS: dict[str, dict[str, Any]] = json.loads(
    data_path("diffusion_models.json").read_text(encoding="utf-8"),
)
INDEX = "model_index.json"  # of a pipeline, which has its denoiser in one of the first two
FOLDERS = ("unet", "transformer", ".")


def config_file(path: str) -> Path | None:
    """Return the denoiser's configuration at `path`; None where there is none.

    That is a pipeline's folder or index, a denoiser's folder, or the file itself.
    """
    given = Path(path)
    if given.name == INDEX:
        given = given.parent
    elif given.suffix == ".json":
        return given
    files = (given / folder / "config.json" for folder in FOLDERS)
    return next((file for file in files if file.is_file()), None)


def published_like(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the published model of a configuration's architecture, of its sizes if there is one.

    None where there is none.
    """
    alike = [record for record in MODELS.values() if _is_like(config, record["config"])]
    same = [record for record in alike if is_of(record, config)]
    return next(iter([*same, *alike]), None)


def is_of(record: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Return whether a configuration has all sizes that a published model's says."""
    return record["config"].items() <= config.items()


def _is_like(config: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    embeds_alike = config.get("addition_embed_type") == own.get("addition_embed_type")
    # the VAE's; of Wan's those that continue an image have more
    reads_alike = own.get("in_channels") in (None, config.get("in_channels"))
    return config.get("_class_name") == own["_class_name"] and embeds_alike and reads_alike


def refuse_as_recipe(model: str, config: Any) -> None:
    """Raise RecipeError, which names the command, where `config` is diffusers' own.

    `model` is the path that a person gave, or "" where there is none.
    """
    if not isinstance(config, Mapping) or "_class_name" not in config or "model_type" in config:
        return
    rest = (
        f"it is the configuration of diffusers' {config['_class_name']}, and recipes train "
        "transformers' models: "
    )
    if published_like(config):
        path = shlex.quote(model) if model else "FOLDER"
        rest += f"vramlab diffusion {path} simulates diffusers' own step, "
    rest += (
        "simulate(model=…, batch=…) takes the module, "
        "vramlab run --gpu CARD -- python train.py its script"
    )
    raise RecipeError("model", model or config["_class_name"], rest)
