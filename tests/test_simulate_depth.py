"""A deep model from a shallow run: equal to the whole run to the byte, for every architecture."""

import pytest
from tiny_models import TINY, config, quick_collections  # noqa: F401
from vramlab.recipe import Loop, LoRA, Quantization, Recipe, Sharding
from vramlab.repetition import GROUPS, NotRegular
from vramlab.report import CATEGORIES, GiB
from vramlab.shapes import model_names, read_shape
from vramlab.simulate import simulate

EVERYWHERE = LoRA(r=4, target_modules="all-linear")
RECIPES = {
    "default": {},
    "checkpointing, autocast, plain": {
        "precision": "bf16-mixed",
        "gradient_checkpointing": True,
        "loop": "plain",
    },
    "adafactor, loss scaling": {"optim": "adafactor", "precision": "fp16-mixed"},
    "lora, 8-bit states": {"lora": EVERYWHERE, "precision": "bf16-true", "optim": "adamw_bnb_8bit"},
    "qlora": {
        "lora": EVERYWHERE,
        "quantization": Quantization(double=True),
        "precision": "bf16-true",
        "gradient_checkpointing": True,
        "optim": "paged_adamw_8bit",
    },
    "eager, sgd, accumulating": {"attn_implementation": "eager", "optim": "sgd", "gradient_accumulation_steps": 2},
    "optimizer in backward": {"loop": "optimizer_in_backward"},
    "zeros at the end, one by one": {
        "loop": Loop.named("trainer", set_to_none=False, foreach=False),
        "precision": "fp16-true",
        "optim": "lion_32bit",
    },
}


@pytest.fixture
def taken(monkeypatch) -> list[str]:
    """What became of each attempt to deepen a log: "deepened", or why not."""
    import importlib

    module = importlib.import_module("vramlab.simulate")
    original, seen = module.deepen, []

    def spy(*args):
        try:
            result = original(*args)
        except NotRegular as error:
            seen.append(str(error))
            raise
        seen.append("deepened")
        return result

    monkeypatch.setattr(module, "deepen", spy)
    return seen


def assert_same(recipe: Recipe, target: str) -> None:
    deepened, whole = simulate(recipe, target), simulate(recipe, target, full=True)
    for name, phase in whole.phases.items():
        for category in CATEGORIES:
            found = deepened.phases[name]
            assert getattr(found.peak, category) == getattr(phase.peak, category), (name, "peak", category)
            assert getattr(found.end, category) == getattr(phase.end, category), (name, "end", category)
    assert (deepened.peak, deepened.peak_phase) == (whole.peak, whole.peak_phase)
    assert [str(t) for t in deepened.largest] == [str(t) for t in whole.largest]
    assert deepened.allocated == whole.allocated and deepened.requested == whole.requested
    if target == "cuda":
        assert deepened.reserved.low <= deepened.reserved.value <= deepened.reserved.high
        assert abs(deepened.reserved.value - whole.reserved.value) <= 0.02 * whole.reserved.value


def tiny(family: str, **changes) -> Recipe:
    # in Gemma 2 every second layer has a window
    layers = 2 * GROUPS if family == "gemma2" else GROUPS + 3
    sizes = {"batch_size": 2, "seq_len": None if family == "vit" else 24, "num_layers": layers}
    return Recipe(config(family), **{**sizes, **changes})


# Pairs of an architecture and a recipe: every recipe with several architectures, every architecture with several.
PAIRS = [
    (family, name)
    for i, family in enumerate(TINY)
    for j, name in enumerate(RECIPES)
    if (i + j) % 5 == 0 or (name == "default" and i % 2)
]


@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_equals_the_whole_run(family, name, taken):
    assert_same(tiny(family, **RECIPES[name]), "cuda")
    assert taken == ["deepened"]


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "mixtral", "t5"])
def test_equals_the_whole_run_on_cpu(family, taken):
    assert_same(tiny(family, num_layers=GROUPS + 2), "cpu")
    assert taken == ["deepened"]


def test_a_sliding_window_is_run_whole_on_cpu(taken):
    """Its cache makes a scalar for each layer before the layers run; on CUDA that is the host's."""
    simulate(tiny("gemma2", loop="plain"), "cpu")
    assert taken == []


def test_every_architecture_and_recipe_is_among_the_pairs():
    assert {family for family, _ in PAIRS} == set(TINY) and {name for _, name in PAIRS} == set(RECIPES)


def test_a_catalogue_model_at_its_own_depth(taken):
    assert_same(Recipe("gpt2", batch_size=2, seq_len=128, precision="bf16-mixed"), "cuda")
    assert taken == ["deepened"]


def test_shallow_models_are_run_whole(taken):
    simulate(tiny("gpt2", num_layers=GROUPS))
    assert taken == []


def test_a_log_that_is_not_regular_is_run_whole(monkeypatch):
    """The way back is tested, too: nothing of the attempt is left in the answer."""
    import importlib

    module = importlib.import_module("vramlab.simulate")

    def refuse(*args):
        raise NotRegular("for the test")

    recipe = tiny("gpt2")
    expected = simulate(recipe, full=True)
    monkeypatch.setattr(module, "deepen", refuse)
    assert simulate(recipe).phases == expected.phases


def test_llama_405b_in_the_time_of_a_shallow_model(taken):
    recipe = Recipe("llama-3.1-405b", batch_size=1, seq_len=256, precision="bf16-true", gradient_checkpointing=True)
    report = simulate(recipe)
    assert taken == ["deepened"]
    sizes = [-(-2 * weight.size // 512) * 512 for weight in recipe.shape.weights()]
    kept = report.phases["between_steps"].end
    assert (kept.parameters, kept.optimizer_states) == (sum(sizes), 2 * sum(sizes))
    assert report.phases["backward"].end.gradients == sum(sizes)
    assert report.peak.total > 3000 * GiB


@pytest.mark.parametrize("family", sorted({read_shape(name).family for name in model_names()}))
def test_every_family_of_the_catalogue_is_among_the_tested(family):
    assert family in TINY


@pytest.mark.parametrize("name", ["gpt2-xl", "gemma-2-27b", "mixtral-8x7b", "t5-3b", "vit-large"])
def test_deep_catalogue_models_take_the_shortcut(name, taken):
    simulate(Recipe(name, seq_len=None if "vit" in name else 32, precision="bf16-true", optim="sgd"))
    assert taken == ["deepened"]


SHARDINGS = {
    "stage 3": Sharding(3, 4),
    "stage 2": Sharding(2, 4),
    "one unit": Sharding(3, 4, wrap="model"),
    "replicas": Sharding(0, 2, "ddp"),
    "states": Sharding(1, 2, "ddp"),
    "slices": Sharding(0, 2, "tensor"),
    "layers": Sharding(0, 2, "pipeline", micro_batches=2),
}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", SHARDINGS)
def test_one_rank_of_many(name, checkpointing, taken):
    sharding = SHARDINGS[name]
    recipe = Recipe(config("llama"), 2, 24, num_layers=GROUPS + 3, gradient_checkpointing=checkpointing)
    assert_same(recipe.replace(sharding=sharding, precision="bf16-true"), "cuda")
    by_layer = sharding.engine == "tensor" or (sharding.engine == "fsdp" and sharding.wrap == "layers")
    assert taken == (["deepened"] if by_layer else [])


def test_norms_of_a_large_vocabulary_in_half_precision():
    """Their kernel's scratch has hundreds of numbers a parameter here, where small models need one."""
    recipe = Recipe("polyglot-ko-1.3b", batch_size=1, seq_len=8, precision="fp16-true", optim="sgd", num_layers=7)
    deepened, whole = simulate(recipe), simulate(recipe, full=True)
    assert (deepened.requested, deepened.phases) == (whole.requested, whole.phases)
