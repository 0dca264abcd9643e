"""diffusers' training step on fake tensors against the same step on real ones, to the byte, and
against a loop written after the script.
"""

import copy
import json

import jsonschema
import pytest
import torch
from quick import params
from real_ranks import births
from typer.testing import CliRunner
from vramlab.base.errors import RecipeError
from vramlab.interfaces.cli import app
from vramlab.interfaces.schema import schema_of
from vramlab.recipe import diffusion
from vramlab.recipe.diffusion import MODELS, Diffusion
from vramlab.recipe.shapes import read_shape
from vramlab.simulation.simulate_diffusion import simulate_diffusion, trace_diffusion
from vramlab.tracking.history import History
from vramlab.tracking.tracked import claim_model, run_tracked
from vramlab.tracking.tracker import Tracker
from vramlab.training.diffusion import build_diffusion, denoiser, on_meta

pytest.importorskip("diffusers", reason="the extra vramlab[diffusion] is not installed")

TINY_CLIP = {
    "vocab_size": 10,
    "hidden_size": 16,
    "intermediate_size": 32,
    "projection_dim": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
TINY_VAE = {
    "block_out_channels": [8, 8, 8, 8],
    "norm_num_groups": 4,
    "layers_per_block": 1,
}
TINY = {
    "sdxl": {
        "config": {
            "addition_time_embed_dim": 8,
            "attention_head_dim": [1, 2],
            "block_out_channels": [16, 32],
            "cross_attention_dim": 32,
            "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
            "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
            "layers_per_block": 1,
            "norm_num_groups": 8,
            "projection_class_embeddings_input_dim": 64,
            "transformer_layers_per_block": [1, 2],
        },
        "encoders": [TINY_CLIP, TINY_CLIP],
    },
    "sd3-medium": {
        "config": {
            "attention_head_dim": 8,
            "caption_projection_dim": 16,
            "joint_attention_dim": 32,
            "num_attention_heads": 2,
            "num_layers": 2,
            "pooled_projection_dim": 32,
            "pos_embed_max_size": 16,
        },
        "encoders": [
            TINY_CLIP,
            TINY_CLIP,
            {
                "vocab_size": 10,
                "d_model": 32,
                "d_ff": 64,
                "d_kv": 8,
                "num_layers": 2,
                "num_heads": 2,
            },
        ],
    },
}

TINY["flux2-klein-4b"] = {
    "config": {
        "attention_head_dim": 16,
        "axes_dims_rope": [4, 4, 4, 4],
        "in_channels": 16,
        "joint_attention_dim": 32,
        "num_attention_heads": 2,
        "num_layers": 1,
        "num_single_layers": 2,
        "timestep_guidance_channels": 16,
    },
    "vae": {"latent_channels": 4},
    "encoders": [],
}


@pytest.fixture(autouse=True)
def tiny_models(monkeypatch):
    """A tiny copy of each model, called tiny-…."""
    for name, sizes in TINY.items():
        record = copy.deepcopy(MODELS[name])
        record["published"] = f"tiny/{name}"
        record["config"].update(sizes["config"])
        record["vae"]["config"].update(TINY_VAE | sizes.get("vae", {}))
        for encoder, config in zip(record["encoders"], sizes["encoders"], strict=True):
            encoder["config"].update(config)
        monkeypatch.setitem(diffusion.MODELS, f"tiny-{name}", record)


def real(asked: Diffusion, steps: int = 2) -> History:
    training = build_diffusion(asked)
    tracker = run_tracked(training, Tracker("cpu"), steps, "cpu")
    return History(tracker.log, tracker.marks)


CASES = {
    "as the script": {},
    "cached, 2 micro-batches": {
        "latents": "cached",
        "text_encoders": "cached",
        "gradient_accumulation_steps": 2,
    },
    "fp32, checkpointed": {"mixed_precision": "no", "gradient_checkpointing": True},
    "full": {"method": "full", "latents": "encoded", "batch_size": 2},
    "all resident": {"text_encoders": "resident", "latents": "encoded", "rank": 2},
}


EVERY = [(model, case) for model in TINY for case in CASES]
QUICK = [("sdxl", "as the script"), ("sd3-medium", "all resident"), ("flux2-klein-4b", "full")]


@pytest.mark.parametrize(("model", "case"), params(EVERY, quick=QUICK))
def test_fake_tensors_take_what_real_ones_take(model, case):
    said = dict(CASES[case])
    if not TINY[model]["encoders"]:
        said.pop("text_encoders", None)
    asked = Diffusion(f"tiny-{model}", resolution=64, **said)
    simulated = trace_diffusion(asked, "cpu")
    measured = real(asked)
    assert births(simulated) == births(measured)
    assert (simulated.splits == measured.splits).all()
    assert simulated.stretches == measured.stretches
    assert ("encode" in simulated.phases()) and simulated.phases()["encode"].peak.total > 0


def test_the_step_is_that_of_the_script():
    """The loop of `train_text_to_image_lora_sdxl.py`, by accelerate, with variables of its own."""
    import diffusers
    from torch.nn import functional as F
    from vramlab.training.engine import autocast_inside

    asked = Diffusion("tiny-sdxl", resolution=64, batch_size=2)
    parts = build_diffusion(asked)
    unet, vae, loaded = parts.model, parts.reference.vae, parts.batch
    encoders = [parts.reference.text_encoder_1, parts.reference.text_encoder_2]
    scheduler = diffusers.DDPMScheduler()
    scheduler.alphas_cumprod = scheduler.alphas_cumprod.clone()
    trained = [parameter for parameter in unet.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=False)
    # what `accelerator.prepare` does to a model; making an Accelerator sets the process's state
    autocast_inside(unet, "cpu", "bf16-mixed")

    def time_ids():
        return torch.tensor([[64, 64, 0, 0, 64, 64]]).to(torch.bfloat16)

    def encode_prompt():
        embeds = []
        for number, encoder in enumerate(encoders, 1):
            ids = loaded[f"input_ids_{number}"]
            made = encoder(ids, output_hidden_states=True, return_dict=False)
            pooled = made[0]
            made = made[-1][-2]
            embeds.append(made.view(*made.shape))
        return torch.cat(embeds, dim=-1), pooled.view(2, -1)

    tracker = Tracker("cpu")
    claim_model(tracker, unet)
    claim_model(tracker, parts.reference)
    tracker.claim(loaded.values(), "inputs")
    with tracker:
        for _ in range(2):
            tracker.begin("encode")
            model_input = vae.encode(loaded["pixel_values"]).latent_dist.sample()
            model_input = model_input * vae.config.scaling_factor
            model_input = model_input.to(torch.bfloat16)
            noise = torch.randn_like(model_input)
            timesteps = torch.randint(0, 1000, (2,)).long()
            noisy = scheduler.add_noise(model_input, noise, timesteps)
            add_time_ids = torch.cat([time_ids() for _ in range(2)])
            prompt_embeds, pooled = encode_prompt()
            tracker.begin("forward")
            conditions = {"time_ids": add_time_ids, "text_embeds": pooled}
            model_pred = unet(noisy, timesteps, prompt_embeds, added_cond_kwargs=conditions).sample
            loss = F.mse_loss(model_pred.float(), noise.float(), reduction="mean")
            tracker.begin("backward")
            loss.backward()
            tracker.begin("step")
            torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=False)
            optimizer.step()
            optimizer.zero_grad()
            tracker.begin("between_steps")
    scripted = History(tracker.finish().log, tracker.marks)
    simulated = trace_diffusion(asked, "cpu")
    peaks = {name: phase.peak.total for name, phase in simulated.phases().items()}
    by_script = {name: phase.peak.total for name, phase in scripted.phases().items()}
    assert peaks == by_script


@pytest.mark.parametrize("model", TINY)
def test_the_sizes_are_those_that_are_published(model):
    record = MODELS[model]
    vae = record["vae"]
    parts = [("diffusers", record["config"]["_class_name"], record)]
    parts.append(("diffusers", vae["config"]["_class_name"], vae))
    for encoder in record["encoders"]:
        parts.append(("transformers", encoder["class"], encoder))
    for library, kind, said in parts:
        made = on_meta(library, kind, said["config"], "float32")
        assert sum(parameter.numel() for parameter in made.parameters()) == said["parameters"], kind


@pytest.mark.parametrize("mixed_precision", ["bf16", "fp16"])
def test_adapters_are_those_that_diffusers_adds(mixed_precision):
    """`add_adapter` on real weights gives names, sizes and formats, and not the meta device."""
    import diffusers
    from diffusers.training_utils import cast_training_params
    from peft import LoraConfig

    asked = Diffusion("tiny-sdxl", mixed_precision=mixed_precision)
    found = denoiser(asked, torch.device("cpu"))
    real = diffusers.UNet2DConditionModel.from_config(dict(asked.config))
    real.requires_grad_(False).to(getattr(torch, asked.frozen_dtype))
    target = asked.script["target_modules"]
    config = LoraConfig(r=4, lora_alpha=4, init_lora_weights="gaussian", target_modules=target)
    real.add_adapter(config)
    if mixed_precision == "fp16":
        cast_training_params(real)

    def described(model):
        return [(name, p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()]

    assert described(found) == described(real)


def test_the_adapters_of_sdxl_are_those_of_the_script():
    """5,806,080 parameters, as logs of the script at rank 4 say."""
    model = on_meta("diffusers", "UNet2DConditionModel", MODELS["sdxl"]["config"], "float16")
    from vramlab.training.diffusion import _adapt

    _adapt(model, Diffusion("sdxl", mixed_precision="fp16"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert sum(parameter.numel() for parameter in trained) == 5_806_080
    assert {parameter.dtype for parameter in trained} == {torch.float32}


@pytest.mark.parametrize(
    ("model", "fields", "said"),
    [
        ("sd9", {}, "known are sdxl"),
        ("sdxl", {"resolution": 1001}, "a multiple of 8 pixels"),
        ("sd3-medium", {"resolution": 4096}, "positions for 3072 pixels"),
        ("sdxl", {"method": "dora"}, "allowed are 'lora', 'full'"),
        ("flux2-klein-4b", {"text_encoders": "resident"}, "frees that of flux2-klein-4b"),
        ("CONFIG", {"text_encoders": "resident"}, "say 'cached'"),
    ],
)
def test_what_is_refused_says_what_is_allowed(model, fields, said, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MODELS["sdxl"]["config"] | {"layers_per_block": 1}))
    with pytest.raises(RecipeError, match=said):
        Diffusion(model.replace("CONFIG", str(file)), **fields)


def test_a_configuration_of_its_own_is_trained(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(diffusion.MODELS["tiny-sdxl"]["config"]))
    asked = {"resolution": 64, "latents": "cached", "text_encoders": "cached"}
    own = simulate_diffusion(str(file), "cpu", **asked)
    assert own.peak == simulate_diffusion("tiny-sdxl", "cpu", **asked).peak
    assert own.title.endswith("latents cached · prompts cached")


def test_others_name_the_command():
    for name in ("sdxl", "stabilityai/stable-diffusion-3-medium-diffusers"):
        with pytest.raises(RecipeError, match="vramlab diffusion s"):
            read_shape(name)


def test_the_command_line_prints_the_report():
    words = ["diffusion", "tiny-sdxl", "--resolution", "64", "--gpu", "RTX 4090", "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    jsonschema.validate(answer, schema_of("diffusion"))
    assert answer["phases"]["encode"]["peak"]["parameters"] > 0
    done = CliRunner().invoke(app, [*words[:4], "--gpu", "T4"])
    assert done.exit_code == 2
    assert "--mixed-precision is 'bf16'" in done.output + done.stderr
