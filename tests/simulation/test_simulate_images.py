"""Vision-language models: images become tokens by the processor's own code, and a simulated step
equals a real one on the CPU to the byte.
"""

from importlib.metadata import version

import pytest
from quick import params
from test_simulate_peft import assert_equal
from tiny_image_models import SMALL
from vramlab import LoRA, Quantization, Recipe, predict, simulate
from vramlab.base.errors import RecipeError
from vramlab.recipe import images
from vramlab.recipe.from_transformers import build
from vramlab.recipe.processors import processed, processor, video_processor
from vramlab.recipe.shapes import read_shape
from vramlab.training.models import meta_model
from vramlab.training.training import make_batch

TOWERS = {
    "qwen2_vl": "visual",
    "qwen3_vl_moe": "visual",
    "qwen2_5_vl": "visual",
    "qwen3_vl": "visual",
    "gemma3": "vision_tower",
    "paligemma": "vision_tower",
    "llava": "vision_tower",
    "llava_next": "vision_tower",
    "llava_onevision": "vision_tower",
    "gemma4": "vision_tower",
    "llama4": "vision_model",
}
LENGTHS = {"gemma4": 540}  # each of its images is some 250 tokens
LANGUAGE = LoRA(r=4, target_modules=r".*language_model.*(q|v)_proj")
WAYS = {
    "all of it": {"precision": "bf16-true"},
    "tower frozen, recomputed": {"precision": "bf16-mixed", "gradient_checkpointing": True},
    "fp32, one image": {"images": 1},
    "no image": {"images": None, "image_size": None},
    "LoRA on all, recomputed": {
        "precision": "bf16-mixed",
        "dtype": "bfloat16",
        "lora": LoRA(r=4, target_modules="all-linear"),
        "gradient_checkpointing": True,
    },
    "LoRA on language in 4 bits": {
        "precision": "bf16-mixed",
        "lora": LANGUAGE,
        "quantization": Quantization("nf4"),
        "gradient_checkpointing": True,
    },
    "4 bits, tower left alone": {
        "precision": "bf16-mixed",
        "lora": LANGUAGE,
        "gradient_checkpointing": True,
    },
    "SFT": {"precision": "bf16-mixed", "trainer": "sft"},
    "SFT without an image": {"images": None, "image_size": None, "trainer": "sft"},
    "unlike images, eager": {"image_size": ("64x48", "100x40"), "attn_implementation": "eager"},
}
CASES = [(family, way) for family in SMALL for way in WAYS]
QUICK = [
    ("llama4", "all of it"),
    ("qwen3_vl", "LoRA on language in 4 bits"),
    ("gemma4", "tower frozen, recomputed"),
    ("llava_onevision", "4 bits, tower left alone"),
]


def recipe_of(family: str, **fields) -> Recipe:
    usual = {"batch_size": 2, "images": 2, "image_size": "40x24"}
    usual["seq_len"] = LENGTHS.get(family, 170)
    return Recipe(**{"model": SMALL[family], **usual, **fields})


def as_llama_4_takes_it(fields: dict) -> dict:
    """Its pixels are in bfloat16, PEFT's all-linear takes its router, SFTTrainer fails on it."""
    if fields.get("lora") and fields["lora"].target_modules == "all-linear":
        fields["lora"] = LoRA(r=4, target_modules=r".*(q|v)_proj")
    fields.pop("trainer", None)
    if fields.get("precision") == "fp32":
        del fields["precision"]
    return {"precision": "bf16-true"} | fields


@pytest.mark.parametrize(("family", "way"), params(CASES, QUICK))
def test_equals_real_tensors(family, way):
    fields = dict(WAYS[way])
    if family == "llama4":
        if version("transformers") == "5.24.0":
            pytest.skip("it asks a text model's output for `image_outputs`, and none trains")
        fields = as_llama_4_takes_it(fields)
    if "frozen" in way:
        fields["freeze"] = (TOWERS[family],)
    if "left alone" in way:
        skipped = (f"model.{TOWERS[family]}", "lm_head")
        fields["quantization"] = Quantization("nf4", skip_modules=skipped)
    assert_equal(recipe_of(family, **fields))


FILMS = [family for family in SMALL if "video" in images.READERS[family]]
FILMED = {
    "all of it": {"precision": "bf16-true"},
    "fp32, images too": {"images": 2, "image_size": "40x24"},
    "tower frozen, recomputed": {"precision": "bf16-mixed", "gradient_checkpointing": True},
    "LoRA in 4 bits": WAYS["LoRA on language in 4 bits"],
}
FILM_CASES = [(family, way) for family in FILMS for way in FILMED]


@pytest.mark.parametrize(("family", "way"), params(FILM_CASES, [("qwen2_5_vl", "all of it")]))
def test_a_video_equals_real_tensors(family, way):
    fields = {"images": None, "image_size": None, "video_frames": 5, "video_size": "40x24"}
    fields |= {"seq_len": 330} | FILMED[way]
    if "frozen" in way:
        fields["freeze"] = (TOWERS[family],)
    assert_equal(recipe_of(family, **fields))


def test_published_tokens_of_a_video():
    """LLaVA-OneVision: 196 a frame and one. Qwen2.5-VL: two frames are one of 28 × 28 pixels each.
    Qwen3-VL writes a time before every two frames: "<0.2 seconds>" is 6 tokens, and 7 from ten on.
    """
    film = {"video_frames": 32, "video_size": "640x360"}
    assert len(images.shown(Recipe("llava-onevision-7b", **film))) == 32 * 196 + 1
    rows, columns = 13, 23
    two_and_a_half = Recipe("qwen2.5-vl-7b", **film)
    assert len(images.shown(two_and_a_half)) == 2 + 16 * rows * columns
    assert two_and_a_half.seq_len == 512 + 2 + 16 * rows * columns
    three = Recipe("qwen3-vl-2b", **film)
    assert len(images.shown(three)) == 2 + 16 * (11 * 20 + 2 + 6) + 6
    assert "a video of 32 frames a sample" in str(three) and Recipe(**three.to_dict()) == three


@pytest.mark.parametrize("family", params(list(SMALL), ["gemma3"]))
def test_runs_as_on_a_gpu(family):
    """Masks are made by `vmap` under CUDA's autocast; the base is loaded in 4 bits before."""
    report = simulate(
        recipe_of(family, **WAYS["LoRA on language in 4 bits"]),
        gpu="RTX 4090",
    )
    assert report.loading and report.verdict == "safe"
    assert report.phases["backward"].end.gradients > 0


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("size", ["40x24", "100x40", "640x480"])
def test_tokens_are_those_of_the_pixels(family, size):
    """Counted without the image, and as the processor cuts it."""
    recipe = recipe_of(family, image_size=size, images=1, max_pixels=80_000, seq_len=1300)
    (grid, _) = images.pixels(recipe)["image_grid_thw"].tolist()
    assert images.tokens(recipe) == [grid[0] * grid[1] * grid[2] // 4]
    batch = make_batch(recipe)
    assert int((batch["input_ids"] == 290).sum()) == 2 * images.tokens(recipe)[0]
    assert len(batch["pixel_values"]) == 4 * 2 * images.tokens(recipe)[0]


def test_published_tokens():
    """Qwen's README: an image of H × W is (H / 28) × (W / 28) tokens; Gemma's card: 256."""
    assert images.tokens(Recipe("qwen2.5-vl-3b", images=1, image_size="1036x1036")) == [37 * 37]
    assert images.tokens(Recipe("qwen3-vl-2b", images=1, image_size="1024x512")) == [32 * 16]
    gemma = Recipe("gemma-3-4b-vision", images=2, image_size="4000x300")
    assert images.tokens(gemma) == [256, 256] and gemma.seq_len == 512 + 2 * 258
    # public programs count 27 × 27 + 27 × 28 for LLaVA-OneVision; 144 a tile is Llama 4's card
    assert images.tokens(Recipe("llava-onevision-7b", images=1, image_size="300x300")) == [1485]
    assert images.tokens(Recipe("llava-1.5-7b", images=1, image_size="640x480")) == [576]
    tiled = Recipe("llama-4-scout-vision", images=1, image_size="640x480", precision="bf16-true")
    assert images.tokens(tiled) == [5 * 144] and len(images.marked(tiled)[0]) == 5 * 144 + 2 + 5
    budget = Recipe("gemma-4-31b-vision", images=2, image_size=("960x672", "768x768"))
    assert images.tokens(budget) == [280, 256]
    smaller = Recipe("qwen3-vl-2b", images=1, image_size="1024x512", max_pixels=256 * 1024)
    assert sum(images.tokens(smaller)) <= 256
    assert Recipe(**smaller.to_dict()) == smaller and "at most 262,144 pixels" in str(smaller)


def test_a_tower_takes_fused_attention_beside_gemma_2():
    config = build(read_shape(SMALL["paligemma"])).config
    assert config.text_config._attn_implementation == "eager"
    chosen = meta_model(recipe_of("paligemma")).config
    assert chosen.vision_config._attn_implementation == "sdpa"
    assert chosen.text_config._attn_implementation == "eager"
    assert images.tokens(Recipe("paligemma2-3b", images=1, image_size="640x480")) == [256]


def test_a_name_that_no_module_has_is_refused():
    """transformers looks for names where a module's begins or ends."""
    fields = {"precision": "bf16-mixed", "lora": LANGUAGE}
    with pytest.raises(RecipeError, match="no weight's does"):
        recipe_of("qwen2_5_vl", quantization=Quantization("nf4", skip_modules="visual"), **fields)


def test_a_frozen_tower_has_no_gradients():
    whole, frozen = (
        simulate(recipe_of("gemma3", freeze=freeze, precision="bf16-true"), target="cpu")
        for freeze in (None, ("vision_tower", "multi_modal_projector"))
    )
    tower = [
        weight.size
        for weight in read_shape(SMALL["gemma3"]).weights()
        if "language_model" not in weight.name
    ]
    gradients = [report.phases["backward"].end.gradients for report in (whole, frozen)]
    assert gradients[0] - gradients[1] == 2 * sum(tower)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"model": "gpt2", "images": 1, "image_size": "8x8"}, "gpt2 reads no images in a recipe"),
        ({"image_size": None}, "say width and height"),
        ({"image_size": "20000x300"}, "of up to 16,384 pixels"),
        ({"image_size": "large"}, "such as '1024x768'"),
        ({"image_size": "10000x20", "seq_len": 9000}, "the processor refuses it: absolute aspect"),
        ({"seq_len": 100}, "the images of a sample are 124 tokens"),
        ({"trainer": "dpo"}, "not for image-text"),
        ({"trainer": "sft", "packing": True}, "rows of their own"),
        ({"max_pixels": 1000}, "makes smaller images 3,136 pixels large"),
        ({"lora": LANGUAGE, "freeze": "visual"}, "adapters leave the whole base frozen"),
        ({"model": SMALL["gemma3"], "max_pixels": 1000}, "makes every image the same size"),
        ({"model": SMALL["gemma4"], "max_pixels": 1000}, "cuts an image into pieces by sizes of"),
        ({"model": SMALL["llama4"]}, "pixels come in bfloat16: say 'bf16-mixed'"),
        (
            {"model": SMALL["llama4"], "precision": "bf16-mixed", "trainer": "sft"},
            "SFTTrainer asks",
        ),
        ({"model": SMALL["gemma3"], "video_frames": 8}, "reads no video in a recipe: qwen2_vl"),
        (
            {"model": "gpt2", "images": None, "image_size": None, "video_frames": 8},
            "gpt2 reads no video in a recipe",
        ),
        ({"video_frames": 8}, "say width and height, such as '640x360'"),
        ({"video_frames": 0, "video_size": "64x64"}, "must be a whole number from 1 to 16,384"),
        ({"video_size": "64x64"}, "say video_frames"),
        (
            {"video_frames": 8, "video_size": "10000x20"},
            "the processor refuses it: absolute aspect",
        ),
        ({"video_frames": 80, "video_size": "64x64"}, "the images and video of a sample are 2,"),
        ({"video_frames": 2, "video_size": "24x24", "trainer": "sft"}, "hands on images alone"),
    ],
)
def test_refusals(fields, words):
    with pytest.raises(RecipeError) as caught:
        recipe_of("qwen2_5_vl", **fields)
    assert words in str(caught.value)


def test_predict_names_simulate():
    with pytest.raises(RecipeError, match="predict does not know qwen3_vl: ask simulate"):
        predict(recipe_of("qwen3_vl"))


@pytest.mark.parametrize("size", ["640x480", "40x24", "1500x300", "336x336", "16x90"])
def test_tiles_are_those_that_the_processor_cuts(size):
    """Llama 4's processor resizes with torchvision, without which its tiles are only counted."""
    pytest.importorskip("torchvision")
    import torch
    from PIL import Image

    recipe = Recipe(SMALL["llama4"], images=1, image_size=size, precision="bf16-true", seq_len=999)
    (sides,) = images.sides(recipe)
    own = processor(recipe.shape, None)
    made = own(images=[Image.new("RGB", (sides[1], sides[0]))], return_tensors="pt")
    counted = processed(recipe.shape, None, (sides,))
    assert made["pixel_values"].shape == counted["pixel_values"].shape
    assert made["pixel_values"].dtype == counted["pixel_values"].dtype
    assert torch.equal(torch.as_tensor(made["aspect_ratios"]), counted["aspect_ratios"])


@pytest.mark.parametrize("size", ["640x360", "100x300", "30x30"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "llava_onevision"])
def test_frames_are_those_that_the_processor_cuts(family, size):
    """Processors of videos resize with torchvision, without which their patches are counted."""
    pytest.importorskip("torchvision")
    import torch

    film = {"video_frames": 7, "video_size": size, "images": None, "image_size": None}
    recipe = recipe_of(family, **film, seq_len=16000)
    counted = images.pixels(recipe.replace(batch_size=1))
    width, height = map(int, size.split("x"))
    frames = torch.zeros(7, 3, height, width, dtype=torch.uint8)
    own = video_processor(recipe.shape)
    made = own(videos=[frames], do_sample_frames=False, return_tensors="pt")
    for name in ("pixel_values_videos", "video_grid_thw"):
        if name in counted:
            assert made[name].shape == counted[name].shape
    assert str(made.get("video_grid_thw")) == str(counted.get("video_grid_thw"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"precision": "bf16-true"}, AttributeError, "last_hidden_state"),
        ({"precision": "fp32", "images": None, "image_size": None}, RuntimeError, "same dtype"),
    ],
)
def test_what_llama_4_is_refused_for_fails_in_the_libraries(fields, error, words):
    """TRL's head asks for hidden states; weights in fp32 are given pixels in bfloat16."""
    from trl.trainer.utils import add_fused_lm_head
    from vramlab.training.models import build_model

    recipe = recipe_of("llama4", **fields)
    pixels = images.pixels(recipe_of("llama4", precision="bf16-true"))
    model = build_model(recipe)
    batch = make_batch(recipe) | pixels
    if not recipe.images:
        batch["input_ids"] = make_batch(recipe_of("llama4", precision="bf16-true"))["input_ids"]
    with pytest.raises(error, match=words):
        if words == "last_hidden_state":
            add_fused_lm_head(model)
            model(**batch, fused_lm_head=True)
        else:
            model(**batch)


@pytest.mark.slow
def test_a_tower_for_sound_is_held_and_not_run():
    """Gemma 4 E2B and E4B have one, which takes no fused attention."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sound = {**sizes, "subsampling_conv_channels": [4, 2], "output_proj_dims": 32}
    model = SMALL["gemma4"] | {"audio_config": {"model_type": "gemma4_audio", **sound}}
    recipe = recipe_of("gemma4", model=model, precision="bf16-true")
    held = sum(weight.size for weight in recipe.shape.weights() if "audio" in weight.name)
    without = recipe_of("gemma4").shape.num_parameters
    assert held == recipe.shape.num_parameters - without > 0
    assert_equal(recipe)
