"""What chapter 06 says of published and recorded runs follows from the stored numbers."""

import dataclasses
from statistics import mean, stdev

import pytest
from told import text_of
from vramlab import GiB, MiB, Recipe, plan, predict
from vramlab.report.report import Bytes, TensorGroup
from vramlab_course.chapters.chapter_06 import peak_in_parts
from vramlab_course.finetuning import recorded_quality
from vramlab_course.published import json_of


@pytest.fixture
def chapter():
    return text_of("06_")


def stored(name):
    return json_of(f"elsewhere/{name}")["runs"]


def said(low, likely, high):
    return f"{likely:.2f} ({low:.1f} to {high:.1f})"


def test_the_published_14b_lies_in_the_predicted_range(chapter):
    run = stored("trl_sft")[0]
    recipe = Recipe(**run["recipe"])
    reserved = predict(recipe, gpu="T4").reserved
    sizes = [size / GiB for size in (reserved.low, reserved.value, reserved.high)]
    peak = run["published"]["reserved_peak_gib"]
    assert f"predicted: {said(*sizes)} | [{peak:.2f}](" in chapter and run["commit"] in chapter
    assert sizes[0] < peak < sizes[2] and f"{1 - sizes[1] / peak:.0%}" == "2%"
    cast = dataclasses.replace(recipe.quantization, prepare=True)
    tensors = predict(recipe.replace(quantization=cast), gpu="T4").peak.total / GiB
    assert f"its tensors alone would take {tensors:.1f} GiB" in chapter
    assert tensors > run["published"]["card_gib"] > peak
    assert f"{run['published']['seconds'] / run['published']['steps']:.0f} s for each" in chapter


def test_the_published_70b_lies_in_the_simulated_range(chapter):
    (run,) = (
        run
        for run in stored("answer_ai")
        if run["model"] == "llama-2-70b" and run["gpu"] == "RTX 3090"
    )
    ours = run["simulated"]
    sizes = [ours[f"reserved{end}_gib"] for end in ("_from", "", "_to")]
    peak = run["peak_reserved_gib"]
    assert f"simulated: {said(*sizes)} | [{peak:.2f}](" in chapter
    assert sizes[0] < peak < sizes[2] and f"{1 - sizes[1] / peak:.0%}" == "6%"
    assert f"1,024 samples took {run['seconds'] / 3600:.1f} hours" in chapter
    shape = json_of("elsewhere/answer_ai")["models"]["llama-2-70b"]
    width, inner = shape["hidden_size"], shape["intermediate_size"]
    heads = shape["num_attention_heads"] // shape["num_key_value_heads"]
    layer = 2 * width * width + 2 * width * (width // heads) + 3 * width * inner
    coded = shape["num_hidden_layers"] * layer
    # Half a byte and the scales in double quantization; embedding and head in 16 bits.
    base = coded * (1 / 2 + (1 + 4 / 256) / 64) + 2 * 2 * shape["vocab_size"] * width
    assert f"its base takes {base / GiB:.1f} GiB" in chapter


def test_the_loss_without_the_cast_is_the_recorded_one(chapter):
    runs = recorded_quality()["runs"]
    pairs = zip(
        runs["nf4 double, all else in bf16"]["seeds"], runs["nf4 double"]["seeds"], strict=True
    )
    more = [without - cast for without, cast in pairs]
    assert f"{mean(more):.4f} bits per byte worse, ± {stdev(more):.4f} from" in chapter


class AtPeak:
    peak = Bytes(parameters=MiB, activations=9 * MiB)
    largest = [
        TensorGroup(MiB, "activations", (1, 8, 4), "bfloat16", op, where, 1)
        for op, where in (
            ("add", "0.mlp.gate_proj"),
            ("silu", "0.mlp.act_fn"),
            ("mul", "0.mlp"),
            ("mul", "0.input_layernorm"),
            ("_to_copy", "0.q_proj.lora_A.default"),
            ("add", "0.self_attn"),
            ("_log_softmax", "model"),
        )
    ] + [
        TensorGroup(MiB, "activations", (8, 4), "bfloat16", "_to_copy", "lm_head"),
        TensorGroup(MiB, "activations", (8, 4), "bfloat16", "_to_copy", "0.q_proj.lora_A.default"),
    ]


def test_a_peak_falls_into_parts_by_what_made_each_tensor():
    for adapters, sizes in {True: [1, 2, 1, 1, 3, 2, 10], False: [1, 2, 1, 1, 5, 10]}.items():
        table = peak_in_parts({"a run": AtPeak}, MiB, "MiB", adapters).split("\n")
        assert [float(line.split()[-1]) for line in table[2:]] == sizes


def test_plan_takes_double_quantization_where_a_run_does_not_fit_without(chapter):
    assert "`vramlab plan` uses it only where a run does not fit without" in chapter
    asked = {"global_batch": 16, "method": "qlora", "confirm": False}
    assert plan("qwen3-8b", "T4", seq_len=4096, **asked).best.recipe.quantization.double
