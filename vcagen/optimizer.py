import math

import torch

from vcagen.config import TrainConfig
from vcagen.models.transformer import DiffusionTransformer
from vcagen.sharding import split_like


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of a step, counted from 0: linear warm-up, then constant, or a cosine to 0 at `max_steps`."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    progress = (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def build_optimizer(model: DiffusionTransformer, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW; weight decay on the weights of linear and convolution layers alone (not embeddings, norms, lambdas)."""
    decayed = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Linear | torch.nn.Conv2d)}
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if id(p) in decayed], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if id(p) not in decayed], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True)


class OptimizerTensors:
    """The moments of an AdamW optimiser as tensors named `kind.parameter_name`, and back.

    The tensors that are read are split where the parameters are; those that are written are whole.
    """

    kinds = ("exp_avg", "exp_avg_sq", "step")

    def __init__(self, model: DiffusionTransformer, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    @property
    def named(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Names and parameters in the optimiser's order, as they are now: splitting a model exchanges them."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return [(names[id(p)], p) for group in self.optimizer.param_groups for p in group["params"]]

    def read(self) -> dict[str, torch.Tensor]:
        """The tensors; only after the first update are there any."""
        return {
            f"{kind}.{name}": self.optimizer.state[parameter][kind]
            for name, parameter in self.named
            if parameter in self.optimizer.state
            for kind in self.kinds
        }

    def expected(self) -> dict[str, torch.Tensor]:
        """A tensor of the right shape for each name that `read` returns after an update."""
        scalar = torch.zeros(())
        return {
            f"{kind}.{name}": scalar if kind == "step" else parameter
            for name, parameter in self.named
            for kind in self.kinds
        }

    def write(self, tensors: dict[str, torch.Tensor]) -> None:
        """Puts tensors that `read` returned back."""
        state = {}
        for index, (name, parameter) in enumerate(self.named):
            parts = {kind: split_like(tensors[f"{kind}.{name}"], parameter) for kind in self.kinds if kind != "step"}
            state[index] = parts | {"step": tensors[f"step.{name}"]}
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": state})
