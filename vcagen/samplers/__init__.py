"""Samplers: plain functions of a model callable, noise and one generator per sample. They know no labels."""

from typing import Annotated

from pydantic import Field

from vcagen.samplers.diffusion import DDIMConfig, DDPMConfig
from vcagen.samplers.ode import EulerConfig, HeunConfig
from vcagen.samplers.sde import EulerMaruyamaConfig

SamplerConfig = Annotated[
    DDPMConfig | DDIMConfig | EulerConfig | HeunConfig | EulerMaruyamaConfig, Field(discriminator="name")
]
DIFFUSION_SAMPLERS = (DDPMConfig, DDIMConfig)
FLOW_SAMPLERS = (EulerConfig, HeunConfig, EulerMaruyamaConfig)
