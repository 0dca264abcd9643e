"""What diffusers' scripts compute around the denoiser, written out after them.

Their variables are a script's: they live until the next micro-batch's take their place.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch.nn import functional as F

from ..private.of_diffusers import klein_latents, klein_positions
from ..recipe.diffusion import Diffusion
from .models import real_tensors

TIMESTEP = 500  # of a scheduler's 1,000: sizes do not depend on it
SIZES = 6  # numbers that SDXL is told of an image: its size, crop and target size


class LatentStep:
    """What the scripts do around the denoiser; a class for each architecture says the rest."""

    patch = 1  # latents of a token's side, where the script joins them before the denoiser

    def __init__(self, asked: Diffusion, residents: Any, device: torch.device) -> None:
        self.asked = asked
        self.vae = residents.vae if asked.encodes else None
        self.encoders = []
        if asked.has_text_encoders:
            self.encoders = [own for name, own in residents.items() if name != "vae"]
        self.weight_dtype = getattr(torch, asked.frozen_dtype)
        self.make = partial(torch.rand, device=device)
        self.device = device
        self.loaded = self._load()
        self.start()

    def start(self) -> None:
        """Make the scheduler."""

    def cached_prompts(self) -> dict[str, tuple[int, ...]]:
        """Return the sizes of what is kept of a prompt, by the name of what `arguments` takes."""
        raise NotImplementedError

    def _load(self) -> dict[str, torch.Tensor]:
        """Return what the data loader puts on the device: pixels and ids, or what is cached."""
        asked = self.asked
        rows = asked.batch_size
        cached = getattr(torch, asked.record.get("cached_dtype", asked.frozen_dtype))
        loaded = {}
        if asked.encodes:
            side = asked.sides["resolution"]
            loaded["pixel_values"] = self.make(rows, 3, side, side)
        else:
            side = asked.latent_side
            channels = asked.config.get("in_channels", 4) // self.patch**2
            loaded["model_input"] = self.make(rows, channels, side, side, dtype=cached)
        if asked.has_text_encoders:
            for number, _ in enumerate(self.encoders, 1):
                length = asked.record["tokens"][max(0, number - 2)]
                ids = torch.ones(rows, length, dtype=torch.int64, device=self.device)
                loaded[f"input_ids_{number}"] = ids
        else:
            for name, sizes in self.cached_prompts().items():
                loaded[name] = self.make(rows, *sizes, dtype=cached)
        return loaded

    def next_batch(self, on_phase: Callable[[str], None]) -> dict[str, Any]:
        """Return the denoiser's arguments for a micro-batch, made in the phase "encode"."""
        on_phase("encode")
        if not self.asked.has_text_encoders:
            self.prompt_embeds = self.loaded["prompt_embeds"]
            self.pooled = self.loaded.get("pooled_prompt_embeds")
        if self.vae is None:
            self.model_input = self.loaded["model_input"]
        return self.arguments()

    def arguments(self) -> dict[str, Any]:
        """Return the denoiser's arguments."""
        raise NotImplementedError

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        """Return the loss of the denoiser's outputs, computed in fp32."""
        raise NotImplementedError

    def encode_clip(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the joined embeddings of CLIP's encoders, and each one's of the whole prompt."""
        embeds = []
        pooled = []
        for number, encoder in enumerate(self.encoders[:2], 1):
            ids = self.loaded[f"input_ids_{number}"]
            made = encoder(ids, output_hidden_states=True, return_dict=False)
            pooled.append(made[0])
            embeds.append(made[-1][-2])
        return torch.cat(embeds, dim=-1), pooled


class SdxlStep(LatentStep):
    """`train_text_to_image_lora_sdxl.py` and `train_text_to_image_sdxl.py`."""

    def start(self) -> None:
        """Make the scheduler, whose `add_noise` moves a table to the device."""
        from diffusers import DDPMScheduler

        with real_tensors():
            # Its table is an attribute that the class does not declare.
            self.scheduler = cast(Any, DDPMScheduler())
        table = torch.empty_like(self.scheduler.alphas_cumprod, device=self.device)
        self.scheduler.alphas_cumprod = table.fill_(0.5)
        self.loaded["alphas_cumprod"] = table

    def cached_prompts(self) -> dict[str, tuple[int, ...]]:
        """Return the sizes of what is kept of a prompt."""
        config = self.asked.config
        of_sizes = SIZES * config["addition_time_embed_dim"]
        pooled = config["projection_class_embeddings_input_dim"] - of_sizes
        length = sum(self.asked.record["tokens"])
        return {
            "prompt_embeds": (length, config["cross_attention_dim"]),
            "pooled_prompt_embeds": (pooled,),
        }

    def arguments(self) -> dict[str, Any]:
        """Return noisy latents, timesteps, embeddings and sizes."""
        if self.vae is not None:
            self.model_input = self.vae.encode(self.loaded["pixel_values"]).latent_dist.sample()
            self.model_input = self.model_input * self.vae.config.scaling_factor
            self.model_input = self.model_input.to(self.weight_dtype)
        self.noise = torch.randn_like(self.model_input)
        rows = self.asked.batch_size
        self.timesteps = torch.full((rows,), TIMESTEP, device=self.device)
        self.noisy = self.scheduler.add_noise(self.model_input, self.noise, self.timesteps)
        self.time_ids = self.make(rows, SIZES, dtype=self.weight_dtype)
        if self.encoders:
            self.prompt_embeds, pooled = self.encode_clip()
            self.pooled = pooled[-1]
        return {
            "sample": self.noisy,
            "timestep": self.timesteps,
            "encoder_hidden_states": self.prompt_embeds,
            "added_cond_kwargs": {"time_ids": self.time_ids, "text_embeds": self.pooled},
        }

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        """Return the squared error of the predicted noise."""
        self.model_pred = outputs.sample
        return F.mse_loss(self.model_pred.float(), self.noise.float())


class Sd3Step(LatentStep):
    """`train_dreambooth_lora_sd3.py` and `train_dreambooth_sd3.py`, with their defaults."""

    def start(self) -> None:
        """Make the scheduler, whose tables stay on the host."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        with real_tensors():
            scheduler: Any = FlowMatchEulerDiscreteScheduler()
        self.count = len(scheduler.sigmas)

    def cached_prompts(self) -> dict[str, tuple[int, ...]]:
        """Return the sizes of what is kept of a prompt."""
        config = self.asked.config
        length = sum(self.asked.record["tokens"])
        return {
            "prompt_embeds": (length, config["joint_attention_dim"]),
            "pooled_prompt_embeds": (config["pooled_projection_dim"],),
        }

    def arguments(self) -> dict[str, Any]:
        """Return noisy latents, timesteps and embeddings."""
        if self.encoders:
            self._encode_prompts()
        if self.vae is not None:
            config = self.vae.config
            pixels = self.loaded["pixel_values"]
            self.model_input = self.vae.encode(pixels).latent_dist.sample()
            factor = config.scaling_factor
            self.model_input = (self.model_input - config.shift_factor) * factor
            self.model_input = self.model_input.to(self.weight_dtype)
        self.add_noise()
        return {
            "hidden_states": self.noisy,
            "timestep": self.timesteps,
            "encoder_hidden_states": self.prompt_embeds,
            "pooled_projections": self.pooled,
            "return_dict": False,
        }

    def add_noise(self) -> None:
        """Draw noise and timesteps, and mix the noise with the latents."""
        self.noise = torch.randn_like(self.model_input)
        rows = self.asked.batch_size
        self.timesteps = self.make(rows)
        table = self.make(self.count, dtype=self.model_input.dtype)
        self.sigmas = table[[TIMESTEP] * rows].view(-1, 1, 1, 1)
        del table
        self.noisy = (1.0 - self.sigmas) * self.model_input + self.sigmas * self.noise

    def _encode_prompts(self) -> None:
        """Join CLIP's embeddings, padded to T5's width, with those of T5."""
        clip, pooled = self.encode_clip()
        self.pooled = torch.cat(pooled, dim=-1)
        ids = self.loaded["input_ids_3"]
        of_t5 = self.encoders[2](ids)[0].to(self.weight_dtype)
        clip = F.pad(clip, (0, of_t5.shape[-1] - clip.shape[-1]))
        self.prompt_embeds = torch.cat([clip, of_t5], dim=-2)

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        """Return the weighted squared error of the latents that the prediction leads to."""
        self.model_pred = outputs[0]
        self.model_pred = self.model_pred * (-self.sigmas) + self.noisy
        return self.weighted_error(self.model_input)

    def weighted_error(self, target: torch.Tensor) -> torch.Tensor:
        """Return the weighted squared error of the prediction."""
        self.target = target
        self.weighting = torch.ones_like(self.sigmas)
        # in one expression, so that no temporary lives longer than in the script
        return torch.mean(
            (self.weighting.float() * (self.model_pred.float() - target.float()) ** 2).reshape(
                target.shape[0], -1
            ),
            1,
        ).mean()


class KleinStep(Sd3Step):
    """`train_dreambooth_lora_flux2_klein.py`, which frees the text encoder before it trains."""

    patch = 2

    def start(self) -> None:
        """Make the scheduler, and the latents' mean and deviation, which the script has in fp32."""
        super().start()
        self.join, self.pack, self.unpack = klein_latents()
        self.text_positions, self.positions = klein_positions()
        channels = self.asked.config["in_channels"]
        self.mean = self.make(1, channels, 1, 1)
        self.deviation = self.make(1, channels, 1, 1) + 1.0
        self.loaded |= {"mean": self.mean, "deviation": self.deviation}

    def cached_prompts(self) -> dict[str, tuple[int, ...]]:
        """Return the sizes of what is kept of a prompt."""
        length = sum(self.asked.record["tokens"])
        return {"prompt_embeds": (length, self.asked.config["joint_attention_dim"])}

    def arguments(self) -> dict[str, Any]:
        """Return noisy latents as tokens, timesteps, embeddings and positions."""
        if self.vae is not None:
            self.pixels = self.loaded["pixel_values"].to(self.vae.dtype)
            self.model_input = self.vae.encode(self.pixels).latent_dist.mode()
        else:
            self.model_input = torch.cat([self.loaded["model_input"]])
        self.model_input = self.join(self.model_input)
        self.model_input = (self.model_input - self.mean) / self.deviation
        self.text_ids = self.text_positions(self.prompt_embeds).to(self.device)
        self.ids = self.positions(self.model_input).to(self.device)
        self.add_noise()
        self.packed = self.pack(self.noisy)
        return {
            "hidden_states": self.packed,
            "timestep": self.timesteps / 1000,
            "guidance": None,
            "encoder_hidden_states": self.prompt_embeds,
            "txt_ids": self.text_ids,
            "img_ids": self.ids,
            "return_dict": False,
        }

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        """Return the weighted squared error of the predicted flow."""
        height, width = self.noisy.shape[-2:]
        self.model_pred = outputs[0]
        self.model_pred = self.model_pred[:, : self.packed.size(1) :]
        # the script lets it read both from the positions
        self.model_pred = self.unpack(self.model_pred, self.ids, height, width)
        return self.weighted_error(self.noise - self.model_input)
