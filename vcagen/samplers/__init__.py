"""Samplers: plain functions of a model callable, noise and one generator per sample. They know no labels."""

from typing import Annotated

from pydantic import Field

from vcagen.samplers.diffusion import DDIMConfig, DDPMConfig, DPMSolverConfig, UniPCConfig
from vcagen.samplers.ode import Dopri5Config, EulerConfig, HeunConfig
from vcagen.samplers.sde import EulerMaruyamaConfig, StochasticHeunConfig

SamplerConfig = Annotated[
    DDPMConfig
    | DDIMConfig
    | DPMSolverConfig
    | UniPCConfig
    | EulerConfig
    | HeunConfig
    | Dopri5Config
    | EulerMaruyamaConfig
    | StochasticHeunConfig,
    Field(discriminator="name"),
]
DIFFUSION_SAMPLERS = (DDPMConfig, DDIMConfig, DPMSolverConfig, UniPCConfig)
FLOW_SAMPLERS = (EulerConfig, HeunConfig, Dopri5Config, EulerMaruyamaConfig, StochasticHeunConfig)
