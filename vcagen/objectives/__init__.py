"""What a model is trained to predict. An objective offers `loss(model, latents, labels, generators)`."""

from typing import Annotated

import torch
from pydantic import Field

from vcagen.objectives.diffusion import DiffusionConfig, DiffusionObjective
from vcagen.objectives.flow import FlowConfig, FlowObjective
from vcagen.objectives.output import ObjectiveOutput

ObjectiveConfig = Annotated[DiffusionConfig | FlowConfig, Field(discriminator="name")]
Objective = DiffusionObjective | FlowObjective

__all__ = [
    "DiffusionConfig",
    "DiffusionObjective",
    "FlowConfig",
    "FlowObjective",
    "Objective",
    "ObjectiveConfig",
    "ObjectiveOutput",
    "build_objective",
]


def build_objective(config: ObjectiveConfig, device: torch.device | None = None) -> Objective:
    """The objective that a config describes, for latents on a device (default: the CPU)."""
    if isinstance(config, DiffusionConfig):
        return DiffusionObjective(config, device)
    return FlowObjective(config)
