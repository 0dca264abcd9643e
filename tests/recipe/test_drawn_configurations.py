"""Configurations drawn at random, sound and broken: a report or one sentence, and simulate equals
the real CPU step.
"""

import json
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vramlab import Recipe, predict, simulate
from vramlab.base.data import data_path
from vramlab.base.errors import RecipeError
from vramlab.recipe.recipe import PRECISIONS
from vramlab.recipe.shapes import catalogue
from vramlab.tracking.history import History, to_report
from vramlab.tracking.tracked import run_tracked
from vramlab.tracking.tracker import Tracker
from vramlab.training.training import build

# Fields that most text models have, in the range in which a step takes milliseconds.
COMMON = {
    "hidden_size": st.sampled_from([16, 24, 32, 48]),
    "num_hidden_layers": st.integers(1, 2),
    "num_attention_heads": st.sampled_from([1, 2, 4]),
    "vocab_size": st.integers(20, 90),
    "intermediate_size": st.integers(8, 70),
    "max_position_embeddings": st.sampled_from([8, 40]),
    "tie_word_embeddings": st.booleans(),
    "hidden_act": st.sampled_from(["gelu", "gelu_new", "relu", "silu"]),
    "attention_dropout": st.sampled_from([0.0, 0.1]),
    "pad_token_id": st.just(0),
}
GROUPED = {
    "num_key_value_heads": st.sampled_from([1, 2, 4]),
    "head_dim": st.sampled_from([4, 8, 10, 15]),
    "attention_bias": st.booleans(),
    "rms_norm_eps": st.just(1e-5),
    "rope_theta": st.sampled_from([1e4, 5e5]),
    "sliding_window": st.sampled_from([None, 4]),
}
ENCODER = {"hidden_dropout_prob": st.sampled_from([0.0, 0.1]), "type_vocab_size": st.integers(1, 3)}
KINDS = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "olmo2", "phi3", "starcoder2"),
        GROUPED,
    ),
    "mixtral": GROUPED
    | {"num_local_experts": st.integers(2, 4), "num_experts_per_tok": st.integers(1, 2)},
    **dict.fromkeys(("bert", "roberta", "electra"), ENCODER),
    "gpt_neox": {"rotary_pct": st.sampled_from([0.25, 0.5, 1.0]), "attention_bias": st.booleans()},
    "phi": {"partial_rotary_factor": st.sampled_from([0.3, 0.5]), "qk_layernorm": st.booleans()},
    "falcon": {name: st.booleans() for name in ("multi_query", "parallel_attn", "bias", "alibi")},
    "opt": {
        "ffn_dim": st.integers(8, 70),
        "do_layer_norm_before": st.booleans(),
        "dropout": st.just(0.1),
    },
    "gpt2": {"n_inner": st.sampled_from([None, 40]), "resid_pdrop": st.sampled_from([0.0, 0.1])},
    "bloom": {"hidden_dropout": st.sampled_from([0.0, 0.1])},
}
JUNK = [
    None,
    "x",
    "",
    -1,
    0,
    3,
    7.5,
    True,
    [],
    [1],
    {},
    {"a": 1},
    10**30,
    float("nan"),
    float("inf"),
    "float32",
]
OTHER_FIELDS = [
    "rope_scaling",
    "rope_parameters",
    "layer_types",
    "dtype",
    "num_labels",
    "id2label",
    "architectures",
]
READS = {"type_vocab_size": "bert-base", "num_channels": "vit-base"}
OTHER_FIELDS += [
    "model_type",
    "initializer_range",
    "quantization_config",
    "text_config",
    "use_cache",
    "is_decoder",
]
RECIPES = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 2),
        "precision": st.sampled_from(PRECISIONS),
        "gradient_checkpointing": st.booleans(),
        "loop": st.sampled_from(["trainer", "plain"]),
        "task": st.sampled_from([None, None, "sequence-classification"]),
    }
)


@st.composite
def configurations(draw, broken: bool):
    """A configuration; one or two of its fields are junk, or missing, if `broken`."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    config = {"model_type": kind, **draw(st.fixed_dictionaries(COMMON | KINDS[kind]))}
    for _ in range(draw(st.integers(1, 2)) if broken else 0):
        name = draw(st.sampled_from([*config, *OTHER_FIELDS]))
        if draw(st.integers(0, 5)):
            config[name] = draw(st.sampled_from(JUNK))
        else:
            config.pop(name, None)
    return config


def outcome(call, *args, **options):
    """What `call` returns, or None if it refuses in one sentence."""
    try:
        return call(*args, **options)
    except RecipeError as error:
        message = str(error)
        assert "\n" not in message and message.endswith(".") and len(message) < 700
        return None


def hold(config: dict, fields: dict) -> None:
    """No witness fails with anything but a RecipeError, and what simulate says is what the real
    step allocates.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recipe = outcome(Recipe, config, **{"seq_len": 8, **fields})
        if recipe is None:
            return
        predicted = outcome(predict, recipe)
        assert predicted is None or predicted.peak.total > 0
        simulated = outcome(simulate, recipe, target="cpu")
        if simulated is None or simulated.notes:
            return
        torch.manual_seed(0)
        training = build(recipe, "cpu", target="cpu")
        tracker = run_tracked(training, Tracker("cpu"), 2, "cpu")
        if training.scaler and training.scaler.get_scale() < 1:
            return  # random weights whose fp16 gradients overflow: the scaler left the update out
    real = to_report(History(tracker.log, tracker.marks), "measured", recipe, "cpu")
    assert simulated.phases == real.phases and simulated.peak_phase == real.peak_phase


@given(configurations(broken=False), RECIPES)
@settings(max_examples=8)
def test_sound_configurations(config, fields):
    hold(config, fields)


@given(configurations(broken=True), RECIPES)
@settings(max_examples=10)
def test_broken_configurations(config, fields):
    hold(config, fields)


def test_a_long_list_in_a_librarys_refusal_is_cut_short():
    """transformers names all of its model types where it does not know one: 11,000 characters."""
    with pytest.raises(RecipeError, match=r"Unrecognized model identifier: x\. .{100,270} …\.$"):
        Recipe({"model_type": "x"})


SIZES = json.loads(data_path("config_keys.json").read_text())["counts"]


@pytest.mark.parametrize("key", SIZES)
def test_a_size_that_is_none_is_refused_or_makes_no_difference(key):
    """Each in a family that reads it: text made tensors of text, null made tensors of no size."""
    config = json.loads(catalogue()[READS.get(key, "deepseek-v3")]["config"])
    fields = {"batch_size": 1, "seq_len": 8, "num_layers": 1}
    for value in ("x", -1, 7.5, True):
        assert outcome(Recipe, config | {key: value}, **fields) is None
    for value in (0, None):
        recipe = outcome(Recipe, config | {key: value}, **fields)
        assert recipe is None or predict(recipe).peak.total > 0


@pytest.mark.slow
@given(st.booleans().flatmap(configurations), RECIPES)
@settings(max_examples=5000)
def test_many_configurations(config, fields):
    hold(config, fields)
