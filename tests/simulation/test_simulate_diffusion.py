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
    "vae": TINY_VAE | {"latent_channels": 4},
    "encoders": [],
}
TINY["wan2.1-t2v-1.3b"] = {
    "config": {
        "attention_head_dim": 16,
        "ffn_dim": 64,
        "num_attention_heads": 2,
        "num_layers": 2,
        "text_dim": 32,
    },
    "vae": {"base_dim": 8, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1},
    "encoders": [TINY["sd3-medium"]["encoders"][2]],
}
SIZE = {"wan2.1-t2v-1.3b": {"frames": 5, "height": 32, "width": 48}}


@pytest.fixture(autouse=True)
def tiny_models(monkeypatch):
    """A tiny copy of each model, called tiny-…."""
    for name, sizes in TINY.items():
        record = copy.deepcopy(MODELS[name])
        record["published"] = f"tiny/{name}"
        record["config"].update(sizes["config"])
        record["vae"]["config"].update(sizes.get("vae", TINY_VAE))
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


WAN_CASES = [
    ("lora", True, 2),
    ("lora", False, 1),
    ("full", False, 2),
    ("full", True, 1),
]
EVERY = [(model, case) for model in TINY for case in CASES]
QUICK = [  # SDXL's step is held by the loop below
    ("sd3-medium", "all resident"),
    ("flux2-klein-4b", "full"),
    ("wan2.1-t2v-1.3b", "as the script"),
]


@pytest.mark.parametrize(("model", "case"), params(EVERY, quick=QUICK))
def test_fake_tensors_take_what_real_ones_take(model, case):
    said = dict(CASES[case])
    if not TINY[model]["encoders"]:
        said.pop("text_encoders", None)
    said |= SIZE.get(model, {"resolution": 64})
    asked = Diffusion(f"tiny-{model}", **said)
    simulated = trace_diffusion(asked, "cpu")
    measured = real(asked)
    assert births(simulated) == births(measured)
    assert (simulated.splits == measured.splits).all()
    assert simulated.stretches == measured.stretches
    assert ("encode" in simulated.phases()) and simulated.phases()["encode"].peak.total > 0


def assert_equal_peaks(tracker, asked):
    """Hold each phase's peak of a script that `tracker` has followed against the simulation's."""
    scripted = History(tracker.finish().log, tracker.marks)
    simulated = trace_diffusion(asked, "cpu")
    peaks = {name: phase.peak.total for name, phase in simulated.phases().items()}
    by_script = {name: phase.peak.total for name, phase in scripted.phases().items()}
    assert peaks == by_script


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
    scheduler.alphas_cumprod = loaded["alphas_cumprod"]
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
    assert_equal_peaks(tracker, asked)


@pytest.mark.parametrize(
    ("method", "resident", "rows"), params(WAN_CASES, quick=[("lora", True, 2)])
)
def test_the_step_of_wan_is_that_of_finetrainers(method, resident, rows):
    """The loop of finetrainers' SFT trainer, with diffusers' own pipeline parts and variables of
    its own: `precomputation.py`, `modeling_utils.py`, `models/wan/base_specification.py`.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
    from diffusers.training_utils import compute_loss_weighting_for_sd3

    said = {"latents": "encoded", "text_encoders": "resident"} if resident else {}
    said |= SIZE["wan2.1-t2v-1.3b"] | {"method": method, "batch_size": rows}
    asked = Diffusion("tiny-wan2.1-t2v-1.3b", **said)
    parts = build_diffusion(asked)
    transformer = parts.model
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler_sigmas = scheduler.sigmas.clone()
    trained = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=False)
    dtype = torch.bfloat16

    def encode_text(encoder):
        ids = torch.ones(1, 512, dtype=torch.int64)
        mask = torch.ones(1, 512).bool()
        embeds = encoder(ids)[0].to(dtype=dtype)
        return embeds, mask

    def encode_video(vae):
        video = torch.rand(1, 5, 3, 32, 48, dtype=dtype)
        video = video.permute(0, 2, 1, 3, 4).contiguous()
        return vae._encode(video).to(dtype)

    @torch.no_grad()
    def item():
        if not resident:  # as `torch.load` brings them onto the device
            text = torch.rand(1, 512, 32, dtype=dtype)
            latents = torch.rand(1, 32, 2, 4, 6, dtype=dtype)
            return text, latents, torch.rand(16), torch.rand(16)
        config = parts.reference.vae.config
        text = encode_text(parts.reference.text_encoder_1)[0]
        latents = encode_video(parts.reference.vae)
        # on the host until they are aligned: as numbers, so that no tensor is counted
        return text, latents, config.latents_mean, config.latents_std

    def normalize(latents, mean, std):
        mean = mean.view(1, -1, 1, 1, 1)
        std = std.view(1, -1, 1, 1, 1)
        return ((latents.float() - mean) * std).to(latents)

    def specification_forward(conditions, latent_conditions, sigmas):
        latents = latent_conditions.pop("latents")
        mean = latent_conditions.pop("mean")
        std = latent_conditions.pop("std")
        mu, logvar = torch.chunk(latents, 2, dim=1)
        mu = normalize(mu, mean, std)
        logvar = normalize(logvar, mean, std)
        latents = torch.cat([mu, logvar], dim=1)
        posterior = DiagonalGaussianDistribution(latents)
        latents = posterior.sample(generator=None)
        del posterior
        noise = torch.zeros_like(latents).normal_()
        noisy_latents = (1.0 - sigmas) * latents + sigmas * noise
        timesteps = (sigmas.flatten() * 1000.0).long()
        latent_conditions["hidden_states"] = noisy_latents.to(latents)
        tracker.begin("forward")
        pred = transformer(
            **latent_conditions, **conditions, timestep=timesteps, return_dict=False
        )[0]
        target = noise - latents
        return pred, target, sigmas

    tracker = Tracker("cpu")
    claim_model(tracker, transformer)
    if resident:
        claim_model(tracker, parts.reference)
    tracker.claim([scheduler_sigmas], "inputs")
    kept = []  # timesteps, which nothing reads
    with tracker:
        for _ in range(2):
            tracker.begin("encode")
            items = []
            for _ in range(rows):
                items.append(item())
            batch = items
            del items
            conditions = {"encoder_hidden_states": torch.cat([each[0] for each in batch])}
            latents = torch.cat([each[1] for each in batch])
            mean = torch.as_tensor(batch[0][2]).to(dtype)
            std = torch.as_tensor(batch[0][3]).to(dtype)
            latent_conditions = {"latents": latents, "mean": mean, "std": std}
            del latents, mean, std
            weights_of_draw = torch.rand(rows)
            indices = (weights_of_draw * 1000).long()
            sigmas = scheduler_sigmas[indices]
            sigmas = sigmas.reshape(rows, 1, 1, 1, 1)
            del weights_of_draw, indices
            pred, target, sigmas = specification_forward(conditions, latent_conditions, sigmas)
            kept[:] = [(sigmas * 1000.0).long()]
            weights = compute_loss_weighting_for_sd3("none", sigmas)
            loss = weights.float() * (pred.float() - target.float()).pow(2)
            loss = loss.mean(list(range(1, loss.ndim)))
            loss = loss.mean()
            tracker.begin("backward")
            loss.backward()
            tracker.begin("step")
            torch.nn.utils.clip_grad_norm_(transformer.parameters(), 1.0, foreach=False)
            optimizer.step()
            optimizer.zero_grad()
            tracker.begin("between_steps")
    assert_equal_peaks(tracker, asked)


@pytest.mark.parametrize("model", MODELS)
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


def test_wan_is_loaded_as_from_pretrained_loads_it(tmp_path):
    """`_keep_in_fp32_modules` stay in fp32, and adapters are trained in it."""
    import diffusers
    from diffusers.training_utils import cast_training_params
    from peft import LoraConfig

    asked = Diffusion("tiny-wan2.1-t2v-1.3b")
    diffusers.WanTransformer3DModel.from_config(dict(asked.config)).save_pretrained(tmp_path)
    real = diffusers.WanTransformer3DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    real.requires_grad_(False)
    target = asked.script["target_modules"]
    real.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=target))
    cast_training_params([real], dtype=torch.float32)
    found = denoiser(asked, torch.device("cpu"))

    def described(model):
        parts = [*model.named_parameters(), *model.named_buffers()]
        return [(name, p.shape, p.dtype, p.requires_grad) for name, p in parts]

    assert described(found) == described(real)
    assert len({dtype for _, _, dtype, _ in described(found)}) == 2


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
        ("pipelines/mine", {}, "the folder of a pipeline or of a denoiser"),
        ("sdxl", {"resolution": 1001}, "a multiple of 8 pixels"),
        ("sd3-medium", {"resolution": 4096}, "positions for 3072 pixels"),
        ("sdxl", {"method": "dora"}, "allowed are 'lora', 'full'"),
        ("flux2-klein-4b", {"text_encoders": "resident"}, "frees that of flux2-klein-4b"),
        ("sdxl", {"frames": 9}, "sdxl has none: say resolution"),
        ("wan2.1-t2v-14b", {"resolution": 512}, "has none: say frames, height and width"),
        ("wan2.1-t2v-14b", {"frames": 16}, "a multiple of 4, and one more"),
        ("wan2.2-ti2v-5b", {"height": 720}, "a multiple of 32 pixels"),
        ("CONFIG", {"text_encoders": "resident"}, "say 'cached'"),
    ],
)
def test_what_is_refused_says_what_is_allowed(model, fields, said, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MODELS["sdxl"]["config"] | {"attention_head_dim": 8}))
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
