"""Shapes against transformers: names, sizes and order of every tensor, and what PEFT adapts, on the
meta device.
"""

import dataclasses
import importlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
from vramlab.base.errors import RecipeError
from vramlab.recipe.families import FAMILIES
from vramlab.recipe.from_transformers import build
from vramlab.recipe.generation import as_generating
from vramlab.recipe.shapes import catalogue, model_names, read_shape

SMALL = {  # one small catalogue model for each architecture
    "bert": "bert-base",
    "deepseek_v3": "deepseek-v3",
    "falcon": "falcon-7b",
    "gemma2": "gemma-2-2b",
    "gemma3_text": "gemma-3-270m",
    "glm4_moe": "glm-4.5-air",
    "gpt2": "gpt2",
    "gpt_neox": "pythia-70m",
    "gpt_oss": "gpt-oss-20b",
    "granite": "granite-3.3-2b",
    "llama": "llama-3.2-1b",
    "mistral": "mistral-7b",
    "mixtral": "mixtral-8x7b",
    "olmo2": "olmo-2-1b",
    "olmo3": "olmo-3-7b",
    "opt": "opt-125m",
    "phi": "phi-2",
    "phi3": "phi-4",
    "qwen2": "qwen2.5-0.5b",
    "qwen3": "qwen3-0.6b",
    "qwen3_moe": "qwen3-30b-a3b",
    "smollm3": "smollm3-3b",
    "t5": "t5-small",
    "vit": "vit-base",
}
TEXT = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
}
VARIANTS = {
    "llama with biases": {
        "model_type": "llama",
        **TEXT,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama, heads wider than hidden": {"model_type": "llama", **TEXT, "head_dim": 48},
    "llama, tied": {"model_type": "llama", **TEXT, "tie_word_embeddings": True},
    "mistral by defaults": {"model_type": "mistral", **TEXT, "num_attention_heads": 8},
    "mixtral, four experts": {
        "model_type": "mixtral",
        **TEXT,
        "num_attention_heads": 8,
        "num_local_experts": 4,
    },
    "qwen3 with biases": {
        "model_type": "qwen3",
        **TEXT,
        "num_key_value_heads": 1,
        "attention_bias": True,
    },
    "gemma": {"model_type": "gemma", **TEXT, "num_key_value_heads": 1, "head_dim": 32},
    "qwen2 as transformers completes it": {
        "model_type": "qwen2",
        **TEXT,
        "num_attention_heads": 32,
    },
    "gemma2, untied": {
        "model_type": "gemma2",
        **TEXT,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    },
    "gpt_neox without biases": {
        "model_type": "gpt_neox",
        **TEXT,
        "attention_bias": False,
        "rotary_pct": 1.0,
    },
    "gpt_neox as transformers 5 writes it": {
        "model_type": "gpt_neox",
        **TEXT,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000,
            "partial_rotary_factor": 0.5,
        },
    },
    "gpt_neox, odd rotation": {
        "model_type": "gpt_neox",
        **TEXT,
        "num_attention_heads": 1,
        "rotary_pct": 0.11,
    },
    "gpt2, untied, narrow": {
        "model_type": "gpt2",
        "vocab_size": 96,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_inner": 80,
        "n_positions": 32,
        "tie_word_embeddings": False,
    },
    "gpt2 with cross attention": {
        "model_type": "gpt2",
        "vocab_size": 96,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 32,
        "add_cross_attention": True,
    },
    "bert, three classes": {
        "model_type": "bert",
        **TEXT,
        "max_position_embeddings": 48,
        "id2label": {"0": "a", "1": "b", "2": "c"},
    },
    "bert, untied": {
        "model_type": "bert",
        **TEXT,
        "max_position_embeddings": 48,
        "tie_word_embeddings": False,
    },
    "opt with projections": {
        "model_type": "opt",
        **TEXT,
        "ffn_dim": 80,
        "word_embed_proj_dim": 32,
        "do_layer_norm_before": False,
        "max_position_embeddings": 48,
    },
    "opt without biases": {
        "model_type": "opt",
        **TEXT,
        "ffn_dim": 80,
        "enable_bias": False,
        "max_position_embeddings": 48,
    },
    "phi, tied": {"model_type": "phi", **TEXT, "tie_word_embeddings": True},
    "phi with normed queries": {
        "model_type": "phi",
        **TEXT,
        "qk_layernorm": True,
        "num_key_value_heads": 2,
    },
    "falcon, new architecture": {
        "model_type": "falcon",
        **TEXT,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
    },
    "falcon, one after the other": {
        "model_type": "falcon",
        **TEXT,
        "parallel_attn": False,
        "multi_query": False,
        "bias": True,
        "tie_word_embeddings": False,
    },
    "falcon with alibi": {"model_type": "falcon", **TEXT, "alibi": True, "ffn_hidden_size": 72},
    "t5, gated, uneven": {
        "model_type": "t5",
        "vocab_size": 96,
        "d_model": 64,
        "d_kv": 24,
        "d_ff": 80,
        "num_layers": 3,
        "num_decoder_layers": 2,
        "num_heads": 2,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    },
    "vit, grey": {
        "model_type": "vit",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 80,
        "image_size": 64,
        "patch_size": 8,
        "num_channels": 1,
        "qkv_bias": False,
        "num_labels": 5,
    },
    # architectures without a list of their own
    "bloom": {
        "model_type": "bloom",
        "vocab_size": 96,
        "hidden_size": 64,
        "n_layer": 2,
        "n_head": 4,
    },
    "phi3": {"model_type": "phi3", **TEXT, "pad_token_id": 0},
    "roberta": {"model_type": "roberta", **TEXT, "max_position_embeddings": 48},
}


def assert_same_tensors(shape):
    model = build(shape)
    assert type(model).__name__ == shape.config["architectures"][0]
    assert [(w.name, w.shape) for w in shape.weights()] == [
        (n, tuple(p.shape)) for n, p in model.named_parameters()
    ]
    expected = [(n, tuple(b.shape), str(b.dtype)) for n, b in model.named_buffers()]
    assert [(n, s, f"torch.{dtype}") for n, s, dtype in shape.buffers()] == expected
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    return model


def test_every_architecture_is_in_the_catalogue():
    families = {json.loads(entry["config"])["model_type"] for entry in catalogue().values()}
    assert SMALL.keys() == FAMILIES.keys() - {"gemma"} and families > SMALL.keys()


@pytest.mark.parametrize("name", model_names())
def test_tensors_of_published_models(name):
    entry, full = catalogue()[name], read_shape(name)
    assert full.task == entry["task"]
    assert full.num_parameters == entry["parameters"]
    assert entry["source"].strip() and entry["hub_id"].count("/") == 1
    for depth in (1, 3):
        shape = read_shape(name, num_layers=depth)
        assert_same_tensors(shape)
        assert shape.num_layers == depth and shape.num_decoder_layers == (
            depth if full.num_decoder_layers else 0
        )
        assert {w.layer for w in shape.weights()} == {None, *range(depth)}


@pytest.mark.parametrize("name", ["gpt2-xl", "llama-3.1-405b", "gemma-2-27b", "t5-3b"])
def test_tensors_at_full_depth(name):
    assert_same_tensors(read_shape(name))


@pytest.mark.parametrize("name", SMALL.values())
def test_tensors_of_every_head(name):
    for task in FAMILIES[read_shape(name).family].classes:
        shape = read_shape(name, num_layers=2, task=task)
        model = assert_same_tensors(shape)
        assert dict(model.named_modules())[shape.head].weight.shape[0] in (
            shape.vocab_size,
            shape.num_labels,
        )


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_tensors_of_variants(config):
    for task in (
        (None, *FAMILIES[config["model_type"]].classes)
        if config["model_type"] in FAMILIES
        else (None,)
    ):
        assert_same_tensors(read_shape(config, task=task))


@pytest.mark.parametrize("name", SMALL.values())
def test_a_configuration_that_transformers_wrote_reads_the_same(name, tmp_path):
    shape = read_shape(name)
    config = build(read_shape(name, num_layers=1)).config
    config.save_pretrained(tmp_path)
    for source in (config.to_dict(), str(tmp_path), str(tmp_path / "config.json")):
        again = read_shape(source)
        for name in (
            "family",
            "task",
            "head",
            "hidden_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
        ):
            assert getattr(again, name) == getattr(shape, name), name
        for name in ("intermediate_size", "max_positions", "tied", "activation", "rotary_dim"):
            assert getattr(again, name) == getattr(shape, name), name
        for name in (
            "sliding_window",
            "hidden_dropout",
            "attention_dropout",
            "embedding_dropout",
            "num_experts",
        ):
            assert getattr(again, name) == getattr(shape, name), name
        assert again.num_labels == shape.num_labels and again.image_tokens == shape.image_tokens
        assert (
            again.num_layers == 1
            and again.weights() == read_shape(shape.name, num_layers=1).weights()
        )


@pytest.mark.parametrize("name", SMALL.values())
def test_settings_are_what_the_model_uses(name):
    """Dropout, activation and norms as the built model has them, not as a table says."""
    from torch import nn

    shape = read_shape(name, num_layers=1)
    model = build(shape)
    kept = {round(m.p, 3) for m in model.modules() if isinstance(m, nn.Dropout)}
    said = {shape.hidden_dropout, shape.attention_dropout, shape.embedding_dropout}
    extra = (
        {0.0, 0.1} if shape.task == "sequence-classification" else {0.0}
    )  # a classifier's own; none used
    assert kept <= said | extra
    config = model.config
    names = ("hidden_activation", "hidden_act", "activation_function", "activation", "dense_act_fn")
    assert shape.activation in [getattr(config, n, None) for n in names]
    norms = [m for m in model.modules() if "Norm" in type(m).__name__]
    assert all(isinstance(m, nn.LayerNorm) == (shape.norm == "layernorm") for m in norms)


def test_kinds():
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    for name in SMALL.values():
        shape = read_shape(name, num_layers=1)
        modules = dict(build(shape).named_modules())
        classes = {
            "linear": nn.Linear,
            "conv1d": Conv1D,
            "embedding": (nn.Embedding, nn.Linear),
            "conv": nn.Conv2d,
        }
        for w in shape.weights():
            owner = modules[w.name.rpartition(".")[0]]
            if w.kind in classes:
                assert isinstance(owner, classes[w.kind]), w
            elif w.kind == "norm":
                assert "Norm" in type(owner).__name__, w
            elif w.kind == "bias":
                assert w.name.endswith("bias"), w
            else:
                assert w.kind in ("expert", "other") and not isinstance(
                    owner, nn.Linear | nn.Embedding
                ), w


def test_depth_override():
    deep = read_shape("gpt2", num_layers=20)
    assert deep.config["n_layer"] == 20 and deep.num_parameters == 124_439_808 + 8 * 7_087_872
    layers = ["full_attention", "sliding_attention", "full_attention"]
    config = {
        "model_type": "qwen2",
        **TEXT,
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": layers,
    }
    assert read_shape(config, num_layers=2).config["layer_types"] == layers[:2]
    assert_same_tensors(read_shape(config, num_layers=2))
    assert_same_tensors(read_shape(config, num_layers=5))


def test_what_a_configuration_says_of_single_layers_is_cut_with_them():
    """transformers writes Gemma 4's other head sizes by layer number; the last layers take earlier
    ones' keys.
    """
    written = build(read_shape("gemma-4-e4b")).config.to_dict()
    assert written["per_layer_config"].keys() == {"05", "11", "17", "23", "29", "35", "41"}
    for keep_layers, overridden, shared in (
        (12, {"5", "11"}, 0),
        (30, {"5", "11", "17", "23", "29"}, 6),
    ):
        shape = read_shape(written, num_layers=keep_layers)
        assert shape.settings["per_layer_config"].keys() == overridden
        assert shape.settings["num_kv_shared_layers"] == shared
        assert_same_tensors(shape)
        assert shape.weights() == read_shape("gemma-4-e4b", num_layers=keep_layers).weights()


def window_switches() -> dict[str, type]:
    """transformers' configuration classes, by model type, that declare a switch for
    `sliding_window`.
    """
    found = {}
    for folder in Path(transformers.models.__file__).parent.iterdir():
        source = folder / f"configuration_{folder.name}.py"
        if source.exists() and "use_sliding_window:" in source.read_text():
            module = importlib.import_module(f"transformers.models.{folder.name}.{source.stem}")
            kinds = [
                kind
                for kind in vars(module).values()
                if isinstance(kind, type) and kind.__module__ == module.__name__
            ]
            found |= {
                kind.model_type: kind for kind in kinds if hasattr(kind, "use_sliding_window")
            }
    return found


def test_a_switched_off_window_is_none_in_every_configuration_that_has_the_switch():
    switches = window_switches()
    assert {"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"} <= set(switches)
    for model_type, kind in switches.items():
        config = kind(use_sliding_window=False, sliding_window=7)
        layers = config.to_dict().get("layer_types") or []
        assert not config.sliding_window or (layers and "sliding_attention" not in layers), (
            model_type
        )
        if model_type in FAMILIES:
            assert not FAMILIES[model_type].window
    assert {name for name, family in FAMILIES.items() if not family.window} <= set(switches)


@pytest.mark.parametrize("model_type, window", [("mistral", 8), ("qwen2", None), ("smollm3", None)])
def test_a_windows_switch_counts_where_the_model_has_it(model_type, window):
    config = {
        "model_type": model_type,
        **TEXT,
        "num_key_value_heads": 2,
        "use_sliding_window": False,
        "pad_token_id": 0,
    }
    assert read_shape({**config, "sliding_window": 8}).sliding_window == window


@pytest.mark.parametrize(
    "said, dtype",
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": None, "torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "float32"),
        ({"dtype": torch.bfloat16}, "bfloat16"),
        ({}, None),
    ],
)
def test_the_published_dtype_is_that_which_transformers_reads(said, dtype):
    config = json.loads(catalogue()["gpt2"]["config"])
    del config["dtype"]
    config |= said
    assert read_shape(config).published_dtype == dtype
    real = transformers.AutoConfig.for_model(**config).dtype
    assert real == (dtype and getattr(torch, dtype))
    expected = {"bfloat16": "bf16-true", "float16": "fp16-true"}.get(dtype, "fp32")
    assert as_generating(config).precision == expected


def test_a_dtype_of_the_language_model_alone_is_published_too():
    config = json.loads(catalogue()["qwen3-vl-2b"]["config"])
    config["text_config"]["dtype"] = config.pop("dtype")
    assert read_shape(config).published_dtype == "bfloat16"


@pytest.mark.parametrize(
    "spelling, name",
    [
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("LLAMA-3.1-8B", "llama-3.1-8b"),
        ("EleutherAI/polyglot-ko-1.3b", "polyglot-ko-1.3b"),
        ("bert-large-uncased", "bert-large"),
        ("google/vit-base-patch16-224", "vit-base"),
        ("openai-community/gpt2", "gpt2"),
        ("gpt2", "gpt2"),
        ("Mistral-7B-v0.1", "mistral-7b"),
        ("facebook/opt-125m", "opt-125m"),
        ("pythia-160m-deduped", "pythia-160m"),
    ],
)
def test_spellings(spelling, name):
    found = read_shape(spelling)
    assert dataclasses.replace(found, hub_id=read_shape(name).hub_id) == read_shape(name)
    alias = spelling in catalogue()[name].get("aliases", ())
    assert not alias or found.hub_id == spelling, "a program loads the weights that were named"


def test_names_are_unique_and_ordered():
    names = model_names()
    assert len(names) == len(set(names)) >= 50
    assert names.index("gpt2") < names.index("gpt2-medium") < names.index("gpt2-xl")
    claimed = [
        s.lower()
        for e in catalogue().values()
        for s in {e["name"], e["hub_id"], *e.get("aliases", ())}
    ]
    assert len(claimed) == len(set(claimed))


def test_task_comes_from_the_architecture():
    config = {
        "model_type": "bert",
        **TEXT,
        "max_position_embeddings": 48,
        "architectures": ["BertForMaskedLM"],
    }
    assert read_shape(config).task == "masked-lm"
    assert read_shape(config, task="sequence-classification").task == "sequence-classification"
    assert (
        read_shape({**config, "architectures": ["BertForPreTraining"]}).task
        == "sequence-classification"
    )


GOOD = {"model_type": "llama", **TEXT}


@pytest.mark.parametrize(
    "model, arguments, field, words",
    [
        ("gpt-2", {}, "model", "did you mean 'gpt2'?"),
        ("meta-llama/Llama-3.1-9B", {}, "model", "llama-3.1-8b"),
        ("no such thing at all", {}, "model", "config.json"),
        ({**GOOD, "hidden_size": None}, {}, "model.hidden_size", "must say it"),
        (
            {k: v for k, v in GOOD.items() if k != "vocab_size"},
            {},
            "model.vocab_size",
            "must say it",
        ),
        (
            {"model_type": "opt", **TEXT, "ffn_dim": 80},
            {},
            "model.max_position_embeddings",
            "must say it",
        ),
        (
            {"model_type": "opt", **TEXT, "max_position_embeddings": 8},
            {},
            "model.ffn_dim",
            "must say it",
        ),
        ({**GOOD, "num_hidden_layers": 0}, {}, "model.num_hidden_layers", "from 1 to 1,000"),
        ({**GOOD, "vocab_size": -5}, {}, "model.vocab_size", "from 1"),
        ({**GOOD, "intermediate_size": 80.5}, {}, "model.intermediate_size", "whole number"),
        ({**GOOD, "hidden_size": "64"}, {}, "model.hidden_size", "whole number"),
        ({**GOOD, "num_attention_heads": 5}, {}, "model.hidden_size", "multiple of the 5 heads"),
        ({**GOOD, "num_key_value_heads": 3}, {}, "model.num_key_value_heads", "divide the 4 heads"),
        ({**GOOD, "attention_dropout": 5}, {}, "model.attention_dropout", "from 0 to under 1"),
        (
            {"model_type": "gpt2", **TEXT, "n_positions": 64, "attn_pdrop": "0.1"},
            {},
            "model.attn_pdrop",
            "from 0 to under 1",
        ),
        *[
            (
                {**GOOD, "quantization_config": stored},
                {},
                "model.quantization_config",
                "leave it out",
            )
            for stored in (
                {"quant_method": "gptq", "bits": 4},
                {"quant_method": "fp8"},
                {"load_in_4bit": True},
            )
        ],
        ({"hidden_size": 64}, {}, "model", "model_type"),
        (
            {"model_type": "no-such-architecture", "hidden_size": 64},
            {},
            "model",
            "no-such-architecture",
        ),
        ({"model_type": "mllama", "text_config": {"hidden_size": 64}}, {}, "model", "text_config"),
        ({"model_type": "moonshine"}, {}, "model", "simulate(model="),
        ({**GOOD, "per_layer_config": [1]}, {"num_layers": 1}, "model", "cannot be read"),
        (
            {"model_type": "vit", **TEXT, "patch_size": 300},
            {},
            "model.patch_size",
            "fit each other",
        ),
        ({"model_type": "vit", **TEXT, "image_size": [64, 32]}, {}, "model.patch_size", "[64, 32]"),
        ("gpt2", {"task": "masked-lm"}, "task", "'causal-lm' or 'sequence-classification'"),
        ("vit-base", {"task": "causal-lm"}, "task", "'image-classification'"),
        ("gpt2", {"num_layers": 0}, "model.n_layer", "from 1"),
        ("SDXL", {}, "model", "vramlab diffusion sdxl"),
    ],
)
def test_errors_name_the_field(model, arguments, field, words):
    with pytest.raises(RecipeError) as caught:
        read_shape(model, **arguments)
    assert caught.value.field == field
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_are_no_configuration(tmp_path):
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(RecipeError, match="not JSON"):
        read_shape(str(tmp_path))
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(RecipeError, match="model_type"):
        read_shape(str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecipeError, match="no readable file"):
        read_shape(str(tmp_path / "empty"))


def test_a_changed_file_is_read_again(tmp_path):
    path = tmp_path / "mine.json"
    for layers in (2, 3):
        path.write_text(json.dumps({**GOOD, "num_hidden_layers": layers}))
        assert read_shape(str(path)).num_layers == layers
        assert read_shape(str(path)).name == "mine"


def test_configuration_cannot_be_changed_from_outside():
    read_shape("llama-3.1-8b").config["rope_scaling"]["factor"] = 99
    assert read_shape("llama-3.1-8b").config["rope_scaling"]["factor"] == 8.0
    hash(read_shape("llama-3.1-8b"))


def test_reading_is_quick_and_needs_no_torch():
    code = (
        "import sys; from vramlab.recipe.shapes import read_shape; s = "
        "read_shape('llama-3.1-405b');"
    )
    code += " s.weights(); s.buffers(); "
    code += (
        "s.lora_targets('all-linear'); assert not {'torch', 'transformers', 'peft'} & "
        "set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    read_shape("gpt2", num_layers=7)
    best = min(_seconds(lambda: read_shape("gpt2", num_layers=7)) for _ in range(20))
    assert best < 0.0002


def _seconds(call):
    start = time.process_time()
    call()
    return time.process_time() - start
