"""A plan's answer as a program for transformers' Trainer or one of TRL's, from `templates/`.

For several GPUs there is also FSDP's or DeepSpeed's configuration and a Slurm script. What decides
the memory is said once, in the arguments; the program reads its recipe off them and stops where the
card cannot hold it.

Names come from configurations that others wrote, so no template writes text as it is: see
`_filled`.
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

from ..base.errors import RecipeError, needing
from ..formulas.predict import knows
from ..recipe import cut_head, images, lora_modules
from ..recipe.arguments import arguments_class, settings
from ..recipe.families import TASKS
from ..recipe.knobs import knobs, python_arguments, unchecked
from ..recipe.options import TRL, LoRA
from ..recipe.process_context import loads_on_host
from ..recipe.recipe import Recipe
from ..report.report import format_bytes, installed, repository
from .counted import counted_as
from .question import Question
from .search_space import to_install
from .source_text import Code, docstring, identifier, literal

Arguments = dict[str, Any]

TEMPLATES = Path(__file__).parent / "templates"
# By trainer: what its samples have, what becomes of longer ones, the learning rate of full training
# (TRL's own where preferences are learned). By module: what a program may import.
PROGRAMS = json.loads((TEMPLATES / "programs.json").read_text(encoding="utf-8"))
ADAPTERS_TIMES = 10  # the learning rate of full training (chapter 05)
OPTIONAL = ("peft", "trl", "bitsandbytes", "deepspeed", "liger-kernel", "vllm")
TESTED = ("torch", "transformers", "accelerate", "datasets", *OPTIONAL)
PER_NODE = 8  # GPUs
WIDTH = 100  # characters of a line of the program's description
# Of vramlab, what the check of the memory calls; without vramlab a program trains unchecked.
CHECKED = ("Loop", "LoRA", "Quantization", "Recipe", "Sharding", "predict", "simulate")


def check_question(question: Question) -> None:
    """Raise RecipeError where no answer of `question` has a program, which takes no search."""
    recipe = question.plain
    check(unchecked(recipe, trainer="sft") if question.may_use_sft() else recipe)


def check(recipe: Recipe) -> None:
    """Raise RecipeError where there is no template for `recipe`."""
    task = recipe.shape.task
    if task == "image-text" and recipe.trainer != "sft":
        rest = "programs for samples with images are SFTTrainer's: say trainer='sft'"
        if not images.sft_reads(recipe):
            rest = "programs for samples with images are SFTTrainer's, which does not train these"
        raise RecipeError("trainer", recipe.trainer, rest)
    if task == "image-text" and not recipe.images:
        rest = "programs for a model that reads images train it on samples with some: say how many"
        raise RecipeError("images", recipe.images, rest)
    if task not in ("causal-lm", "image-text") and recipe.trainer != "reward":
        raise RecipeError("task", task, "programs are written for causal-lm and image-text")
    rest = "written programs train all of a base, or adapters: no part of it is frozen"
    if recipe.freeze:
        raise RecipeError("freeze", recipe.freeze, rest)


@needing("--write")
def scripts(
    recipe: Recipe,
    name: str,
    planned: dict[str, Any],
) -> dict[str, str]:
    """Return file name to text of the program `name` and of what it takes along.

    `planned`: of the plan version, cards, peak, source, process, tier, usable, packing,
    expandable_segments. Raises RecipeError where there is no template or the `Trainer` cannot train
    like this.
    """
    if not name.isprintable():
        rest = "line breaks and control characters cannot stand in the lines that start the program"
        raise RecipeError("path", name, rest)
    check(recipe)
    sharding = recipe.group
    stem = Path(name).stem
    beside = ""
    if sharding.engine != "ddp":
        beside = f"{stem}.{sharding.engine}.json"
    ranks = sharding.world_size
    arguments, config = _arguments(recipe)
    values = planned | {
        **_about_the_recipe(recipe),
        "arguments": arguments,
        "beside": beside,
        "launch": _launch(name, ranks, bool(beside)),
    }
    head = _filled("train.txt", values, write=str)
    # argparse would fill it in, and fail at other percent signs
    values["head"] = head.replace("%(prog)", "%[prog]")
    # What the program imports depends on what it calls, so it is written twice.
    without = values | {"imports": Code(), "checked": Code("Recipe")}
    named = _names(_filled("train.py", without, write=literal))
    imports = {
        "imports": _imports(named, values["adapters_class"]),
        "checked": Code(", ".join(name for name in CHECKED if name in named)),
    }
    texts = {name: _filled("train.py", values | imports, write=literal)}
    if beside:
        texts[beside] = json.dumps(config, indent=2) + "\n"
    if ranks > 1:
        texts[f"{stem}.sbatch"] = _slurm_script(name, ranks)
    return texts


def _about_the_recipe(recipe: Recipe) -> dict[str, Any]:
    """Return what the templates write of the recipe, but for its arguments."""
    trainer = PROGRAMS["images"] if recipe.images else PROGRAMS["trainers"][recipe.trainer]
    rate = trainer["learning_rate"]
    if recipe.adapters:
        rate *= ADAPTERS_TIMES
    pins = textwrap.wrap(
        " ".join(_pins(recipe)),
        WIDTH,
        subsequent_indent=8 * " ",
        break_on_hyphens=False,
    )
    path = recipe.model if isinstance(recipe.model, str) else "path/to/the/model"
    return {
        "recipe": recipe,
        "own": trainer,
        "longer": Code("refused" if _is_uncut(recipe) else trainer["longer"]),
        "uncut": _is_uncut(recipe),
        "shown_tokens": len(images.shown(recipe)),
        "trl": TRL.get(recipe.trainer),
        "trainer_class": _trainer_class(recipe),
        "words": textwrap.fill(words(recipe), WIDTH, subsequent_indent=4 * " "),
        "samples": textwrap.fill(trainer["samples"], WIDTH),
        "pins": pins,
        "cut_package": cut_head.PACKAGE,
        "address": repository() or "",
        "model": recipe.shape.hub_id or path,
        "model_class": TASKS[recipe.shape.task].auto_class,
        # 2e-05 becomes 2e-5, as people write it.
        "learning_rate": Code(f"{rate:.0e}".replace("e-0", "e-")),
        "arguments_class": arguments_class(recipe).__name__,
        "unseen": _unseen(recipe),
        "loads_on_host": loads_on_host(recipe),
        # two bytes for each number
        "merged_size": Code(format_bytes(2 * recipe.shape.num_parameters, digits=1)),
        "witness": _witness(recipe),
        "adapters": _adapters(recipe) if recipe.adapters else {},
        "adapters_class": recipe.peft.class_name if recipe.peft else "LoraConfig",
        "gives_adapters": _gives_adapters(recipe),
    }


def _witness(recipe: Recipe) -> Code:
    """Return the name of what knows the bytes of this very recipe."""
    is_known = counted_as(recipe) is recipe and knows(recipe)
    reads_images = images.reader_of(recipe.shape) is not None
    return Code("predict" if is_known and not reads_images else "simulate")


def _is_uncut(recipe: Recipe) -> bool:
    """Tell whether SFTTrainer joins samples as they are, and refuses to cut any."""
    return recipe.padding_free and not recipe.packing


def _trainer_class(recipe: Recipe) -> str:
    """Return the name of the class that trains, the program's own where weights need one."""
    if recipe.loop.optimizer_in_backward:
        return "InBackward"
    return TRL.get(recipe.trainer, "Trainer")


def _gives_adapters(recipe: Recipe) -> Any:
    """Tell whether TRL's trainer gives the model its adapters, which it does in PEFT's dtype."""
    lora = recipe.lora
    in_fp32 = recipe.peft or recipe.quantization or (lora and lora.autocast_adapter_dtype)
    return recipe.trainer in TRL and recipe.adapters and in_fp32


def _launch(name: str, ranks: int, has_config: bool) -> str:
    """Return the command that starts the program `name`."""
    if ranks > PER_NODE:
        return f"sbatch {shlex.quote(_sbatch(name))}"
    if ranks > 1 or has_config:
        return f"torchrun --nproc-per-node {ranks} {shlex.quote(name)}"
    return f"python {shlex.quote(name)}"


def _sbatch(name: str) -> str:
    """Return the name of the Slurm script that starts the program `name`."""
    return f"{Path(name).stem}.sbatch"


def _slurm_script(name: str, ranks: int) -> str:
    """Return the Slurm script that starts the program `name` on the fewest machines."""
    # Each machine gets as many ranks as any other.
    nodes = 1
    # The fewest machines that hold all ranks in equal parts.
    while ranks % nodes or ranks // nodes > PER_NODE:
        nodes += 1
    values = {
        "script": name,
        "sbatch": _sbatch(name),
        "gpus": ranks,
        "nodes": nodes,
        "per_node": ranks // nodes,
        # Slurm reads % in a file's name.
        "job": re.sub(
            r"[^\w.-]+",
            "-",
            Path(name).stem,
            flags=re.ASCII,
        ),
    }
    return _filled("train.sbatch", values, write=_shell_word)


def _filled(
    name: str,
    values: dict[str, Any],
    write: Callable[[Any], str],
) -> str:
    """Return the template `name` filled in with `values`.

    `write` makes text of each value but `Code`, whatever the template.
    """
    return _templates(write).get_template(f"{name}.jinja").render(values)


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
    """Return what pip is to install, with the versions that are installed here.

    Of a vLLM that is not here TRL's own extra says which versions it works with: the newest may be
    none of them, or need older transformers.
    """
    needed = {name for name in TESTED if name not in OPTIONAL}.union(to_install(recipe))
    pins = []
    extra = ""
    if "vllm" in needed and not installed("vllm"):
        needed.remove("vllm")
        extra = "[vllm]"
    for name in TESTED:
        if name in needed:
            version = installed(name)
            # PyPI has no local labels such as +cu130.
            public = version.partition("+")[0] if version else ""
            asked = name + extra if name == "trl" else name
            # A shell reads brackets as a pattern.
            pins.append(_shell_word(f"{asked}=={public}" if version else asked))
    return pins


def words(recipe: Recipe) -> str:
    """Return the recipe's words without its model."""
    # Once and from the left: a model's name could occur again in what follows.
    text = str(unchecked(recipe, lengths=None)).replace(
        f"{recipe.name} · ",
        "",
        1,
    )
    return f"{text} · padded" if recipe.lengths and not recipe.packing else text


def _names(program: str) -> set[str]:
    """Return the names that a program uses."""
    return {node.id for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Name)}


def _imports(named: set[str], adapters_class: str) -> Code:
    """Return the imports of what a program calls, which uses the names `named`."""
    lines = []
    for module, names in PROGRAMS["imports"].items():
        known = names.split()
        if module == "peft":
            known.insert(0, adapters_class)
        used = [name for name in known if name in named]
        if not used:
            continue
        listed = ", ".join(used)
        if module == "transformers":
            listed = "(\n    " + ",\n    ".join(used) + ",\n)"
        lines.append(f"from {module} import {listed}")
    return Code("\n".join(lines))


def _arguments(recipe: Recipe) -> tuple[Arguments, dict[str, Any]]:
    """Return what the program's arguments are, and the content of the configuration's file.

    Left out are defaults of their class but those that memory always depends on. The arguments name
    the configuration's file.
    """
    fields = dataclasses.fields(arguments_class(recipe))
    defaults = {field.name: field.default for field in fields}
    always = ["per_device_train_batch_size", "gradient_accumulation_steps", "optim"]
    if recipe.trainer in TRL:  # whose defaults are other ones
        always += ["bf16", "activation_checkpointing", "gradient_checkpointing"]
    # No value equals the dots, so these are always written.
    defaults |= dict.fromkeys(always, ...)
    wanted = {}
    # Arguments name no updates in the backward pass: the program makes them.
    loop = dataclasses.replace(recipe.loop, optimizer_in_backward=False)
    for name, value in settings(unchecked(recipe, loop=loop)).items():
        # False stands for a default that is None, which an unset switch has.
        if value != (defaults.get(name) or False):
            wanted[name] = value
    # None says something only of this one: that no sample is cut.
    kept = {"max_length"} | {name for name, value in wanted.items() if value is not None}
    arguments = {name: wanted[name] for name in wanted if name in kept}
    config: dict[str, Any] = {}
    # The configuration is a file beside the program.
    for name in {"fsdp_config", "deepspeed"} & arguments.keys():
        arguments[name] = Code("CONFIG")
        config = wanted[name]
    sharding = recipe.group
    if sharding.engine == "deepspeed" and sharding.stage == 3:  # else none is saved
        saves = {"stage3_gather_16bit_weights_on_model_save": True}
        config["zero_optimization"] = config["zero_optimization"] | saves
    if "fsdp_config" in arguments:  # accelerate sends the first rank's weights to the others
        config = config | {"cpu_ram_efficient_loading": True, "state_dict_type": "FULL_STATE_DICT"}
    # Triton compiles for no CPU, and TRL offloads from an accelerator.
    for name in {"use_liger_kernel", "activation_offloading"} & arguments.keys():
        arguments[name] = Code("torch.cuda.is_available()")
    _write_mesh(recipe, arguments)
    if arguments.get("max_length"):
        arguments["max_length"] = Code("TOKENS")
    return arguments, config


def _write_mesh(recipe: Recipe, arguments: Arguments) -> None:
    """Write how ranks form a mesh, and of one sample's tokens that they divide equally."""
    if "parallelism_config" in arguments:
        sizes = literal(arguments["parallelism_config"])
        handler = ""
        if "sp_size" in arguments["parallelism_config"]:
            name = literal(recipe.attn_implementation)
            handler = f", sp_handler=DeepSpeedSequenceParallelConfig(sp_attn_implementation={name})"
        arguments["parallelism_config"] = Code(f"ParallelismConfig(**{sizes}{handler})")
    if recipe.trainer == "sft" and recipe.pieces > 1:
        # accelerate cuts a row into equal pieces, so its length has to be a multiple of their
        # number.
        arguments.setdefault("pad_to_multiple_of", recipe.pieces)


def _unseen(recipe: Recipe) -> Arguments:
    """Return what `Recipe.from_training_arguments` cannot see in the arguments."""
    unseen: Arguments = {}
    if recipe.trainer not in TRL or _is_uncut(recipe) or recipe.images:
        unseen["seq_len"] = Code("TOKENS")
    if recipe.precision.endswith("-true"):
        unseen["precision"] = recipe.precision
    if recipe.lengths:
        shortest = int(recipe.lengths[-1])
        lengths = f"(TOKENS,) * {recipe.batch_size - 1} + ({shortest},)"
        if recipe.packing:  # each row has as many samples as any of the data set
            times = len(recipe.lengths) // recipe.batch_size - 1
            row = f"({int(recipe.lengths[0])},) + ({shortest},) * {times}"
            lengths = f"({row}) * {recipe.batch_size}"
        unseen["lengths"] = Code(lengths)
    default = Recipe(
        recipe.model,
        # one rank samples a group; several may share it
        recipe.rollouts.num_generations if recipe.rollouts else recipe.batch_size,
        gradient_accumulation_steps=recipe.gradient_accumulation_steps,
        trainer=recipe.trainer,
        rollouts=recipe.rollouts,
    )
    # Only what differs from a recipe that is given nothing.
    lines = python_arguments(recipe, default, literal=literal)
    sources = dict(line.split("=", 1) for line in lines)
    for name in (
        "dtype",
        "attn_implementation",
        "lora",
        "peft",
        "quantization",
        "sharding",
        "loop",
        "cut_cross_entropy",
        "images",
        "image_size",
        "max_pixels",
        "video_frames",
        "video_size",
    ):
        if name in sources:
            unseen[name] = Code(sources[name])
    if recipe.rollouts:
        unseen["rollouts"] = Code('{"prompt_length": PROMPT}')
    return unseen


def _adapters(recipe: Recipe) -> Arguments:
    """Return the arguments of the adapters' configuration that are not its defaults.

    LoRA's rank and scale are always among them.
    """
    arguments: Arguments = {}
    task_type = TASKS[recipe.shape.task].peft
    if recipe.peft:
        return recipe.peft.arguments | {"task_type": task_type}
    for name, knob in knobs(LoRA).items():
        value = getattr(recipe.lora, name)
        differs = knob.elsewhere and value != knob.default
        if name in ("r", "lora_alpha") or differs:
            arguments[name] = list(value) if isinstance(value, tuple) else value
    parts = lora_modules.adapted_beside_experts(recipe.shape, recipe.lora)
    if parts:
        arguments["target_modules"] = parts
    arguments["task_type"] = task_type
    return arguments
