"""Models from shapes: what is built, on which storages, with which dtypes, and that a real one can
be trained.
"""

from collections import Counter

import pytest
import torch
from tiny_models import TINY, config
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from vramlab.base.errors import RecipeError
from vramlab.formulas.model_states import parameter_bytes, parameter_table
from vramlab.recipe.from_transformers import make
from vramlab.recipe.recipe import LoRA, Quantization, Recipe
from vramlab.training.models import build_model, meta_model, real_tensors, weight_dtype
from vramlab.training.training import build, train_step

QLORA = {
    "lora": LoRA(r=4, target_modules="all-linear"),
    "quantization": Quantization(),
    "precision": "bf16-true",
}


def tiny(family: str, **changes) -> Recipe:
    return Recipe(
        config(family),
        **{"batch_size": 2, "seq_len": None if family == "vit" else 24, "num_layers": 2, **changes},
    )


@pytest.mark.parametrize("family", TINY)
def test_real_models_start_usable_and_learn(family):
    """Every value is finite, nothing stays on meta, and three steps on a batch lower the loss."""
    torch.manual_seed(0)
    training = build(tiny(family, optim_args="lr=0.01"), "cpu")
    state = {**dict(training.model.named_parameters()), **dict(training.model.named_buffers())}
    assert not any(tensor.is_meta for tensor in state.values())
    assert all(
        torch.isfinite(tensor).all() for tensor in state.values() if tensor.is_floating_point()
    )
    losses = [float(train_step(training)) for _ in range(4)]
    assert losses[-1] < losses[0]
    assert all(
        torch.isfinite(tensor).all() for tensor in state.values() if tensor.is_floating_point()
    )


@pytest.mark.parametrize("family", TINY)
def test_buffers_are_those_that_transformers_makes(family):
    """Rotary frequencies, position ids and Gemma's scale are computed, not left at zero."""
    import transformers

    recipe = tiny(family)
    built = build_model(recipe)
    theirs = type(built)(transformers.AutoConfig.for_model(**recipe.shape.config))
    expected = dict(theirs.named_buffers())
    found = dict(built.named_buffers())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("family", TINY)
def test_tied_weights_stay_tied_and_counts_are_the_shapes(family):
    recipe = tiny(family)
    model = build_model(recipe)
    assert sum(p.numel() for p in model.parameters()) == recipe.shape.num_parameters
    head = model.get_output_embeddings()
    if recipe.shape.tied:
        assert head.weight is model.get_input_embeddings().weight
    assert model.training


def test_fake_models_have_no_memory():
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build_model(Recipe("llama-3.1-405b", num_layers=2))
    parameters = list(model.parameters())
    assert all(isinstance(p, FakeTensor) and p.device.type == "cpu" for p in parameters)
    assert sum(p.numel() for p in parameters) > 10**10


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, torch.float32),
        ({"precision": "tf32"}, torch.float32),
        ({"precision": "bf16-mixed"}, torch.float32),
        ({"precision": "bf16-true"}, torch.bfloat16),
        ({"precision": "fp16-true"}, torch.float16),
        ({**QLORA, "precision": "bf16-mixed"}, torch.bfloat16),
        ({**QLORA, "precision": "fp32"}, torch.float32),
        ({**QLORA, "quantization": Quantization(compute_dtype="float16")}, torch.float16),
    ],
)
def test_dtype_of_weights_that_are_not_quantized(changes, dtype):
    assert weight_dtype(tiny("llama", **changes)) == dtype


def test_adapters_are_fp32_unless_told_otherwise():
    for cast, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        lora = LoRA(r=4, autocast_adapter_dtype=cast)
        model = build_model(tiny("llama", lora=lora, precision="bf16-true"))
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        assert trained and all("lora_" in name and p.dtype == dtype for name, p in trained.items())


def test_adapters_start_as_peft_starts_them():
    """B is zero, so the first forward pass is the base's; A is not."""
    model = build_model(tiny("llama", lora=LoRA(r=4)))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            assert bool(parameter.any()) == ("lora_A" in name)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_quantized_weights_hold_the_values(kind):
    """Real weights are quantized by bitsandbytes, so what they dequantize to is near a normal of
    deviation 0.02.
    """
    import bitsandbytes as bnb

    model = build_model(tiny("llama", **{**QLORA, "quantization": Quantization(kind)}))
    layer = model.get_base_model().model.layers[0].mlp.up_proj.base_layer
    assert not layer.weight.requires_grad
    assert layer.weight.numel() == 256 * 96 // 2
    values = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    assert values.shape == (256, 96) and 0.015 < values.float().std() < 0.025


def stored(model) -> Counter:
    """(what it is, dtype, bytes) of every storage of a model's weights, and how many there are."""
    found, seen = Counter(), set()
    for name, parameter in model.named_parameters():
        state = getattr(parameter, "quant_state", None)
        nested = state.state2 if state is not None else None
        parts = {"weight" if state is not None else name: parameter}
        parts |= {"scales": state.absmax, "code": state.code} if state is not None else {}
        parts |= (
            {"offset": state.offset, "nested": nested.absmax, "nested code": nested.code}
            if nested
            else {}
        )
        for part, tensor in parts.items():
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                found[part, tensor.dtype, storage.nbytes()] += 1
    return found


QWEN3_MOE = {
    **{
        "model_type": "qwen3_moe",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "head_dim": 16,
    },
    **{
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    },
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}

FLINT = QWEN3_MOE | {"model_type": "flint", "mlp_only_layers": [0]}


@pytest.mark.parametrize(
    "family", ["llama", "opt", "qwen3_moe"]
)  # without and with biases, and fused experts
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_four_bit_bases_are_those_that_from_pretrained_loads(family, double, dtype, tmp_path):
    """A checkpoint that is loaded in 4 bits and ours: the same storages, the same dtype to unpack
    into, all counted.
    """
    import transformers

    quantization = Quantization("nf4", double=double, prepare=False)
    precision = "bf16-true" if dtype == torch.bfloat16 else "fp32"
    base = (
        Recipe(QWEN3_MOE, seq_len=8, precision=precision)
        if family == "qwen3_moe"
        else tiny(family, precision=precision)
    )
    recipe = base.replace(
        lora=LoRA(r=4, target_modules=("q_proj", "v_proj")), quantization=quantization
    )
    build_model(base).save_pretrained(tmp_path)
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=dtype,
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    ours = build_model(recipe).unload()  # without its adapters
    assert stored(ours) == stored(theirs)
    states = [
        [p.quant_state.dtype for p in m.parameters() if hasattr(p, "quant_state")]
        for m in (ours, theirs)
    ]
    assert states[0] == states[1] and set(states[0]) == {dtype}
    blocks = sum(-(-size // 512) * 512 * n for (_, _, size), n in stored(theirs).items())
    adapters = sum(row.count * row.size for row in parameter_table(recipe) if row.trained)
    assert blocks == parameter_bytes(recipe) - adapters


def test_prepared_bases_keep_the_rest_in_fp32():
    prepared = build_model(tiny("llama", **QLORA)).get_base_model()
    assert prepared.model.embed_tokens.weight.dtype == torch.float32
    plain = {**QLORA, "quantization": Quantization(prepare=False)}
    assert (
        build_model(tiny("llama", **plain)).get_base_model().model.embed_tokens.weight.dtype
        == torch.bfloat16
    )


def test_t5_keeps_one_matrix_in_fp32_under_fp16():
    """Its `wo` overflows in fp16 (`_keep_in_fp32_modules`)."""
    model = build_model(tiny("t5", precision="fp16-true"))
    dtypes = {
        name.split(".")[-2]: p.dtype
        for name, p in model.named_parameters()
        if "DenseReluDense" in name
    }
    assert dtypes == {"wi": torch.float16, "wo": torch.float32}


def test_what_stays_in_fp32_is_what_from_pretrained_leaves_so(tmp_path):
    """A pattern in `_keep_in_fp32_modules_strict` may have dots: Flint's `gate.weight`."""
    import transformers

    ours = build_model(Recipe(FLINT, seq_len=8, precision="bf16-true"))
    ours.save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    found, expected = (
        {name: p.dtype for name, p in model.named_parameters()} for model in (ours, theirs)
    )
    assert found == expected
    assert found["model.layers.1.mlp.gate.weight"] == torch.float32


def test_an_error_of_transformers_is_one_sentence():
    with pytest.raises(RecipeError) as caught:
        build_model(tiny("gpt2", precision="bf16-true", attn_implementation="flash_attention_2"))
    assert "\n" not in str(caught.value)


def test_real_tensors_can_be_made_within_a_fake_mode():
    with FakeTensorMode():
        with real_tensors():
            assert not isinstance(torch.ones(2), FakeTensor)
        assert isinstance(torch.ones(2), FakeTensor)


TEXT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "intermediate_size": 80,
}
EXPERTS = {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
STATES = {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "expand": 2}
OTHERS = {
    "gpt_oss": {**TEXT, **EXPERTS},
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96},
    "mamba2": {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 96, **STATES},
    "deberta-v2": TEXT,
}


@pytest.mark.parametrize("kind", OTHERS)
def test_architectures_without_sdpa_take_eager(kind):
    """By themselves; and what cannot be simulated is one sentence."""
    from vramlab import simulate

    recipe = Recipe({"model_type": kind, **OTHERS[kind]}, seq_len=16)
    assert recipe.attn_implementation == "eager"
    with pytest.raises(RecipeError, match="use 'eager'"):
        recipe.replace(attn_implementation="sdpa")
    try:
        assert simulate(recipe, target="cpu").peak.total > 0
    except RecipeError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    "kind",
    [
        "speech_to_text",
        "sam",
        "wav2vec2",
        "swin",
        "convnext",
        "mamba",
        "rwkv",
        "gemma3n",
        "gemma3n_text",
    ],
)
def test_what_no_recipe_describes_goes_to_simulate_as_a_module(kind):
    from transformers import AutoConfig

    with pytest.raises(RecipeError, match=r"simulate\(model="):
        Recipe(AutoConfig.for_model(kind))


def test_positions_that_are_counted_from_the_paddings():
    """RoBERTa's table has two rows more than positions (with padding token 1)."""
    config = {"model_type": "roberta", **TEXT, "max_position_embeddings": 34, "pad_token_id": 1}
    assert Recipe(config).seq_len == Recipe(config).shape.max_positions == 32
    with pytest.raises(RecipeError, match="32 positions"):
        Recipe(config, seq_len=33)


def test_sizes_that_differ_by_layer_are_no_traceback():
    """Gemma 4's heads are wider in some layers, and its configuration refuses to name one width."""
    try:
        Recipe(
            {"model_type": "gemma4_text", **TEXT, "num_key_value_heads": 2, "head_dim": 16},
            seq_len=16,
        )
    except RecipeError as error:
        assert "\n" not in str(error)


def test_a_model_is_whole_where_arguments_ask_deepspeed_for_divided_ones():
    """As in a process that has made TrainingArguments with DeepSpeed's stage 3."""
    pytest.importorskip("deepspeed")
    from transformers.integrations import HfDeepSpeedConfig, unset_hf_deepspeed_config

    recipe = Recipe(config("llama"), attn_implementation="sdpa")
    asks = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    try:
        # to train, and to read an architecture's shapes off
        models = (meta_model(recipe), make(recipe.shape))
    finally:
        unset_hf_deepspeed_config()
    for model in models:
        assert asks.is_zero3() and sum(map(torch.numel, model.parameters())) > 0
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
