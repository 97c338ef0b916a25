"""A plan before training: it changes nothing, and says what "auto" would have said."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import halfwise.torch as hw
from halfwise.errors import PolicyError


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))


X, Y = torch.randn(6, 4), torch.tensor([0, 1, 0, 1, 0, 1])
TIMING = hw.TimingTable.uniform(["0", "1", "3"], relative={"float16": 0.5})


def test_nothing_changes() -> None:
    model = network()
    before = [t.clone() for t in model.state_dict().values()]
    random_state = torch.get_rng_state()
    plan = hw.plan(model, lambda: nn.functional.cross_entropy(model(X), Y), timing=TIMING)
    assert plan.uses("float16")
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    assert all("forward" not in m.__dict__ and not m._forward_hooks for m in model.modules())


def test_the_same_answer_as_auto_gives() -> None:
    model = network()
    planned = hw.plan(model, lambda: nn.functional.cross_entropy(model(X), Y), timing=TIMING)
    with hw.MixedPrecision(model, torch.optim.SGD(model.parameters(), 1e-9), "auto", timing=TIMING) as mp:
        for _ in range(3):
            mp.step(lambda: nn.functional.cross_entropy(model(X), Y))
        assert mp.plan is not None
        assert {r.path: r.compute for r in planned.layers} == {r.path: r.compute for r in mp.plan.layers}


def test_measured_plans_run_here() -> None:
    model = network()
    plan = hw.plan(model, [lambda: nn.functional.cross_entropy(model(X), Y)] * 2)
    with hw.apply(model, plan):
        assert torch.isfinite(model(X)).all()
    assert {rule.path for rule in plan.layers} >= {"0", "1", "3"}


def test_options_are_checked() -> None:
    model = network()
    with pytest.raises(PolicyError, match="objective is 'energy'"):
        hw.plan(model, lambda: model(X).sum(), objective="energy")  # type: ignore[arg-type]
