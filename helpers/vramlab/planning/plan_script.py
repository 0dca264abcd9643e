"""A plan's answer as a program for transformers' Trainer or one of TRL's, from the files in `templates/`.

For several GPUs there is also FSDP's or DeepSpeed's configuration and a Slurm script. What decides the memory is said
once, in the arguments; the program reads its recipe off them and stops where the card cannot hold it.

Names come from configurations that others wrote, so no template writes text as it is: see `_filled`.
"""

import ast
import dataclasses
import json
import re
import shlex
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from ..recipe.arguments import arguments_class, settings
from ..recipe.families import TASKS
from ..recipe.knobs import knobs, python_arguments, unchecked
from ..recipe.options import TRL, LoRA
from ..recipe.recipe import Recipe
from ..report.errors import RecipeError, needing
from ..report.report import installed, repository
from .search_space import counted_as, to_install
from .source_text import Code, docstring, identifier, literal

TEMPLATES = Path(__file__).parent / "templates"
# By trainer: what its samples have, what becomes of longer ones, the learning rate of full training (TRL's own where
# preferences are learned). By module: what a program may import.
PROGRAMS = json.loads((TEMPLATES / "programs.json").read_text(encoding="utf-8"))
ADAPTERS_TIMES = 10  # the learning rate of full training (chapter 05)
OPTIONAL = ("peft", "trl", "bitsandbytes", "deepspeed", "liger-kernel")
TESTED = ("torch", "transformers", "accelerate", "datasets", *OPTIONAL)
PER_NODE = 8  # GPUs


@needing("--write")
def scripts(recipe: Recipe, name: str, planned: dict[str, Any]) -> dict[str, str]:
    """File name to text of the program `name` and of what it takes along.

    `planned`: of the plan version, cards, peak, source, process, tier, usable, packing, expandable_segments. Raises
    RecipeError where there is no template or the `Trainer` cannot train like this.
    """
    if not name.isprintable():
        rest = "line breaks and control characters cannot stand in the lines that start the program"
        raise RecipeError("path", name, rest)
    if recipe.shape.task != "causal-lm" and recipe.trainer != "reward":
        raise RecipeError("task", recipe.shape.task, "programs are written for causal-lm")
    sharding, lora, stem = recipe.sharding, recipe.lora, Path(name).stem
    beside = f"{stem}.{sharding.engine}.json" if sharding and sharding.engine != "ddp" else ""
    ranks = sharding.world_size if sharding else 1
    starter = f"torchrun --nproc-per-node {ranks}" if ranks > 1 or beside else "python"
    if ranks > PER_NODE:
        starter, started = "sbatch", f"{stem}.sbatch"
    else:
        started = name
    arguments, config = _arguments(recipe)
    own = PROGRAMS["trainers"][recipe.trainer]
    rate = own["learning_rate"] * (ADAPTERS_TIMES if lora else 1)
    said = planned | dict(
        recipe=recipe,
        own=own,
        longer=Code(own["longer"]),
        trl=TRL.get(recipe.trainer),
        beside=beside,
        launch=f"{starter} {shlex.quote(started)}",
        words=words(recipe),
        pins=textwrap.wrap(" ".join(_pins(recipe)), 100, subsequent_indent=" " * 8, break_on_hyphens=False),
        model=recipe.shape.hub_id or (recipe.model if isinstance(recipe.model, str) else "path/to/the/model"),
        model_class=TASKS[recipe.shape.task].auto_class,
        learning_rate=Code(f"{rate:.0e}".replace("e-0", "e-")),
        arguments_class=arguments_class(recipe).__name__,
        arguments=arguments,
        unseen=_unseen(recipe),
        witness=Code("predict" if counted_as(recipe) is recipe else "simulate"),
        adapters=_adapters(recipe) if lora else {},
        # TRL's trainers give the model its adapters themselves, in PEFT's default dtype
        gives_adapters=recipe.trainer in TRL and lora and (lora.autocast_adapter_dtype or recipe.quantization),
    )
    head = _filled("train.txt", said, write=str)
    said["head"] = head.replace("%(prog)", "%[prog]")  # argparse would fill it in, and fail at other percent signs
    program = _filled("train.py", said | {"imports": Code()}, write=literal)
    found = {name: _filled("train.py", said | {"imports": _imports(program)}, write=literal)}
    if beside:
        found[beside] = json.dumps(config, indent=2) + "\n"
    if ranks > 1:
        nodes = next(n for n in range(1, ranks + 1) if ranks % n == 0 and ranks // n <= PER_NODE)
        slurm = dict(script=name, sbatch=f"{stem}.sbatch", gpus=ranks, nodes=nodes, per_node=ranks // nodes)
        slurm["job"] = re.sub(r"[^\w.-]+", "-", stem, flags=re.ASCII)  # Slurm reads % in a file's name
        found[f"{stem}.sbatch"] = _filled("train.sbatch", slurm, write=_shell_word)
    return found


def _filled(name: str, said: dict[str, Any], write: Callable[[Any], str]) -> str:
    """The template `name` with what is `said`; `write` makes text of each value but `Code`, whatever the template."""
    return _templates(write).get_template(f"{name}.jinja").render(said)


@cache
def _templates(write: Callable[[Any], str]) -> Any:
    import jinja2

    def written(value: Any) -> str:
        if isinstance(value, jinja2.Undefined):
            return str(value)  # raises an error that names it
        return value if isinstance(value, Code) else write(value)

    files = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        trim_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        finalize=written,
    )
    files.filters |= {"docstring": docstring, "identifier": identifier}
    return files


def _shell_word(value: Any) -> str:
    return shlex.quote(str(value))


def _pins(recipe: Recipe) -> list[str]:
    """What pip is to install, with the versions that are installed here; vramlab itself only where it is installed."""
    needed = [name for name in TESTED if name not in OPTIONAL] + [*to_install(recipe)]
    versions = {name: installed(name) for name in TESTED if name in needed}
    pins = [f"{name}=={version.partition('+')[0]}" if version else name for name, version in versions.items()]
    return ["psutil", *pins, *(f"git+{address}" for address in [repository()] if address)]


def words(recipe: Recipe) -> str:
    """The recipe without its model."""
    said = str(unchecked(recipe, lengths=None)).replace(f"{recipe.name} · ", "", 1)
    return f"{said} · padded" if recipe.lengths else said


def _imports(program: str) -> Code:
    """The imports of what the program calls."""
    named = {node.id for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Name)}
    lines = []
    for module, names in PROGRAMS["imports"].items():
        used = [name for name in names.split() if name in named]
        listed = "(\n    " + ",\n    ".join(used) + ",\n)" if module == "transformers" else ", ".join(used)
        lines += [f"from {module} import {listed}"] if used else []
    return Code("\n".join(lines))


def _arguments(recipe: Recipe) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arguments that are not the defaults of their class, and those that memory always depends on; the content of the
    configuration's file, which they name)."""
    usual = {field.name: field.default for field in dataclasses.fields(arguments_class(recipe))}
    usual |= dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps", "optim"), ...)
    if recipe.trainer in TRL:  # whose defaults are other ones
        usual |= dict.fromkeys(("bf16", "activation_checkpointing", "gradient_checkpointing"), ...)
    wanted = {name: value for name, value in settings(recipe).items() if value != (usual.get(name) or False)}
    found = {name: value for name, value in wanted.items() if value is not None}
    config = {}
    for name in {"fsdp_config", "deepspeed"} & found.keys():
        found[name], config = Code("CONFIG"), wanted[name]
    if recipe.sharding and recipe.sharding.engine == "deepspeed" and recipe.sharding.stage == 3:  # else none is saved
        config["zero_optimization"] = config["zero_optimization"] | {"stage3_gather_16bit_weights_on_model_save": True}
    if "fsdp_config" in found:  # one rank reads the weights, the others get their shards from it
        config = config | {"cpu_ram_efficient_loading": True, "state_dict_type": "FULL_STATE_DICT"}
    if "use_liger_kernel" in found:  # Triton compiles for no CPU
        found["use_liger_kernel"] = Code("torch.cuda.is_available()")
    if "max_length" in found:
        found["max_length"] = Code("TOKENS")
    return found, config


def _unseen(recipe: Recipe) -> dict[str, Any]:
    """What `Recipe.from_training_arguments` cannot see in the arguments."""
    names = ("dtype", "attn_implementation", "lora", "quantization", "sharding")
    usual = Recipe(recipe.model, recipe.batch_size, trainer=recipe.trainer)
    found = {} if recipe.trainer in TRL else {"seq_len": Code("TOKENS")}
    found |= {"precision": recipe.precision} if recipe.precision.endswith("-true") else {}
    if recipe.lengths:
        found["lengths"] = Code(f"(TOKENS,) * {recipe.batch_size - 1} + ({int(recipe.lengths[-1])},)")
    said = dict(line.split("=", 1) for line in python_arguments(recipe, usual, literal=literal))
    return found | {name: Code(said[name]) for name in names if name in said}


def _adapters(recipe: Recipe) -> dict[str, object]:
    """Arguments of `LoraConfig` that are not its defaults; rank and scale always."""
    found = {}
    for name, knob in knobs(LoRA).items():
        value = getattr(recipe.lora, name)
        if name in ("r", "lora_alpha") or (knob.elsewhere and value != knob.default):
            found[name] = list(value) if isinstance(value, tuple) else value
    return found | {"task_type": TASKS[recipe.shape.task].peft}
