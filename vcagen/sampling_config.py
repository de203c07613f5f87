"""All that sampling must know beside the weights: part of a run's config, and what travels with a pipeline folder."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from vcagen.autoencoder import AutoencoderConfig, DecodingConfig, IdentityConfig
from vcagen.guidance import GuidanceConfig
from vcagen.noise_schedule import NUM_TRAIN_TIMESTEPS
from vcagen.objectives import ObjectiveConfig
from vcagen.protocols import SECTIONS, read_protocol
from vcagen.samplers import DIFFUSION_SAMPLERS, FLOW_SAMPLERS, SamplerConfig

CONFIG_VERSION = 1

LabelMode = Literal["balanced", "random"]


class SamplingConfig(BaseModel, extra="forbid", frozen=True):
    """How a model is read, sampled and decoded.

    Attributes:
        config_version: of the format.
        protocol: name of the published protocol that sampler, guidance, decoding and label_mode were taken from.
        label_mode: labels of sets to score: `balanced`, each class equally often; `random`, drawn uniformly.
    """

    config_version: int = CONFIG_VERSION
    protocol: str | None = None
    objective: ObjectiveConfig
    sampler: SamplerConfig
    guidance: GuidanceConfig = GuidanceConfig()
    autoencoder: AutoencoderConfig = IdentityConfig()
    decoding: DecodingConfig = DecodingConfig()
    label_mode: LabelMode = "balanced"

    @model_validator(mode="after")
    def _parts_fit(self) -> "SamplingConfig":
        self._require_fitting_parts()
        return self

    def _require_fitting_parts(self) -> None:
        is_diffusion = self.objective.name == "diffusion"
        fitting = DIFFUSION_SAMPLERS if is_diffusion else FLOW_SAMPLERS
        if not isinstance(self.sampler, fitting):
            names = ", ".join(config.model_fields["name"].default for config in fitting)
            raise ValueError(
                f"sampler.name={self.sampler.name} does not sample {self.objective.name} models; use one of {names}"
            )
        latest = NUM_TRAIN_TIMESTEPS - 1 if is_diffusion else 1
        if self.guidance.interval is not None and self.guidance.interval[1] > latest:
            raise ValueError(
                f"guidance.interval={list(self.guidance.interval)}: timesteps of {self.objective.name} models lie "
                f"within [0, {latest}]"
            )
        if isinstance(self.autoencoder, IdentityConfig) and self.decoding.decoder is not None:
            raise ValueError(
                f"decoding.decoder={self.decoding.decoder}: this model works on pixels and has nothing to decode; "
                "use decoding.decoder=null"
            )

    def modified(self) -> list[str]:
        """What differs from the protocol, as `key=value (protocol: value)`; empty where nothing does, or without one.

        Raises:
            ValueError: there is no protocol of that name.
        """
        if self.protocol is None:
            return []
        settings = self.model_dump(mode="json", include=set(SECTIONS))
        ours, theirs = dict(flat(settings)), dict(flat(read_protocol(self.protocol)))
        return [
            f"{key}={ours.get(key)} (protocol: {theirs.get(key)})"
            for key in sorted(ours.keys() | theirs.keys())
            if ours.get(key) != theirs.get(key)
        ]


class WeightsRecord(BaseModel, extra="forbid", frozen=True):
    """Which weights a pipeline folder holds.

    Attributes:
        kind: `ema`; `raw`, as the optimiser left them; `unknown`, from a file that did not say.
        step: updates they have seen, where known.
        initial_share: weight of the initial values in a young EMA.
    """

    kind: Literal["ema", "raw", "unknown"]
    step: int | None = None
    initial_share: Annotated[float, Field(ge=0, le=1)] = 0.0


class PipelineConfig(SamplingConfig, extra="forbid", frozen=True):
    """What travels with a pipeline folder; sizes and attention are in the transformer's own config.

    Attributes:
        variant: name of the model, such as `SiT-XL/2`, or what is known of it.
        class_names: in label order.
        weights: what the transformer folder holds.
        provenance: where converted weights came from and what was assumed; empty for a run's own.
    """

    variant: str
    class_names: tuple[str, ...]
    weights: WeightsRecord
    provenance: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _papers_sampler(cls, settings: Any) -> Any:
        """Without a sampler, as when a protocol was taken away: the papers' own."""
        if not isinstance(settings, dict) or "sampler" in settings:
            return settings
        objective = settings.get("objective")
        is_diffusion = isinstance(objective, dict) and objective.get("name") == "diffusion"
        return settings | {"sampler": {"name": "ddpm" if is_diffusion else "euler_maruyama"}}


def flat(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings as (dotted key, value)."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
