"""What `simulate` and `predict` say of loading, against transformers' own `from_pretrained` of
small checkpoints.
"""

import pytest
import torch
import transformers
from quick import params
from tiny_models import config
from vramlab import LoRA, Quantization, Recipe, Sharding, predict, simulate
from vramlab.formulas.loading import loaded_on_host
from vramlab.recipe.shapes import Shape
from vramlab.report.report import GiB
from vramlab.simulation.quantized_loading import loading_peak
from vramlab.tracking.tracker import Tracker
from vramlab.training.models import build_model

pytestmark = pytest.mark.usefixtures("quiet")

CASES = {
    "llama nf4 double": ("llama", Quantization("nf4", double=True)),
    "llama nf4 as loaded": ("llama", Quantization("nf4", prepare=False)),
    "qwen2 tied": ("qwen2", Quantization("nf4")),
    "qwen2 tied, the head stored too": ("qwen2", Quantization("nf4", double=True, prepare=False)),
    "mixtral merges experts": ("mixtral", Quantization("nf4", prepare=False)),
    "gpt2 transposes": ("gpt2", Quantization("fp4")),
    "t5 keeps fp32": ("t5", Quantization("nf4")),
    "bert ties a bias": ("bert", Quantization("nf4")),
    "llama int8": ("llama", Quantization("int8")),
    "gpt2 int8 transposes": ("gpt2", Quantization("int8", prepare=False)),
}


def published(model: torch.nn.Module, recipe: Recipe) -> dict | None:
    """The weights with the head's apart, where the published checkpoint has them so."""
    return (
        {name: weight.clone() for name, weight in model.state_dict().items()}
        if recipe.shape.stores_tied_head
        else None
    )


def loaded(recipe: Recipe, folder) -> Tracker:
    """The tracker of the real loading of a checkpoint in several files, in the recipe's dtype."""
    from peft import prepare_model_for_kbit_training

    base = recipe.replace(lora=None, quantization=None)
    build_model(base).save_pretrained(
        folder, max_shard_size="40KB", state_dict=published(build_model(base), recipe)
    )
    quantization = recipe.quantization
    said = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantization.quant_type,
        bnb_4bit_use_double_quant=quantization.double,
        bnb_4bit_compute_dtype=getattr(torch, recipe.weights_dtype),
    )
    if quantization.quant_type == "int8":
        said = transformers.BitsAndBytesConfig(load_in_8bit=True)
    kind = getattr(transformers, type(build_model(base)).__name__)
    with Tracker("cpu") as tracker:
        model = kind.from_pretrained(
            folder, dtype=getattr(torch, recipe.weights_dtype), quantization_config=said
        )
        if quantization.prepare:
            model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return tracker.finish()


def highest(tracker: Tracker) -> int:
    alive = peak = 0
    for size, *_ in tracker.log:
        alive += size
        peak = max(peak, alive)
    return peak


@pytest.mark.parametrize("name", params(CASES, ["llama int8", "mixtral merges experts"]))
def test_the_device_holds_what_from_pretrained_has_at_once(name, tmp_path, monkeypatch):
    family, quantization = CASES[name]
    monkeypatch.setattr(Shape, "stores_tied_head", "stored too" in name)
    precision = "fp16-true" if family == "t5" else "bf16-true"
    task = "masked-lm" if family == "bert" else None
    recipe = Recipe(
        config(family),
        task=task,
        precision=precision,
        num_layers=7,
        lora=LoRA(r=4),
        quantization=quantization,
    )
    assert loading_peak(recipe, "cpu").total == highest(loaded(recipe, tmp_path))


FORMULA = ["llama-3.1-8b", "mixtral-8x7b", "gpt2", "qwen3-1.7b"]


@pytest.mark.parametrize("model", params(FORMULA, ["gpt2", "mixtral-8x7b"]))
def test_the_formula_sums_up_what_is_loaded(model):
    recipe = Recipe(
        model, seq_len=64, precision="bf16-true", lora=LoRA(), quantization=Quantization("nf4")
    )
    found, said = loading_peak(recipe, "cuda"), predict(recipe).loading
    assert found.total - found.workspace == said.total
    assert said.total > predict(recipe).phases["load"].end.parameters


# GiB, `torch.cuda.max_memory_allocated()` after from_pretrained and prepare_model_for_kbit_training
# on an RTX 4080 (can-i-finetune-this, MIT; see data/published_runs.json)
MEASURED = {"qwen2.5-0.5b": 0.9339, "qwen2.5-1.5b": 1.9436, "qwen2.5-3b": 3.0833}


@pytest.mark.parametrize("model", params(MEASURED, ["qwen2.5-1.5b"]))
def test_a_real_gpu_held_as_much(model):
    recipe = Recipe(
        model, precision="bf16-true", lora=LoRA(r=16), quantization=Quantization("nf4", double=True)
    )
    assert loading_peak(recipe, "cuda").total / GiB == pytest.approx(MEASURED[model], abs=3e-4)


def test_a_tied_head_that_the_file_has_too_is_loaded_and_compared():
    """PEFT's `examples/sft/train.py` held as much on PyTorch's allocator (data/stand_in)."""
    base = {"dtype": "float32", "quantization": Quantization("nf4", double=True, prepare=False)}
    recipe = Recipe("qwen3-0.6b", 2, 1024, "bf16-mixed", lora=LoRA(r=8), **base)
    assert loading_peak(recipe, "cuda").total / GiB == pytest.approx(1.517, abs=5e-4)
    own = recipe.replace(
        model=recipe.shape.config
    )  # a file that `save_pretrained` wrote has it once
    assert predict(recipe).loading.total - predict(own).loading.total > GiB / 2


def test_loading_may_need_more_than_training():
    """Experts stay in 16 bits, and a layer's are there twice while they are merged."""
    fields = {"num_layers": 2, "precision": "bf16-true", "lora": LoRA(r=4)}
    recipe = Recipe("mixtral-8x7b", 1, 64, quantization=Quantization(prepare=False), **fields)
    for report in (simulate(recipe), predict(recipe)):
        assert report.loading.total > report.peak.total and "loading peaks at" in str(report)
    assert predict(recipe.replace(quantization=None)).loading is None


def test_each_rank_loads_the_whole_quantized_base():
    alone = Recipe(
        "llama-3.1-8b", precision="bf16-true", lora=LoRA(), quantization=Quantization(prepare=False)
    )
    rank = predict(alone.replace(sharding=Sharding(3, 8, "fsdp")))
    assert (
        rank.loading == predict(alone).loading
        and rank.loading.total > rank.phases["load"].end.total
    )


def test_each_rank_loads_a_base_that_fsdp_offloads_in_host_memory(tmp_path):
    """`plan`'s program did so on two stood-in cards, which held nothing until it was sharded."""
    recipe = Recipe(
        config("llama", hidden_size=288, intermediate_size=1024),
        precision="bf16-true",
        num_layers=7,
        lora=LoRA(r=4),
        quantization=Quantization("nf4", double=True),
    )
    ranks = recipe.replace(sharding=Sharding(3, 2, "fsdp", offload="parameters"))
    assert predict(ranks).loading is None and simulate(ranks).loading is None
    assert any("device_map={'': 'cpu'}" in note for note in predict(ranks).notes)
    real = 2 * highest(loaded(recipe, tmp_path))
    # blocks of 512 bytes count more in small tensors
    assert real <= loaded_on_host(ranks) < 1.02 * real
    assert loaded_on_host(recipe) == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_in_host_memory_weights_are_the_file_unless_they_are_converted(dtype, tmp_path):
    """Mapped pages, which all processes of a node share, or a copy for each process."""
    build_model(Recipe(config("llama"), num_layers=1, precision="bf16-true")).save_pretrained(
        tmp_path
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # threads are not followed
        with Tracker("cpu") as tracker:
            model = transformers.LlamaForCausalLM.from_pretrained(
                tmp_path, dtype=getattr(torch, dtype)
            )
    made = {tracker.live[p.untyped_storage()._cdata].op for p in model.parameters()}
    assert made == ({"set_"} if dtype == "bfloat16" else {"_to_copy"})


def test_each_rank_of_fsdp_reads_all_weights_though_one_alone_is_asked_to(tmp_path, monkeypatch):
    """When this fails, transformers has mended its issue 43749, and `loaded_on_host` follows."""
    recipe = Recipe(config("llama"), num_layers=1, sharding=Sharding(3, 8, "fsdp"))
    build_model(recipe.replace(sharding=None)).save_pretrained(tmp_path)
    # what the second rank of a run with `cpu_ram_efficient_loading` sees
    monkeypatch.setattr("transformers.modeling_utils.is_fsdp_enabled", lambda: True)
    monkeypatch.setattr("transformers.modeling_utils.is_local_dist_rank_0", lambda: False)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    read = sum(weight.nbytes for weight in model.parameters() if weight.count_nonzero())
    assert read == sum(weight.nbytes for weight in model.parameters())
    assert loaded_on_host(recipe) == 8 * read
    # while accelerate sends a whole model, and shards that stay on the host
    offloaded = Sharding(3, 8, "fsdp", offload="parameters")
    assert loaded_on_host(recipe.replace(sharding=offloaded)) == 9 * read
    half = recipe.replace(precision="bf16-true")
    assert loaded_on_host(half) == read // 2


@pytest.mark.parametrize(
    "copies, width, changes",
    [
        (1, 2, {"lora": LoRA(), "dtype": "bfloat16", "sharding": Sharding(0, 8, "deepspeed")}),
        (8, 2, {"lora": LoRA(), "dtype": "float16", "sharding": Sharding(0, 8, "deepspeed")}),
        (8, 4, {"precision": "bf16-mixed", "sharding": Sharding(2, 8, "deepspeed")}),
        (1, 2, {"precision": "bf16-mixed", "sharding": Sharding(3, 8, "deepspeed")}),
        (
            1,
            4,
            {"model": "gpt2", "precision": "bf16-mixed", "sharding": Sharding(0, 8, "deepspeed")},
        ),
    ],
    ids=["as in the file", "converted", "trained in fp32", "rank 0 alone", "a file of fp32"],
)
def test_ranks_share_a_file_and_have_a_copy_each_of_what_is_converted(copies, width, changes):
    recipe = Recipe("llama-3.1-8b", 1, 64).replace(**changes)
    assert loaded_on_host(recipe) == copies * width * recipe.shape.num_parameters
