"""(seed, label) plan -> uint8 images, in any process count and batch size."""

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from tqdm import tqdm

from vcagen import interpolants
from vcagen.autoencoder import Autoencoder, KLAutoencoder, build_autoencoder, load_vae, to_numpy
from vcagen.checkpoint import resolve_checkpoint
from vcagen.config import override_sampling
from vcagen.devices import Dtype, read_later, usable_device
from vcagen.files import file_sha256
from vcagen.guidance import guided_model
from vcagen.models.transformer import DiffusionTransformer
from vcagen.objectives import DiffusionConfig
from vcagen.pipeline_folder import VAE, Weights, load_transformer, read_index, weights_file
from vcagen.samplers import DIFFUSION_SAMPLERS, SamplerConfig
from vcagen.samplers.diffusion import sample_diffusion
from vcagen.samplers.ode import Dopri5Config, ODEConfig, sample_ode
from vcagen.samplers.sde import SDEConfig, sample_sde
from vcagen.sampling_config import LabelMode, PipelineConfig, SamplingConfig, WeightsRecord
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


def plan_labels(num_samples: int, seed: int, num_classes: int, mode: LabelMode) -> list[int]:
    """Labels of a set to score; label i depends on (seed, i) alone in both modes.

    `random` draws each label by itself. `balanced` shuffles all classes, round after round, so that classes differ by
    one image at most and a split of the set is no run of one class.
    """
    if mode == "balanced":
        labels: list[int] = []
        for start in range(0, num_samples, num_classes):
            generator = sample_generator(seed, "labels", start // num_classes)
            labels += torch.randperm(num_classes, generator=generator).tolist()
        return labels[:num_samples]
    generators = (sample_generator(seed, "label", index) for index in range(num_samples))
    return [int(torch.randint(num_classes, (), generator=generator)) for generator in generators]


def parse_labels(text: str, class_names: Sequence[str]) -> list[int]:
    """Label ids from `all` or a comma-separated list of ids and class names.

    A name wins over a number. `id:3` and `name:3` say which is meant where both exist and differ.

    Raises:
        ValueError: something that is neither, or is both.
    """
    if text == "all":
        return list(range(len(class_names)))
    return [class_id(part.strip(), class_names) for part in text.split(",")]


def class_id(text: str, class_names: Sequence[str]) -> int:
    """The label that one id or name means. See `parse_labels`."""
    kind, _, value = text.partition(":") if text.startswith(("id:", "name:")) else ("", "", text)
    named = [index for index, name in enumerate(class_names) if name == value and kind != "id"]
    if len(named) > 1:
        raise ValueError(f"label {text!r} is the name of classes {' and '.join(map(str, named))}; give the id")
    by_name = named[0] if named else None
    by_id = int(value) if value.removeprefix("-").isdecimal() and kind != "name" else None
    if by_name is None and by_id is None:
        close = difflib.get_close_matches(value, class_names, n=3)
        shown = ", ".join(class_names[:10]) + (", ..." if len(class_names) > 10 else "")
        shown += f"; did you mean {' or '.join(close)}?" if close else ""
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
    """All that turns labels and generators into images.

    Attributes:
        model: in eval mode, on the device to use.
        config: how its output is read, guided, integrated and decoded.
        autoencoder: latents to images; on the model's device.
        model_calls: of each batch so far; a guided call, of twice the batch, counts once.
    """

    model: DiffusionTransformer
    config: SamplingConfig
    autoencoder: Autoencoder
    model_calls: list[int] = field(default_factory=list)

    @torch.no_grad()
    def latents(self, labels: Sequence[int], generators: Sequence[torch.Generator]) -> torch.Tensor:
        """Latents (B, C, H, W), float32; each sample's own generator draws its start, then the sampler's noise."""
        settings, config = self.model.config, self.config
        device = self.model.device
        noise = normal(
            torch.empty((len(labels), settings.in_channels, *settings.latent_size), device=device), generators
        )
        null_label = self.model.null_label if settings.has_null_label else None
        guided = guided_model(self.model, torch.tensor(labels, device=device), null_label, config.guidance)
        self.model_calls.append(0)

        def model_fn(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            self.model_calls[-1] += 1
            return guided(x.to(self.model.dtype), t).float()  # the state and the solver stay float32

        if isinstance(config.objective, DiffusionConfig):
            assert isinstance(config.sampler, DIFFUSION_SAMPLERS)
            return sample_diffusion(model_fn, noise, generators, config.sampler, self.autoencoder.latent_range)
        path, prediction = config.objective.path, config.objective.prediction

        def velocity_fn(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            output = model_fn(x, t)[:, : settings.in_channels]  # a flow model's second half is unused
            return interpolants.velocity_from(prediction, interpolants.coefficients(path, t, x), output, x)

        interval = interpolants.time_interval(path, prediction, training=False)
        if isinstance(config.sampler, SDEConfig):
            return sample_sde(velocity_fn, noise, generators, path, interval, config.sampler)
        assert isinstance(config.sampler, ODEConfig)
        return sample_ode(velocity_fn, noise, interval, config.sampler)

    @torch.no_grad()
    def batch(self, samples: Sequence[PlannedSample]) -> np.ndarray:
        """The images of samples taken together, uint8 (B, H, W, C)."""
        return to_numpy(self.autoencoder.decode(self.latents(*labels_and_generators(samples))))

    def images(
        self, samples: Sequence[PlannedSample], batch_size: int, progress: bool = True
    ) -> Iterator[tuple[PlannedSample, np.ndarray]]:
        """Yields each sample with its image, uint8 (H, W, C), in the plan's order.

        A GPU is asked for the next batch before a batch is handed out, so that it has work while images are written.
        """
        before: _Decoded | None = None
        with tqdm(total=len(samples), desc="sampling", unit="image", disable=not progress, delay=2) as bar:
            for start in range(0, len(samples), batch_size):
                batch = samples[start : start + batch_size]
                try:
                    images = self.autoencoder.decode(self.latents(*labels_and_generators(batch)))
                    now = _Decoded(batch, read_later(images), bar)
                finally:  # also where this batch fails: finished images are not lost
                    if before:
                        yield from before.images()
                before = now
                if not _works_ahead(self.model):
                    yield from before.images()
                    before = None
            if before:
                yield from before.images()


@dataclass(frozen=True)
class _Decoded:
    """Images of a batch that a device has been asked for."""

    samples: Sequence[PlannedSample]
    read: Callable[[], torch.Tensor]
    bar: "tqdm[Any]"

    def images(self) -> Iterator[tuple[PlannedSample, np.ndarray]]:
        images = to_numpy(self.read())
        self.bar.update(len(self.samples))
        yield from zip(self.samples, images, strict=True)


def _works_ahead(model: DiffusionTransformer) -> bool:
    """Whether a model is asked for more than is waited for."""
    return model.device.type == "cuda"


@dataclass(frozen=True)
class LoadedModel:
    """A pipeline or checkpoint folder made ready to sample from."""

    maker: ImageMaker
    checkpoint: Path
    config: PipelineConfig
    weights: Weights
    dtype: Dtype

    @property
    def class_names(self) -> tuple[str, ...]:
        """In label order."""
        return self.config.class_names

    @property
    def folder(self) -> Path:
        """The run folder; for a model that lies elsewhere, its own folder."""
        has_parent = self.checkpoint.parent.name != ""
        checkpoint = self.checkpoint if has_parent else self.checkpoint.resolve()
        return checkpoint.parents[1] if checkpoint.parent.name == "checkpoints" else checkpoint

    @property
    def weights_record(self) -> WeightsRecord:
        """What is known of the weights that were loaded."""
        record = self.config.weights
        return record if self.weights == "ema" else WeightsRecord(kind="raw", step=record.step)

    @cached_property
    def protocol(self) -> dict[str, Any]:
        """How images come about, whole: what goes beside them and beside a score."""
        config, weights = self.config, self.weights_record
        clips = config.objective.name == "diffusion"
        return {
            "checkpoint": str(self.checkpoint),
            "weights_sha256": file_sha256(weights_file(self.checkpoint, self.weights)),
            "step": weights.step,
            "weights": weights.kind,
            "dtype": self.dtype,
            "variant": config.variant,
            "attention": self.maker.model.config.attention or {"name": "mhsa"},
            "protocol": {"name": config.protocol, "modified": config.modified()},
            "objective": config.objective.model_dump(mode="json"),
            "sampler": config.sampler.model_dump(mode="json"),
            "clip_range": self.maker.autoencoder.latent_range if clips else None,
            "guidance": config.guidance.model_dump(mode="json"),
            "autoencoder": config.autoencoder.model_dump(mode="json"),
            "decoding": config.decoding.model_dump(mode="json"),
            "decoder_sha256": self.maker.autoencoder.decoder_sha256(),
        }

    def describe(self) -> str:
        """Which weights of which folder and how they are sampled, in a few lines, with warnings."""
        config, weights = self.config, self.weights_record
        attention = (self.maker.model.config.attention or {"name": "mhsa"})["name"]
        step = "" if weights.step is None else f" at step {weights.step}"
        dtype = "" if self.dtype == "fp32" else f" in {self.dtype}"
        lines = [
            f"{self.checkpoint}: {weights.kind} weights{step}{dtype}, {config.variant} with {attention}; "
            f"{describe_sampler(config.sampler)}, guidance {config.guidance.scale:g}"
        ]
        if config.protocol:
            modified = config.modified()
            lines.append(f"protocol {config.protocol}" + (f", modified: {', '.join(modified)}" if modified else ""))
        if weights.initial_share > 0.05:
            lines.append(
                f"warning: the EMA is young, {weights.initial_share:.0%} initial weights still; --weights raw shows "
                "the raw ones"
            )
        if isinstance(config.sampler, Dopri5Config):
            lines.append("note: dopri5 sizes its steps by the whole batch, so --batch-size changes images a little")
        return "\n".join(lines)


def describe_sampler(sampler: SamplerConfig) -> str:
    """Name and steps, or tolerances, of a sampler."""
    if isinstance(sampler, Dopri5Config):
        return f"dopri5, rtol {sampler.rtol:g}, atol {sampler.atol:g}"
    return f"{sampler.name}, {sampler.num_steps} steps"


def labels_and_generators(samples: Sequence[PlannedSample]) -> tuple[list[int], list[torch.Generator]]:
    """The labels of planned samples, and each one's own generator."""
    generators = [sample_generator(sample.seed, "sample", sample.index) for sample in samples]
    return [sample.label for sample in samples], generators


def load_model(
    path: Path,
    weights: Weights = "ema",
    overrides: Sequence[str] = (),
    device: str | None = None,
    dtype: Dtype = "fp32",
) -> LoadedModel:
    """Loads a run folder (its newest checkpoint), a checkpoint or a pipeline folder.

    Objective, prediction type, path, autoencoder and class names come from the folder; sampling too, but for
    `protocol`, `sampler.*`, `guidance.*` and `decoding.*` overrides. The device is the GPU, if there is one, unless
    given. The dtype is the model's alone: the sampler's state and the autoencoder stay float32.

    Raises:
        ValueError: what is there cannot be loaded, or cannot be sampled that way.
    """
    checkpoint = resolve_checkpoint(path)
    config = override_sampling(read_index(checkpoint), overrides)
    target = usable_device(device)
    model = load_transformer(checkpoint, weights)
    vae = load_vae(str(checkpoint / VAE), str(checkpoint)) if (checkpoint / VAE).is_dir() else None
    autoencoder = build_autoencoder(config.autoencoder, config.decoding, vae)
    require_consistent(model, config, autoencoder, str(checkpoint))
    if dtype == "bf16":
        model.bfloat16()  # not `to`, at which diffusers warns of parts in float32 that it does not have
    maker = ImageMaker(model.to(target), config, autoencoder.to(target))
    return LoadedModel(maker, checkpoint, config, weights, dtype)


def require_consistent(
    model: DiffusionTransformer, config: PipelineConfig, autoencoder: Autoencoder | None, source: str
) -> None:
    """Proves that model, settings and autoencoder (where it is at hand) belong together.

    Raises:
        ValueError: they do not; both sides are named.
    """
    settings = model.config
    if len(config.class_names) != settings.num_classes:
        raise ValueError(
            f"{source}: {len(config.class_names)} class names, but the model has {settings.num_classes} classes"
        )
    if config.guidance.scale != 1 and not settings.has_null_label:
        raise ValueError(
            f"{source}: guidance.scale={config.guidance.scale:g} needs a null label, but this model was trained "
            "without label dropout and has none; use guidance.scale=1"
        )
    if config.objective.name == "diffusion" and not settings.learn_sigma:
        raise ValueError(f"{source}: diffusion needs variance channels (learn_sigma), which this model has not")
    if isinstance(autoencoder, KLAutoencoder) and autoencoder.vae.config.latent_channels != settings.in_channels:
        raise ValueError(
            f"{source}: the model works on latents of {settings.in_channels} channels, but the autoencoder has "
            f"{autoencoder.vae.config.latent_channels}; give the one it was trained with"
        )
