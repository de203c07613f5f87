from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tests.reference import attention as reference
from vcagen.attention import AttentionConfig, build_attention

Grid = tuple[int, int]
HIDDEN_SIZE = 16


def randomised(
    config: AttentionConfig,
    *,
    num_heads: int = 2,
    grid_size: Grid = (3, 4),
    layer_index: int = 0,
    seed: int = 0,
) -> nn.Module:
    """A float32 module with noise in every parameter, so that no term of the equations is 0 or 1 by init."""
    module = build_attention(config, HIDDEN_SIZE, num_heads, grid_size, layer_index)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(mean=1.0 if name.startswith("norm") else 0.0, std=0.2, generator=generator)
    return module


def random_tokens(grid_size: Grid = (3, 4), *, batch: int = 2, seed: int = 1) -> Tensor:
    """Float32 tokens (B, N, C)."""
    shape = (batch, grid_size[0] * grid_size[1], HIDDEN_SIZE)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def reference_output(
    config: AttentionConfig,
    x: Tensor,
    params: Mapping[str, Tensor],
    num_heads: int,
    grid_size: Grid,
    layer_index: int,
) -> Tensor:
    """The output by the loops of `tests.reference.attention`."""
    settings = config.model_dump(exclude={"name", "embedding_init_std"})
    if config.name == "mhsa":
        return reference.mhsa(x, params, num_heads, grid_size, **settings)
    if config.name == "differential":
        return reference.differential(x, params, num_heads, grid_size, layer_index, **settings)
    return reference.vca(x, params, num_heads, grid_size, layer_index, **settings)


def output_and_gradients(module: nn.Module, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients of (output * upstream).sum() for x and every parameter, by name."""
    x = x.detach().requires_grad_()
    out = module(x)
    names, parameters = zip(*module.named_parameters(), strict=True)
    gradients = torch.autograd.grad(out, [x, *parameters], upstream)
    return {"output": out.detach(), **dict(zip(["input", *names], gradients, strict=True))}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference over the largest absolute expected value."""
    return ((actual.double() - expected).abs().max() / expected.abs().max()).item()


def count_parameters(module: nn.Module) -> int:
    """Number of scalars in the parameters."""
    return sum(parameter.numel() for parameter in module.parameters())
