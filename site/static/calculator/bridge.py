"""What the calculator's page asks of vramlab: its controls, and an answer for what they say, as
JSON.

Runs on the standard library alone, in the browser under Pyodide as well as here.
"""

import functools
import json
import shutil
from pathlib import Path

from vramlab import Loop, predict
from vramlab.base.errors import RecipeError, VramLabError
from vramlab.hardware.gpu import Gpu, find_gpu, usable_memory
from vramlab.interfaces.plot.style import LOOK
from vramlab.interfaces.recipe_options import OPTIONS
from vramlab.planning.changes import cheapest
from vramlab.planning.step_time import step_time
from vramlab.recipe.recipe import Recipe
from vramlab.recipe.shapes import read_shape
from vramlab.report.report import Report
from vramlab_course.calculator import (
    CONTROLS,
    LABELS,
    START,
    SWITCHES,
    UNSET,
    code_of,
    idle,
    other_memory,
    predicted,
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
    "free_memory": "all",
    "lora_r": "none",
    "quantization": "none",
    "stage": "one GPU",
}  # what an unset control means
NUMBERS = frozenset(
    name
    for name, values in CONTROLS.items()
    if values and name in OPTIONS and OPTIONS[name][1].kind is int and not OPTIONS[name][1].choices
) | {"free_memory"}
# Ways to train that a click chooses; model, card, batch and length stay.
PRESETS = {
    "Full": {"lora_r": UNSET, "quantization": UNSET, "dtype": UNSET, "trainer": "sft"},
    "LoRA": {"lora_r": 16, "quantization": UNSET, "dtype": "bfloat16", "trainer": "sft"},
    "QLoRA": {"lora_r": 16, "quantization": "nf4", "dtype": UNSET, "trainer": "sft"},
    "DPO with LoRA": {"lora_r": 16, "quantization": UNSET, "dtype": "bfloat16", "trainer": "dpo"},
}
PRESETS_KEEP = ("model", "gpu", "free_memory", "expandable_segments", "batch_size", "seq_len")
MOST_CHANGES = 6
LARGEST = {"batch_size": (1, 2**17), "seq_len": (64, 2**24)}  # its unit, and where a search ends
PLAIN = str | int | float | bool | None  # values that a sentence can repeat
TEXTS = {"lora_target": ("all-linear", "")}  # what a repair may write into a field of text
MOST_REPAIRS = 3


def page() -> str:
    """The controls in their order, where they begin, the cards' sizes, the categories' colours."""
    controls = []
    for name, values in CONTROLS.items():
        words = [_word(name, value) for value in values]
        kind = "number" if name in NUMBERS else "text" if not values else "select"
        said = OPTIONS[name][1].help if name in OPTIONS else ""
        controls.append({"name": name, "label": LABELS[name], "help": said, "kind": kind,
            "values": values,
                         "words": words, "more": name in MORE, "needs": _needs(name)})  # fmt: skip
    cards = {name: find_gpu(name).total for name in CONTROLS["gpu"]}
    return json.dumps(
        {
            "controls": controls,
            "start": BEGIN,
            "cards": cards,
            "look": {k: v[0] for k, v in LOOK.items()},
            "presets": PRESETS,
        }
    )


def preset(given: str, name: str) -> str:
    """The changes of controls that make a state one of PRESETS, as JSON.

    In fp16 where the card lacks bf16.
    """
    state = BEGIN | json.loads(given)
    kept = {control: state[control] for control in PRESETS_KEEP}
    wanted = BEGIN | PRESETS[name] | kept
    wanted |= fp16_for(wanted)
    return json.dumps({control: wanted[control] for control in CONTROLS})


def _needs(name: str) -> str:
    """What a control waits for while it is idle: `idle` has the rule."""
    switch = SWITCHES.get(OPTIONS[name][0][0]) if name in OPTIONS else None
    return f"needs {LABELS[switch]}" if switch else "the images say it"


def _word(name: str, value) -> str:
    """What a control says for a value; 1 is no True."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return NOTHING.get(name, "default") if value == UNSET else str(value)


def add_config(name: str, text: str) -> str:
    """Keep a pasted config.json that can be read; its folder's name serves as the model.

    Another text of the same name gets a name of its own. A JSON object whose `error` says what is
    wrong with it, and then nothing is kept.
    """
    plain = "".join(c if c.isalnum() or c in "-._" else "-" for c in name.strip()).strip(".")
    wanted = plain or "my-model"
    folder = Path(wanted)
    number = 1
    while folder.exists() and _text_in(folder) != text:
        number += 1
        folder = Path(f"{wanted}-{number}")
    is_new = not folder.exists()
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(text, encoding="utf-8")
    try:
        shape = read_shape(folder.name)
    except (VramLabError, ImportError) as error:
        if is_new:
            shutil.rmtree(folder)
        return json.dumps({"error": _why(error)})
    return json.dumps({"model": folder.name, "parameters": shape.num_parameters})


def _text_in(folder: Path) -> str:
    return (folder / "config.json").read_text(encoding="utf-8")


def _why(error: Exception) -> str:
    if isinstance(error, ImportError):
        return (
            "This architecture is read from transformers, which a page has not, and the formulas "
            "do not know it: `vramlab simulate FOLDER` reads it where transformers is installed."
        )
    if isinstance(error, RecipeError):
        control = _named(error.field)
        if control and not isinstance(error.value, PLAIN):
            return f"{LABELS[control]}: {error.allowed}."
        return error.about(LABELS[control]) if control else str(error)
    if isinstance(error, VramLabError):
        return str(error)
    return f"The formulas fail on this, which is a bug of ours and no fault of yours: {error!r}."


def control_of(error: Exception) -> str | None:
    """The control that an error is about: of its field, or else of the part that has the field."""
    if not isinstance(error, RecipeError):
        return None
    part = error.field.partition(".")[0]
    return _named(error.field) or SWITCHES.get(part) or _named(part)


def _named(field: str) -> str | None:
    """The control of a recipe's field, such as "lora.target_modules"."""
    for option, (path, _) in OPTIONS.items():
        if option in CONTROLS and ".".join(path) == field:
            return option
    return field if field in CONTROLS else None


def _predicted(state: dict):
    """As `predicted`; values that a control does not offer are refused here, by their control."""
    model = state["model"]
    if model not in CONTROLS["model"] and not Path(model, "config.json").is_file():
        raise VramLabError(
            f"The config.json of {model} is missing: an address has only its name. Paste the file "
            f"again under 'Another model', or choose a model of the list."
        )
    for name, values in CONTROLS.items():
        if values and name not in NUMBERS and name != "model" and state[name] not in values:
            offered = ", ".join(_word(name, value) for value in values)
            raise RecipeError(name, state[name], f"it must be one of {offered}")
    return predicted(state)


def _refusal(state: dict) -> Exception | None:
    """Why a state cannot be trained; None when it can."""
    try:
        _predicted(state)
    except Exception as error:  # a bug of the formulas too: the page goes on, and says so
        return error
    return None


def _idle(state: dict) -> list[str]:
    try:
        return sorted(idle(state))
    except (VramLabError, ImportError):  # a model that cannot be read: each control may be turned
        return []


def answer(given: str) -> str:
    """The prediction for the controls' state as JSON, or `error`: why it cannot be trained, in one
    sentence. Both say which controls are idle.
    """
    state = BEGIN | json.loads(given)
    try:
        recipe, card, report = _predicted(state)
    except Exception as error:
        said = {"error": _why(error), "control": control_of(error), "idle": _idle(state)}
        return json.dumps(said)
    expandable = state["expandable_segments"]
    return json.dumps(
        {
            "recipe": str(recipe), "peak": report.peak.total, "phase": report.peak_phase,
            "why": report.why,
            "parts": [[name, size] for name, size in report.peak.items() if size],
            "card": [card.name, report.usable], "idle": _idle(state), "notes": report.notes,
            **_fit(recipe, card, report),
            "code": code_of(recipe, card.name, expandable, other_memory(state, card)),
            "command": _command(state, recipe), "arguments": _arguments(recipe),
        }
    )  # fmt: skip


def _fit(recipe: Recipe, card: Gpu, report: Report) -> dict:
    """What a card's answer says: the tier, the process's least, likely and most bytes, speed.

    `grade` is the tier with the allocator's setting that it is of, and the other setting's.
    """
    need = report.process
    return {
        "tier": report.verdict,
        "grade": report.grade,
        "process": [need.low, need.value, need.high],
        "speed": _speed(recipe, card),
    }


def _speed(recipe: Recipe, card: Gpu) -> dict:
    """Seconds of a step, samples and tokens in it; or why they are not known."""
    try:
        time = step_time(recipe, card)
    except VramLabError as error:
        return {"error": str(error)}
    ranks = recipe.sharding.world_size if recipe.sharding else 1
    samples = recipe.batch_size * recipe.gradient_accumulation_steps * ranks
    return {
        "seconds": [time.low, time.seconds, time.high],
        "samples": samples,
        "tokens": time.tokens,
        "basis": time.basis,
    }


def cards(given: str) -> str:
    """Whether each card of the table can train a state, as JSON: a list, least memory first.

    Each has its name and memory, `change` (fp16 where it lacks bf16), and the answer's tier,
    process and speed, or `error`.
    """
    state = BEGIN | json.loads(given) | {"free_memory": UNSET}
    rows = []
    for name in CONTROLS["gpu"]:
        on_it = state | {"gpu": name}
        change = {"gpu": name, "free_memory": UNSET} | fp16_for(on_it)
        row: dict = {"card": name, "memory": usable_memory(find_gpu(name)), "change": change}
        try:
            recipe, card, report = _predicted(state | change)
        except VramLabError as error:
            row["error"] = _why(error)
        else:
            row |= _fit(recipe, card, report)
        rows.append(row)
    return json.dumps(sorted(rows, key=lambda row: (row["memory"], row["card"])))


def changes(given: str) -> str:
    """The cheapest single changes that take memory off the peak, as JSON: a list.

    First what makes it fit. Each has the controls to `change`, the bytes that it `saves`, the
    step's `time` over that before or null, and whether it is the `same` training.
    """
    state = BEGIN | json.loads(given)
    try:
        recipe, card, report = _predicted(state)
    except VramLabError as error:
        return json.dumps({"error": _why(error)})
    missing = max(0, report.process.high - report.usable)
    rows = []
    granted = {
        "gpu": card,
        "other_memory": other_memory(state, card),
        "expandable_segments": state["expandable_segments"],
    }
    witness = functools.partial(predict, **granted)
    for change in cheapest(recipe, card, 0, MOST_CHANGES, witness, process=missing):
        moved = _moved(recipe, recipe.replace(**change.fields))
        if moved and _refusal(state | moved) is None:
            kind = {"saves": change.saves, "time": change.time, "same": change.same}
            rows.append({"change": moved, **kind})
    return json.dumps(rows)


def _moved(recipe: Recipe, changed: Recipe) -> dict:
    """The controls whose options differ between two recipes, with what they say of the second."""
    found = {}
    for option in [option for option in CONTROLS if option in OPTIONS]:
        path, _ = OPTIONS[option]
        before = _option(recipe, path)
        after = _option(changed, path)
        if before != after:
            found[option] = after
    return found


def _option(recipe: Recipe, path: tuple[str, ...]):
    """What a recipe's option is, as a control says it."""
    value = recipe
    for name in path:
        value = getattr(value, name, None)
    if isinstance(value, tuple):
        return ",".join(value)
    return UNSET if value is None else value


def largest(given: str) -> str:
    """The largest micro-batch and length that fit, other controls as they are, as JSON.

    By control: `safe` and `likely`, null where even the least does not fit, and `limit`, why no
    larger one can be trained at all, or null.
    """
    state = BEGIN | json.loads(given)
    found = {}
    idle_now = _idle(state)
    for name in [name for name in LARGEST if name not in idle_now]:
        reason = _limit(state, name)
        safe = _largest(state, name, ("safe",))
        found[name] = {
            "safe": safe,
            "likely": _largest(state, name, ("safe", "likely")),
            "limit": reason if safe is not None else None,
        }
    return json.dumps(found)


def _fits(state: dict, name: str, value: int, tiers: tuple[str, ...]) -> bool:
    try:
        _, _, report = _predicted(state | {name: value})
    except VramLabError:
        return False
    return report.verdict in tiers


def _largest(state: dict, name: str, tiers: tuple[str, ...]) -> int | None:
    """The largest multiple of the control's unit that fits, by doubling and then by halves."""
    unit, end = LARGEST[name]
    if not _fits(state, name, unit, tiers):
        return None
    low = 1
    while low * unit < end and _fits(state, name, 2 * low * unit, tiers):
        low *= 2
    high = 2 * low
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(state, name, middle * unit, tiers):
            low = middle
        else:
            high = middle
    return low * unit


def _limit(state: dict, name: str) -> str | None:
    """Why a value far above the state's cannot be trained at all."""
    _, end = LARGEST[name]
    error = _refusal(state | {name: end})
    return error.allowed if isinstance(error, RecipeError) else None


def named(text: str) -> str:
    """The model of the list that a name of the hub stands for, as JSON; or `error`."""
    try:
        model = recipe_in(BEGIN | {"model": text.strip()}).shape.name
    except VramLabError as error:
        return json.dumps({"error": _why(error)})
    return json.dumps({"model": model})


def refused(given: str, name: str) -> str:
    """Why values of a control cannot be chosen now, by their index, as JSON.

    Values that another control forbids are not among them while changes of others mend it: once
    chosen, `repairs` names those. Nor are values of a part's first control, which wakes the others.
    """
    state = BEGIN | json.loads(given)
    found = {}
    for index, value in enumerate(CONTROLS[name]):
        if value == state[name] or name in SWITCHES.values():
            continue
        trial = state | {name: value}
        error = _refusal(trial)
        if name == "trainer" and error and not fp16_for(trial):
            _, error = _steps(trial, {}, name)
        if isinstance(error, RecipeError) and control_of(error) == name:
            found[index] = error.allowed
    return json.dumps(found)


def repairs(given: str, moved: str = "") -> str:
    """Changes of controls, each of which makes a refused state one that can be trained, as JSON.

    First fp16 for a card without bf16, or what the refusal names, step by step; then changes of one
    other control. What the reader has just `moved` stays. Where there is none: what of the state
    goes with the page's beginning, and the rest as there.
    """
    state = BEGIN | json.loads(given)
    if _refusal(state) is None:
        return "[]"
    if moved in NUMBERS or moved in TEXTS:
        moved = ""  # a number has neighbours, which a choice has not
    half = fp16_for(state)
    if half and _refusal(state | half) is None:
        return json.dumps([half])
    change, left = _steps(state, half, moved)
    found = [] if left else [change]
    touched = {name for change in found for name in change}
    found += _single(state, {moved, *touched})[: MOST_REPAIRS - len(found)]
    return json.dumps(found or [_nearest(state)])


def _steps(state: dict, change: dict, moved: str) -> tuple[dict, Exception | None]:
    """The refused control's nearest value that serves, then the next refused one's.

    Returns the changes, and what is still refused after them; None: nothing.
    """
    change = dict(change)
    error = _refusal(state | change)
    while error is not None:
        name = control_of(error)
        if name is None or name in {"model", moved, *change}:
            break
        ways = {}
        for value in _near(name, state[name]):
            after = _refusal(state | change | {name: value})
            ways.setdefault(None if after is None else control_of(after) or "", (value, after))
        ways.pop(name, None)
        if not ways:
            break
        value, error = ways[None] if None in ways else next(iter(ways.values()))
        change[name] = value
    return change, error


def fp16_for(state: dict) -> dict:
    """Controls that say fp16 where the card lacks the bf16 of the state; {} where it has it.

    TRL's trainers put adapters of a quantized base in bf16, which fp16's loss scaler refuses, so
    the plain Trainer takes their place where that alone is in the way.
    """
    card = find_gpu(state["gpu"]) if state["gpu"] in CONTROLS["gpu"] else None
    if card is None or card.supports("bf16"):
        return {}
    found = {}
    if state["precision"].startswith("bf16"):
        found["precision"] = state["precision"].replace("bf16", "fp16")
        if state["dtype"] == "bfloat16":
            found["dtype"] = "float16"
    plain = found | {"trainer": "transformers"}
    if found and _refusal(state | found) and _refusal(state | plain) is None:
        return plain
    return found


def _single(state: dict, still: set[str]) -> list[dict]:
    """Repairs of one control each, in the controls' order; those in `still` stay."""
    found = []
    page_only = {"model", "gpu", "free_memory", "expandable_segments"}
    for name in CONTROLS.keys() - page_only - {*_idle(state)} - still:
        for value in _near(name, state[name]):
            if _refusal(state | {name: value}) is None:
                found.append({name: value})
                break
    order = list(CONTROLS)
    return sorted(found, key=lambda change: order.index(next(iter(change))))


def _near(name: str, now) -> list:
    """Other values of a control: the nearest numbers first, or where the page begins."""
    values = CONTROLS[name] or TEXTS[name]
    others = [value for value in values if value != now]
    if name in NUMBERS:
        size = now
        if not isinstance(size, int | float) or size <= 0:
            begin = BEGIN[name]
            size = begin if begin != UNSET else max(value for value in values if value != UNSET)
        numbers = [value for value in others if value != UNSET]
        below = sorted((value for value in numbers if value < size), reverse=True)
        above = [value for value in numbers if value >= size]
        return below + above + [value for value in others if value == UNSET]
    return sorted(others, key=lambda value: value != BEGIN[name])


def _nearest(state: dict) -> dict:
    """Changes to a trainable state: the page's beginning with as much of `state` as goes with it.

    Values are taken over in the controls' order, again until no further one goes. A value may move
    one control that was not taken over yet.
    """
    found = dict(BEGIN)
    kept = {name for name in CONTROLS if state[name] == BEGIN[name]}
    grows = True
    while grows:
        grows = False
        for name in [name for name in CONTROLS if name not in kept]:
            trial = found | {name: state[name]}
            error = _refusal(trial)
            other = control_of(error) if error else None
            for change in [fp16_for(trial), *({other: value} for value in _others(other, kept))]:
                if error and change and name not in change:
                    error = _refusal(trial | change)
                    trial = trial if error else trial | change
            if error is None:
                found = trial
                kept |= {name}
                grows = True
    return {name: found[name] for name in CONTROLS if found[name] != state[name]}


def _others(name: str | None, kept: set) -> list:
    return [] if name is None or name in kept else _near(name, BEGIN[name])


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
    if other := other_memory(state, find_gpu(state["gpu"])):
        words.append(f"--other-memory {other}")
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
