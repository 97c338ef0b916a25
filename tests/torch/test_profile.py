"""Profiles: what stands where, that it is exact, and that taking one leaves no trace."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor, nn

import halfwise.torch as hw
from halfwise.core.histogram import ExponentHistogram
from halfwise.core.profile import Role
from halfwise.torch.profile import profiled_layers

X = torch.randn(6, 4)


def histogram(*tensors: Tensor | None) -> ExponentHistogram:
    total = ExponentHistogram.empty()
    for tensor in tensors:
        assert tensor is not None
        total = total + hw.exponent_histogram(tensor)
    return total


def test_every_role_is_exact() -> None:
    first, second = nn.Linear(4, 8), nn.Linear(8, 2)
    model = nn.Sequential(first, second)
    hidden = first(X)
    hidden.retain_grad()
    output = second(hidden)
    output.retain_grad()
    output.square().mean().backward()
    weight, bias = second.weight, second.bias
    expected: dict[Role, ExponentHistogram] = {
        "activation": histogram(hidden, output),
        "activation_gradient": histogram(hidden.grad, output.grad),
        "weight": histogram(weight, bias),
        "weight_gradient": histogram(weight.grad, bias.grad),
    }
    model.zero_grad()
    profile = hw.profile(model, lambda: model(X).square().mean())
    for role, found in expected.items():
        assert profile.get("1", role) == found, role


def test_taking_a_profile_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.ReLU(inplace=True))
    before = [t.clone() for t in model.state_dict().values()]
    random_state = torch.get_rng_state()
    hw.profile(model, lambda: model(X).sum())
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    assert all(not m._forward_hooks for m in model.modules())


def test_layers() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.attention = nn.MultiheadAttention(4, 2)
            self.rest = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
            self.memory = nn.LSTM(4, 4)

    assert set(profiled_layers(Net())) == {"", "attention", "rest.0", "rest.1", "memory"}


def test_masks_as_keyword_arguments_are_left_out() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    profile = hw.profile(layer, lambda: layer(X[None], src_mask=mask).square().mean())
    found = profile.get("self_attn", "activation")
    assert found is not None
    assert found.infinities == 0


def test_compiled_models_have_plain_paths() -> None:
    plain = nn.Sequential(nn.Linear(4, 2))
    model = cast(nn.Sequential, torch.compile(plain, backend="eager"))
    model(X)
    profile = hw.profile(model, lambda: model(X).sum())
    assert profile.paths() == ("0",)
    torch.compiler.reset()


def test_a_closure_without_a_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="returned NoneType"):
        hw.profile(nn.Linear(1, 1), lambda: None)


def test_a_container_with_weights_of_its_own_has_not_those_of_its_children() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(3))
            self.inner = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.gain

    model = Scaled()
    profile = hw.profile(model, lambda: model(X).square().mean())
    assert profile.get("", "weight") == histogram(model.gain)
    assert profile.get("inner", "weight") == histogram(model.inner.weight, model.inner.bias)
