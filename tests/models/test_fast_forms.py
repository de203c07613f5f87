"""Each fast form against the plain one it stands for, gradients included."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.conftest import relative_error, tiny_model
from tests.fast_forms import LIMITS, require_equal
from vcagen.models import layers
from vcagen.models.layers import FinalLayer, PatchEmbed, TransformerBlock, gelu, modulate, sigmoid_gelu


@LIMITS
def test_modulation(dtype: torch.dtype, limit: float) -> None:
    inputs = [torch.randn(2, 6, 8, dtype=dtype), torch.randn(2, 8, dtype=dtype), torch.randn(2, 8, dtype=dtype)]
    require_equal(modulate, lambda x, shift, scale: x * (1 + scale[:, None]) + shift[:, None], inputs, limit)


@LIMITS
@pytest.mark.parametrize("patch_size", [1, 2, 4])
def test_patches_through_a_linear_layer(patch_size: int, dtype: torch.dtype, limit: float) -> None:
    module = PatchEmbed(3, 8, patch_size).to(dtype)

    def plain(latents: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.conv2d(latents, weight, bias, stride=patch_size).flatten(2).transpose(1, 2)

    def fast(latents: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.func.functional_call(module, {"proj.weight": weight, "proj.bias": bias}, latents)

    latents = torch.randn(2, 3, 4, 12, dtype=dtype)
    require_equal(fast, plain, [latents, *module.parameters()], limit)
    # The layout is the gain.
    assert fast(latents, *module.parameters()).is_contiguous()
    assert not plain(latents, *module.parameters()).is_contiguous()


@LIMITS
def test_gelu_by_a_sigmoid(dtype: torch.dtype, limit: float) -> None:
    values = torch.linspace(-12, 12, 2001, dtype=dtype)
    require_equal(sigmoid_gelu, lambda x: F.gelu(x, approximate="tanh"), [values], limit)
    assert torch.equal(gelu(values), F.gelu(values, approximate="tanh"))


@LIMITS
def test_blocks_with_gates_and_one_silu(dtype: torch.dtype, limit: float) -> None:
    model = tiny_model().to(dtype)
    block, final = model.blocks[0], model.final_layer
    assert isinstance(block, TransformerBlock)
    assert isinstance(final, FinalLayer)

    def fast(x: Tensor, condition: Tensor) -> Tensor:
        return final(block(x, F.silu(condition)), F.silu(condition))

    def plain(x: Tensor, condition: Tensor) -> Tensor:
        vectors = block.adaLN_modulation[1](F.silu(condition)).unsqueeze(1).chunk(6, dim=2)
        shift_attn, scale_attn, gate_attn, shift_mlp, scale_mlp, gate_mlp = vectors
        x = x + gate_attn * block.attn(block.norm1(x) * (1 + scale_attn) + shift_attn)
        hidden = block.mlp.fc1(block.norm2(x) * (1 + scale_mlp) + shift_mlp)
        x = x + gate_mlp * block.mlp.fc2(F.gelu(hidden, approximate="tanh"))
        shift, scale = final.adaLN_modulation[1](F.silu(condition)).unsqueeze(1).chunk(2, dim=2)
        return final.linear(final.norm_final(x) * (1 + scale) + shift)

    inputs = [torch.randn(3, 16, 32, dtype=dtype), torch.randn(3, 32, dtype=dtype)]
    require_equal(fast, plain, inputs, limit)


def test_silu_of_the_condition_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(depth=3)
    shapes = []
    silu = F.silu

    def counted(x: Tensor, inplace: bool = False) -> Tensor:
        shapes.append(tuple(x.shape))
        return silu(x, inplace)

    monkeypatch.setattr(F, "silu", counted)
    model(torch.randn(2, 4, 8, 8), torch.tensor([3, 900]), torch.tensor([1, 10]))
    assert len(shapes) == 2  # within the timestep embedder, and here


@pytest.mark.parametrize("attention", ["mhsa", "vca", "differential"])
def test_fast_forms_agree_with_plain_ones_under_autocast(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(attention={"name": attention})
    inputs = (torch.randn(2, 4, 8, 8), torch.tensor([3, 900]), torch.tensor([1, 10]))
    exact = model(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        fast = model(*inputs)
    monkeypatch.setattr(layers, "modulate", lambda x, shift, scale: x * (1 + scale[:, None]) + shift[:, None])
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(*inputs)
    assert relative_error(fast.float(), exact) < 0.03
    assert relative_error(fast.float(), exact) < 1.5 * relative_error(plain.float(), exact)


@pytest.mark.parametrize("attention", ["mhsa", "vca", "differential"])
def test_compiled_blocks_share_one_graph_and_agree(attention: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, compiled = (tiny_model(depth=4, attention={"name": attention}) for _ in range(2))
    compiled.compile_repeated_blocks(backend="eager")  # traced, not compiled: that takes minutes
    inputs = (torch.randn(2, 4, 8, 8), torch.tensor([3, 900]), torch.tensor([1, 10]))
    outputs = [each(*inputs) for each in (model, compiled)]
    assert relative_error(outputs[1], outputs[0]) < 1e-5
    gradients = [
        torch.autograd.grad(output.square().sum(), [p for p in each.parameters() if p.requires_grad])
        for each, output in zip((model, compiled), outputs, strict=True)
    ]
    for plain, other in zip(*gradients, strict=True):
        assert relative_error(other, plain) < 1e-4
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
