from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tests.reference import attention as reference
from vcagen.attention import AttentionConfig, build_attention

Grid = tuple[int, int]


def randomised(
    config: AttentionConfig,
    *,
    hidden_size: int = 8,
    num_heads: int = 2,
    grid_size: Grid = (3, 4),
    layer_index: int = 0,
    seed: int = 0,
) -> nn.Module:
    """A float32 module with noise in every parameter, so that no term of the equations is 0 or 1 by init."""
    module = build_attention(config, hidden_size, num_heads, grid_size, layer_index)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = 0.5 * torch.randn(parameter.shape, generator=generator)
        parameter.data = noise + 1 if name.startswith("norm") else noise
    return module


def random_tokens(grid_size: Grid, *, batch: int = 2, hidden_size: int = 8, seed: int = 1) -> Tensor:
    """Float32 tokens (B, N, C)."""
    shape = (batch, grid_size[0] * grid_size[1], hidden_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def reference_output(
    config: AttentionConfig, x: Tensor, params: Mapping[str, Tensor], num_heads: int, grid: Grid, layer_index: int
) -> Tensor:
    """The output by the loops of `tests.reference.attention`."""
    settings = config.model_dump(exclude={"name", "embedding_init_std"})
    if config.name == "mhsa":
        return reference.mhsa(x, params, num_heads, grid, **settings)
    if config.name == "differential":
        return reference.differential(x, params, num_heads, grid, layer_index, **settings)
    return reference.vca(x, params, num_heads, grid, layer_index, **settings)


def output_and_gradients(module: nn.Module, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients of (output * upstream).sum() for x and every parameter, by name."""
    x = x.detach().requires_grad_()
    out = module(x)
    names, parameters = zip(*module.named_parameters(), strict=True)
    gradients = torch.autograd.grad(out, [x, *parameters], upstream)
    return {"output": out.detach(), **dict(zip(["input", *names], gradients, strict=True))}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference over the largest absolute expected value."""
    return float((actual.double() - expected).abs().max() / expected.abs().max())
