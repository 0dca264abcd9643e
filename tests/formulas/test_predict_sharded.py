"""predict against simulate for one rank of many: what it holds to the byte, its peak within a few
per cent.
"""

import itertools
import time
from importlib.metadata import version
from math import prod

import pytest
from predict_grid import assert_still_said, stored
from quick import params
from sharded_grid import grid, simulated
from test_predict_grid import error
from vramlab import LoRA, Quantization, Recipe
from vramlab.base.errors import RecipeError
from vramlab.formulas import fsdp_memory as units
from vramlab.formulas.predict import predict
from vramlab.recipe.options import Sharding
from vramlab.report.report import MiB
from vramlab.simulation.simulate import simulate

# Of the simulated peak.
BOUND, MEAN = 0.03, 0.01
PHASE_BOUND = 0.06
HELD = ("parameters", "optimizer_states", "buffers", "inputs")


GRID = grid()


def _quick() -> list[Recipe]:
    """The cheapest recipe of each engine's stages that there is to simulate."""
    kinds = {}
    for recipe in sorted(
        GRID, key=lambda r: (r.sharding.world_size, r.gradient_accumulation_steps, r.tokens)
    ):
        kinds.setdefault((recipe.sharding.engine, recipe.sharding.stage), recipe)
    return [*kinds.values()]


QUICK = _quick()


@pytest.fixture(scope="module")
def pairs():
    """(recipe, predicted, simulated) for the grid; what was simulated is stored."""
    truths = stored("sharded_grid.jsonl")
    return [(recipe, predict(recipe), truths[recipe.key]) for recipe in GRID]


@pytest.mark.parametrize("recipe", params(GRID, QUICK), ids=str)
def test_simulate_still_says_what_is_stored(recipe):
    if recipe.sharding.engine == "deepspeed":
        pytest.importorskip("deepspeed")
    assert_still_said("sharded_grid.jsonl", recipe, simulated)


def test_stage_3_updates_a_billion_elements_at_a_time():
    """The grid's ranks have fewer: without `sub_group_size` 8B on four ranks came out 18 % too
    high.
    """
    pytest.importorskip("deepspeed")
    sharding = Sharding(stage=3, world_size=2, engine="deepspeed")
    recipe = Recipe(
        "llama-3.1-8b",
        num_layers=6,
        batch_size=1,
        seq_len=64,
        precision="bf16-true",
        sharding=sharding,
    )
    predicted, truth = predict(recipe), simulate(recipe)
    assert recipe.shape.num_parameters > 2.2e9
    assert predicted.phases["step"].peak.total == pytest.approx(
        truth.phases["step"].peak.total, rel=0.002
    )


def test_the_grid_has_sixty_recipes_of_every_engine_and_stage():
    assert len(GRID) >= 60
    kinds = {(r.sharding.engine, r.sharding.stage) for r in GRID}
    assert kinds == {
        ("ddp", 0),
        ("fsdp", 2),
        ("fsdp", 3),
        *(("deepspeed", stage) for stage in (1, 2, 3)),
    }
    assert {r.sharding.world_size for r in GRID} == {2, 8, 64, 1024}


def test_the_peak_of_a_rank_is_within_three_percent(pairs):
    rows = [(error(p.peak.total, t["peak"]), str(recipe)) for recipe, p, t in pairs]
    text = "\n".join(
        f"{100 * e:+.2f} %  {name}" for e, name in sorted(rows, key=lambda row: -abs(row[0]))
    )
    assert sum(abs(e) for e, _ in rows) / len(rows) <= MEAN, text
    assert max(abs(e) for e, _ in rows) <= BOUND, text


def test_forward_backward_and_step_are_close(pairs):
    rows = [
        (error(p.phases[name].peak.total, sum(t["phases"][name][0].values())), f"{name}: {recipe}")
        for recipe, p, t in pairs
        for name in ("forward", "backward", "step")
    ]
    worst = sorted(rows, key=lambda row: -abs(row[0]))[:6]
    # Not the peak in either: the step of DeepSpeed's offloaded stage 2 (-14 %), and its backward
    # pass (+6.2 %).
    assert abs(worst[0][0]) < 0.14 and abs(worst[2][0]) <= PHASE_BOUND, worst


def test_what_fsdp_holds_between_steps_is_exact_to_the_byte(pairs):
    found = [(recipe, p, t) for recipe, p, t in pairs if recipe.sharding.engine == "fsdp"]
    assert len(found) >= 6
    for recipe, p, t in found:
        predicted, truth = (
            dict(p.phases["between_steps"].end.items()),
            t["phases"]["between_steps"][1],
        )
        assert {k: predicted[k] for k in HELD} == {k: truth[k] for k in HELD}, str(recipe)
        assert (
            abs(
                dict(p.phases["step"].peak.items())["gradients"]
                - t["phases"]["step"][0]["gradients"]
            )
            == 0
        ), str(recipe)


QLORA = {"lora": LoRA(r=16), "quantization": Quantization("nf4"), "seq_len": 256}
WHOLE = [
    {"sharding": Sharding(3, 8, "fsdp"), **QLORA},
    {"sharding": Sharding(3, 8, "deepspeed")},  # as much is gathered as there may be, not all of it
    {"sharding": Sharding(3, 8, "deepspeed", offload="parameters"), "seq_len": 256},
    {"sharding": Sharding(2, 8, "deepspeed"), "seq_len": 256},
    {"sharding": Sharding(2, 8, "deepspeed"), **QLORA},
]


@pytest.mark.parametrize(
    "changes", params(WHOLE, [WHOLE[0]]), ids=lambda changes: str(changes["sharding"])
)
def test_a_whole_model_is_within_three_percent(changes):
    """Billions of parameters, where DeepSpeed's limits are reached, and quantized ones, which
    become half precision too.
    """
    if changes["sharding"].engine == "deepspeed":
        pytest.importorskip("deepspeed")
    if (
        changes["sharding"].engine == "fsdp"
        and "quantization" in changes
        and version("torch") < "2.13"
    ):
        pytest.skip("FSDP of torch before 2.13 shards no integers")
    options = {"seq_len": 2048, "precision": "bf16-mixed", "gradient_checkpointing": True} | changes
    recipe = Recipe("llama-3.2-1b", 1, **options)
    report, truth = predict(recipe), simulated(recipe)
    assert abs(error(report.peak.total, truth["peak"])) <= BOUND
    for name in ("forward", "backward", "step"):
        assert (
            abs(error(report.phases[name].peak.total, sum(truth["phases"][name][0].values())))
            <= PHASE_BOUND
        ), name


@pytest.mark.parametrize("layers", params([1, 3], [3]))
def test_stage_3_lets_go_of_the_layers_before_the_embeddings_gradient(layers):
    pytest.importorskip("deepspeed")
    sharding = Sharding(engine="deepspeed", stage=3, world_size=2)
    recipe = Recipe("gpt2", batch_size=1, seq_len=32, num_layers=layers, sharding=sharding)
    report, truth = predict(recipe), simulated(recipe)
    for name in ("forward", "backward", "step"):
        assert (
            abs(error(report.phases[name].peak.total, sum(truth["phases"][name][0].values())))
            < 0.005
        ), name


STEPS = {  # (stage, precision, optimizer), each of two ranks
    "the norm of the largest gradient in fp64": (3, "fp32", "sgd"),
    "gradients that DeepSpeed has in fp32, which its configuration does not say": (
        3,
        "bf16-true",
        "sgd",
    ),
    "Adafactor's two copies of a flat part": (3, "bf16-mixed", "adafactor"),
    "one gradient is its own flat part": (2, "fp32", "adafactor"),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_step_of_deepspeed_has(name):
    pytest.importorskip("deepspeed")
    stage, precision, optim = STEPS[name]
    sharding = Sharding(stage, 2, "deepspeed")
    recipe = Recipe(
        "gpt2", seq_len=16, num_layers=3, precision=precision, optim=optim, sharding=sharding
    )
    report, truth = predict(recipe), simulated(recipe)
    assert (
        abs(error(report.phases["step"].peak.total, sum(truth["phases"]["step"][0].values())))
        < 0.01
    )


REFUSED = [
    Sharding(0, 2, "tensor"),
    Sharding(0, 2, "pipeline", schedule="gpipe"),
    Sharding(1, 2, "ddp"),
    Sharding(3, 2, wrap="model"),
    Sharding(0, 2, "deepspeed"),
    Sharding(1, 2, "deepspeed", "optimizer"),
    Sharding(3, 1, "deepspeed"),
]


@pytest.mark.parametrize("sharding", REFUSED, ids=str)
def test_what_no_plan_tries_is_refused(sharding):
    recipe = Recipe("llama-3.2-1b", num_layers=2, sharding=sharding)
    with pytest.raises(RecipeError, match=f"is {sharding.engine} stage.*ask simulate"):
        predict(recipe)


@pytest.mark.parametrize(("stage", "offload"), [(2, "optimizer"), (3, "parameters")])
def test_offload_on_one_gpu(stage, offload):
    """Without weights that are gathered, and the tied table's gradient in fp64, these were 15 and
    26 % too low.
    """
    pytest.importorskip("deepspeed")
    sharding = Sharding(stage, 1, "deepspeed", offload)
    recipe = Recipe("llama-3.2-1b", 1, 128, "bf16-mixed", num_layers=3, sharding=sharding)
    assert abs(error(predict(recipe).peak.total, simulated(recipe)["peak"])) <= 0.01


@pytest.mark.parametrize("model", params(["gemma-2-2b", "phi-3-mini"], ["gemma-2-2b"]))
def test_one_ranks_copy_from_the_host_is_the_weight_itself(model):
    """A second one was counted: forward was 5 to 53 % too high. Gemma's backward was 6 % too low
    without its table's gradient in fp32, which is larger than the 250 million in fp64 of the norm.
    """
    pytest.importorskip("deepspeed")
    sharding = Sharding(3, 1, "deepspeed", "parameters")
    options = {"num_layers": 2, "trainer": "sft", "gradient_checkpointing": True}
    recipe = Recipe(model, 2, 16, "bf16-mixed", sharding=sharding, **options)
    report, truth = predict(recipe), simulated(recipe)
    for name in ("forward", "backward"):
        size = sum(truth["phases"][name][0].values())
        assert abs(error(report.phases[name].peak.total, size)) <= 0.003, name


@pytest.mark.parametrize(("offload", "precision"), [(None, "fp32"), ("parameters", "bf16-mixed")])
def test_one_rank_copies_weights_from_their_shards(offload, precision):
    """With the flat buffer that more ranks gather into, forward was up to 20 % too high."""
    sharding = Sharding(3, 1, "fsdp", offload)
    recipe = Recipe("bert-base", 2, 128, precision, num_layers=3, sharding=sharding)
    report, truth = predict(recipe), simulated(recipe)
    for name in ("forward", "backward"):
        size = sum(truth["phases"][name][0].values())
        assert abs(error(report.phases[name].peak.total, size)) <= 0.025, name


ALL_LINEAR = LoRA(target_modules="all-linear")


# What `predict` was off by: phi-2 26 % low, in fp32 15 % high; others for comparison.
def test_the_scales_of_an_offloaded_base_stay_on_the_card():
    """On two stood-in cards a program of `plan` held 10.98 MiB once sharded, 408.43 at most."""
    small = {
        "model_type": "llama",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "num_hidden_layers": 12,
        "vocab_size": 2048,
    }
    recipe = Recipe(
        small,
        8,
        512,
        "bf16-mixed",
        gradient_checkpointing=True,
        dtype="bfloat16",
        lora=LoRA(r=16, target_modules="all-linear"),
        quantization=Quantization("nf4", prepare=False),
        sharding=Sharding(3, 2, "fsdp", offload="parameters"),
    )
    for report in (predict(recipe), simulate(recipe)):
        assert report.phases["load"].end.total / MiB == pytest.approx(10.98, abs=0.005)
        assert report.peak.total / MiB == pytest.approx(408.43, abs=0.05)


FROZEN_HEADS = {
    "gathered in fp32 beside fp16": {"model": "phi-2", "precision": "fp16-mixed"},
    "in uneven rows, and an embedding without a gradient": {
        "model": "phi-2",
        "precision": "bf16-true",
        "sharding": Sharding(3, 3, "fsdp", rank=2),
    },
    "in bf16 beside 4 bits": {
        "model": "mistral-7b",
        "precision": "bf16-true",
        "quantization": Quantization("nf4", prepare=False),
    },
    "in its unit, as GPT-NeoX's norm is found": {"model": "pythia-160m"},
    "in its unit, as it is called": {"model": "phi-3-mini", "trainer": "transformers"},
    "in its unit, as nothing hides the norm": {"model": "phi-3-mini", "lora": None},
}


@pytest.mark.parametrize("case", params(FROZEN_HEADS, list(FROZEN_HEADS)[:4]))
def test_a_frozen_head_that_trl_gathers_lives_into_backward(case):
    """PEFT's wrapper hides the last norm from accelerate, and nothing calls the head."""
    fields = {
        "batch_size": 2,
        "seq_len": 32,
        "num_layers": 2,
        "precision": "bf16-mixed",
        "lora": ALL_LINEAR,
        "trainer": "sft",
        "sharding": Sharding(3, 8, "fsdp"),
    }
    recipe = Recipe(**fields | FROZEN_HEADS[case])
    report, truth = predict(recipe), simulated(recipe)
    for name in ("forward", "backward"):
        size = sum(truth["phases"][name][0].values())
        assert abs(error(report.phases[name].peak.total, size)) <= 0.03, name


ADDED_UP = [
    (2, "optimizer", 2, "bf16-true"),
    (2, None, 2, "bf16-mixed"),
    (1, None, 2, "bf16-true"),
    (2, None, 1, "fp32"),
    (2, None, 2, "bf16-true"),
]


@pytest.mark.parametrize(("stage", "offload", "steps", "precision"), params(ADDED_UP, ADDED_UP[:3]))
def test_gradients_are_added_up_beside_those_of_a_tied_embedding(stage, offload, steps, precision):
    """Stage 2 was 6 to 24 % too low without fp32 gradients that stay on the device and the tied
    table's three; stage 1 had its fp32 gradients twice."""
    pytest.importorskip("deepspeed")
    sharding = Sharding(stage, 2, "deepspeed", offload)
    options = {
        "num_layers": 6,
        "precision": precision,
        "gradient_accumulation_steps": steps,
        "sharding": sharding,
    }
    recipe = Recipe("qwen3-0.6b", 1, 64, **options)
    report, truth = predict(recipe), simulated(recipe)
    for name in ("forward", "backward", "step"):
        assert (
            abs(error(report.phases[name].peak.total, sum(truth["phases"][name][0].values())))
            < 0.005
        ), name


@pytest.mark.parametrize("precision", params(("fp16-true", "fp16-mixed"), ("fp16-true",)))
def test_gradients_to_offload_stay_whole_until_the_last_micro_batch(precision):
    """Predict was 7.6 and 9.4 % too low for the last rank; the first has only the embedding's."""
    pytest.importorskip("deepspeed")
    recipe = Recipe(
        "opt-125m",
        4,
        2,
        precision=precision,
        gradient_accumulation_steps=3,
        sharding=Sharding(2, 3, "deepspeed", "optimizer", rank=2),
    )
    assert abs(error(predict(recipe).peak.total, simulated(recipe)["peak"])) < 0.01


def test_stage_3_reduces_in_fp32_what_its_configuration_does_not_know():
    """The bucket was counted in the weights' half precision."""
    pytest.importorskip("deepspeed")
    sharding = Sharding(3, 2, "deepspeed", "parameters")
    recipe = Recipe("llama-3.2-1b", 1, 2, num_layers=1, precision="bf16-true", sharding=sharding)
    truth = simulated(recipe)["phases"]["load"][0]
    assert predict(recipe).phases["load"].peak.workspace == truth["workspace"]


@pytest.mark.parametrize(
    "sharding, precision",
    params(
        [
            (Sharding(3, 2, "fsdp"), "fp32"),
            (Sharding(2, 8, "deepspeed", "optimizer", rank=7), "fp32"),
            (Sharding(2, 2, "deepspeed"), "bf16-true"),
        ],
        [(Sharding(2, 8, "deepspeed", "optimizer", rank=7), "fp32")],
    ),
)
def test_a_fused_heads_gradient_is_added_to_in_place(sharding, precision):
    """Their sum was counted beside those of head and lookup: 6 to 8 % too much."""
    if sharding.engine == "deepspeed":
        pytest.importorskip("deepspeed")
    more = {"gradient_accumulation_steps": 3, "trainer": "sft", "sharding": sharding}
    recipe = Recipe("gpt2", 2, 16, precision, num_layers=3, **more)
    truth = simulated(recipe)["phases"]["backward"][0]
    said = predict(recipe).phases["backward"].peak.total
    assert abs(error(said, sum(truth.values()))) <= 0.02


def test_a_frozen_head_on_the_host_is_refused():
    """TRL's loss is computed where the weight is: 53 % too much was counted on the device."""
    sharding = Sharding(3, 2, "fsdp", "parameters")
    recipe = Recipe("phi-2", trainer="sft", lora=ALL_LINEAR, sharding=sharding)
    with pytest.raises(RecipeError, match=r"computed on the host.*ask simulate"):
        predict(recipe)
    assert predict(recipe.replace(model="gpt2")).peak.total > 0


# (model, layers, precision, checkpointing, ranks, offload, trainer): what came out 4 to 10 % off.
HEADS = [
    ("phi-2", 2, "bf16-true", False, 2, None, "transformers"),
    ("mistral-7b", 2, "fp16-true", False, 2, "parameters", "transformers"),
    ("phi-3-mini", None, "fp16-true", True, 1, "parameters", "sft"),
    ("mistral-7b", None, "fp16-true", False, 2, "parameters", "transformers"),
    ("mistral-7b", 8, "bf16-true", False, 8, None, "transformers"),
    ("gemma-2-2b", None, "bf16-true", True, 2, None, "sft"),
    ("phi-2", 12, "bf16-true", True, 8, None, "transformers"),
]


@pytest.mark.parametrize(
    "model, layers, precision, checkpoints, ranks, offload, trainer", params(HEADS, HEADS[:2])
)
def test_a_heads_gradient_is_reduced_when_more_has_been_gathered(
    model, layers, precision, checkpoints, ranks, offload, trainer
):
    """It waits in the bucket for the next gradient, and by then the last layers are prefetched.

    A head that TRL multiplies with is gathered with the whole model, and stays.
    """
    pytest.importorskip("deepspeed")
    recipe = Recipe(
        model,
        2,
        16,
        precision,
        num_layers=layers,
        gradient_checkpointing=checkpoints,
        trainer=trainer,
        sharding=Sharding(3, ranks, "deepspeed", offload),
    )
    report, truth = predict(recipe), simulated(recipe)
    for name in ("forward", "backward"):
        size = sum(truth["phases"][name][0].values())
        assert abs(error(report.phases[name].peak.total, size)) <= 0.03, name


def test_shards_of_all_ranks_are_the_model():
    for rows in (1, 5, 64, 50_257):
        for ranks in (2, 3, 64, 1024):
            own = [units.own((rows, 7), ranks, rank) for rank in range(ranks)]
            assert sum(first for first, _ in own) == rows
            assert units.padded((rows, 7), ranks) == 7 * max(first for first, _ in own)


def test_a_sharded_prediction_is_quick():
    recipe = Recipe("llama-3.1-70b", precision="bf16-mixed", sharding=Sharding(3, 64, "fsdp"))
    predict(recipe)
    best = min(_seconds(recipe) for _ in range(5))
    assert best < 0.01  # a third of it on an idle machine


def _seconds(recipe: Recipe) -> float:
    begin = time.process_time()
    predict(recipe)
    return time.process_time() - begin


def test_more_ranks_hold_less_and_a_mixed_precision_gathers_in_half():
    sizes = [
        predict(Recipe("gpt2", sharding=Sharding(3, n, "fsdp"))).peak.total for n in (2, 8, 64)
    ]
    assert sizes == sorted(sizes, reverse=True)
    mixed = predict(Recipe("gpt2", precision="bf16-mixed", sharding=Sharding(3, 8, "fsdp")))
    true = predict(Recipe("gpt2", precision="bf16-true", sharding=Sharding(3, 8, "fsdp")))
    assert mixed.peak.parameters == pytest.approx(2 * true.peak.parameters, rel=0.01)
    assert mixed.peak.activations == true.peak.activations


@pytest.mark.parametrize("precision", ["fp16-mixed", "bf16-mixed", "fp32"])
def test_stage_3_trains_adapters_in_fp32(precision):
    """fp16 was never simulated; biases of half-precision weights beside fp32 adapters end in a bare
    AssertionError.
    """
    pytest.importorskip("deepspeed")
    fields = {
        "seq_len": 32,
        "num_layers": 2,
        "precision": precision,
        "sharding": Sharding(3, 2, "deepspeed"),
    }
    bias = "all" if precision == "fp32" else "none"
    recipe = Recipe("gpt2", lora=LoRA(bias=bias), **fields)
    predicted, truth = predict(recipe), simulate(recipe)
    for name, phase in truth.phases.items():
        assert abs(error(predicted.phases[name].peak.total, phase.peak.total)) < BOUND, name
    for lora in (LoRA(bias="all"), LoRA(modules_to_save=("lm_head",))):
        if precision != "fp32":
            with pytest.raises(RecipeError, match="stage 3 trains one format"):
                Recipe("gpt2", lora=lora, **fields)


def _with_other_heads() -> list[dict]:
    """TRL's preference trainers, and Liger's kernels, as ranks train them."""
    lora = {"lora": LoRA(r=16, target_modules="all-linear"), "dtype": "bfloat16"}
    qlora = lora | {"dtype": None, "quantization": Quantization("nf4", prepare=False)}
    methods = {"full": {}, "lora": lora, "qlora": qlora}
    ways = [Sharding(stage, 2, "deepspeed") for stage in (1, 2)]
    ways += [Sharding(0, 2, "ddp"), *(Sharding(stage, 2, "fsdp") for stage in (2, 3))]
    found = []
    for trainer in ("dpo", "kto", "reward", "liger"):
        heads = {"trainer": trainer}
        if trainer == "reward":
            heads["task"] = "sequence-classification"
        if trainer == "liger":
            heads = {"use_liger_kernel": True}
        for method, sharding in itertools.product(methods, ways):
            found.append(heads | methods[method] | {"sharding": sharding})
    return found


def _named(changes: dict) -> str:
    sharding = changes["sharding"]
    words = [changes.get("trainer", "liger"), sharding.engine, str(sharding.stage)]
    words += [name for name in ("lora", "quantization") if name in changes]
    return " ".join(words)


OTHER_HEADS = _with_other_heads()
# And the reward trainer's full training at FSDP's stage 2: its peak is where the embedding's
# gradient is reduced, of which `foreach_reduce` holds the last whole one.
FEW_HEADS = [*OTHER_HEADS[9::16], OTHER_HEADS[33]]


@pytest.mark.parametrize("steps", params((1, 2), (2,)))
@pytest.mark.parametrize("changes", params(OTHER_HEADS, FEW_HEADS), ids=_named)
def test_ranks_divide_the_heads_of_trl_and_liger_as_others(changes, steps):
    """The same engines run them: what was refused is within 0.3 %."""
    sized = dict(batch_size=2, seq_len=512, num_layers=4, gradient_accumulation_steps=steps)
    try:
        recipe = Recipe(
            "llama-3.2-1b",
            precision="bf16-mixed",
            gradient_checkpointing=True,
            **sized,
            **changes,
        )
    except RecipeError:
        return  # the library trains it otherwise: tests/recipe/test_refusals.py
    is_whole = recipe.sharding.engine == "fsdp" and not recipe.lora
    if is_whole and recipe.use_liger_kernel:
        with pytest.raises(RecipeError, match="do not know what FSDP keeps of the head"):
            predict(recipe, "RTX 4090")
        return
    if recipe.sharding.engine == "deepspeed":
        pytest.importorskip("deepspeed")
    truth = simulate(recipe, gpu="RTX 4090").peak.total
    assert predict(recipe, "RTX 4090").peak.total == pytest.approx(truth, rel=0.003)


@pytest.mark.parametrize("stage", [2, 3])
def test_copies_of_the_model_keep_what_they_average(stage):
    """Hybrid sharding in half precision: every unit's reduced gradients stay to the end of the
    backward pass. At its peak they are those of all layers.
    """
    whole = Recipe("qwen3-0.6b", 1, 128, precision="bf16-mixed", sharding=Sharding(stage, 2))
    copies = whole.replace(sharding=Sharding(stage, 4, rank=3, dp_replicate_size=2))
    predicted, truth = predict(copies), simulate(copies)
    assert predicted.peak.total == pytest.approx(truth.peak.total, rel=BOUND)
    for name in HELD:
        held = getattr(predicted.phases["between_steps"].end, name)
        assert held == getattr(truth.phases["between_steps"].end, name)
    more = predicted.phases["backward"].peak.total - predict(whole).phases["backward"].peak.total
    layers = [each for each in whole.shape.weights() if ".layers." in each.name]
    assert more >= sum(prod(each.shape) for each in layers) * 2 / 2
