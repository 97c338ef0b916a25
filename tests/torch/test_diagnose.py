"""`hw.diagnose` on a step without a training loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfwise.core.plan import Plan
from halfwise.errors import PolicyError, UsageError
from halfwise.torch.diagnose import diagnose


class HandWrittenNorm(nn.Module):
    """An RMS norm without the cast to float32 that the original papers' code has."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class HandWrittenSigmoid(nn.Module):
    """Overflows in half at -12 and is right nevertheless."""

    def forward(self, x: Tensor) -> Tensor:
        gate = 1 / (1 + torch.exp(x.detach() * 0 + 12))
        return gate * x + x


def _model(middle: nn.Module, bias: float = 0.0) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 8), middle, nn.Linear(8, 2))
    with torch.no_grad():
        model[0].bias.fill_(bias)  # type: ignore[operator]
    return model


def test_healthy() -> None:
    model = _model(nn.Tanh())
    for policy in ("mixed_float16", "mixed_bfloat16", "float32", "bf16-mixed"):
        found = diagnose(model, lambda: model(torch.ones(2, 8)).float().square().mean(), policy=policy)
        assert found.healthy
        assert found.text() == "halfwise: the step is healthy"


def test_an_overflow_that_became_zero_is_found_by_comparing_with_float32() -> None:
    model = _model(HandWrittenNorm(), bias=300.0)
    found = diagnose(model, lambda: model(torch.randn(4, 8)).float().square().mean(), loss_scale=1.0)
    assert (found.verdict, found.module, found.operation) == ("overflow_at_every_scale", "1", "aten.pow")
    assert "loss and gradients are finite" in found.detail
    assert found.source == f"test_diagnose.py:{HandWrittenNorm.forward.__code__.co_firstlineno + 1}"
    assert diagnose(model, lambda: model(torch.randn(4, 8)).float().square().mean(), policy="mixed_bfloat16").healthy


def test_an_overflow_that_is_healed_rightly_is_no_fault() -> None:
    model = _model(HandWrittenSigmoid())
    assert diagnose(model, lambda: model(torch.randn(4, 8)).float().square().mean(), loss_scale=1.0).healthy


def test_the_loss_scale_counts_for_float16_only() -> None:
    model = _model(nn.Tanh())

    def closure() -> Any:
        return (model(torch.ones(2, 8)).float() * 1e4).sum()

    assert diagnose(model, closure).verdict == "loss_scale_too_high"
    assert diagnose(model, closure, policy="mixed_bfloat16").healthy
    assert diagnose(model, closure, loss_scale=1.0).healthy


def test_a_list_of_closures_and_a_caller_inside_autocast() -> None:
    model = _model(nn.LayerNorm(8))
    with torch.no_grad():
        model[0].weight.fill_(6e4)  # type: ignore[operator]
    sound, failing = torch.zeros(2, 8), torch.ones(2, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        found = diagnose(model, [lambda: model(sound).double().mean(), lambda: model(failing).double().mean()])
    assert (found.verdict, found.module, found.dtype) == ("overflow_at_every_scale", "0", "float16")


def test_modes_gradients_buffers_and_generators_are_kept() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), HandWrittenNorm())
    model[2].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()

    def closure() -> Any:
        model.train()
        return model(torch.randn(4, 8)).float().square().mean()

    diagnose(model, closure)
    assert not model[2].training
    assert model[1].training
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(generator, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_bad_arguments() -> None:
    model = _model(nn.Tanh())

    def closure() -> Any:
        return model(torch.ones(2, 8)).float().mean()

    with pytest.raises(PolicyError, match='policy="auto"'):
        diagnose(model, closure, policy="auto")
    with pytest.raises(PolicyError, match="unknown policy"):
        diagnose(model, closure, policy="float12")
    with pytest.raises(UsageError, match="loss_scale=0"):
        diagnose(model, closure, loss_scale=0)
    with pytest.raises(UsageError, match="loss_scale='x'"):
        diagnose(model, closure, loss_scale="x")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="diagnose\\(model='m'\\)"):
        diagnose("m", closure)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="hw\\.apply"):
        diagnose(model, closure, policy=Plan.manual())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="must return the loss"):
        diagnose(model, lambda: 3.0)
    with pytest.raises(UsageError):
        diagnose(model, [])
