"""What the calculator's page asks of vramlab: its controls, and an answer for what they say, as
JSON.

Runs on the standard library alone, in the browser under Pyodide as well as here.
"""

import json
from pathlib import Path

from vramlab import Loop, predict
from vramlab.faces.options import OPTIONS
from vramlab.faces.plot.style import LOOK
from vramlab.hardware.gpu import find_gpu
from vramlab.recipe.shapes import read_shape
from vramlab.report.errors import VramLabError
from vramlab_course.calculator import (
    CONTROLS,
    LABELS,
    SIZES,
    START,
    SWITCHES,
    UNSET,
    code_of,
    idle,
    recipe_in,
)

MORE = ("attn_implementation", "loop", "lora_target", "double_quant", "dtype",
    "gradient_accumulation_steps", "packing",
    "padding_free", "precompute_ref_log_probs", "task", "engine", *(
    name for name in LABELS
    if SWITCHES.get(OPTIONS[name][0][0] if name in OPTIONS else "") == "stage"
))  # fmt: skip
# Where the page begins: the course's example, an 8B fine-tuned on one card.
BEGIN = START | {
    "model": "llama-3.1-8b", "gpu": "RTX 4090", "batch_size": 1, "seq_len": 2048,
    "precision": "bf16-mixed",
    "dtype": "bfloat16", "gradient_checkpointing": True, "lora_r": 16, "lora_target": "all-linear",
    "trainer": "sft",
}  # fmt: skip
NOTHING = {
    "lora_r": "none",
    "quantization": "none",
    "stage": "one GPU",
}  # what an unset control means


def page() -> str:
    """The controls in their order, where they begin, the cards' sizes, the categories' colours."""
    controls = []
    for name, values in CONTROLS.items():
        sizes = set(SIZES[-9:]) <= set(values)
        words = [_word(name, value) for value in values]
        kind = "slider" if sizes else "text" if not values else "select"
        said = OPTIONS[name][1].help if name in OPTIONS else ""
        controls.append({"name": name, "label": LABELS[name], "help": said, "kind": kind,
            "values": values,
                         "words": words, "more": name in MORE})  # fmt: skip
    cards = {name: find_gpu(name).total for name in CONTROLS["gpu"]}
    return json.dumps(
        {
            "controls": controls,
            "start": BEGIN,
            "cards": cards,
            "look": {k: v[0] for k, v in LOOK.items()},
        }
    )


def _word(name: str, value) -> str:
    """What a control says for a value; 1 is no True."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return NOTHING.get(name, "default") if value == UNSET else str(value)


def add_config(name: str, text: str) -> str:
    """Keep a pasted config.json; its path serves as the model.

    A JSON object whose `error` says what is wrong with it.
    """
    name = (
        "".join(c if c.isalnum() or c in "-._" else "-" for c in name.strip()).strip(".")
        or "my-model"
    )
    folder = Path(name)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(text, encoding="utf-8")
    try:
        shape = read_shape(name)
    except (VramLabError, ImportError) as error:
        return json.dumps({"error": _why(error)})
    return json.dumps({"model": name, "parameters": shape.num_parameters})


def _why(error: Exception) -> str:
    if isinstance(error, ImportError):
        return (
            "This architecture is read from transformers, which a page has not: predict it "
            "with the package."
        )
    return str(error)


def answer(given: str) -> str:
    """The prediction for the controls' state as JSON, or `error`: why it cannot be trained, in one
    sentence.
    """
    state = BEGIN | json.loads(given)
    try:
        card = find_gpu(state["gpu"])
        recipe = recipe_in(state)
        expandable = state["expandable_segments"]
        report = predict(recipe, gpu=card, expandable_segments=expandable)
    except (VramLabError, ImportError) as error:
        return json.dumps({"error": _why(error)})
    need = report.process
    return json.dumps(
        {
            "recipe": str(recipe), "peak": report.peak.total, "phase": report.peak_phase,
            "why": report.why,
            "parts": [[name, size] for name, size in report.peak.items() if size],
            "process": [need.low, need.value, need.high], "card": [card.name, report.usable],
            "tier": report.verdict,
            "idle": sorted(idle(state)), "notes": report.notes,
            "code": code_of(recipe, card.name, expandable),
            "command": _command(state, recipe), "arguments": _arguments(recipe),
        }
    )  # fmt: skip


def _command(state: dict, recipe) -> str:
    words = [f"vramlab predict {recipe.model}"]
    for name in state.keys() & OPTIONS.keys() - idle(state):
        value, ((*part, _), knob) = state[name], OPTIONS[name]
        if value in (UNSET, "", False) or (
            not part and value == knob.default and name != "batch_size"
        ):
            continue
        words.append(f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}"))
    words += ["--expandable-segments"] if state["expandable_segments"] else []
    return " \\\n  ".join([words[0], *sorted(words[1:]), f"--gpu '{state['gpu']}'"])


def _arguments(recipe) -> str:
    """What `TrainingArguments` and other configurations of libraries call the options."""
    from vramlab.recipe.knobs import knobs

    def said(part, always=()):
        for name, knob in knobs(type(part)).items():
            value = getattr(part, name)
            if len(knob.elsewhere) == 1 and (name in always or value != knob.default):
                yield f"{knob.elsewhere[0]}={value!r}"

    mixed = {"fp16-mixed": "fp16", "bf16-mixed": "bf16", "tf32": "tf32"}.get(recipe.precision)
    config = {"transformers": "TrainingArguments"}.get(
        recipe.trainer, f"{recipe.trainer.upper()}Config"
    )
    lines = [config.replace("REWARD", "Reward"), *said(recipe, ("batch_size", "optim"))]
    lines += [f"max_length={recipe.seq_len}"] * (recipe.trainer != "transformers")
    lines += [f"{mixed}=True"] * bool(mixed)
    lines += ["gradient_checkpointing=True"] * recipe.gradient_checkpointing
    text = _other_loop(recipe.loop) + _call(lines[0], lines[1:])
    if recipe.lora:
        text += "\n\n" + _call("LoraConfig", said(recipe.lora, ("r",)))
    if recipe.quantization:
        bits = said(recipe.quantization, ("quant_type", "double"))
        text += "\n\n" + _call("BitsAndBytesConfig", ["load_in_4bit=True", *bits])
    return text


def _other_loop(loop: Loop) -> str:
    """A comment where the Trainer cannot run the loop, with what the Trainer's has instead."""
    usual = vars(Loop())
    differs = [
        f"{name}={usual[name]!r}"
        for name, value in vars(loop).items()
        if name != "name" and value != usual[name]
    ]
    return (
        f"# The Trainer cannot run loop={loop.name!r}. Its own has {', '.join(differs)}.\n"
        if differs
        else ""
    )


def _call(name: str, arguments) -> str:
    return "\n".join([f"{name}(", *(f"    {argument}," for argument in arguments), ")"])
