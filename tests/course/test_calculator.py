"""The calculator without a browser: what the controls say becomes a recipe, and the bar shows that
recipe's bytes.
"""

import re
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from vramlab import LoRA, Quantization, Recipe, Sharding, find_gpu, predict
from vramlab.base.errors import RecipeError
from vramlab.hardware.gpu import GpuError
from vramlab.interfaces.recipe_options import OPTIONS
from vramlab.report.report import GiB
from vramlab_course import calculator
from vramlab_course.calculator import CONTROLS, LABELS, START, UNSET, Calculator

WIDGET = "application/vnd.jupyter.widget-view+json"

STATES = st.fixed_dictionaries(
    {
        key: st.sampled_from(values or ("", "all-linear", "nothing"))
        for key, values in CONTROLS.items()
    }
)
QLORA = dict(
    model="llama-3.1-8b",
    gpu="RTX 4090",
    precision="bf16-true",
    lora_r=16,
    quantization="nf4",
    double_quant=True,
)


def state(**changes):
    return START | changes


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
        (
            {"model": "vit-base", "optim": "sgd"},
            Recipe("vit-base", 4, None, "fp16-true", optim="sgd"),
        ),
        (
            {"lora_r": 8, "lora_target": " "},
            Recipe("polyglot-ko-1.3b", 4, 256, "fp16-true", lora=LoRA(8)),
        ),
        (
            {"model": "gpt2", "lora_r": 4, "lora_target": "c_attn, c_fc"},
            Recipe("gpt2", 4, 256, "fp16-true", lora=LoRA(4, target_modules=("c_attn", "c_fc"))),
        ),
        (
            QLORA | {"lora_target": "all-linear"},
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
            {"stage": 2, "world_size": 64},
            Recipe("polyglot-ko-1.3b", 4, 256, "fp16-true", sharding=Sharding(2, 64, "fsdp")),
        ),
    ],
)
def test_what_the_controls_say_is_the_recipe(changes, recipe):
    assert calculator.recipe_in(state(**changes)) == recipe


@given(STATES)
@example(state(model="vit-base", lora_r=8))
def test_no_choice_of_controls_breaks_it(chosen):
    """Each is predicted, or refused with one sentence while the last valid picture stays."""
    shown = Calculator()
    before = shown.report, shown.recipe
    shown.change(**chosen)
    if shown.error:
        assert (shown.report, shown.recipe) == before
        assert re.fullmatch(r"Recipe field '.+' is .+, but .+\.", str(shown.error))
    else:
        assert shown.recipe == calculator.recipe_in(chosen)
        assert (
            shown.report == predict(shown.recipe, gpu=chosen["gpu"])
            and shown.card.name == chosen["gpu"]
        )


@given(STATES)
def test_the_code_to_copy_makes_the_same_recipe(chosen):
    try:
        shown = Calculator(**chosen)
    except RecipeError:
        return
    told, printed = {}, []
    exec(calculator.code_of(shown.recipe, shown.card.name), {"print": printed.append}, told)
    assert told["recipe"] == shown.recipe and printed == [shown.report]


def test_an_invalid_change_keeps_the_picture_and_says_why():
    shown = Calculator(**QLORA)
    before = str(shown)
    shown.change(lora_r=UNSET)
    assert "quantized weights cannot be trained: add lora=LoRA(...)" in str(shown.error)
    assert str(shown.error) in str(shown) and "The picture is still that of: llama-3.1-8b" in str(
        shown
    )
    shown.change(lora_r=16)
    assert shown.error is None and str(shown) == before


def test_a_bad_beginning_is_refused():
    with pytest.raises(RecipeError, match="quantized weights cannot be trained"):
        Calculator(quantization="nf4")
    with pytest.raises(
        ValueError,
        match="no control rank; it has model, gpu, free_memory, expandable_segments, batch",
    ):
        Calculator(rank=8)
    with pytest.raises(RecipeError, match=r"sharding.stage.* is 4, but allowed are 0, 1, 2, 3"):
        Calculator(stage=4)
    with pytest.raises(GpuError):
        Calculator(gpu="T5000")


def sizes(shown: Calculator) -> list[float]:
    """The GiB of its table."""
    return [float(line.split()[-2]) for line in str(shown).splitlines() if line.endswith("%")]


def test_the_sentences_name_total_largest_and_whether_it_fits():
    small, tight, large = (
        Calculator(model="gpt2", batch_size=1),
        Calculator(),
        Calculator(batch_size=64),
    )
    default = "without expandable segments (PyTorch's default)"
    grades = (
        (small, "Safe with expandable segments and without"),
        (tight, f"Tight {default}; safe with expandable segments"),
        (large, "Does not fit"),
    )
    for shown, grade in grades:
        text, report = str(shown), shown.report
        part = max(dict(report.peak.items()), key=lambda key: getattr(report.peak, key))
        assert (
            f"Predicted peak {report.peak.total / GiB:,.3f} GiB, in phase {report.peak_phase}; "
            in text
        )
        assert (
            f"; largest: {part.replace('_', ' ')}, {getattr(report.peak, part) / GiB:,.3f} GiB ("
            in text
        )
        assert (
            f"Why there: {report.why}." in text
            and report.cause == report.phases[report.peak_phase].cause
        )
        assert f"\n{grade}" in text
        assert f": the process takes {report.process}, T4 has 14.562 GiB." in text
    with pytest.raises(RecipeError, match=r"T4 has compute capability 7\.5 and bf16 starts"):
        Calculator(precision="bf16-true")
    *parts, total = sizes(tight)
    assert sum(parts) == pytest.approx(total, abs=0.004)


def test_the_bar_and_the_figure_to_keep_show_the_same(no_figure_stays):
    shown = Calculator(**QLORA)
    figure = shown.figure()
    assert [float(n) for n in figure.rows[1][1:]] == sizes(shown)
    assert "RTX 4090" in figure.alt or any(
        "RTX 4090" in t.get_text() for t in figure.legends[0].get_texts()
    )
    assert figure.alt


def text_of(shown: Calculator) -> str:
    """What the page shows below the controls, as text."""
    return "".join(
        part["text"] if "text" in part else part["data"]["text/plain"]
        for part in shown._picture.outputs
    )


def test_moving_a_control_moves_the_picture(capsys, no_figure_stays):
    pytest.importorskip("ipywidgets")
    shown = Calculator()
    grid, _ = shown.widget.children
    assert "12.423 GiB" in text_of(shown) and len(grid.children) == len(CONTROLS)
    shown._widgets["batch_size"].value = 16
    assert shown.recipe.batch_size == 16
    assert shown.report.peak.total == predict(shown.recipe, gpu="T4").peak.total
    assert f"Predicted peak {shown.report.peak.total / GiB:.3f} GiB" in text_of(shown)
    assert "<Figure: Memory at the peak" in text_of(shown) and capsys.readouterr().out == ""
    for name, control in shown._widgets.items():
        assert control.description == LABELS[name] and control.value == shown.state[name]


def test_controls_follow_what_code_sets_even_beyond_their_choices(no_figure_stays):
    pytest.importorskip("ipywidgets")
    shown = Calculator(batch_size=5)
    assert shown.widget and shown._widgets["batch_size"].value == 5
    shown.change(seq_len=1000, gpu="h200", lora_r=8, lora_target="dense_4h_to_h")
    assert [shown._widgets[key].value for key in ("seq_len", "gpu", "lora_r")] == [1000, "H200", 8]
    assert shown._widgets["lora_target"].value == "dense_4h_to_h" and shown.recipe.seq_len == 1000


def test_controls_without_effect_are_grey(no_figure_stays):
    pytest.importorskip("ipywidgets")
    shown = Calculator()
    grey = lambda: {key for key, control in shown._widgets.items() if control.disabled}  # noqa: E731
    assert shown.widget and grey() == {
        "lora_target",
        "double_quant",
        "quantize_experts",
        "world_size",
        "engine",
    }
    shown.change(model="vit-base", lora_r=8, lora_target="all-linear")
    assert grey() == {"seq_len", "double_quant", "quantize_experts", "world_size", "engine"}
    for key in grey():  # grey means that it does change nothing
        before = shown.recipe
        shown.change(**{key: CONTROLS[key][1]})
        assert shown.recipe == before and not shown.error
    shown.change(stage=3)
    assert "world_size" not in grey()


def test_a_page_gets_controls_and_everything_else_the_text(no_figure_stays):
    pytest.importorskip("ipywidgets")
    shown = Calculator()
    bundle = shown._repr_mimebundle_()
    assert bundle[WIDGET]["model_id"] == shown.widget.model_id and bundle["text/plain"] == str(
        shown
    )
    assert "\n" in str(shown), "by which the notebook gate knows a widget that says what it shows"


def test_every_labelled_option_has_a_control_that_starts_with_something_it_offers():
    assert set(CONTROLS) - {"model", "gpu", "free_memory", "expandable_segments"} == {
        option for option, (_, knob) in OPTIONS.items() if knob.label
    }
    assert all(START[name] in values for name, values in CONTROLS.items() if values)


def test_expandable_segments_are_a_control_and_stand_in_the_code():
    by_default, expandable = Calculator(), Calculator(expandable_segments=True)
    assert expandable.report.process.high < by_default.report.process.high
    assert "expandable_segments=True" in calculator.code_of(expandable.recipe, "T4", True)


def test_a_prediction_loads_no_heavy_library():
    script = "import sys, vramlab_course.calculator as c; str(c.Calculator())"
    script += (
        "; sys.exit(', '.join({'torch', 'transformers', 'matplotlib', 'peft'} & "
        "sys.modules.keys()) or 0)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_every_gpu_of_the_table_is_offered():
    for name in CONTROLS["gpu"]:
        assert find_gpu(name).name == name
