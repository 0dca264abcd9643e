"""What finetrainers computes around Wan's denoiser, written out after it.

diffusers has Wan's models and no script that trains them; finetrainers, of the same authors, has.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from ..private.of_diffusers import moments_of
from .diffusion_steps import Sd3Step


class WanStep(Sd3Step):
    """finetrainers' `SFTTrainer` with its `WanModelSpecification`, on one GPU.

    Each sample is encoded by itself, or read from disk onto the device.
    """

    def start(self) -> None:
        """Make the scheduler's table, which finetrainers copies to the device."""
        super().start()
        self.table = self.make(self.count)
        self.loaded["sigmas"] = self.table
        self.stored = getattr(torch, self.asked.record["residents_dtype"])

    def _load(self) -> dict[str, torch.Tensor]:
        """Return nothing: what the data loader gives is on the host."""
        return {}

    def next_batch(self, on_phase: Callable[[str], None]) -> dict[str, Any]:
        """Return the denoiser's arguments for a micro-batch, made in the phase "encode"."""
        on_phase("encode")
        # those of the last micro-batch live until these are all there
        self.samples = [self._sample() for _ in range(self.asked.batch_size)]
        prompts = [sample["prompt_embeds"] for sample in self.samples]
        self.prompt_embeds = torch.cat(prompts)
        moments = [sample["moments"] for sample in self.samples]
        self.model_input = torch.cat(moments)
        self.prompt_embeds = self.prompt_embeds.to(self.weight_dtype)
        self.model_input = self.model_input.to(self.weight_dtype)
        return self.arguments()

    def _sample(self) -> dict[str, Any]:
        """Return what is on the device of one sample: its prompt's embedding and moments."""
        asked = self.asked
        sample: dict[str, Any] = {"prompt_embeds": self._embedding()}
        channels = asked.config["in_channels"]
        height, width = asked.sides.values()
        if self.vae is not None:
            shape = (1, asked.number_of_frames, 3, height, width)
            video = self.make(*shape, dtype=self.stored)
            video = video.permute(0, 2, 1, 3, 4).contiguous()
            sample["moments"] = moments_of(self.vae, video)
            return sample
        config = asked.record["vae"]["config"]
        frames = (asked.number_of_frames - 1) // asked.record["frames_step"] + 1
        factor = config["scale_factor_spatial"]
        sizes = (1, 2 * channels, frames, height // factor, width // factor)
        sample["moments"] = self.make(*sizes, dtype=self.stored)
        # mean and deviation are saved beside the moments, in fp32
        sample["statistics"] = (self.make(channels), self.make(channels))
        return sample

    def _embedding(self) -> torch.Tensor:
        """Return the embedding of a prompt."""
        length = self.asked.record["tokens"][0]
        if not self.encoders:
            return self.make(1, length, self.asked.config["text_dim"], dtype=self.stored)
        ids = torch.ones(1, length, dtype=torch.int64, device=self.device)
        # the processor makes a mask, and drops it
        mask = torch.ones(1, length, dtype=torch.bool, device=self.device)
        embedding = self.encoders[0](ids)[0]
        del mask
        return embedding

    def arguments(self) -> dict[str, Any]:
        """Return noisy latents, timesteps and embeddings."""
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

        rows = self.asked.batch_size
        indices = (self.make(rows) * self.count).long()
        self.sigmas = self.table[indices].view(-1, 1, 1, 1, 1)
        # what the specification's `forward` calls by a name lives until it returns
        inside = SimpleNamespace()
        inside.mean, inside.deviation = self._statistics()
        mean, log_variance = self.model_input.chunk(2, dim=1)
        inside.mean_of_latents = self._normalized(mean, inside)
        inside.log_variance = self._normalized(log_variance, inside)
        self.model_input = torch.cat([inside.mean_of_latents, inside.log_variance], dim=1)
        del mean, log_variance
        posterior = DiagonalGaussianDistribution(self.model_input)
        inside.latents = posterior.sample()
        del posterior, self.model_input
        inside.noise = torch.zeros_like(inside.latents).normal_()
        noisy = (1.0 - self.sigmas) * inside.latents + self.sigmas * inside.noise
        inside.noisy = noisy
        self.noisy = noisy.to(inside.latents)
        self.inside = inside
        return {
            "hidden_states": self.noisy,
            "timestep": (self.sigmas.flatten() * 1000.0).long(),
            "encoder_hidden_states": self.prompt_embeds,
            "return_dict": False,
        }

    def _statistics(self) -> Iterator[torch.Tensor]:
        """Yield the latents' mean and deviation as the denoiser's format has them."""
        channels = self.asked.config["in_channels"]
        saved = self.samples[0].get("statistics")
        for own in saved or (self.make(channels), self.make(channels)):
            yield own.to(self.weight_dtype)

    def _normalized(self, half: torch.Tensor, inside: Any) -> torch.Tensor:
        """Return half of the moments without the latents' mean, by their deviation."""
        mean = inside.mean.view(1, -1, 1, 1, 1)
        deviation = inside.deviation.view(1, -1, 1, 1, 1)
        return ((half.float() - mean) * deviation).to(half)

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        """Return the weighted squared error of the predicted flow."""
        target = self.inside.noise - self.inside.latents
        self.model_pred = outputs[0]
        self.target = target
        del self.inside, batch["timestep"]
        self.timesteps = (self.sigmas * 1000.0).long()
        return self.weighted_error(target)
