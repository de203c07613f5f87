"""(seed, label) plan -> uint8 images, in any process count and batch size."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from tqdm import tqdm

from vcagen import interpolants
from vcagen.autoencoder import IdentityAutoencoder, to_numpy
from vcagen.checkpoint import (
    WEIGHTS_FILE,
    CheckpointState,
    Weights,
    load_model,
    load_run_config,
    load_state,
    resolve_checkpoint,
)
from vcagen.config import RunConfig, override_sampling
from vcagen.files import file_sha256
from vcagen.guidance import GuidanceConfig, guided_model
from vcagen.models.transformer import DiffusionTransformer
from vcagen.objectives import DiffusionConfig, ObjectiveConfig
from vcagen.samplers import SamplerConfig
from vcagen.samplers.diffusion import DDIMConfig, DDPMConfig, sample_diffusion
from vcagen.samplers.ode import EulerConfig, HeunConfig, sample_ode
from vcagen.samplers.sde import EulerMaruyamaConfig, sample_sde
from vcagen.seeds import normal, sample_generator


class PlannedSample(BaseModel, frozen=True):
    """Image `index` of a set; its noise depends on (seed, index) alone, its content on that and the label."""

    index: int
    seed: int
    label: int


def plan_samples(labels: Sequence[int], seed: int, num_classes: int) -> list[PlannedSample]:
    """One sample per label, in order.

    Raises:
        ValueError: a label that the model does not have.
    """
    wrong = sorted({label for label in labels if not 0 <= label < num_classes})
    if wrong:
        raise ValueError(f"labels {wrong} do not exist; this model has classes 0 to {num_classes - 1}")
    return [PlannedSample(index=index, seed=seed, label=label) for index, label in enumerate(labels)]


def parse_labels(text: str, class_names: Sequence[str]) -> list[int]:
    """Label ids from `all` or a comma-separated list of ids and class names.

    A name wins over a number. `id:3` and `name:3` say which is meant where both exist and differ.

    Raises:
        ValueError: something that is neither, or is both.
    """
    if text == "all":
        return list(range(len(class_names)))
    return [_parse_label(part.strip(), class_names) for part in text.split(",")]


def _parse_label(text: str, class_names: Sequence[str]) -> int:
    kind, _, value = text.partition(":") if text.startswith(("id:", "name:")) else ("", "", text)
    by_name = class_names.index(value) if value in class_names and kind != "id" else None
    by_id = int(value) if value.removeprefix("-").isdecimal() and kind != "name" else None
    if by_name is None and by_id is None:
        shown = ", ".join(class_names[:10]) + (", ..." if len(class_names) > 10 else "")
        raise ValueError(f"label {text!r} is neither a class id nor a class name; the classes are {shown}")
    if by_name is not None and by_id is not None and by_name != by_id and by_id < len(class_names):
        raise ValueError(
            f"label {text!r} is the name of class {by_name} and the id of class {class_names[by_id]!r}; "
            f"write name:{value} or id:{value}"
        )
    label = by_name if by_name is not None else by_id
    assert label is not None
    return label


@dataclass(frozen=True)
class ImageMaker:
    """All that turns a plan into images.

    Attributes:
        model: in eval mode, on the device to use.
        objective, sampler, guidance: how its output is read, integrated and guided.
        autoencoder: latents to images.
    """

    model: DiffusionTransformer
    objective: ObjectiveConfig
    sampler: SamplerConfig
    guidance: GuidanceConfig
    autoencoder: IdentityAutoencoder

    def latents(self, samples: Sequence[PlannedSample]) -> torch.Tensor:
        """Latents (B, C, H, W), float32, of one batch; each sample's own generator draws its noise."""
        settings = self.model.config
        device = self.model.device
        generators = [sample_generator(sample.seed, "sample", sample.index) for sample in samples]
        shape = (len(samples), settings.in_channels, *settings.latent_size)
        noise = normal(torch.empty(shape, device=device), generators)
        labels = torch.tensor([sample.label for sample in samples], device=device)
        null_label = self.model.null_label if settings.has_null_label else None
        model_fn = guided_model(self.model, labels, null_label, self.guidance)
        if isinstance(self.objective, DiffusionConfig):
            assert isinstance(self.sampler, DDPMConfig | DDIMConfig)
            return sample_diffusion(model_fn, noise, generators, self.sampler, self.autoencoder.latent_range)

        path, prediction = self.objective.path, self.objective.prediction

        def velocity_fn(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            output = model_fn(x, t)[:, : settings.in_channels]  # a flow model's second half is unused
            return interpolants.velocity_from(prediction, interpolants.coefficients(path, t, x), output, x)

        interval = interpolants.time_interval(path, prediction, training=False)
        if isinstance(self.sampler, EulerMaruyamaConfig):
            return sample_sde(velocity_fn, noise, generators, path, interval, self.sampler)
        assert isinstance(self.sampler, EulerConfig | HeunConfig)
        return sample_ode(velocity_fn, noise, interval, self.sampler)

    @torch.no_grad()
    def images(
        self, samples: Sequence[PlannedSample], batch_size: int, progress: bool = True
    ) -> Iterator[tuple[PlannedSample, np.ndarray]]:
        """Yields each sample with its image, uint8 (H, W, C), in the plan's order."""
        with tqdm(total=len(samples), desc="sampling", unit="image", disable=not progress, delay=2) as bar:
            for start in range(0, len(samples), batch_size):
                batch = samples[start : start + batch_size]
                images = to_numpy(self.autoencoder.decode(self.latents(batch)))
                bar.update(len(batch))
                yield from zip(batch, images, strict=True)


@dataclass(frozen=True)
class LoadedRun:
    """A checkpoint made ready to sample from."""

    maker: ImageMaker
    checkpoint: Path
    config: RunConfig
    state: CheckpointState
    protocol: dict[str, Any]

    @property
    def class_names(self) -> tuple[str, ...]:
        """In label order."""
        return self.state.class_names

    @property
    def folder(self) -> Path:
        """The run folder; for a checkpoint that lies elsewhere, the checkpoint folder itself."""
        has_parent = self.checkpoint.parent.name != ""
        checkpoint = self.checkpoint if has_parent else self.checkpoint.resolve()
        return checkpoint.parents[1] if checkpoint.parent.name == "checkpoints" else checkpoint

    def describe(self) -> str:
        """Which weights of which checkpoint and how they are sampled, in a line; a warning if the EMA is young."""
        sampler, guidance = self.maker.sampler, self.maker.guidance
        line = (
            f"{self.checkpoint}: {self.protocol['weights']} weights at step {self.state.step}, "
            f"{self.config.model.variant} with {self.config.model.attention.name}; "
            f"{sampler.name}, {sampler.num_steps} steps, guidance {guidance.scale:g}"
        )
        initial = self.state.ema_decay**self.state.ema_updates
        if self.protocol["weights"] == "ema" and initial > 0.05:
            line += (
                f"\nwarning: the EMA is young, {initial:.0%} initial weights still; --weights model shows the raw ones"
            )
        return line


def load_run(
    path: Path, weights: Weights = "ema", overrides: Sequence[str] = (), device: str | None = None
) -> LoadedRun:
    """Loads a run folder (its newest checkpoint) or a checkpoint folder.

    Objective, prediction type, path and latent space come from the checkpoint; sampler and guidance too, but for
    `sampler.*` and `guidance.*` overrides. The device is the GPU, if there is one, unless given.

    Raises:
        ValueError: what is there cannot be loaded, or cannot be sampled that way.
    """
    checkpoint = resolve_checkpoint(path)
    config = override_sampling(load_run_config(checkpoint), overrides)
    state = load_state(checkpoint)
    autoencoder = IdentityAutoencoder()
    model = load_model(checkpoint, weights).to(usable_device(device))
    maker = ImageMaker(model, config.objective, config.sampler, config.guidance, autoencoder)
    protocol = {
        "checkpoint": str(checkpoint),
        "weights_sha256": file_sha256(checkpoint / weights / WEIGHTS_FILE),
        "step": state.step,
        "weights": weights,
        "variant": config.model.variant,
        "attention": config.model.attention.model_dump(mode="json"),
        "objective": config.objective.model_dump(mode="json"),
        "sampler": config.sampler.model_dump(mode="json"),
        "clip_range": autoencoder.latent_range if config.objective.name == "diffusion" else None,
        "guidance": config.guidance.model_dump(mode="json"),
    }
    return LoadedRun(maker, checkpoint, config, state, protocol)


def usable_device(name: str | None) -> torch.device:
    """The device called `name`, or the GPU if there is one; a `ValueError` if tensors cannot be kept there."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device
