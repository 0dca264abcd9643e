"""Sliders and the bar that follows them: from what the controls say to a recipe, its prediction and a picture.

from vramlab.faces.calculator import Calculator
calculator = Calculator(model="gpt2", gpu="T4", batch_size=8)
calculator             # last in a cell: the controls, where a page can draw them, else the same as text
calculator.recipe      # what they say now, for the other witnesses
"""

import dataclasses
from collections.abc import Mapping
from functools import cached_property, partial
from html import escape
from importlib.util import find_spec
from typing import Any

from ..formulas.predict import predict
from ..hardware.gpu import Gpu, find_gpu, gpu_names
from ..recipe.options import LoRA, Quantization, Sharding
from ..recipe.recipe import ATTENTION, OPTIMIZERS, PRECISIONS, Recipe
from ..recipe.shapes import model_names, read_shape
from ..report.errors import RecipeError
from ..report.report import Report, format_bytes, text_table
from .plot.splits import amount, exact, label_of, split_of, used
from .plot.style import ALARM, INK, LOOK

USUAL = "the usual"
WIDGET = "application/vnd.jupyter.widget-view+json"
NO_WIDGETS = "The controls need ipywidgets (pip install ipywidgets); Calculator(batch_size=…) works without them."
QUANTIZATIONS = {"none": None} | {
    kind + (" double" if double else ""): Quantization(kind, double=double)
    for kind, double in (("nf4", False), ("nf4", True), ("fp4", False), ("fp4", True), ("int8", False))
}
STAGES = {
    "none": None,
    "0, every rank holds all (DDP)": (0, "ddp"),
    "1, optimizer states (DeepSpeed)": (1, "deepspeed"),
    "2, and gradients (DeepSpeed)": (2, "deepspeed"),
    "2, and gradients (FSDP)": (2, "fsdp"),
    "3, and parameters (DeepSpeed)": (3, "deepspeed"),
    "3, and parameters (FSDP)": (3, "fsdp"),
}
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
POWERS = tuple(2**n for n in range(18))
# Each control: what the reader sees, its values, and what it begins with.
CONTROLS: dict[str, tuple[str, tuple, Any]] = {
    "model": ("Model", tuple(model_names()), "polyglot-ko-1.3b"),
    "gpu": ("GPU", tuple(gpu_names()), "T4"),
    "batch_size": ("Batch size", BATCHES, 4),
    "seq_len": ("Tokens a sample", POWERS[4:], 256),
    "precision": ("Precision", PRECISIONS, "fp16-true"),
    "optim": ("Optimizer", OPTIMIZERS, "adamw_torch"),
    "gradient_checkpointing": ("Checkpointing", (False, True), False),
    "attn_implementation": ("Attention", (USUAL, *ATTENTION), USUAL),
    "lora_r": ("LoRA rank", (0, *POWERS[:9]), 0),
    "lora_targets": ("LoRA targets", (USUAL, "all-linear"), USUAL),
    "quantization": ("Frozen base", tuple(QUANTIZATIONS), "none"),
    "sharding": ("ZeRO stage", tuple(STAGES), "none"),
    "world_size": ("GPUs", POWERS[:11], 8),
}
SLIDERS = ("batch_size", "seq_len", "lora_r", "world_size")

BAR = f"position: absolute; top: 34px; height: 40px; border: 1px solid {INK}; box-sizing: border-box"
STRIPES = "repeating-linear-gradient({}deg, {ink} 0, {ink} 1px, transparent 1px, transparent {}px)"
DOTS = "radial-gradient({ink} 1px, transparent 1.5px) 0 0 / 6px 6px"
# The hatches of `LOOK` in CSS: degrees of their lines, and pixels between two.
HATCHES = {
    "": (), "//": ((-45, 7),), "\\\\": ((45, 7),), "..": (DOTS,), "xx": ((-45, 7), (45, 7)), "||": ((90, 7),),
    "--": ((0, 7),), "++": ((0, 7), (90, 7)), "////": ((-45, 4),),
}  # fmt: skip


def recipe_of(state: Mapping[str, Any]) -> Recipe:
    """The recipe that the controls in `state` describe. Raises RecipeError when it cannot be trained."""
    same = ("model", "batch_size", "precision", "optim", "gradient_checkpointing")
    names = tuple(part.strip() for part in state["lora_targets"].split(",") if part.strip())
    targets = {(): None, (USUAL,): None, ("all-linear",): "all-linear"}.get(names, names)
    stage = STAGES[state["sharding"]]
    return Recipe(
        **{field: state[field] for field in same},
        seq_len=None if read_shape(state["model"]).image_tokens else state["seq_len"],
        attn_implementation=None if state["attn_implementation"] == USUAL else state["attn_implementation"],
        lora=LoRA(r=state["lora_r"], target_modules=targets) if state["lora_r"] else None,
        quantization=QUANTIZATIONS[state["quantization"]],
        sharding=Sharding(stage[0], state["world_size"], stage[1]) if stage else None,
    )


def idle(state: Mapping[str, Any]) -> set[str]:
    """The controls that change nothing while the others are as in `state`."""
    found = set() if state["lora_r"] else {"lora_targets"}
    found |= set() if STAGES[state["sharding"]] else {"world_size"}
    return found | ({"seq_len"} if read_shape(state["model"]).image_tokens else set())


def code_of(recipe: Recipe, gpu: str) -> str:
    """Python that predicts `recipe` on `gpu`, to copy; what is as usual for the model is left out."""
    usual, shown = Recipe(recipe.model), ("batch_size", "seq_len", "precision", "optim")
    lines, kinds = [f"    {recipe.model!r},"], ["Recipe"]
    for field in dataclasses.fields(Recipe):
        value = getattr(recipe, field.name)
        if field.name in ("model", "shape") or (field.name not in shown and value == getattr(usual, field.name)):
            continue
        if dataclasses.is_dataclass(value):
            kinds.append(type(value).__name__)
            value = _short(value)
        else:
            value = repr(value)
        if not (field.name == "seq_len" and recipe.shape.image_tokens):
            lines.append(f"    {field.name}={value},")
    body = "\n".join(lines)
    imports = ", ".join([*sorted(kinds, key=str.lower), "predict"])
    return f"from vramlab import {imports}\n\nrecipe = Recipe(\n{body}\n)\nprint(predict(recipe, gpu={gpu!r}))"


def _short(part: LoRA | Quantization | Sharding) -> str:
    """The part of a recipe as it would be written: only what is not the default."""
    given = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    said = [f"{f.name}={given[f.name]!r}" for f in dataclasses.fields(part) if given[f.name] != f.default]
    return f"{type(part).__name__}({', '.join(said)})"


def sentences(report: Report, card: Gpu) -> list[str]:
    """What the bar says, in words: the total and what is largest in it, whether the card can hold it, the notes."""
    total = report.peak.total
    part, size = max(report.peak.items(), key=lambda item: item[1])
    process = report.process
    fits = "fits" if process.high <= card.total else "does not fit" if process.low > card.total else "may not fit"
    return [
        f"Predicted peak {format_bytes(total)}, in phase {report.peak_phase}; "
        f"largest: {label_of(part)}, {format_bytes(size)} ({size / total:.0%}).",
        f"The whole process is likely to take {process}; {card.name} has {format_bytes(card.total)}: it {fits}.",
        *(f"Note: {note}." for note in report.notes),
    ]


def rows(report: Report) -> list[tuple[str, str, str]]:
    """The bar as a text table's rows: category, GiB, share."""
    split, total = report.peak, report.peak.total
    sizes = [(key, getattr(split, key)) for key in used([split_of(report)])]
    body = [(label_of(key), exact(size), f"{size / total:.1%}") for key, size in sizes]
    return [("at the peak", "GiB", "share"), *body, ("total", exact(total), "100.0%")]


def bar_html(report: Report, card: Gpu) -> str:
    """Return the peak by category as an HTML bar to scale, with the card's limit and the span of the whole process."""
    process, left, parts = report.process, 0.0, []
    across = 84 / max(report.peak.total, card.total, process.high)  # per cent of the width for a byte
    for key in used([split_of(report)]):
        size = getattr(report.peak, key)
        look = f"left: {left * across:.3f}%; width: {size * across:.3f}%; {BAR}; {background(key)}"
        parts.append(f'<div title="{label_of(key)}: {amount(size)} GiB" style="{look}"></div>')
        left += size
    limit, high = card.total * across, process.high * across
    side = ("left", limit) if limit < 50 else ("right", 100 - limit)  # of the line that its name stands on
    look = f"top: 0; height: 92px; color: {ALARM}; font-weight: bold; border-{side[0]}: 2px dashed; padding: 0 4px"
    labels = [(*side, look, f"{escape(card.name)}: {amount(card.total)} GiB")]
    labels += [("left", left * across + 1, "top: 46px; font-weight: bold; background: white", f"{amount(left)} GiB")]
    span = f"top: 84px; min-width: {high - process.low * across:.3f}%; text-align: right; border-top: 2px solid"
    labels += [("right", 100 - high, span, "whole process")]
    for edge, x, look, words in labels:
        parts.append(f'<div style="position: absolute; {edge}: {x:.3f}%; white-space: nowrap; {look}">{words}</div>')
    said = escape(" ".join(sentences(report, card)))
    page = "position: relative; height: 104px; max-width: 700px; background: white; font: 13px sans-serif"
    return f'<div role="img" aria-label="{said}" style="{page}">{"".join(parts)}</div>'


def background(category: str) -> str:
    """Return the CSS of a category's colour and hatch."""
    colour, hatch = LOOK[category]
    drawn = (line if isinstance(line, str) else STRIPES.format(*line, ink=INK) for line in HATCHES[hatch])
    return "background: " + ", ".join([*(line.format(ink=INK) for line in drawn), colour])


def swatch(category: str) -> str:
    """Return a small square in a category's look; screen readers pass over it."""
    return (
        f'<div aria-hidden="true" style="width: 16px; height: 16px; border: 1px solid; {background(category)}"></div>'
    )


class Calculator:
    """Controls, and below them the predicted peak of the recipe that they describe.

    Attributes:
        state: what each control says, by the names of CONTROLS.
        recipe, report, card: of the last state that could be trained: its recipe, prediction, and GPU.
        error: why the present state cannot be trained, in one sentence; "" when it can.
    Raises:
        ValueError: there is no such control or no such choice.
        RecipeError, GpuError: what the calculator begins with cannot be trained, or no such GPU is known.
    """

    def __init__(self, **state: Any):
        self.state = {key: start for key, (_, _, start) in CONTROLS.items()}
        self._controls: dict[str, Any] = {}
        self.change(**state)
        if self.error:
            raise RecipeError(*self._wrong)

    def change(self, **state: Any) -> None:
        """Set controls by name; what cannot be trained leaves the last valid picture and says why in `error`."""
        if unknown := ", ".join(sorted(state.keys() - CONTROLS.keys())):
            raise ValueError(f"the calculator has no control {unknown}; it has {', '.join(CONTROLS)}.")
        for key in ("quantization", "sharding"):
            if key in state and state[key] not in CONTROLS[key][1]:
                raise ValueError(f"{key} is {state[key]!r}, but allowed are {', '.join(map(repr, CONTROLS[key][1]))}.")
        if "gpu" in state:
            state["gpu"] = find_gpu(state["gpu"]).name
        self.state |= state
        try:
            recipe, card = recipe_of(self.state), find_gpu(self.state["gpu"])
            self.recipe, self.card, self.report, self.error = recipe, card, predict(recipe, gpu=card), ""
        except RecipeError as error:
            self.error, self._wrong = str(error), (error.field, error.value, error.allowed)
        self._show()

    @property
    def code(self) -> str:
        """Python that makes and predicts `recipe`."""
        return code_of(self.recipe, self.card.name)

    def figure(self):
        """The bar in the look of the course's figures, to keep; returns the figure."""
        from .plot import compare

        return compare(self.report, limit=self.card)

    def __str__(self) -> str:
        """The picture as text."""
        return "\n".join([*self._said(), "", text_table(rows(self.report))])

    def _said(self) -> list[str]:
        kept = f"{self.error} The picture is still that of: {self.recipe}." if self.error else str(self.recipe)
        return [kept, *sentences(self.report, self.card)]

    def html(self) -> str:
        """The picture as HTML: the recipe or what is wrong, the bar, what it says in words, its parts as a table."""
        first, *others = map(escape, self._said())
        style_ = f"color: {ALARM}; font-weight: bold" if self.error else ""
        (corner, *heads), *body = rows(self.report)
        cells = "".join(f"<th>{head}</th>" for head in heads)
        table = [f"<tr><th></th><th>{corner}</th>{cells}</tr>"]
        for category, *figures in body:
            mark = swatch(key) if (key := category.replace(" ", "_")) in LOOK else ""
            cells = "".join(f'<td style="text-align: right; padding-left: 1em">{figure}</td>' for figure in figures)
            table.append(f"<tr><td>{mark}</td><td>{category}</td>{cells}</tr>")
        return (
            '<div style="line-height: 1.4">'
            f'<p role="status" style="{style_}">{"⚠ " if self.error else ""}{first}</p>{bar_html(self.report, self.card)}'
            f"{''.join(f'<p>{text}</p>' for text in others)}<table>{''.join(table)}</table>"
            f'<p>To copy:</p><pre tabindex="0" style="user-select: all">{escape(self.code)}</pre></div>'
        )

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        # The text is what a page without controls shows, and all that a committed notebook keeps.
        if find_spec("ipywidgets") is None:
            return {"text/plain": f"{self}\n\n{NO_WIDGETS}"}
        page = {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}
        return {"text/plain": str(self), WIDGET: page}

    @cached_property
    def widget(self):
        """The page: an ipywidgets box of the controls and the picture that follows them."""
        import ipywidgets

        layout = ipywidgets.Layout(width="auto")
        look = {"layout": layout, "style": {"description_width": "110px"}}
        kinds = {key: ipywidgets.SelectionSlider for key in SLIDERS} | {"lora_targets": ipywidgets.Combobox}
        for key, (label, values, _) in CONTROLS.items():
            kind = kinds.get(key, ipywidgets.Dropdown)
            options = list(values) if key == "lora_targets" else choices(values, self.state[key])
            more = {"continuous_update": kind is ipywidgets.SelectionSlider} if key in kinds else {}
            self._controls[key] = kind(options=options, value=self.state[key], description=label, **more, **look)
            self._controls[key].observe(partial(self._moved, key), "value")
        columns = ipywidgets.Layout(grid_template_columns="repeat(auto-fit, minmax(320px, 1fr))", max_width="1000px")
        self._picture = ipywidgets.HTML()
        self._show()
        return ipywidgets.VBox([ipywidgets.GridBox(list(self._controls.values()), layout=columns), self._picture])

    def _moved(self, key: str, change: Mapping[str, Any]) -> None:
        if not self._showing:
            self.change(**{key: change["new"]})

    def _show(self) -> None:
        """Put state and picture on the page, if there is one."""
        self._showing = True  # what moves now was moved by code
        for key, control in self._controls.items():
            if control.value != self.state[key]:  # set by code, maybe to a value that the control did not offer
                if key != "lora_targets":
                    control.options = choices(CONTROLS[key][1], self.state[key])
                control.value = self.state[key]
            control.disabled = key in idle(self.state)
        if self._controls:
            self._picture.value = self.html()
        self._showing = False


def choices(values: tuple, value: Any) -> list[tuple[str, Any]]:
    """What a control offers, as (what the reader sees, value); `value` is among it."""
    offered = values if value in values else sorted({*values, value})
    words = {False: "off", True: "on"} if values == (False, True) else {0: "none"}
    return [(words.get(v, f"{v:,}" if isinstance(v, int) else v), v) for v in offered]
