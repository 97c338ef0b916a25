"""Steps that are queued before anybody knows whether they are sound: on unsound numbers nothing changes.

The path is for accelerators; a CPU's fused optimizers follow the same protocol, so it is switched on by hand here.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import halfwise.torch as hw
from halfwise.torch.suppress import can_suppress, step_unless_unsound


def parameter_with(gradient: float) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), gradient)
    return parameter


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize(
    ("norm", "loss", "moves"),
    [
        (1.0, 1.0, True),
        (1e18, 1.0, True),
        (math.inf, 1.0, False),
        (math.nan, 1.0, False),
        (1e20, 1.0, False),
        (1.0, math.nan, False),
    ],
)
def test_only_sound_steps_move_anything(make: type[torch.optim.Adam], norm: float, loss: float, moves: bool) -> None:
    parameter = parameter_with(1.0)
    optimizer = make([parameter], lr=0.1, fused=True)
    assert can_suppress([optimizer])
    step_unless_unsound([optimizer], torch.tensor(norm), torch.tensor(loss))
    assert torch.equal(parameter.detach(), torch.ones(2)) is not moves
    assert not hasattr(optimizer, "found_inf")
    state = optimizer.state[parameter]
    if "step" in state:
        assert float(state["step"]) == float(moves)


def test_optimizers_that_are_not_fused_cannot() -> None:
    fused = torch.optim.Adam([parameter_with(1.0)], fused=True)
    assert not can_suppress([fused, torch.optim.Adam([parameter_with(1.0)])])
    assert not can_suppress([torch.optim.LBFGS([parameter_with(1.0)])])


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("guard", [True, False])
def test_runs_are_bit_identical_with_and_without(policy: str, guard: bool) -> None:
    def run(suppresses: bool) -> tuple[list[Tensor], list[bool]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2))
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
        x = torch.randn(6, 4)
        with hw.MixedPrecision(model, optimizer, policy, guard=guard, log=lambda _: None) as mp:
            mp._engine.suppresses = suppresses
            factors = [1.0, 1.0, 3e4, 1.0, math.nan, 1e30, 1.0, math.inf, 1.0, 1.0]
            applied = [
                mp.step(lambda f=f: model(x).float().square().mean() * f, clip_grad_norm=0.5).applied  # type: ignore[misc]
                for f in factors
            ]
            mp.zero_grad()
            with mp.autocast():
                loss = model(x).float().square().mean()
            mp.backward(loss)
            mp.clip_grad_norm_(0.5)
            applied.append(mp.optimizer_step().applied)
        return [t.clone() for t in model.state_dict().values()], applied

    plain, expected = run(False)
    early, applied = run(True)
    assert applied == expected
    assert not all(expected)
    assert any(expected)
    assert all(torch.equal(a, b) for a, b in zip(plain, early, strict=True))
