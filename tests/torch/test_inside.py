"""What happens inside a layer in a format: by the device's own rules and by another's, and nothing is disturbed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from halfwise.torch.inside import has_an_inside, passes_inside


class Norm(nn.Module):
    """A hand-written norm whose squares overflow float16 from 256 on."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * self.weight


class Powers(Norm):
    """The same with an operation that CUDA runs in float32 and a CPU does not."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Noisy(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.rand_like(x))


class Counting(Norm):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def change(module: nn.Module, x: Tensor, name: str, rules: str = "cpu") -> tuple[float, float]:
    """Relative errors of the output and of the weight gradients."""
    arguments = (x,) * 3 if isinstance(module, nn.MultiheadAttention) else (x,)
    found = passes_inside(module, arguments, {}, [torch.ones_like(x)], name, rules)
    assert found is not None
    exact, lowered = found
    assert lowered.outputs[0].dtype is torch.float32
    gradients = [(a, b) for a, b in zip(exact.weight_gradients, lowered.weight_gradients, strict=True)]
    error = sum(float((a - b).norm() ** 2) for a, b in gradients if a is not None and b is not None)
    size = sum(float(a.norm() ** 2) for a, _ in gradients if a is not None)
    return float((lowered.outputs[0] - exact.outputs[0]).norm() / exact.outputs[0].norm()), (error / size) ** 0.5


@pytest.mark.parametrize(("name", "dead"), [("float16", True), ("bfloat16", False), ("tensorfloat32", False)])
def test_a_norm_by_hand_is_dead_where_its_squares_overflow(name: str, dead: bool) -> None:
    output, gradient = change(Norm(), 300.0 + torch.randn(4, 8), name)
    assert (output == 1.0, gradient == 1.0) == (dead, dead)
    assert dead or max(output, gradient) < 0.02


def test_which_rules_hold_matters() -> None:
    x = 300.0 + torch.randn(4, 8)
    assert change(Powers(), x, "float16", "cpu")[0] == 1.0
    assert change(Powers(), x, "float16", "cuda")[0] < 0.01
    assert change(Norm(), x, "float16", "cuda")[0] == 1.0


@pytest.mark.parametrize("name", ["float16", "bfloat16", "tensorfloat32", "float8_e4m3fn"])
def test_healthy_attention_is_nearly_as_in_float32_dropout_or_not(name: str) -> None:
    attention = nn.MultiheadAttention(16, 2, dropout=0.5, batch_first=True)
    output, gradient = change(attention, torch.randn(4, 6, 16), name, "cuda")
    assert 0.0 < output < (0.1 if name.startswith("float8") else 0.02)
    assert gradient < 0.1
    assert attention.dropout == 0.5


def test_keys_far_from_zero_spoil_attention() -> None:
    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    with torch.no_grad():
        attention.in_proj_bias[16:32] += 4096.0
    _, gradient = change(attention, torch.randn(4, 6, 16), "bfloat16")
    assert not gradient < 0.5


def test_small_gradients_are_scaled_as_by_a_loss_scale() -> None:
    module, x = Norm(), torch.randn(4, 8)
    found = passes_inside(module, (x,), {}, [torch.full((4, 8), 1e-9)], "float16", "cpu")
    assert found is not None
    exact, lowered = (one.weight_gradients[0] for one in found)
    assert exact is not None
    assert lowered is not None
    torch.testing.assert_close(lowered, exact, rtol=0.01, atol=1e-12)


def test_nothing_is_disturbed() -> None:
    module, x = Counting(), torch.randn(4, 8, requires_grad=True)
    generator = torch.get_rng_state()
    assert passes_inside(module, (x,), {}, [torch.ones(4, 8)], "float16", "cpu") is not None
    assert float(module.calls) == 0.0
    assert module.weight.grad is None
    assert x.grad is None
    assert torch.equal(torch.get_rng_state(), generator)
    assert not torch.is_autocast_enabled("cpu")


def test_a_layer_of_ones_own_that_draws_random_numbers_is_not_compared() -> None:
    assert passes_inside(Noisy(), (torch.ones(4, 8),), {}, [None], "bfloat16", "cpu") is None


def test_which_layers_have_an_inside() -> None:
    without = (nn.Linear(2, 2), nn.LSTM(2, 2), nn.LayerNorm(2), nn.Embedding(2, 2))
    assert [has_an_inside(module) for module in (*without, Norm(), nn.MultiheadAttention(2, 1))] == [False] * 4 + [
        True
    ] * 2
