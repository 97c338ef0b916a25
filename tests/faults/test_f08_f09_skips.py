"""Skipped steps are visible, and leave batch-norm statistics alone."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import halfwise.torch as hw


def test_the_scheduler_stays_in_step_with_the_weights() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def loss(factor: float) -> Tensor:
        return model(torch.tensor([[0.01, 0.02]])).sum() * factor

    with hw.MixedPrecision(model, optimizer, "mixed_float16") as mp:
        for factor in [1e4] * 5 + [1.0] * 2:  # 1e4 times 65536 overflows float16; it takes 5 halvings to fit
            result = mp.step(partial(loss, factor))
            if result.applied:
                scheduler.step()
        applied = mp.steps - mp.skipped_steps
    assert mp.skipped_steps >= 3
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**applied)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float32"])
@pytest.mark.parametrize("guard", [True, "report", False])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_bad_batch_leaves_no_trace_in_the_statistics(policy: str, guard: bool, bad: float) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    good = torch.randn(8, 4)
    poisoned = good.clone()
    poisoned[3, 1] = bad
    with hw.MixedPrecision(model, torch.optim.Adam(model.parameters()), policy, guard=guard, log=lambda _: None) as mp:
        mp.step(lambda: model(good).square().mean())
        before = [t.clone() for t in [*model.parameters(), *model.buffers()]]
        result = mp.step(lambda: model(poisoned).square().mean())
        assert not result.applied
        after = [*model.parameters(), *model.buffers()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        if guard:
            assert result.incident is not None
            assert result.incident.verdict == "nonfinite_input"
        assert mp.step(lambda: model(good).square().mean()).applied


def test_torchs_own_scaler_poisons_them() -> None:
    linear, norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
    model = nn.Sequential(linear, norm, nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu")
    x = torch.randn(8, 4)
    x[3, 1] = math.inf
    with torch.autocast("cpu", dtype=torch.float16):
        loss: Tensor = model(x).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.isfinite(linear.weight).all()
    assert norm.running_var is not None
    assert not torch.isfinite(norm.running_var).all()
