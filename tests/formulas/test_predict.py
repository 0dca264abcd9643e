"""The formulas by themselves: what they say, that they need no torch, that nonsense is refused."""

import subprocess
import sys
import time
from itertools import pairwise
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from predict_grid import written_down
from quick import params
from vramlab import Loop, LoRA, Quantization, Recipe, RecipeError, Report, Sharding
from vramlab.formulas import account, elementwise, model, model_states, parameters, tensor_sizes
from vramlab.formulas.predict import predict
from vramlab.hardware.overhead import rounded
from vramlab.recipe.options import QUANT_TYPES
from vramlab.recipe.recipe import ATTENTION, OPTIMIZERS, PRECISIONS
from vramlab.recipe.shapes import model_names, read_shape
from vramlab.report.report import CATEGORIES, PHASES, Interval, MiB

GPT2 = Recipe("gpt2", batch_size=4, seq_len=256)
LLAMA = Recipe("llama-3.1-8b", batch_size=2, seq_len=512, precision="bf16-true")


def simulated(recipe: Recipe) -> Report:
    from vramlab.simulation.simulate import simulate

    return simulate(recipe)


# --- the report


def test_it_needs_no_torch():
    code = (
        "import sys; from vramlab import Recipe, LoRA, Quantization; from "
        "vramlab.formulas.predict import predict\n"
        "for r in (Recipe('gpt2'), Recipe('vit-base'), Recipe('mixtral-8x7b'),"
        " Recipe('llama-3.1-8b', lora=LoRA(), quantization=Quantization())): predict(r, 'T4')\n"
        "heavy = {'torch', 'transformers', 'numpy', 'peft', 'bitsandbytes'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


KNOWN = written_down()


@pytest.mark.parametrize("name", KNOWN)
def test_a_report_is_whole_for_every_model(name):
    report = predict(Recipe(name), "A100")
    assert report.source == "predicted" and report.status == "ok" and report.target == "cuda"
    assert tuple(report.phases) == PHASES
    assert report.peak == report.phases[report.peak_phase].peak
    assert report.peak.total == max(phase.peak.total for phase in report.phases.values())
    for phase in report.phases.values():
        assert phase.end.total <= phase.peak.total
        assert all(getattr(split, c) >= 0 for split in (phase.peak, phase.end) for c in CATEGORIES)
    assert isinstance(report.reserved, Interval) and isinstance(report.process, Interval)
    assert report.peak.total <= report.reserved.value <= report.reserved.high < report.process.high
    assert (
        report.largest[0].size * report.largest[0].count
        >= report.largest[-1].size * report.largest[-1].count
    )
    assert sum(t.size * t.count for t in report.largest) <= report.peak.total
    assert Report.from_json(report.to_json()).to_dict() == report.to_dict()


def test_the_largest_tensors_are_those_of_the_simulation():
    report, truth = predict(GPT2), simulated(GPT2)
    assert report.peak_phase == truth.peak_phase
    named = {(t.category, t.shape): t.size * t.count for t in report.largest}
    first = truth.largest[0]
    states = (
        2 if first.category == "optimizer_states" else 1
    )  # one entry here, exp_avg and exp_avg_sq there
    assert named[first.category, first.shape] in (
        first.size * first.count,
        states * first.size * first.count,
    )


def test_the_card_changes_what_depends_on_it():
    t4, a100, h100 = (predict(LLAMA, name) for name in ("T4", "A100", "H100"))
    assert h100.peak.workspace - a100.peak.workspace == 2 * (32 * MiB - 8_519_680)
    assert any("bf16" in note for note in t4.notes) and not a100.notes
    kept = [report.phases["forward"].end.activations for report in (t4, a100)]
    assert kept[0] > 1.2 * kept[1]  # no fused attention for bf16 below compute capability 8.0
    with pytest.raises(LookupError, match="A1000"):
        predict(LLAMA, "A1000")


@pytest.mark.parametrize(
    "precision", ["bf16-true", pytest.param("bf16-mixed", marks=pytest.mark.slow)]
)
def test_embedded_tokens_do_not_add_up_with_depth(precision):
    """At full depth: grids have two or three layers, where a block that every layer keeps hardly
    shows.
    """
    recipe = Recipe("llama-3.1-8b", batch_size=8, seq_len=512, precision=precision)
    assert predict(recipe).peak.total == pytest.approx(simulated(recipe).peak.total, rel=1e-5)


@pytest.mark.parametrize(
    ("saved", "settings"),
    [
        (("lm_head",), {}),
        (("lm_head",), {"trainer": "sft"}),
        (("embed_tokens",), {"gradient_checkpointing": True}),
        (("lm_head", "embed_tokens"), {"gradient_checkpointing": True, "trainer": "sft"}),
    ],
    ids=str,
)
def test_a_trained_copy_of_a_tied_table_unties_it(saved, settings):
    """PEFT copies the module that `modules_to_save` names; the other one goes on with the frozen
    matrix.
    """
    lora = LoRA(modules_to_save=saved)
    recipe = Recipe(
        "llama-3.2-1b", num_layers=2, seq_len=64, precision="bf16-true", lora=lora, **settings
    )
    assert recipe.shape.tied
    predicted, truth = predict(recipe), simulated(recipe)
    for phase in PHASES:
        assert predicted.phases[phase].peak.total == pytest.approx(
            truth.phases[phase].peak.total, rel=0.002
        ), phase


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
def test_copies_that_no_formula_places_are_refused(engine):
    recipe = GPT2.replace(lora=LoRA(modules_to_save=("wte",)), sharding=Sharding(3, 4, engine))
    with pytest.raises(RecipeError, match=r"modules_to_save.*ask simulate"):
        predict(recipe)


WRITTEN_OUT = [
    (name, gpu) for name in ("bert-large", "pythia-410m", "falcon-7b") for gpu in ("T4", "V100")
]


@pytest.mark.parametrize(
    ("name", "gpu"), params(WRITTEN_OUT, [("bert-large", "V100"), ("falcon-7b", "T4")])
)
def test_autocast_is_off_inside_attention_that_is_written_out(name, gpu):
    from vramlab.simulation.simulate import simulate

    recipe = Recipe(
        name, batch_size=4, seq_len=256, precision="bf16-mixed", optim="sgd", num_layers=2
    )
    predicted, truth = predict(recipe, gpu), simulate(recipe, gpu=gpu)
    kept, really = (report.phases["forward"].end.activations for report in (predicted, truth))
    assert kept == pytest.approx(really, rel=0.001)
    assert predicted.peak.total == pytest.approx(truth.peak.total, rel=0.005)


def with_activation(name: str, precision: str) -> Recipe:
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 256,
    }
    config = {"model_type": "gpt_neox", "hidden_act": name, "vocab_size": 96, **sizes}
    return Recipe(config, batch_size=4, seq_len=256, precision=precision)


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize("name", ["gelu_accurate", "mish", "relu6"])
def test_activations_are_counted_as_simulated(name, precision):
    from vramlab.simulation.simulate import simulate

    recipe = with_activation(name, precision)
    assert predict(recipe).peak.total == pytest.approx(simulate(recipe).peak.total, rel=0.001)


ACTIVATIONS = {*elementwise.OF_RESULT, *elementwise.OF_INPUT, *elementwise.WRITTEN_OUT}


@pytest.mark.parametrize(
    "name", sorted({"gelu_10", "laplace", "prelu", "xielu", "zzz"} - ACTIVATIONS)
)
def test_activations_that_are_not_written_down_are_refused(name):
    with pytest.raises(RecipeError, match=r"model.activation.*ask simulate"):
        predict(with_activation(name, "fp32"))


def test_flash_attention_needs_ampere():
    recipe = Recipe("gpt2", precision="fp16-true", attn_implementation="flash_attention_2")
    for gpu in ("T4", "V100"):
        with pytest.raises(RecipeError, match="flash_attention_2 starts at 8"):
            predict(recipe, gpu)
    assert predict(recipe, "A100").peak.total == predict(recipe).peak.total


def test_depth_costs_nothing():
    def cpu_seconds(recipe: Recipe) -> float:
        predict(recipe)
        best = []
        for _ in range(5):
            start = time.process_time()
            for _ in range(20):
                account.cached_account.cache_clear()
                predict(recipe)
            best.append((time.process_time() - start) / 20)
        return min(best)

    shallow, deep = (
        cpu_seconds(Recipe("llama-3.1-8b", num_layers=2)),
        cpu_seconds(Recipe("llama-3.1-405b")),
    )
    assert deep < 3 * shallow
    assert deep < 0.01  # a millisecond on an idle core, with room for a busy machine


def test_reserved_counts_what_one_layer_recomputes_once():
    recipe = Recipe(
        "gpt2-xl", batch_size=4, seq_len=1024, precision="fp16-true", optim="adamw_bnb_8bit"
    )
    recipe = recipe.replace(gradient_checkpointing=True)
    assert predict(recipe, "T4").reserved.value == pytest.approx(
        simulated(recipe).reserved.value, rel=0.1
    )


# --- what stays


@pytest.mark.parametrize(
    "name", ["gpt2", "bert-base", "pythia-410m", "llama-3.2-1b", "vit-base", "opt-125m"]
)
@pytest.mark.parametrize("precision,width", [("fp32", 4), ("bf16-mixed", 4), ("bf16-true", 2)])
def test_parameters_and_gradients_are_the_shapes_numbers(name, precision, width):
    recipe = Recipe(name, precision=precision)
    expected = sum(rounded(weight.size * width) for weight in recipe.shape.weights())
    assert model_states.parameter_bytes(recipe) == model_states.gradient_bytes(recipe) == expected
    assert predict(recipe).phases["load"].peak.parameters == expected
    assert 0 <= expected - recipe.shape.num_parameters * width < 512 * len(recipe.shape.weights())


def test_lora_counts_what_peft_counts():
    shape = read_shape("polyglot-ko-1.3b")
    recipe = Recipe(
        "polyglot-ko-1.3b",
        precision="fp16-true",
        lora=LoRA(r=8, target_modules=("query_key_value",)),
    )
    trained = [row for row in model_states.parameter_table(recipe) if row.trained]
    assert sum(row.count * prod(row.shape) for row in trained) == 1_572_864
    assert model_states.gradient_bytes(recipe) == 4 * 1_572_864
    assert (
        model_states.parameter_bytes(recipe)
        - model_states.parameter_bytes(recipe.replace(lora=None))
        == 4 * 1_572_864
    )
    assert round(100 * 1_572_864 / shape.num_parameters, 3) == 0.118


def test_four_bits_are_four_and_a_half_and_four_point_127():
    plain, double = (
        sum(tensor_sizes.stored_sizes((4096, 4096), 2, "nf4", nested)) for nested in (False, True)
    )
    assert abs(8 * plain / 4096**2 - 4.5) < 0.001
    assert abs(8 * double / 4096**2 - 4.127) < 0.001


@pytest.mark.parametrize(
    "optim,arguments,per_number",
    [
        ("sgd", None, 0),
        ("sgd", "momentum=0.9", 4),
        ("rmsprop", "momentum=0.9,centered=1", 12),
        ("adamw_torch", None, 8),
        ("lion_32bit", None, 4),
    ],
)
def test_states_per_number(optim, arguments, per_number):
    recipe = GPT2.replace(optim=optim, optim_args=arguments)
    assert (
        model_states.optimizer_state_bytes(recipe)
        == per_number * model_states.gradient_bytes(recipe) // 4
    )


def test_the_trainer_keeps_embeddings_out_of_eight_bits():
    trainer, plain = (
        GPT2.replace(optim="adamw_bnb_8bit", loop=loop) for loop in ("trainer", "plain")
    )
    embeddings = 2 * (50257 + 1024) * 768
    difference = model_states.optimizer_state_bytes(trainer) - model_states.optimizer_state_bytes(
        plain
    )
    assert abs(difference - (3 - 4 / 256) * embeddings) < 4096


# --- what a layer keeps


def kept_by_a_layer(recipe: Recipe) -> int:
    """Bytes of activations that one layer more adds at the end of the forward pass."""
    deep, shallow = (
        predict(recipe.replace(num_layers=n)).phases["forward"].end.activations for n in (4, 3)
    )
    return deep - shallow


def test_a_gpt2_layer_by_hand_and_by_simulation():
    b, s, h, a = 4, 256, 768, 12
    tokens = b * s
    kept = {
        "inputs and results of the two norms": 4 * 4 * tokens * h,
        "queries, keys and values": 4 * 3 * tokens * h,
        "attention's result": 4 * tokens * h,
        "gelu_new: input, x/2, tanh, 1 + tanh": 4 * 4 * tokens * 4 * h,
        "its result": 4 * tokens * 4 * h,
        "three masks of one byte less the attention's": 2 * tokens * h,
        "a mean and a deviation a token, twice; log-sums": 4 * (4 * tokens + b * a * s),
    }
    by_hand = sum(kept.values())
    by_formula = kept_by_a_layer(GPT2)
    assert abs(by_formula - by_hand) <= 0.001 * by_hand
    deep, shallow = (
        simulated(GPT2.replace(num_layers=n)).phases["forward"].end.activations for n in (3, 2)
    )
    assert abs(by_formula - (deep - shallow)) <= 0.001 * by_hand


THREE = [
    LLAMA.replace(num_layers=3, precision="bf16-mixed"),
    LLAMA.replace(num_layers=3, gradient_checkpointing=True),
    Recipe("bert-base", batch_size=4, seq_len=128, num_layers=3, attn_implementation="eager"),
    LLAMA.replace(num_layers=3),
    LLAMA.replace(num_layers=3, lora=LoRA(r=16)),
    Recipe("vit-base", batch_size=8, num_layers=3),
]


@pytest.mark.parametrize("recipe", params(THREE, THREE[:3]), ids=str)
def test_a_layer_keeps_what_the_simulated_one_keeps(recipe):
    deep, shallow = (
        simulated(recipe.replace(num_layers=n)).phases["forward"].end.activations for n in (4, 3)
    )
    assert abs(kept_by_a_layer(recipe) - (deep - shallow)) <= 0.002 * (deep - shallow)


NEOX = Recipe("pythia-70m", batch_size=4, seq_len=256, precision="fp16-true", num_layers=3)


NEOXES = [
    NEOX,
    NEOX.replace(precision="fp16-mixed"),
    NEOX.replace(lora=LoRA(target_modules=("query_key_value",))),
    NEOX.replace(lora=LoRA(target_modules=("dense",))),
    NEOX.replace(gradient_checkpointing=True),
    NEOX.replace(model=NEOX.shape.config | {"rotary_pct": 1.0}),
]
CARDS = [(recipe, gpu) for gpu in ("A100", "T4") for recipe in NEOXES]


@pytest.mark.parametrize(("recipe", "gpu"), params(CARDS, CARDS[:8]), ids=str)
def test_heads_that_lie_one_after_the_other_are_copied_after_flash_attention(recipe, gpu):
    from vramlab.simulation.simulate import simulate

    predicted, truth = (find(recipe, gpu=gpu).phases["forward"].end for find in (predict, simulate))
    tensor = 2 * 4 * 256 * 512
    assert abs(predicted.activations - truth.activations) < tensor // 4


def test_checkpointing_leaves_the_layers_input():
    assert kept_by_a_layer(LLAMA.replace(gradient_checkpointing=True)) == 2 * 2 * 512 * 4096


def test_scores_grow_with_the_square_of_the_tokens_only_when_written_out():
    def kept(tokens: int, attention: str) -> int:
        return kept_by_a_layer(LLAMA.replace(seq_len=tokens, attn_implementation=attention))

    assert kept(2048, "sdpa") == pytest.approx(4 * kept(512, "sdpa"), rel=0.001)
    heads, scores = 32, 2048**2 - 4 * 512**2
    assert kept(2048, "eager") - 4 * kept(512, "eager") == pytest.approx(
        2 * heads * scores * (4 + 2), rel=0.001
    )


def test_logits():
    shallow = LLAMA.replace(num_layers=1, optim="sgd")
    names = {(t.shape, t.dtype): t.size for t in predict(shallow.replace(batch_size=64)).largest}
    assert names[(64 * 512, 128256), "float32"] == 4 * 64 * 512 * 128256


# --- what is asked of it


@given(
    st.sampled_from(
        ["gpt2", "llama-3.2-1b", "bert-base", "pythia-70m", "gemma-2-2b", "mixtral-8x7b"]
    ),
    st.sampled_from(PRECISIONS),
    st.integers(1, 16),
    st.integers(16, 400),
    st.booleans(),
)
@settings(max_examples=60)
def test_more_never_takes_less(name, precision, batch, tokens, checkpointing):
    base = Recipe(
        name,
        batch_size=batch,
        seq_len=tokens,
        precision=precision,
        num_layers=3,
        gradient_checkpointing=checkpointing,
    )
    least = predict(base).peak.total
    slack = 4 * MiB  # the allocator's rests do not grow evenly
    for more in (dict(batch_size=batch + 1), dict(seq_len=tokens + 16), dict(num_layers=4)):
        assert predict(base.replace(**more)).peak.total >= least - slack
    assert predict(base.replace(optim="sgd")).peak.total <= least + slack
    adapted = predict(base.replace(lora=LoRA(target_modules="all-linear"))).peak
    assert adapted.gradients <= predict(base).phases["step"].peak.gradients


def test_zero_divides_what_its_stage_says():
    full = Recipe("llama-3.1-8b", precision="bf16-true", gradient_checkpointing=True)
    whole = predict(full).phases["between_steps"].end
    for stage, engine, n in (
        (1, "deepspeed", 8),
        (2, "deepspeed", 8),
        (3, "fsdp", 8),
        (3, "deepspeed", 64),
    ):
        rank = predict(full.replace(sharding=Sharding(stage, n, engine)))
        split, rest = rank.phases["step"].peak, rank.phases["between_steps"].end
        fp32 = (
            3 if engine == "deepspeed" else 1
        )  # it updates a copy of the weights in fp32, with states in fp32
        assert rest.optimizer_states == pytest.approx(fp32 * whole.optimizer_states / n, rel=1e-4)
        assert split.parameters == pytest.approx(
            whole.parameters / (n if stage == 3 else 1), rel=1e-4
        )
        assert any(f"rank 0 of {n}" in note for note in rank.notes)
    gradients = predict(full.replace(sharding=Sharding(3, 8))).phases["step"].peak.gradients
    assert gradients == pytest.approx(model_states.gradient_bytes(full) / 8, rel=1e-4)
    alone, two, many = (
        predict(full.replace(sharding=Sharding(3, n))).peak.total for n in (1, 2, 64)
    )
    assert alone == predict(full).peak.total and many < two < alone
    offloaded = predict(full.replace(sharding=Sharding(3, 8, "deepspeed", offload="optimizer")))
    assert offloaded.phases["step"].peak.optimizer_states == 0
    replicas = predict(full.replace(sharding=Sharding(0, 8, "ddp"))).peak.total
    buckets = replicas - predict(full).peak.total
    assert buckets == pytest.approx(model_states.gradient_bytes(full), rel=1e-3)


def test_a_compiled_step_is_for_simulate():
    with pytest.raises(RecipeError, match=r"'torch_compile' is True, but Inductor.*ask simulate"):
        predict(GPT2.replace(torch_compile=True))


# --- what nobody wrote out

SIZES = dict(hidden_size=512, num_hidden_layers=2, vocab_size=8000)
DENSE = dict(
    SIZES,
    num_attention_heads=8,
    num_key_value_heads=4,
    intermediate_size=1536,
    head_dim=64,
    pad_token_id=0,
)


@pytest.mark.parametrize("family", ["stablelm", "lfm2", "roberta"])
def test_what_nobody_wrote_out_is_refused(family):
    recipe = Recipe({"model_type": family, **DENSE}, 4, 256, attn_implementation="eager")
    with pytest.raises(RecipeError, match=f"does not know {family}: ask simulate"):
        predict(recipe)


def test_an_encoder_decoder_is_refused():
    with pytest.raises(RecipeError, match="does not know t5: ask simulate"):
        predict(Recipe("t5-small"))


def test_what_predict_refuses_is_measured_all_the_same():
    from vramlab.measurement.measure import too_much

    assert too_much(Recipe({"model_type": "lfm2", **DENSE}, 1, 16)) == ""


# --- nonsense

NONSENSE = [-1, 0, 1, 3, 7, 64, 10**7, 2.5, "4", None, True]


def sometimes(values: list, nonsense: list = NONSENSE) -> st.SearchStrategy:
    """One of `values`, and nonsense about once in sixty times, so that a good part of the recipes
    stand.
    """
    return st.sampled_from(values * (60 * len(nonsense) // len(values) + 1) + nonsense)


LORAS = st.builds(
    dict,
    r=sometimes([1, 8, 64]),
    lora_dropout=sometimes([0.0, 0.1, 1.0, -0.1]),
    lora_alpha=sometimes([8, 16.0]),
    target_modules=sometimes([None, "all-linear", ("q_proj",), (".*",), "(", "c_attn", "", ()]),
    bias=sometimes(["none", "all", "lora_only"]),
    autocast_adapter_dtype=sometimes([True, False]),
    modules_to_save=st.sampled_from([None, ("lm_head",), ("nowhere",)]),
)
QUANTIZATIONS = st.builds(
    dict,
    quant_type=sometimes(list(QUANT_TYPES)),
    double=st.booleans(),
    prepare=st.booleans(),
    compute_dtype=sometimes([None, "float16", "bfloat16"]),
)
SHARDINGS = st.builds(
    dict,
    stage=sometimes([0, 1, 2, 3]),
    world_size=sometimes([1, 2, 8, 1024]),
    engine=sometimes(["ddp", "fsdp", "deepspeed"]),
    offload=sometimes([None, "optimizer", "parameters"]),
)
LOOPS = st.builds(
    dict,
    zero_grad=sometimes(["start", "before_backward", "end"]),
    set_to_none=st.booleans(),
    keep_outputs=st.booleans(),
    use_cache=st.sampled_from([None, True, False]),
    max_grad_norm=sometimes([None, 1.0]),
    foreach=st.sampled_from([None, True, False]),
    optimizer_in_backward=st.booleans(),
)
CONFIGS = [
    dict(
        model_type="llama",
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=100,
    ),
    dict(
        model_type="llama",
        hidden_size=63,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=100,
    ),
    dict(
        model_type="falcon",
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=9,
        bias=True,
    ),
    dict(model_type="gpt2", n_embd=-4),
    dict(model_type="t5", d_model=64, d_ff=32, num_layers=1, num_heads=2, d_kv=8, vocab_size=50),
    dict(hidden_size=64),
    {},
]
RECIPES = st.builds(
    dict,
    model=sometimes([*model_names(), "gpt-2", *CONFIGS]),
    batch_size=sometimes([1, 2, 16]),
    seq_len=sometimes([None, 16, 128, 513]),
    precision=sometimes(list(PRECISIONS)),
    optim=sometimes(list(OPTIMIZERS)),
    optim_args=sometimes([None] * 9 + ["momentum=0.9", "weight_decay=0.1", "nonsense"]),
    gradient_checkpointing=st.booleans(),
    gradient_accumulation_steps=sometimes([1, 2]),
    attn_implementation=sometimes([None, *ATTENTION]),
    torch_compile=st.booleans(),
    lora=st.one_of(st.none(), LORAS, LORAS, sometimes([None])),
    quantization=st.one_of(st.none(), st.none(), st.none(), QUANTIZATIONS),
    sharding=st.one_of(st.none(), st.none(), st.none(), SHARDINGS),
    loop=st.one_of(
        st.sampled_from(["trainer", "plain", "optimizer_in_backward", "plain", "endless"]), LOOPS
    ),
    num_layers=sometimes([None, 1, 2, 3, 80]),
    task=sometimes([None] * 9 + ["causal-lm", "sequence-classification", "masked-lm"]),
)


@given(RECIPES, st.sampled_from([None, "T4", "H100"]))
@settings(max_examples=500)
def test_any_recipe_is_a_report_or_a_recipe_error(fields, gpu):
    try:
        report = predict(Recipe(**fields), gpu)
    except RecipeError as error:
        assert "\n" not in str(error) and str(error).endswith(".")
        return
    assert isinstance(report, Report) and report.peak.total > 0


IN_BACKWARD = GPT2.replace(loop="optimizer_in_backward", optim="rmsprop")
DEEPSPEED = LLAMA.replace(precision="bf16-true", sharding=Sharding(3, 8, "deepspeed", "optimizer"))
CHANGES = [
    *(
        (GPT2, change)
        for change in (dict(batch_size=3), dict(seq_len=96), dict(precision="bf16-mixed"))
    ),
    *(
        (GPT2, change)
        for change in (dict(attn_implementation="eager"), dict(gradient_checkpointing=True))
    ),
    *(
        (GPT2, change)
        for change in (
            dict(num_layers=1),
            dict(task="sequence-classification"),
            dict(model="opt-125m"),
        )
    ),
    *(
        (GPT2, change)
        for change in (dict(lora=LoRA()), dict(loop="plain"), dict(gradient_accumulation_steps=2))
    ),
    (GPT2.replace(lora=LoRA()), dict(lora=LoRA(r=9))),
    (GPT2.replace(lora=LoRA()), dict(quantization=Quantization())),
    *(
        (DEEPSPEED, dict(sharding=Sharding(3, *way)))
        for way in ((2, "deepspeed", "optimizer"), (8, "deepspeed"))
    ),
    (IN_BACKWARD, dict(optim="sgd")),
    (IN_BACKWARD, dict(optim_args="weight_decay=0.1")),
]


@pytest.mark.parametrize("base,change", CHANGES, ids=[str(change) for _, change in CHANGES])
def test_a_cached_account_serves_no_other_recipe(base, change):
    changed = base.replace(**change)
    one, other = account.Account(base), account.Account(changed)
    assert (one.live, one.pieces) != (other.live, other.pieces)
    account.cached_account.cache_clear()
    predict(base)
    after_another = predict(changed).to_json()
    account.cached_account.cache_clear()
    assert predict(changed).to_json() == after_another


def test_a_cached_account_knows_the_card_and_serves_every_optimizer():
    recipe = LLAMA.replace(precision="bf16-true")
    account.cached_account.cache_clear()
    a100, t4 = predict(recipe, "A100"), predict(recipe, "T4")
    assert a100.phases["forward"] != t4.phases["forward"]
    predict(recipe.replace(optim="sgd", sharding=Sharding(0, 8, "ddp"), loop="plain"), "A100")
    predict(recipe.replace(optim="sgd", loop="plain"), "A100")
    for rank in (0, 7):  # FSDP gathers in its account, all ranks alike
        predict(recipe.replace(sharding=Sharding(3, 8, rank=rank)), "A100")
    assert account.cached_account.cache_info()[:2] == (2, 4)  # hits, misses


def test_predictions_leave_nothing_to_the_garbage_collector():
    import gc

    recipes = [IN_BACKWARD, GPT2.replace(lora=LoRA(), gradient_checkpointing=True), LLAMA]
    recipes += [
        LLAMA.replace(sharding=sharding)
        for sharding in (Sharding(3, 8), Sharding(2, 8, "deepspeed"))
    ]
    for recipe in recipes:
        predict(recipe)
    account.cached_account.cache_clear()
    gc.collect()
    gc.disable()
    try:
        for recipe in recipes:
            predict(recipe)
        account.cached_account.cache_clear()
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_written_out_stack_equals_the_multiplied_one():
    """All layers in the ledger against one that stands for them, to the byte."""
    from unittest.mock import patch

    recipe = GPT2.replace(num_layers=5, loop=Loop.named("plain"))

    def whole(self, name, count, layer, first, start=0):
        x = first.pop()
        for i in range(start, start + count):
            x = layer(f"{name}.{i}", x)
            self.ledger.layer_holds.clear()
        return x

    def every(shape, layers=2):
        return tuple((w.name, model_states.starred_name(w.name), w.shape) for w in shape.weights())

    short = account.Account(recipe)
    assert len(every(recipe.shape)) > len(model_states.first_layers(recipe.shape))
    parameters._settings.cache_clear()
    with (
        patch.object(model.Model, "stack", whole),
        patch.object(model_states, "first_layers", every),
    ):
        long = account.Account(recipe)
    parameters._settings.cache_clear()
    for phase in ("forward", "backward"):
        (split,), (other,) = (
            short.splits([short.moments[phase]]),
            long.splits([long.moments[phase]]),
        )
        assert sum(split.values()) == sum(other.values())
        assert {k: n for k, n in split.items() if n} == {k: n for k, n in other.items() if n}


def test_patches_of_an_image_are_free_once_they_are_joined():
    """As in the real forward pass: the class token is joined, then positions are added."""
    from vramlab.simulation.simulate import trace

    recipe = Recipe("vit-base", batch_size=8, num_layers=1)
    moves = []
    for size, storage, _ in trace(recipe, "cpu", full=True).log.events:
        name = storage.where.removesuffix(".patch_embeddings.projection")
        if name == "vit.embeddings":
            moves.append(size)
    live = [int(size) for size in account.Account(recipe).live[:20]]
    found = [after - before for before, after in pairwise(live)]
    large = [size for size in found if abs(size) > MiB]
    assert large[:5] == moves[:5] and sum(moves[:5]) == moves[1]
