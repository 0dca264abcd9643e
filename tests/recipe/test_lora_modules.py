"""LoRA targets against PEFT: the very modules, with the very sizes, that `get_peft_model` adapts on
the meta device.
"""

import warnings

import pytest
from quick import params
from tiny_models import config
from vramlab import LoRA, Recipe, predict, simulate
from vramlab.base.errors import RecipeError
from vramlab.recipe import lora_modules
from vramlab.recipe.from_transformers import build
from vramlab.recipe.shapes import read_shape


def adapted(shape, target_modules, modules_to_save=None):
    """{module name: (inputs, outputs)} of PEFT's adapters, and their numbers at r = 2."""
    from peft import LoraConfig, get_peft_model

    build.cache_clear()  # PEFT changes the model
    task_type = {"sequence-classification": "SEQ_CLS"}.get(shape.task)
    config = LoraConfig(
        r=2, target_modules=target_modules, modules_to_save=modules_to_save, task_type=task_type
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(build(shape), config)
    build.cache_clear()
    found, size = {}, 0
    for name, module in model.base_model.model.named_modules():
        if not hasattr(module, "lora_A") or "default" not in {
            **module.lora_A,
            **module.lora_embedding_A,
        }:
            continue
        if "default" in module.lora_embedding_A:
            a, b = module.lora_embedding_A["default"], module.lora_embedding_B["default"]
        else:
            a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
        rows = 1 if "default" in module.lora_embedding_A else 0
        found[name] = (
            a.numel() // 2,
            b.shape[1 - rows] if rows == 0 and b.shape[0] == 2 else b.numel() // 2,
        )
        size += a.numel() + b.numel()
    return found, size


CASES = [
    *[
        (name, None)
        for name in (
            "gpt2",
            "bert-base",
            "pythia-70m",
            "llama-3.2-1b",
            "opt-125m",
            "phi-2",
            "falcon-7b",
            "t5-small",
        )
    ],
    *[(name, None) for name in ("mistral-7b", "qwen2.5-0.5b", "qwen3-0.6b", "gemma-2-2b")],
    *[
        (name, "all-linear")
        for name in ("gpt2", "pythia-70m", "llama-3.2-1b", "opt-125m", "phi-2", "falcon-7b")
    ],
    *[(name, "all-linear") for name in ("bert-base", "t5-small", "gemma-2-2b", "vit-base")],
    ("mixtral-8x7b", ["q_proj", "v_proj"]),
    ("mixtral-8x7b", ["model.layers.1.self_attn.q_proj", "lm_head"]),
    ("llama-3.1-8b", "All-Linear"),
    ("llama-3.1-8b", ["q_proj", "down_proj", "lm_head"]),
    ("llama-3.2-1b", ["v_proj", "lm_head"]),
    ("llama-3.1-8b", ["embed_tokens", "o_proj"]),
    ("llama-3.1-8b", ["model.layers.0.self_attn.q_proj"]),
    ("llama-3.1-8b", ["proj", "q_proj"]),
    ("llama-3.1-8b", r".*\.1\.mlp\.(up|gate)_proj"),
    ("gpt2", ["c_proj", "wte"]),
    ("gpt2", r"transformer\.h\.\d+\.attn\.c_(attn|proj)"),
    ("bert-large", ("query", "key", "dense")),
    ("t5-small", ["wi", "wo", "o"]),
    ("t5-small", r"decoder\..*\.(q|v)"),
    ("vit-base", ["q_proj", "projection", "classifier"]),
    ("opt-125m", ["fc1", "out_proj"]),
]


@pytest.mark.parametrize("name, target_modules", CASES, ids=[f"{n}-{t}" for n, t in CASES])
def test_targets_are_what_peft_adapts(name, target_modules):
    shape = read_shape(name, num_layers=2)
    targets = shape.lora_targets(target_modules)
    found, size = adapted(
        shape, list(target_modules) if isinstance(target_modules, tuple) else target_modules
    )
    assert found and {name: (inside, out) for name, inside, out in targets} == found
    assert 2 * sum(inside + out for _, inside, out in targets) == size


@pytest.mark.parametrize("name", ["gpt2", "llama-3.2-1b", "opt-125m"])
def test_classifiers(name):
    shape = read_shape(name, num_layers=2, task="sequence-classification")
    found, _ = adapted(shape, "all-linear")
    assert {name for name, _, _ in shape.lora_targets("all-linear")} == found.keys()


@pytest.mark.parametrize("target_modules", [None, "all-linear"])
def test_a_mixture_of_experts_is_adapted_where_it_is_linear(target_modules):
    shape = read_shape("mixtral-8x7b", num_layers=2)
    names = [name for name, _, _ in shape.lora_targets(target_modules)]
    assert {name.rpartition(".")[2] for name in names} == (
        {"q_proj", "v_proj"} if target_modules is None else {"q_proj", "k_proj", "v_proj", "o_proj"}
    )
    found, _ = adapted(shape, names)
    assert found.keys() == set(names)
    report = predict(Recipe("mixtral-8x7b", num_layers=2, lora=LoRA(target_modules=target_modules)))
    assert any("PEFT" in note for note in report.notes) == (target_modules == "all-linear")


def test_modules_to_save_are_not_adapted():
    shape = read_shape("llama-3.1-8b", num_layers=2)
    found, _ = adapted(shape, ["q_proj", "lm_head"], ["lm_head"])
    assert {
        name for name, _, _ in lora_modules.find(shape, ["q_proj", "lm_head"], ("lm_head",))
    } == found.keys()


def test_an_architecture_without_a_list():
    sizes = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape = read_shape(
        {"model_type": "roberta", **sizes, "intermediate_size": 80, "max_position_embeddings": 48}
    )
    for target_modules in (None, "all-linear"):
        found, _ = adapted(shape, target_modules)
        assert found == {
            name: (inside, out) for name, inside, out in shape.lora_targets(target_modules)
        }


def test_published_adapter_size():
    """LoRA at r = 8 on polyglot-ko-1.3b trains 1,572,864 parameters (the book of source B prints
    this number).
    """
    targets = read_shape("polyglot-ko-1.3b").lora_targets(None)
    assert sum(8 * (inside + out) for _, inside, out in targets) == 1_572_864


@pytest.mark.parametrize(
    "name, target_modules, words",
    [
        ("gpt2", ("q_proj",), "c_attn"),
        ("gpt2", "c_attn", "nothing in gpt2 matches"),  # a string must match the whole name
        ("gpt2", "(", "not a regular expression"),
        ("gpt2", (), "nothing in gpt2 matches"),
        (
            "mixtral-8x7b",
            ("q_proj", "w1", "w3"),
            "w1, w3 are fused experts of mixtral-8x7b, which no adapter takes",
        ),
        ("vit-base", None, "no default"),
    ],
)
def test_bad_adapters(name, target_modules, words):
    with pytest.raises(RecipeError) as caught:
        lora_modules.adapted(read_shape(name), LoRA(target_modules=target_modules))
    assert caught.value.field == "lora.target_modules" and words in str(caught.value)


def test_a_rank_over_the_smaller_side_is_as_large_as_it_says():
    recipe = Recipe(config("gpt2"), seq_len=8, lora=LoRA(r=300))
    states = [
        witness(recipe).phases["between_steps"].end.optimizer_states
        for witness in (predict, simulate)
    ]
    assert states[0] == states[1] > 0


SOME_LAYERS = [r".*layers\.[45]\..*q_proj", ["layers.3.self_attn.q_proj"], r".*layers\.0\..*q_proj"]


@pytest.mark.parametrize(
    "targets",
    params(SOME_LAYERS, SOME_LAYERS[:1]),
)
def test_adapters_in_some_layers_are_simulated_whole_and_not_predicted(targets):
    recipe = Recipe(config("llama"), 2, 16, num_layers=8, lora=LoRA(r=2, target_modules=targets))
    assert simulate(recipe).peak.total == simulate(recipe, full=True).peak.total
    everywhere = recipe.replace(lora=LoRA(r=2, target_modules=["q_proj"]))
    assert simulate(recipe).peak.optimizer_states != simulate(everywhere).peak.optimizer_states
    with pytest.raises(RecipeError, match="every layer has to get the same adapters"):
        predict(recipe)
    assert predict(everywhere).peak.total > 0
