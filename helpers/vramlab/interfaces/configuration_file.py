"""The settings in a file by which a program trains, and what the readers of such files share."""

import functools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..base.data import data_path
from ..base.errors import RecipeError
from ..base.files import read_text
from ..recipe.configuration import read_json_file
from ..recipe.options import INT8

RUN_IT = "or run the trainer itself: vramlab run --gpu CARD -- COMMAND"
IN_INT8 = {"quant_type": INT8, "prepare": False}
REENTRANT = "checkpointing is re-entrant in it; these figures are of the other kind"
# Of a program's weights under autocast, and without it: names of torch's dtypes to a recipe's
# precision.
MIXED = {"bfloat16": "bf16-mixed", "float16": "fp16-mixed", "float32": "fp32"}
TRUE = {"bfloat16": "bf16-true", "float16": "fp16-true"}


@functools.cache
def known_settings() -> dict[str, dict[str, Any]]:
    """Return what is known of each program's settings, by the program's name."""
    return json.loads(read_text(data_path("configurations.json")))


@dataclass
class Configuration:
    """What a file says: model, fields of a recipe, and `notes` in words.

    `arguments` are those of a Trainer's class, `kind`, whose reader makes the rest of the recipe;
    None where there are none. `asked` is the trainer that an option names, `asked_length` the
    tokens. `adapts_language_alone`: all linear layers are those of the language model, where the
    model reads images.
    """

    program: str
    path: Path
    values: dict[str, Any]
    asked: str | None = None
    asked_length: int | None = None
    model: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] | None = None
    kind: str | None = None
    notes: list[str] = field(default_factory=list)
    adapts_language_alone: bool = False

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting; `default` where it is left out or empty."""
        value = self.values.get(name)
        # An empty setting of a YAML is None, and programs take their default for it.
        return default if value is None else value

    def refuse(self, name: str, rest: str) -> RecipeError:
        """Return the error of a setting that cannot be taken, with its line where it has one."""
        lines = read_text(self.path).splitlines()
        sets = re.compile(rf"\W*{re.escape(name)}\b")
        line = next((f", line {i}" for i, text in enumerate(lines, 1) if sets.match(text)), "")
        return RecipeError(f"{self.path.name}{line}: {name}", self.values.get(name), rest)


def note_others(configuration: Configuration, read: Iterable[str] = ()) -> None:
    """Note how many settings move no memory, and which the program does not have.

    `read`: names of settings that are known by themselves.
    """
    known = known_settings()[configuration.program]
    all_known = {*known["mapped"], *known["neutral"], *read}
    for group in (known["refused"], known["unmodelled"]):
        for names in group.values():
            all_known.update(names)
    # What moves no memory is counted and not listed: such files have dozens of them.
    neutral = configuration.values.keys() & set(known["neutral"])
    if neutral:
        configuration.notes.append(f"{len(neutral)} settings move no memory of a step")
    others = sorted(configuration.values.keys() - all_known)
    if others:
        version = f"{configuration.program} {known['version']}"
        configuration.notes.append(f"no settings of {version}: {', '.join(others)}")


def take_ranks(configuration: Configuration, setting: str) -> None:
    """Take a setting's number of processes; without DeepSpeed or FSDP they are data parallel."""
    ranks = configuration.get(setting, 1)
    if ranks > 1:
        sharding = configuration.fields.setdefault("sharding", {"engine": "ddp", "stage": 0})
        sharding["world_size"] = ranks


def take_reentrant(configuration: Configuration) -> None:
    """Take over that layers are checkpointed re-entrantly, once the base is taken.

    It moves the memory of int8 layers alone: others keep the same, which a test holds.
    """
    fields = configuration.fields
    if fields.get("quantization", {}).get("quant_type") == INT8:
        fields["use_reentrant"] = True
    else:
        configuration.notes.append(REENTRANT)


def names_in(value: Any) -> list[str] | None:
    """Return names given as a list or in one text with commas; None for none."""
    if not value:
        return None
    if isinstance(value, str):
        value = value.split(",")
    return [name.strip() for name in value]


def take_sharding(configuration: Configuration) -> None:
    """Take DeepSpeed's stage and offloading, or FSDP's, which no Trainer's class reads then."""
    deepspeed = configuration.get("deepspeed")
    # `check_fsdp_config_kwargs_prefix` of axolotl and `_process_fsdp_args` of transformers take an
    # older name, such as fsdp_offload_params, for the one without its prefix.
    said = configuration.get("fsdp_config", {})
    fsdp = {name.removeprefix("fsdp_"): value for name, value in said.items()}
    # The reader of the Trainer's arguments would make a sharding of them once more.
    for name in ("deepspeed", "fsdp", "fsdp_config"):
        if configuration.arguments is not None:
            configuration.arguments.pop(name, None)
    if deepspeed:
        configuration.fields["sharding"] = _deepspeed(configuration, deepspeed)
    elif fsdp or configuration.get("fsdp"):
        words = str(configuration.get("fsdp", ""))
        # FSDP2's name for what FSDP1 called a sharding strategy, of which full_shard reshards and
        # shard_grad_op does not.
        reshards = fsdp.get("reshard_after_forward", True)
        # The Trainer's own name is the second (`_process_fsdp_args`).
        offloads = fsdp.get("offload_params") or fsdp.get("cpu_offload") or "offload" in words
        # The Trainer refuses its own switch beside FSDP's, so in such a file only this one is on.
        if fsdp.get("activation_checkpointing"):
            configuration.fields["gradient_checkpointing"] = True
        configuration.fields["sharding"] = {
            "engine": "fsdp",
            # Parameters that stay gathered between forward and backward are what ZeRO calls stage
            # 2.
            "stage": 3 if reshards and "shard_grad_op" not in words else 2,
            "offload": "parameters" if offloads else None,
        }


def _deepspeed(configuration: Configuration, said: Any) -> dict[str, Any]:
    """Return what DeepSpeed's JSON says, a path from here or from the file."""
    if isinstance(said, str):
        # Programs resolve it from where they are started, which for their own examples is a folder
        # above the YAML.
        places = [Path(said), *(folder / said for folder in configuration.path.absolute().parents)]
        found = [place for place in places if place.is_file()]
        if not found:
            rest = "that file is not here, nor beside or above the YAML: the stage stands in it"
            raise configuration.refuse("deepspeed", rest)
        said = read_json_file("deepspeed", found[0])
    zero = said.get("zero_optimization", {})
    offload = None
    # DeepSpeed allows offloaded parameters in stage 3 alone, and their states are then on the host
    # as well.
    if zero.get("offload_param", {}).get("device", "none") != "none":
        offload = "parameters"
    elif zero.get("offload_optimizer", {}).get("device", "none") != "none":
        offload = "optimizer"
    return {"engine": "deepspeed", "stage": zero.get("stage", 0), "offload": offload}
