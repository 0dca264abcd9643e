"""The calculator without a browser: what the controls say becomes a recipe, and the bar shows that recipe's bytes."""

import re
import subprocess
import sys
from itertools import pairwise
from types import SimpleNamespace
from unittest import mock
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from vramlab import LoRA, Quantization, Recipe, Sharding, find_gpu, plot, predict
from vramlab.faces import calculator
from vramlab.faces.calculator import CONTROLS, SLIDERS, WIDGET, Calculator
from vramlab.faces.plot import style
from vramlab.faces.plot.splits import used
from vramlab.hardware.gpu import GpuError
from vramlab.report.errors import RecipeError
from vramlab.report.report import Bytes, GiB, Interval

STATES = st.fixed_dictionaries({key: st.sampled_from(values) for key, (_, values, _) in CONTROLS.items()})
QLORA = dict(model="llama-3.1-8b", gpu="RTX 4090", precision="bf16-true", lora_r=16, quantization="nf4 double")


def state(**changes):
    return {key: start for key, (_, _, start) in CONTROLS.items()} | changes


@pytest.mark.parametrize(
    ("changes", "recipe"),
    [
        ({}, Recipe("polyglot-ko-1.3b", 4, 256, "fp16-true")),
        (
            {"gradient_checkpointing": True, "batch_size": 7},
            Recipe("polyglot-ko-1.3b", 7, 256, "fp16-true", gradient_checkpointing=True),
        ),
        (
            {"attn_implementation": "eager"},
            Recipe("polyglot-ko-1.3b", 4, 256, "fp16-true", attn_implementation="eager"),
        ),
        ({"model": "vit-base", "optim": "sgd"}, Recipe("vit-base", 4, None, "fp16-true", optim="sgd")),
        ({"lora_r": 8, "lora_targets": " "}, Recipe("polyglot-ko-1.3b", 4, 256, "fp16-true", lora=LoRA(8))),
        (
            {"model": "gpt2", "lora_r": 4, "lora_targets": "c_attn, c_fc"},
            Recipe("gpt2", 4, 256, "fp16-true", lora=LoRA(4, target_modules=("c_attn", "c_fc"))),
        ),
        (
            QLORA | {"lora_targets": "all-linear"},
            Recipe(
                "llama-3.1-8b",
                4,
                256,
                "bf16-true",
                lora=LoRA(16, target_modules="all-linear"),
                quantization=Quantization("nf4", double=True),
            ),
        ),
        (
            {"sharding": "2, and gradients (FSDP)", "world_size": 64},
            Recipe("polyglot-ko-1.3b", 4, 256, "fp16-true", sharding=Sharding(2, 64, "fsdp")),
        ),
    ],
)
def test_what_the_controls_say_is_the_recipe(changes, recipe):
    assert calculator.recipe_of(state(**changes)) == recipe


@given(STATES)
@example(state(model="vit-base", lora_r=8))
def test_no_choice_of_controls_breaks_it(chosen):
    """Each is predicted, or refused with one sentence while the last valid picture stays."""
    shown = Calculator()
    before = shown.report, shown.recipe
    shown.change(**chosen)
    if shown.error:
        assert (shown.report, shown.recipe) == before
        assert re.fullmatch(r"Recipe field '.+' is .+, but .+\.", shown.error) and "\n" not in shown.error
    else:
        assert shown.recipe == calculator.recipe_of(chosen)
        assert shown.report == predict(shown.recipe, gpu=chosen["gpu"]) and shown.card.name == chosen["gpu"]
    ElementTree.fromstring(f"<div>{shown.html()}</div>")


@given(STATES)
def test_the_code_to_copy_makes_the_same_recipe(chosen):
    try:
        shown = Calculator(**chosen)
    except RecipeError:
        return
    told, printed = {}, []
    exec(shown.code, {"print": printed.append}, told)
    assert told["recipe"] == shown.recipe and printed == [shown.report]


def test_an_invalid_change_keeps_the_picture_and_says_why():
    shown = Calculator(**QLORA)
    before = shown.html()
    shown.change(lora_r=0)
    assert "quantized weights cannot be trained: add lora=LoRA(...)." in shown.error
    assert shown.error in str(shown) and "The picture is still that of: llama-3.1-8b" in str(shown)
    assert "quantized weights cannot be trained" in shown.html() and style.ALARM in shown.html() and "⚠" in shown.html()
    shown.change(lora_r=16)
    assert shown.error == "" and shown.html() == before


def test_a_bad_beginning_is_refused():
    with pytest.raises(RecipeError, match="quantized weights cannot be trained"):
        Calculator(quantization="nf4")
    with pytest.raises(ValueError, match="no control rank; it has model, gpu, batch_size"):
        Calculator(rank=8)
    with pytest.raises(ValueError, match=r"sharding is 3, but allowed are 'none', '0, every rank"):
        Calculator(sharding=3)
    with pytest.raises(GpuError):
        Calculator(gpu="T5000")


def test_the_sentences_name_total_largest_and_whether_it_fits():
    small, tight, large = Calculator(model="gpt2", batch_size=1), Calculator(), Calculator(batch_size=64)
    for shown, fits in ((small, "it fits."), (tight, "it may not fit."), (large, "it does not fit.")):
        text, report = str(shown), shown.report
        part = max(dict(report.peak.items()), key=lambda key: getattr(report.peak, key))
        assert f"Predicted peak {report.peak.total / GiB:,.3f} GiB, in phase {report.peak_phase}; " in text
        assert f"; largest: {part.replace('_', ' ')}, {getattr(report.peak, part) / GiB:,.3f} GiB (" in text
        assert f"T4 has 14.562 GiB: {fits}" in text
    assert "Note: T4 has compute capability 7.5 and bf16" in str(Calculator(precision="bf16-true"))
    lines = calculator.rows(tight.report)
    assert sum(float(size) for _, size, _ in lines[1:-1]) == pytest.approx(float(lines[-1][1]), abs=0.004)


def styles(element) -> dict[str, str]:
    """The declarations of an element's style attribute."""
    return dict(part.strip().split(": ", 1) for part in element.get("style").split(";") if part.strip())


def bar(total=8 * GiB, limit=16 * GiB, high=12 * GiB):
    split = Bytes(parameters=total // 4, activations=total - total // 4 - total // 8, workspace=total // 8)
    report = SimpleNamespace(peak=split, process=Interval(total, total, high), notes=[], peak_phase="step")
    card = SimpleNamespace(name="so <much>", total=limit)
    with mock.patch.object(calculator, "split_of", lambda report: dict(report.peak.items())):
        return split, ElementTree.fromstring(calculator.bar_html(report, card))


def test_the_bar_is_drawn_to_scale_in_the_categories_colours():
    split, root = bar()
    parts = [part for part in root if part.get("title")]
    starts, widths = ([float(styles(part)[key].rstrip("%")) for part in parts] for key in ("left", "width"))
    assert [width / widths[2] for width in widths] == pytest.approx([2, 5, 1], rel=1e-3)
    assert [b - a for a, b in pairwise(starts)] == pytest.approx(widths[:2], abs=0.01)
    titles = ["parameters: 2.00 GiB", "activations: 5.00 GiB", "workspace: 1.00 GiB"]
    assert [part.get("title") for part in parts] == titles
    limit, total, process = (part for part in root if not part.get("title"))
    assert 100 - float(styles(limit)["right"].rstrip("%")) == pytest.approx(16 * widths[2], rel=1e-3)
    assert (limit.text, total.text, process.text) == ("so <much>: 16.0 GiB", "8.00 GiB", "whole process")
    assert 100 - float(styles(process)["right"].rstrip("%")) == pytest.approx(12 * widths[2], rel=1e-3)
    colours = [styles(part)["background"] for part in parts]
    assert all(
        said.endswith(style.LOOK[key][0]) for key, said in zip(used([dict(split.items())]), colours, strict=True)
    )
    assert root.get("role") == "img" and "so <much>" in root.get("aria-label")


def test_every_hatch_is_drawn():
    assert {hatch for _, hatch in style.LOOK.values()} == calculator.HATCHES.keys()


@pytest.mark.parametrize(("limit", "high"), [(GiB // 1000, 9 * GiB), (900 * GiB, 9 * GiB), (GiB, 900 * GiB)])
def test_nothing_leaves_the_picture(limit, high):
    _, root = bar(limit=limit, high=high)
    for part in root:
        look = styles(part)
        edge = next(float(look[key].rstrip("%")) for key in ("left", "right") if key in look)
        assert edge >= 0 and edge + float(look.get("width", "0").rstrip("%")) <= 100


def test_the_bar_and_the_figure_to_keep_show_the_same(no_figure_stays):
    shown = Calculator(**QLORA)
    figure = shown.figure()
    assert [float(n) for n in figure.rows[1][1:]] == [float(size) for _, size, _ in calculator.rows(shown.report)[1:]]
    assert "RTX 4090" in figure.alt or any("RTX 4090" in t.get_text() for t in figure.legends[0].get_texts())
    assert plot.alt_text(figure)


def test_moving_a_control_moves_the_picture():
    pytest.importorskip("ipywidgets")
    shown = Calculator()
    assert shown.widget.children[1].value == shown._picture.value and "12.423 GiB" in shown._picture.value
    shown._controls["batch_size"].value = 16
    assert shown.recipe.batch_size == 16
    assert shown.report.peak.total == predict(shown.recipe, gpu="T4").peak.total
    assert f"{shown.report.peak.total / GiB:.3f} GiB" in shown._picture.value
    for key, control in shown._controls.items():
        assert control.description == CONTROLS[key][0] and control.value == shown.state[key]


def test_controls_follow_what_code_sets_even_beyond_their_choices():
    pytest.importorskip("ipywidgets")
    shown = Calculator(batch_size=5)
    assert shown.widget and shown._controls["batch_size"].value == 5
    shown.change(seq_len=1000, gpu="h200", lora_r=8, lora_targets="dense_4h_to_h")
    assert [shown._controls[key].value for key in ("seq_len", "gpu", "lora_r")] == [1000, "H200", 8]
    assert shown._controls["lora_targets"].value == "dense_4h_to_h" and shown.recipe.seq_len == 1000


def test_controls_without_effect_are_grey():
    pytest.importorskip("ipywidgets")
    shown = Calculator()
    grey = lambda: {key for key, control in shown._controls.items() if control.disabled}  # noqa: E731
    assert shown.widget and grey() == {"lora_targets", "world_size"}
    shown.change(model="vit-base", lora_r=8, lora_targets="all-linear")
    assert grey() == {"seq_len", "world_size"}
    for key in grey():  # grey means that it does change nothing
        before = shown.recipe
        shown.change(**{key: CONTROLS[key][1][1]})
        assert shown.recipe == before and not shown.error
    shown.change(sharding="3, and parameters (FSDP)")
    assert "world_size" not in grey()


def test_a_page_gets_controls_and_everything_else_the_text():
    pytest.importorskip("ipywidgets")
    shown = Calculator()
    bundle = shown._repr_mimebundle_()
    assert bundle[WIDGET]["model_id"] == shown.widget.model_id and bundle["text/plain"] == str(shown)
    assert "\n" in str(shown), "by which the notebook gate knows a widget that says what it shows"


def test_without_ipywidgets_it_is_text(monkeypatch):
    monkeypatch.setattr(calculator, "find_spec", lambda name: None)
    bundle = Calculator()._repr_mimebundle_()
    assert bundle.keys() == {"text/plain"} and "pip install ipywidgets" in bundle["text/plain"]


def test_sliders_are_numbers_in_order():
    for key in SLIDERS:
        values = CONTROLS[key][1]
        assert list(values) == sorted(values) and CONTROLS[key][2] in values


def test_a_prediction_loads_no_heavy_library():
    script = "import sys, vramlab.faces.calculator as c; c.Calculator().html()"
    script += "; sys.exit(', '.join({'torch', 'transformers', 'matplotlib', 'peft'} & sys.modules.keys()) or 0)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_every_gpu_of_the_table_is_offered():
    for name in CONTROLS["gpu"][1]:
        assert find_gpu(name).name == name
