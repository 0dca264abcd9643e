"""Names of the hub: the architecture that they share, and what lies in the local cache."""

import json
from pathlib import Path

import pytest
from vramlab import Recipe, RecipeError, predict, read_shape
from vramlab.recipe import hub_names
from vramlab.recipe.denoisers import MODELS
from vramlab.recipe.diffusion import Diffusion
from vramlab.recipe.shapes import catalogue


@pytest.mark.parametrize(
    ("name", "entry", "hub_id"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct"),
        ("Qwen3-4B-Instruct-2507", "qwen3-4b", "Qwen/Qwen3-4B-Instruct-2507"),
        ("gemma-3-4b-it", "gemma-3-4b", "google/gemma-3-4b-it"),
        ("Llama-3.3-70B-Instruct", "llama-3.1-70b", "meta-llama/Llama-3.3-70B-Instruct"),
        (
            "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit",
            "llama-3.1-8b",
            "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit",
        ),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b", "Qwen/Qwen3-8B-Base"),
        ("allenai/OLMo-2-1124-7B-DPO", "olmo-2-7b", "allenai/OLMo-2-1124-7B-DPO"),
    ],
)
def test_a_name_of_the_hub_has_the_architecture_that_it_shares(name, entry, hub_id):
    shape = read_shape(name)
    assert (shape.name, shape.hub_id) == (entry, hub_id), "a program loads what was named"
    assert shape.shares.startswith(f"{name} has the architecture of {entry}")
    assert shape.weights() == read_shape(entry).weights()
    assert read_shape(entry).shares == ""


def test_what_differs_counts():
    assert read_shape("Qwen3-4B-Instruct-2507").max_positions == 262144
    assert predict(
        Recipe("Qwen3-4B-Instruct-2507", seq_len=65536, gradient_checkpointing=True)
    ).peak.total
    for size in (7, 14, 32):
        assert read_shape(f"Qwen/Qwen2.5-Coder-{size}B-Instruct").max_positions == 32768
    third = read_shape("mistralai/Mistral-7B-Instruct-v0.3")
    assert (third.vocab_size, third.sliding_window) == (32768, None)
    assert third.num_parameters == 7_248_023_552, "as its model card says"


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("microsoft/phi-1_5", 1.418),
        ("codellama/CodeLlama-34b-hf", 33.7),
        ("openlm-research/open_llama_3b_v2", 3.43),
        ("01-ai/Yi-34B-Chat", 34.4),
        ("HuggingFaceTB/SmolLM2-135M", 0.135),
        ("mistralai/Magistral-Small-2506", 23.6),
        ("mistralai/Ministral-8B-Instruct-2410", 8.02),
        ("mistral-community/Mixtral-8x22B-v0.1", 141),
        ("Qwen/Qwen2.5-72B-Instruct", 72.7),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 1.78),
    ],
)
def test_other_sizes_of_an_architecture_have_the_published_count(name, billions):
    assert read_shape(name).num_parameters / 1e9 == pytest.approx(billions, rel=0.005)


def test_the_table_names_entries_and_no_spelling_of_the_catalogue():
    claimed = {
        name.lower().rpartition("/")[2]
        for entry in catalogue().values()
        for name in entry.get("aliases", ())
    }
    for name, said in hub_names.KNOWN["names"].items():
        assert said["entry"] in catalogue()
        assert name not in claimed and name not in catalogue()
        assert read_shape(name).name == said["entry"]
        assert said["source"], "where the row was checked"


@pytest.mark.parametrize(
    "name", ["no-such-model-instruct", "../../no-such-folder/x", "Qwen/Qwen2.5-1000B-Instruct"]
)
def test_another_name_is_none(name):
    with pytest.raises(RecipeError, match=r"`vramlab models` lists the names.*--download"):
        read_shape(name)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def put(cache: Path, revision: str, layers: int) -> Path:
    folder = cache / "models--someone--their-model" / "snapshots" / revision
    folder.mkdir(parents=True)
    config = json.loads(catalogue()["qwen3-0.6b"]["config"]) | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_model_of_the_local_cache_is_read_from_there(cache):
    put(cache, "a", 3)
    put(cache, "b", 4)
    refs = cache / "models--someone--their-model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("b")
    shape = read_shape("someone/their-model")
    assert (shape.num_layers, shape.hub_id) == (4, "someone/their-model")
    assert "in the hub's local cache" in shape.shares


def test_download_fetches_the_configuration_alone(cache, monkeypatch):
    import huggingface_hub

    asked = []
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda *words: asked.append(words) or put(cache, "a", 2)
    )
    hub_names.download("someone/their-model")
    assert asked == [("someone/their-model", "config.json")]
    assert read_shape("someone/their-model").num_layers == 2


def test_a_download_that_fails_is_one_sentence(monkeypatch):
    import huggingface_hub

    def offline(*_):
        raise OSError("no route to the hub")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(
        RecipeError, match=r"could not be downloaded .OSError: no route to the hub.*hf auth login"
    ):
        hub_names.download("someone/their-model")


def test_a_diffusers_configuration_and_a_yaml_say_what_to_do(tmp_path):
    unet = tmp_path / "my pipeline" / "unet"
    unet.mkdir(parents=True)
    file = unet / "config.json"
    file.write_text(json.dumps(MODELS["sdxl"]["config"]))
    index = unet.parent / "model_index.json"
    index.write_text(json.dumps({"_class_name": "StableDiffusionXLPipeline"}))
    for path in (file, unet, index, unet.parent):
        # the command that is named takes what was given
        assert Diffusion(str(path)).record is MODELS["sdxl"]
        said = rf"UNet2DConditionModel.*: vramlab diffusion '{path}' .*vramlab run"
        with pytest.raises(RecipeError, match=said):
            read_shape(str(path))
    file.write_text(json.dumps({"_class_name": "UNet2DConditionModel", "sample_size": 64}))
    with pytest.raises(RecipeError, match=r"models: simulate.model=…, batch=…. takes the module"):
        read_shape(str(unet.parent))
    file = tmp_path / "axolotl.yaml"
    file.write_text("base_model: x")
    with pytest.raises(RecipeError, match="the command line reads the YAML of axolotl"):
        read_shape(str(file))
