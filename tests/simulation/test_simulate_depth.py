"""A deep model from a shallow run: equal to the whole run to the byte, for every architecture."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from predict_grid import families
from quick import params
from tiny_models import TINY, config
from vramlab.hardware import overhead
from vramlab.recipe.recipe import Loop, LoRA, Quantization, Recipe, Sharding
from vramlab.recipe.shapes import read_shape
from vramlab.report.report import CATEGORIES, GiB, Report
from vramlab.simulation.repetition import GROUPS, NotRegular, Repetition, find, longest_pattern
from vramlab.simulation.shallow import may_be_deepened, streamed
from vramlab.simulation.simulate import simulate, trace

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
    "eager, sgd, accumulating": {
        "attn_implementation": "eager",
        "optim": "sgd",
        "gradient_accumulation_steps": 2,
    },
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

    module = importlib.import_module("vramlab.simulation.simulate")
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


def assert_same(recipe: Recipe, target: str, gpu: str | None = None) -> Report:
    deepened = simulate(recipe, target, gpu=gpu)
    whole = simulate(recipe, target, full=True, gpu=gpu)
    for name, phase in whole.phases.items():
        for category in CATEGORIES:
            found = deepened.phases[name]
            assert getattr(found.peak, category) == getattr(phase.peak, category), (
                name,
                "peak",
                category,
            )
            assert getattr(found.end, category) == getattr(phase.end, category), (
                name,
                "end",
                category,
            )
    assert (deepened.peak, deepened.peak_phase) == (whole.peak, whole.peak_phase)
    assert [str(t) for t in deepened.largest] == [str(t) for t in whole.largest]
    assert deepened.allocated == whole.allocated and deepened.requested == whole.requested
    if target == "cuda":
        assert deepened.reserved.low <= deepened.reserved.value <= deepened.reserved.high
        assert abs(deepened.reserved.value - whole.reserved.value) <= 0.02 * whole.reserved.value
    return deepened


def tiny(family: str, **changes) -> Recipe:
    # in Gemma 2 every second layer has a window; T5 is not written down, so that it is checked with
    # a group more
    layers = {"gemma2": 2 * GROUPS, "t5": 2 * GROUPS + 1}.get(family, GROUPS + 3)
    sizes = {"batch_size": 2, "seq_len": None if family == "vit" else 24, "num_layers": layers}
    return Recipe(config(family), **{**sizes, **changes})


# Pairs of an architecture and a recipe: every recipe with several architectures, every architecture
# with several.
PAIRS = [
    (family, name)
    for i, family in enumerate(TINY)
    for j, name in enumerate(RECIPES)
    if (i + j) % 5 == 0 or (name == "default" and i % 2)
]
# What a log is repeated by: layers of one kind and of two, recomputed, frozen and quantized,
# updated in backward, run more than once. Which optimizer and precision it is makes other rows of
# the same log.
QUICK = [
    ("mixtral", "default"),
    ("gpt2", "eager, sgd, accumulating"),
    ("phi", "qlora"),
    ("qwen3", "checkpointing, autocast, plain"),
    ("gemma2", "optimizer in backward"),
]


ACCUMULATING = {
    "full": {"optim": "sgd", "precision": "fp16-mixed"},
    "lora": {"lora": EVERYWHERE, "loop": "plain", "gradient_checkpointing": True},
    "4-bit": {
        "lora": EVERYWHERE,
        "quantization": Quantization(),
        "precision": "bf16-mixed",
        "lengths": (24, 20),
    },
    "dpo": {"trainer": "dpo", "lora": EVERYWHERE},
    "sft": {"trainer": "sft"},
    "kept": {"loop": Loop.named("trainer", set_to_none=False, keep_outputs=True)},
}


MICRO_BATCHES = [(target, name) for target in ("cuda", "cpu") for name in ACCUMULATING]


@pytest.mark.parametrize(
    ("target", "name"), params(MICRO_BATCHES, [("cuda", "full"), ("cpu", "4-bit")])
)
def test_micro_batches_that_were_not_run_are_those_of_the_whole_run(name, target):
    recipe = Recipe(
        config("qwen3"), num_layers=2, seq_len=24, batch_size=2, gradient_accumulation_steps=4
    )
    recipe = recipe.replace(**ACCUMULATING[name])

    def events(full: bool) -> list:
        history, index = trace(recipe, target, full=full), {}
        log = list(history.log)
        fields = ("asked", "category", "op", "where", "shape", "dtype", "stream")
        of = [
            (index.setdefault(id(s), len(index)), *(getattr(s, name) for name in fields))
            for _, s, _ in log
        ]
        assert history.notes == []  # or the whole run took the short one's place
        return [
            (size, op, *seen) for (size, _, op), seen in zip(log, of, strict=True)
        ] + history.stretches

    assert events(full=False) == events(full=True)


@pytest.mark.parametrize(("family", "name"), params(PAIRS, QUICK))
def test_equals_the_whole_run(family, name, taken):
    assert_same(tiny(family, **RECIPES[name]), "cuda")
    assert taken == ["deepened"] * (1 + (family == "t5"))


@pytest.mark.parametrize("family", params(["gpt2", "qwen3", "mixtral", "t5"], ["mixtral"]))
def test_equals_the_whole_run_on_cpu(family, taken):
    assert_same(tiny(family), "cpu")
    assert taken == ["deepened"] * (1 + (family == "t5"))


def test_a_sliding_window_is_run_whole_on_cpu(taken):
    """Its cache makes a scalar for each layer before the layers run; on CUDA that is the host's."""
    simulate(tiny("gemma2", loop="plain"), "cpu")
    assert taken == []


def test_every_architecture_and_recipe_is_among_the_pairs():
    assert {family for family, _ in PAIRS} == set(TINY) and {name for _, name in PAIRS} == set(
        RECIPES
    )


@pytest.mark.slow  # the vocabulary below is a catalogue model's too
def test_a_catalogue_model_at_its_own_depth(taken):
    assert_same(Recipe("gpt2", batch_size=2, seq_len=128, precision="bf16-mixed"), "cuda")
    assert taken == ["deepened"]


def test_shallow_models_are_run_whole(taken):
    simulate(tiny("gpt2", num_layers=GROUPS))
    assert taken == []


def test_a_log_that_is_not_regular_is_run_whole(monkeypatch):
    """The way back is tested, too: nothing of the attempt is left in the answer."""
    import importlib

    module = importlib.import_module("vramlab.simulation.simulate")

    def refuse(*args):
        raise NotRegular("for the test")

    recipe = tiny("gpt2")
    expected = simulate(recipe, full=True)
    monkeypatch.setattr(module, "deepen", refuse)
    assert simulate(recipe).phases == expected.phases


def test_cublas_workspace_in_the_first_layer_does_not_tell_it_from_the_others(monkeypatch, taken):
    """Where a product with a bias takes one of its own, as up to torch 2.11."""
    monkeypatch.setattr(overhead, "installed", lambda package: "2.11.0")
    assert_same(tiny("gpt2"), "cuda")
    assert taken == ["deepened"]


def test_where_three_layers_do_not_suffice_four_are_run(monkeypatch):
    import importlib

    module = importlib.import_module("vramlab.simulation.simulate")
    original, ran = module.deepen, []

    def refuse_three(tracker, layers, more):
        ran.append(layers.shallow)
        if layers.shallow == 3:
            raise NotRegular("for the test")
        return original(tracker, layers, more)

    recipe = tiny("gpt2")
    expected = simulate(recipe, full=True)
    monkeypatch.setattr(module, "deepen", refuse_three)
    report = simulate(recipe)
    assert ran == [3, 4] and (report.phases, report.notes) == (expected.phases, expected.notes)


def test_llama_405b_in_the_time_of_a_shallow_model(taken):
    recipe = Recipe(
        "llama-3.1-405b",
        batch_size=1,
        seq_len=256,
        precision="bf16-true",
        gradient_checkpointing=True,
    )
    report = simulate(recipe)
    assert taken == ["deepened"]
    sizes = [-(-2 * weight.size // 512) * 512 for weight in recipe.shape.weights()]
    kept = report.phases["between_steps"].end
    assert (kept.parameters, kept.optimizer_states) == (sum(sizes), 2 * sum(sizes))
    assert report.phases["backward"].end.gradients == sum(sizes)
    assert report.peak.total > 3000 * GiB


@pytest.mark.parametrize("family", sorted({read_shape(name).family for name in families(None)}))
def test_every_family_of_the_catalogue_is_among_the_tested(family):
    assert family in TINY


@pytest.mark.parametrize(
    "name", params(["gpt2-xl", "gemma-2-27b", "mixtral-8x7b", "t5-3b", "vit-large"], ["t5-3b"])
)
def test_deep_catalogue_models_take_the_shortcut(name, taken):
    simulate(
        Recipe(name, seq_len=None if "vit" in name else 32, precision="bf16-true", optim="sgd")
    )
    assert taken == ["deepened"] * (
        1 + (name == "t5-3b")
    )  # which is not written down, so it is checked


SHARDINGS = {
    "stage 3": Sharding(3, 4),
    "stage 2": Sharding(2, 4),
    "one unit": Sharding(3, 4, wrap="model"),
    "replicas": Sharding(0, 2, "ddp"),
    "states": Sharding(1, 2, "ddp"),
    "slices": Sharding(0, 2, "tensor"),
    "layers": Sharding(0, 2, "pipeline", micro_batches=2),
}


BY_LAYER = ("stage 3", "stage 2", "slices")


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    params([(n, c) for n in BY_LAYER for c in (False, True)], [("stage 3", True)]),
)
def test_one_rank_of_many(name, checkpointing, taken):
    recipe = Recipe(
        config("llama"), 2, 24, num_layers=GROUPS + 3, gradient_checkpointing=checkpointing
    )
    assert_same(recipe.replace(sharding=SHARDINGS[name], precision="bf16-true"), "cuda")
    assert taken == ["deepened"]


# Layers of 0.9, 0.3, and 0.2 billion elements, of which a billion are there at once, in TRL's case
# with the head's. Where the fewest layers do not do, more are run ("more than the fewest").
STREAMED = {
    "by TRL": ("llama-3.1-70b", 8, {"trainer": "sft"}),
    "by TRL, accumulating": (
        "llama-3.1-8b",
        16,
        {"gradient_accumulation_steps": 2, "trainer": "sft", "gradient_checkpointing": True},
    ),
    "two ahead": ("llama-3.1-70b", 12, {"precision": "fp16-mixed"}),
    "four ahead": ("qwen3-14b", 20, {"gradient_checkpointing": True, "optim": "sgd"}),
    "the fewest, by TRL": ("qwen2.5-7b", 10, {"trainer": "sft"}),
    "more than the fewest": ("phi-4", 16, {}),
}


@pytest.mark.parametrize("name", params(list(STREAMED), ["the fewest, by TRL"]))
def test_layers_whose_weights_come_from_the_host_stand_for_all(name, taken):
    """By DeepSpeed's stage 3, which prefetches across layers."""
    pytest.importorskip("deepspeed")
    model, layers, fields = STREAMED[name]
    sharding = Sharding(3, 1, "deepspeed", offload="parameters")
    recipe = Recipe(model, 1, 64, "bf16-mixed", num_layers=layers, sharding=sharding)
    assert_same(recipe.replace(**fields), "cuda")
    assert taken == ["deepened"]


def test_the_fewest_layers_stand_for_all_where_weights_are_fetched_few_ahead():
    sharding = Sharding(3, 1, "deepspeed", offload="parameters")
    recipe = Recipe("llama-3.1-8b", 1, 64, "bf16-mixed", sharding=sharding, trainer="sft")
    repetition = find(recipe.shape, frees_late=True, may_be_alike=False)
    least = repetition.widened(*streamed(recipe), least=True)
    assert (least.shallow, least.is_least) == (11, True)
    more = repetition.widened(*streamed(recipe))
    assert (more.shallow, more.is_least) == (15, False)


def test_weights_that_are_fetched_further_ahead_are_run_whole(taken):
    """A small model's are, and adapters are reduced behind the last layer."""
    pytest.importorskip("deepspeed")
    sharding = Sharding(3, 1, "deepspeed", offload="parameters")
    recipe = Recipe(config("llama"), 2, 24, "bf16-mixed", num_layers=6, sharding=sharding)
    assert any("layers ahead" in note for note in simulate(recipe).notes)
    assert taken == []
    among_ranks = dataclasses.replace(sharding, world_size=2)
    for change in ({"lora": EVERYWHERE}, {"freeze": ("norm",)}, {"sharding": among_ranks}):
        assert not may_be_deepened(recipe.replace(**change), "cuda")


def test_states_that_a_rank_has_before_its_first_step_are_of_their_layers(taken):
    """Adagrad's under FSDP had no owner, and were those of the shallow run."""
    recipe = Recipe(config("llama"), 2, 24, num_layers=GROUPS + 3, optim="adagrad")
    assert_same(recipe.replace(sharding=SHARDINGS["stage 2"]), "cuda")
    assert taken == ["deepened"]


@pytest.mark.parametrize(
    "name", params([name for name in SHARDINGS if name not in BY_LAYER], ["layers"])
)
def test_a_rank_whose_layers_are_not_alike_is_run_whole(name, taken):
    simulate(Recipe(config("llama"), 2, 24, num_layers=GROUPS + 3, sharding=SHARDINGS[name]))
    assert taken == []


def test_a_layer_that_is_named_has_none_like_it():
    """One that is frozen, or that a 4-bit base leaves out."""
    left_out = Quantization(skip_modules=("model.layers.5.mlp.down_proj",))
    assert not may_be_deepened(tiny("gpt2", freeze=("5",)), "cuda")
    assert not may_be_deepened(tiny("llama", lora=EVERYWHERE, quantization=left_out), "cuda")
    assert may_be_deepened(tiny("gpt2", freeze=("wte",)), "cuda")


@pytest.mark.slow
def test_a_layer_that_is_named_is_run():
    assert_same(tiny("gpt2", freeze=("5",)), "cuda")
    left_out = Quantization(skip_modules=("model.layers.5.mlp.down_proj",))
    assert_same(tiny("llama", lora=EVERYWHERE, quantization=left_out), "cuda")


def test_norms_of_a_large_vocabulary_in_half_precision():
    """Their kernel's scratch has hundreds of numbers a parameter; small models need one."""
    recipe = Recipe(
        "polyglot-ko-1.3b",
        batch_size=1,
        seq_len=8,
        precision="fp16-true",
        optim="sgd",
        num_layers=7,
    )
    deepened, whole = simulate(recipe), simulate(recipe, full=True)
    assert (deepened.requested, deepened.phases) == (whole.requested, whole.phases)


# --- layers that are not all alike

_SIZES = dict(
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
)
_EXPERTS = dict(moe_intermediate_size=16, num_experts_per_tok=2)
_LATENT = dict(kv_lora_rank=8, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)


def unlike(name: str, layers: int = 12, **changes) -> Recipe:
    """A recipe for a small model of transformers, by the name of its configuration class."""
    import transformers

    sizes = {
        "DeepseekV3Config": _SIZES
        | _EXPERTS
        | _LATENT
        | dict(num_key_value_heads=4, n_routed_experts=4, n_group=2),
        "Qwen3MoeConfig": _SIZES | _EXPERTS | dict(num_experts=4, head_dim=8),
        "Qwen2Config": _SIZES,
        "AlbertConfig": dict(
            embedding_size=16, hidden_size=32, num_attention_heads=4, intermediate_size=48
        ),
        "Dinov2Config": dict(hidden_size=32, num_attention_heads=4, image_size=28, num_labels=3),
        "BeitConfig": dict(
            hidden_size=32, num_attention_heads=4, intermediate_size=48, image_size=32
        ),
        "MixtralConfig": _SIZES | dict(num_local_experts=2),
        "WhisperConfig": dict(
            d_model=32, decoder_layers=layers, max_source_positions=20, max_target_positions=16
        ),
    }[name]
    if name == "DeepseekV3Config":
        sizes["topk_group"] = 1
    built = getattr(transformers, name)(**{**sizes, "num_hidden_layers": layers, **changes})
    return Recipe(
        built, 2, None if name in ("Dinov2Config", "BeitConfig") else 8, loop="plain", optim="sgd"
    )


UNLIKE = {
    "the first are dense": unlike("DeepseekV3Config", 9, first_k_dense_replace=1),
    "four are dense": unlike("Qwen3MoeConfig", 18, mlp_only_layers=[0, 1, 2, 3]),
    "every second is dense": unlike("Qwen3MoeConfig", 18, decoder_sparse_step=2),
    "windows in the last": unlike(
        "Qwen2Config", use_sliding_window=True, sliding_window=4, max_window_layers=5
    ),
    "DINOv2": unlike("Dinov2Config", drop_path_rate=0.1),
    "BEiT": unlike("BeitConfig"),
    "Whisper": unlike(
        "WhisperConfig", **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
    ),
}
NOT_REPEATED = {
    "shared": (unlike("AlbertConfig"), "no list with a module for each layer"),
    "irregular": (
        unlike("Qwen3MoeConfig", mlp_only_layers=[0, 1, 4, 8]),
        "no pattern that repeats often enough",
    ),
    "what all layers return": (unlike("MixtralConfig", output_router_logits=True), ""),
}


@pytest.mark.parametrize("name", params(UNLIKE, ["the first are dense", "windows in the last"]))
def test_unlike_layers_equal_the_whole_run(name, taken):
    report = assert_same(UNLIKE[name], "cuda")
    assert taken[-1] == "deepened" and not any("none repeated" in note for note in report.notes)


@pytest.mark.parametrize("name", params(NOT_REPEATED, ["irregular"]))
def test_what_does_not_repeat_is_run_whole_with_a_note(name):
    recipe, why = NOT_REPEATED[name]
    (note,) = assert_same(recipe, "cuda").notes
    assert note.startswith("all 12 layers were run, none repeated: ") and why in note


def test_one_group_more_than_needed_is_checked(monkeypatch):
    """Where the deepened log says something else than the run of one more group, the whole model is
    run.
    """
    import importlib

    module = importlib.import_module("vramlab.simulation.simulate")
    original = module.deepen

    def wrong(tracker, layers, more):
        log, marks = original(tracker, layers, more)
        first = next(storage for _, storage, _ in log.events if storage.category == "activations")
        first.category = "workspace"
        return log, marks

    recipe = UNLIKE["DINOv2"]
    expected = simulate(recipe, full=True)
    monkeypatch.setattr(module, "deepen", wrong)
    report = simulate(recipe)
    assert report.phases == expected.phases and "take something else" in report.notes[0]


def test_parameters_outside_the_layers_must_not_depend_on_their_number():
    """Gemma 4 E2B has an embedding with a part for each layer."""
    with pytest.raises(NotRegular, match="outside the layers"):
        find(read_shape("gemma-4-e2b"))


@settings(max_examples=500)
@given(
    first=st.lists(st.integers(0, 2), max_size=4),
    pattern=st.lists(st.integers(0, 2), min_size=1, max_size=4),
    times=st.integers(0, 12),
    last=st.lists(st.integers(0, 2), max_size=4),
)
def test_a_pattern_of_kinds_is_found_and_stands_for_all(first, pattern, times, last):
    kinds = first + pattern * times + last
    middle = 1 if len(set(kinds)) == 1 else 2
    found = longest_pattern(kinds, middle + 2)
    if found is None:
        # two layers may go to the groups at the ends
        assert len(pattern) * times < (middle + 1) * len(pattern) + 2
        return
    before, period, after = found
    assert min(found) >= 1 and (len(kinds) - before - after) % period == 0
    assert all(kinds[i] == kinds[i + period] for i in range(before, len(kinds) - after - period))
    layers = Repetition(("layers",), len(kinds), *found, middle + 2, middle)
    kept = layers.kept()
    assert len(kept) == layers.shallow < layers.depth and layers.more >= 1
    written = [
        k
        for i, k in enumerate(kept)
        for k in ([k] if layers.group(f"layers.{i}") != layers.middle else [])
    ]
    assert [kinds[k] for k in written] == [
        kinds[k] for k in kept if not 0 <= k - before - period * (middle - 1) < period
    ]


PATTERNS = st.one_of(
    st.sets(st.integers(0, 11), max_size=4),  # anywhere
    st.integers(1, 4).map(lambda n: set(range(n))),  # the first
    st.integers(2, 3).flatmap(
        lambda n: st.integers(0, n - 1).map(lambda at: set(range(at, 12, n)))
    ),  # every n-th
)


@pytest.mark.slow
@settings(max_examples=300)
@given(PATTERNS)
def test_random_layers_equal_the_whole_run(dense):
    assert_same(unlike("Qwen3MoeConfig", 12, mlp_only_layers=sorted(dense)), "cuda")
