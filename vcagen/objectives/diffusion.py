import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, Field

from vcagen.callables import Model
from vcagen.noise_schedule import NUM_TRAIN_TIMESTEPS
from vcagen.noise_schedule import betas as schedule_betas
from vcagen.objectives.output import ObjectiveOutput, mean_per_sample
from vcagen.seeds import normal, uniform


class DiffusionConfig(BaseModel, extra="forbid", frozen=True):
    """DiT's diffusion (arXiv 2212.09748): 1000 steps, linear betas 1e-4 to 0.02, epsilon and learned-range variance.

    Attributes:
        min_snr_gamma: weighs the epsilon loss by min(SNR, gamma) / SNR (arXiv 2303.09556, for epsilon), which keeps
            nearly clean timesteps from dominating; the paper's gamma is 5. None weighs all alike, as DiT.
    """

    name: Literal["diffusion"] = "diffusion"
    min_snr_gamma: Annotated[float, Field(gt=0)] | None = None


class DiffusionObjective:
    """Epsilon MSE plus the variational bound of the learned variance (arXiv 2102.09672, section 3.1).

    The schedule is that of diffusers' `DDPMScheduler` with linear betas, held in float64, because 1 - alphas_cumprod
    has lost half its digits in float32 at the first timesteps.

    Args:
        config: see there.
        device: of the latents; the CPU unless given.
    """

    def __init__(self, config: DiffusionConfig, device: torch.device | None = None) -> None:
        self.config = config
        betas = schedule_betas().to(device)
        self.alphas_cumprod = (1 - betas).cumprod(0)
        self.signal_scale = self.alphas_cumprod.sqrt()
        self.noise_scale = (1 - self.alphas_cumprod).sqrt()
        self.x_start_of_x_t = self.alphas_cumprod.rsqrt()
        self.x_start_of_epsilon = (1 / self.alphas_cumprod - 1).sqrt()
        previous = torch.cat([betas.new_ones(1), self.alphas_cumprod[:-1]])
        posterior_variance = betas * (1 - previous) / (1 - self.alphas_cumprod)
        # The variance is 0 at t = 0: its logarithm is clipped to that of t = 1.
        self.log_variance_min = torch.cat([posterior_variance[1:2], posterior_variance[1:]]).log()
        self.log_variance_max = betas.log()
        self.mean_of_x_start = betas * previous.sqrt() / (1 - self.alphas_cumprod)
        self.mean_of_x_t = (1 - previous) * (1 - betas).sqrt() / (1 - self.alphas_cumprod)

    def loss(
        self, model: Model, latents: torch.Tensor, labels: torch.Tensor, generators: Sequence[torch.Generator]
    ) -> ObjectiveOutput:
        """Loss at a uniform random timestep, with fresh noise.

        Args:
            model: called once, with int64 timesteps (B,) in 0..999, larger = noisier; returns epsilon and
                variance channels (B, 2C, H, W).
            latents: (B, C, H, W).
            labels: (B,) int64, null labels included.
            generators: one per sample; each draws a timestep, then the noise.
        """
        timesteps = (uniform(generators, latents.device) * NUM_TRAIN_TIMESTEPS).long()
        return self.loss_at(model, latents, labels, timesteps, normal(latents, generators))

    def loss_at(
        self,
        model: Model,
        latents: torch.Tensor,
        labels: torch.Tensor,
        timesteps: torch.Tensor,
        noise: torch.Tensor,
    ) -> ObjectiveOutput:
        """Loss at given timesteps (B,) and noise (B, C, H, W): parts `mse` and `vb` (bits), which add up to it."""
        x_t = self.add_noise(latents, noise, timesteps)
        output = model(x_t, timesteps, labels).float()
        assert output.shape[1] == 2 * latents.shape[1], "diffusion needs learn_sigma"
        epsilon, variance = output.chunk(2, dim=1)
        mse = mean_per_sample((epsilon - noise) ** 2)
        if self.config.min_snr_gamma is not None:
            snr = (self.alphas_cumprod / (1 - self.alphas_cumprod)).to(mse)[timesteps]
            mse = mse * snr.clamp(max=self.config.min_snr_gamma) / snr
        # The bound trains the variance alone: epsilon is detached (arXiv 2102.09672, section 3.1).
        vb = self._variational_bound(latents, x_t, timesteps, epsilon.detach(), variance)
        return ObjectiveOutput(mse + vb, {"mse": mse, "vb": vb})

    def add_noise(self, latents: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """x_t (B, C, H, W) = sqrt(alphas_cumprod) latents + sqrt(1 - alphas_cumprod) noise."""
        signal_scale = self._at(self.signal_scale, timesteps, latents)
        return signal_scale * latents + self._at(self.noise_scale, timesteps, latents) * noise

    @staticmethod
    def _at(table: torch.Tensor, timesteps: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Values of a (1000,) float64 table at timesteps (B,), float32, shaped to broadcast against `like`."""
        values = table[timesteps].float()
        return values.reshape(-1, *[1] * (like.dim() - 1))

    def _variational_bound(
        self,
        x_start: torch.Tensor,
        x_t: torch.Tensor,
        timesteps: torch.Tensor,
        epsilon: torch.Tensor,
        variance: torch.Tensor,
    ) -> torch.Tensor:
        """One term of the bound per sample (B,), in bits per dimension: KL for t > 0, decoder likelihood at t = 0."""
        fraction = (variance + 1) / 2
        log_min = self._at(self.log_variance_min, timesteps, x_t)
        log_variance = fraction * self._at(self.log_variance_max, timesteps, x_t) + (1 - fraction) * log_min
        x_start_predicted = (
            self._at(self.x_start_of_x_t, timesteps, x_t) * x_t
            - self._at(self.x_start_of_epsilon, timesteps, x_t) * epsilon
        )
        weight_start = self._at(self.mean_of_x_start, timesteps, x_t)
        weight_t = self._at(self.mean_of_x_t, timesteps, x_t)
        true_mean = weight_start * x_start + weight_t * x_t
        mean = weight_start * x_start_predicted + weight_t * x_t
        kl = 0.5 * (
            log_variance - log_min - 1 + (log_min - log_variance).exp()
            + (true_mean - mean) ** 2 * (-log_variance).exp()
        )  # fmt: skip
        decoder = -discretized_gaussian_log_likelihood(x_start, mean, 0.5 * log_variance)
        bits = torch.where(timesteps == 0, mean_per_sample(decoder), mean_per_sample(kl))
        return bits / math.log(2)


def discretized_gaussian_log_likelihood(x: torch.Tensor, mean: torch.Tensor, log_scale: torch.Tensor) -> torch.Tensor:
    """Log-likelihood in nats, elementwise, of x in [-1, 1] on 256 levels (arXiv 2006.11239, equation 13).

    The normal distribution function is the tanh approximation that published DiT losses use.
    """

    def cdf(z: torch.Tensor) -> torch.Tensor:
        return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))

    centred, inverse_scale = x - mean, (-log_scale).exp()
    upper = cdf(inverse_scale * (centred + 1 / 255))
    lower = cdf(inverse_scale * (centred - 1 / 255))
    tiny = 1e-12
    inside = (upper - lower).clamp(min=tiny).log()
    above = (1 - lower).clamp(min=tiny).log()
    below = upper.clamp(min=tiny).log()
    return torch.where(x < -0.999, below, torch.where(x > 0.999, above, inside))
