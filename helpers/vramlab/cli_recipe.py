"""A recipe as command-line options, shared by every command that takes one."""

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from .options import LOOPS, QUANT_TYPES, LoRA, Quantization, Sharding
from .recipe import ATTENTION, OPTIMIZERS, PRECISIONS, TASKS, Recipe


def _one_of(words: tuple[str, ...] | list[str]) -> str:
    return ", ".join(words) + "."


def recipe(
    *,
    model: Annotated[str, typer.Argument(help="A name that `vramlab models` lists, or a path to a config.json.")],
    batch_size: Annotated[int, typer.Option(help="Samples in one micro-batch on one device.")] = 1,
    seq_len: Annotated[int | None, typer.Option(help="Tokens per sample; 512 or the model's longest if less.")] = None,
    precision: Annotated[str, typer.Option(help=_one_of(PRECISIONS))] = "fp32",
    optim: Annotated[str, typer.Option(help=_one_of(OPTIMIZERS))] = "adamw_torch",
    optim_args: Annotated[str | None, typer.Option(help="As in TrainingArguments: momentum=0.9,…")] = None,
    gradient_checkpointing: Annotated[bool, typer.Option("--gradient-checkpointing", help="Recompute layers.")] = False,
    gradient_accumulation_steps: Annotated[int, typer.Option(help="Micro-batches in one optimizer step.")] = 1,
    attn_implementation: Annotated[str, typer.Option(help=_one_of(ATTENTION))] = "sdpa",
    torch_compile: Annotated[bool, typer.Option("--torch-compile", help="Compile the model.")] = False,
    lora_r: Annotated[int | None, typer.Option(help="Train LoRA adapters of this rank.")] = None,
    lora_alpha: Annotated[float | None, typer.Option(help="LoRA's scale.")] = None,
    lora_dropout: Annotated[float | None, typer.Option(help="Dropout before the adapters.")] = None,
    lora_target: Annotated[list[str] | None, typer.Option(help="Module names, with commas, or all-linear.")] = None,
    quantization: Annotated[str | None, typer.Option(help="Of the frozen base: " + _one_of(QUANT_TYPES))] = None,
    double_quant: Annotated[bool, typer.Option("--double-quant", help="Quantize the block scales too.")] = False,
    num_layers: Annotated[int | None, typer.Option(help="A depth other than the model's own.")] = None,
    task: Annotated[str | None, typer.Option(help="Which head: " + _one_of(TASKS))] = None,
    loop: Annotated[str, typer.Option(help=_one_of(list(LOOPS)))] = "trainer",
    stage: Annotated[int | None, typer.Option(help="ZeRO stage 0 to 3.")] = None,
    world_size: Annotated[int | None, typer.Option(help="Ranks that share the model.")] = None,
    engine: Annotated[str | None, typer.Option(help="ddp, fsdp or deepspeed.")] = None,
    offload: Annotated[str | None, typer.Option(help="optimizer or parameters, to the CPU.")] = None,
) -> Recipe:
    """The recipe that the options describe; their names are the fields' names."""
    if lora_alpha is not None and lora_alpha.is_integer():
        lora_alpha = int(lora_alpha)  # as people write it in Python: equal recipes must have equal keys
    lora = _given(r=lora_r, lora_alpha=lora_alpha, lora_dropout=lora_dropout, target_modules=_names(lora_target))
    sharding = _given(stage=stage, world_size=world_size, engine=engine, offload=offload)
    if engine == "ddp":
        sharding.setdefault("stage", 0)
    return Recipe(
        model,
        batch_size=batch_size,
        seq_len=seq_len,
        precision=precision,
        optim=optim,
        optim_args=optim_args,
        gradient_checkpointing=gradient_checkpointing,
        gradient_accumulation_steps=gradient_accumulation_steps,
        attn_implementation=attn_implementation,
        torch_compile=torch_compile,
        lora=LoRA(**lora) if lora else None,
        # --double-quant alone means what it can only mean.
        quantization=Quantization(quantization or "nf4", double=double_quant) if quantization or double_quant else None,
        sharding=Sharding(**sharding) if sharding else None,
        loop=loop,
        num_layers=num_layers,
        task=task,
    )


def _given(**options: Any) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def _names(words: list[str] | None) -> tuple[str, ...] | str | None:
    """PEFT's `target_modules` of the words that were given: names, or the one word "all-linear"."""
    names = tuple(name.strip() for word in words or () for name in word.split(",") if name.strip())
    return "all-linear" if names == ("all-linear",) else names or None


def takes_recipe(command: Callable[..., None]) -> Callable[..., None]:
    """Gives `command(recipe, …)` the options of a recipe before its own."""
    shared = inspect.signature(recipe).parameters
    own = list(inspect.signature(command).parameters.values())[1:]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        command(recipe(**{name: values.pop(name) for name in shared}), **values)

    parameters = [*shared.values(), *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own)]
    run.__signature__ = inspect.Signature(parameters)
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run
