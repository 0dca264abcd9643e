"""Controls for every labelled option of a recipe, and the predicted peak of what they say.

The peak is shown as a bar and as text.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from vramlab.base.errors import RecipeError
from vramlab.formulas.predict import predict
from vramlab.hardware.gpu import Gpu, find_gpu, gpu_names, usable_memory
from vramlab.interfaces import plot
from vramlab.interfaces.plot.splits import label_of, used
from vramlab.interfaces.recipe_options import OPTIONS, recipe_of
from vramlab.recipe.knobs import python_arguments
from vramlab.recipe.recipe import Recipe
from vramlab.recipe.shapes import model_names, read_shape
from vramlab.report.report import GiB, Report, format_bytes, in_unit, text_table

UNSET = "–"  # leaves an option at its default, and a part of the recipe out
POWERS = {2**k for k in range(18)}
# What the controls of batches, lengths and ranks offer.
SIZES = tuple(sorted(POWERS | {3 * 2**k for k in range(9)}))
LABELS = {
    "model": "Model",
    "gpu": "GPU",
    "free_memory": "Of it free, GiB",
    "expandable_segments": "Expandable segments",
}
# A knob with a label is a control, so a new one appears here by itself.
LABELS |= {option: knob.label for option, (_, knob) in OPTIONS.items() if knob.label}
# The first control of each part of a recipe: while it is unset, the part's other controls change
# nothing.
SWITCHES = {
    # Reversed, so that the first option of each part is the one that stays.
    path[0]: option
    for option, (path, _) in reversed(OPTIONS.items())
    if len(path) > 1 and option in LABELS
}


def _values(option: str) -> tuple:
    """Return what the control of an option offers; () is text."""
    path, knob = OPTIONS[option]
    whole = tuple(n for n in SIZES if n <= (knob.most or n))
    by_kind = {bool: (False, True), int: whole}
    values = knob.choices or by_kind.get(knob.kind, ())
    # An option that may be left out, and a part's switch, offer UNSET first.
    may_be_unset = knob.optional or SWITCHES.get(path[0]) == option
    return (UNSET, *values) if values and may_be_unset else values


CONTROLS = {
    "model": tuple(model_names()),
    "gpu": tuple(gpu_names()),
    "free_memory": (UNSET, 4, 6, 8, 10, 12, 14, 16, 20, 22, 24, 32, 40, 48, 80, 96, 140),
    "expandable_segments": (False, True),
}
CONTROLS |= {option: _values(option) for option in LABELS if option in OPTIONS}
START = {name: values[0] if values else "" for name, values in CONTROLS.items()} | {
    "model": "polyglot-ko-1.3b", "gpu": "T4", "batch_size": 4, "seq_len": 256,
    "precision": "fp16-true",
    "engine": "fsdp", "world_size": 8,
}  # fmt: skip


def idle(state: Mapping[str, Any]) -> set[str]:
    """Return the controls that change nothing while the others are as in `state`."""
    # The processor of images says how many tokens they are, whatever length is set.
    without_effect = {"seq_len"} if read_shape(state["model"]).image_tokens else set()
    for option in CONTROLS.keys() & OPTIONS.keys():
        switch = SWITCHES.get(OPTIONS[option][0][0], option)
        if switch != option and state[switch] == UNSET:
            without_effect |= {option}
    return without_effect


def recipe_in(state: Mapping[str, Any]) -> Recipe:
    """Return the recipe that the controls in `state` describe.

    Raises RecipeError when it cannot be trained.
    """
    # What is idle says nothing, or a switched-off part would be made of its other controls.
    given = state.keys() & OPTIONS.keys() - idle(state)
    return recipe_of(
        state["model"],
        {name: state[name] for name in given if state[name] != UNSET},
    )


def predicted(state: Mapping[str, Any]) -> tuple[Recipe, Gpu, Report]:
    """Return the recipe that the controls describe, its GPU, and the prediction for both.

    Raises RecipeError where `vramlab predict` refuses too, as bf16 on a GPU that only emulates it.
    """
    card = find_gpu(state["gpu"])
    recipe = recipe_in(state)
    card.require(recipe.precision)
    report = predict(
        recipe,
        gpu=card,
        other_memory=other_memory(state, card),
        expandable_segments=state["expandable_segments"],
    )
    return recipe, card, report


def other_memory(state: Mapping[str, Any], card: Gpu) -> int:
    """Return the bytes of the card that others hold: all but what the state says is free.

    Raises RecipeError where so much is not free on the card.
    """
    free = state["free_memory"]
    if free == UNSET:
        return 0
    usable = usable_memory(card)
    most = in_unit(usable, "GiB")
    is_number = isinstance(free, int | float)
    if not is_number or not 0 < free * GiB <= usable:
        rest = f"it must be a number of GiB, at most the {most} that {card.name} has"
        raise RecipeError("free_memory", free, rest)
    return usable - int(free * GiB)


def code_of(
    recipe: Recipe,
    gpu: str,
    expandable_segments: bool = False,
    other_memory: int = 0,
) -> str:
    """Return Python that predicts `recipe` on `gpu`; what is as usual for the model is left out."""
    # Shown even where they are as usual: readers change these first.
    always = (
        "batch_size",
        "precision",
        "optim",
        *(() if recipe.shape.image_tokens else ("seq_len",)),
    )
    lines = [repr(recipe.model), *python_arguments(recipe, Recipe(recipe.model), always)]
    text = "recipe = Recipe(\n" + "".join(f"    {line},\n" for line in lines) + ")\n"
    # Only classes that occur in the text are imported.
    names = [
        name
        for name in ("LoRA", "Loop", "Quantization", "Recipe", "Sharding")
        if f"{name}(" in text
    ]
    arguments = ["recipe", f"gpu={gpu!r}"]
    if other_memory:
        arguments.append(f"other_memory={other_memory}")
    if expandable_segments:
        arguments.append("expandable_segments=True")
    imports = f"from vramlab import {', '.join(names)}, predict"
    return f"{imports}\n\n{text}print(predict({', '.join(arguments)}))"


class Calculator:
    """Controls, and below them the predicted peak of the recipe that they describe.

    A page that cannot draw them shows text.

    Attributes:
        state: what each control says, by the names of CONTROLS.
        recipe, report, card: of the last state that could be trained: its recipe, prediction, and
            GPU.
        error: why the present state cannot be trained, a RecipeError; None when it can.
    Raises:
        ValueError: no such control. RecipeError, GpuError: the first state cannot be trained, or no
            such GPU is known.
    """

    def __init__(self, **state: Any):
        self.state = dict(START)
        self._widgets = {}
        self.change(**state)
        # Later a bad state keeps the last picture, but here there is none.
        if self.error:
            raise self.error

    def change(self, **state: Any) -> None:
        """Set controls by name.

        What cannot be trained leaves the last valid picture and says why in `error`.
        """
        unknown = ", ".join(sorted(state.keys() - CONTROLS.keys()))
        if unknown:
            raise ValueError(
                f"the calculator has no control {unknown}; it has {', '.join(CONTROLS)}."
            )
        if "gpu" in state:
            # An alias becomes the name that the control offers.
            state["gpu"] = find_gpu(state["gpu"]).name
        # With widgets each change below goes through `_moved`, which predicts.
        if not self._widgets:
            self._take(state)
        for name in state.keys() & self._widgets.keys():
            widget = self._widgets[name]
            value = state[name]
            if CONTROLS[name] and value not in widget.options:
                # A value from code may be none that the control offers, and ipywidgets would refuse
                # it.
                widget.options = (*widget.options, value)
            widget.value = value  # which moves the picture

    def _take(self, state: Mapping[str, Any]) -> None:
        """Predict the changed state; keep the last valid prediction where it cannot be trained."""
        self.state |= state
        try:
            # All three or none are replaced: an error leaves the last picture whole.
            self.recipe, self.card, self.report = predicted(self.state)
            self.error = None
        except RecipeError as error:
            self.error = error

    def figure(self):
        """Return the bar as one of the course's figures."""
        return plot.compare(self.report, limit=self.card)

    def __str__(self) -> str:
        """The recipe or what is wrong, the peak, whether the card can hold it, notes, a table."""
        report = self.report
        split = dict(self.report.peak.items())
        total = self.report.peak.total
        grade = report.grade[0].upper() + report.grade[1:]
        part, size = max(split.items(), key=lambda item: item[1])
        head = str(self.recipe)
        if self.error:
            head = f"{self.error} The picture is still that of: {head}."
        lines = [
            head,
            f"Predicted peak {format_bytes(total)}, in phase {report.peak_phase}; "
            f"largest: {label_of(part)}, {format_bytes(size)} ({size / total:.0%}).",
            *([f"Why there: {report.why}."] if report.cause else []),
            f"{grade}: the process takes {report.process}, {self.card.name} has "
            f"{format_bytes(report.usable)}.",
            *(f"Note: {note}." for note in report.notes),
        ]
        table = [("at the peak", "GiB", "share")]
        for key in used([split]):
            share = split[key] / total
            table.append((label_of(key), in_unit(split[key]), f"{share:.1%}"))
        table.append(("total", in_unit(total), "100.0%"))
        return "\n".join([*lines, "", text_table(table)])

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        # a page without controls shows the text, and a committed notebook keeps only that
        return self.widget._repr_mimebundle_() | {"text/plain": str(self)}

    @cached_property
    def widget(self):
        """The page: an ipywidgets box of the controls and the picture that follows them."""
        import ipywidgets

        self._widgets = {name: _widget(name, value) for name, value in self.state.items()}
        for control in self._widgets.values():
            control.observe(self._moved, "value")
        self._picture = ipywidgets.Output()
        self._draw()
        columns = ipywidgets.Layout(
            grid_template_columns="repeat(auto-fit, minmax(320px, 1fr))",
            max_width="1000px",
        )
        return ipywidgets.VBox(
            [ipywidgets.GridBox(list(self._widgets.values()), layout=columns), self._picture]
        )

    def _moved(self, change: Any) -> None:
        self._take({name: control.value for name, control in self._widgets.items()})
        self._draw()

    def _draw(self) -> None:
        """Put the picture on the page, and disable the controls that change nothing."""
        import matplotlib.pyplot as plt

        figure = self.figure()
        self._picture.outputs = ()
        self._picture.append_display_data(
            figure
        )  # and no print or display, which would reach the cell's own output
        self._picture.append_stdout(str(self))
        # An open figure of pyplot would be shown again at the cell's end.
        plt.close(figure)
        for name, control in self._widgets.items():
            control.disabled = name in idle(self.state)


def _widget(name: str, value: Any):
    """Return the ipywidget of a control, with `value` among what it offers."""
    import ipywidgets

    values = CONTROLS[name]
    look = {
        "description": LABELS[name],
        "layout": {"width": "auto"},
        "style": {"description_width": "110px"},
    }
    if not values:
        return ipywidgets.Text(value, continuous_update=False, **look)
    options = values if value in values else (*values, value)
    # A slider for numbers that go far, a list to choose from for everything else.
    if not set(SIZES[-9:]) & set(values):
        return ipywidgets.Dropdown(options=options, value=value, **look)
    return ipywidgets.SelectionSlider(options=options, value=value, continuous_update=False, **look)
