"""No sequence of overflows corrupts weights; and good steps after it are applied.

An unbounded loss scale halves until its reciprocal is infinite, and the next good batch writes
inf, then NaN, into every weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor, nn

import halfwise.torch as hw
from halfwise.errors import TrainingStopped

X = torch.tensor([[1.0, -2.0], [0.5, 1.0]])
GOOD, INF, NAN, HUGE = 1.0, math.inf, math.nan, 1e30


class Surge(torch.autograd.Function):
    """Passes values on, and multiplies their gradient: an overflow in backward alone, as large as one likes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


surge: Callable[[Tensor, float], Tensor] = Surge.apply


def loss_of(model: nn.Module, kind: float) -> Tensor:
    return surge(model(X).float(), kind).square().mean()


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def finite(model: nn.Module) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in [*model.parameters(), *model.buffers()])


def naive_loop(kinds: list[float], dtype: torch.dtype) -> nn.Module:
    model = small()
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    for kind in kinds:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = loss_of(model, kind)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return model


def guarded_loop(kinds: list[float], guard: Any, policy: str = "mixed_float16") -> nn.Module:
    model = small()
    with hw.MixedPrecision(model, torch.optim.Adam(model.parameters()), policy, guard=guard, log=lambda _: None) as mp:
        for kind in kinds:
            with suppress(TrainingStopped):
                mp.step(partial(loss_of, model, kind))
            assert finite(model)
    return model


# 170 overflows: 16 bring the scale from 65536 to 1, 144 more below 2^-126, where the reciprocal is infinite
COLLAPSE = [INF] * 170 + [GOOD] * 2
FREEZE = [GOOD, HUGE, GOOD, GOOD]


@pytest.mark.parametrize(
    ("kinds", "dtype"),
    [(COLLAPSE, torch.float16), (FREEZE, torch.bfloat16)],
    ids=["170 overflows in float16", "one gradient of 1e30 in bfloat16"],
)
def test_the_naive_loop_corrupts_or_freezes(kinds: list[float], dtype: torch.dtype) -> None:
    model = naive_loop(kinds, dtype)
    frozen = naive_loop([*kinds, GOOD], dtype)
    moved = finite(frozen) and any(
        not torch.equal(a, b) for a, b in zip(model.parameters(), frozen.parameters(), strict=True)
    )
    assert not moved


@pytest.mark.parametrize("guard", [True, "report", False])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float32"])
@pytest.mark.parametrize("kinds", [COLLAPSE, FREEZE, [GOOD] + [NAN] * 9 + [GOOD]], ids=["170 overflows", "1e30", "nan"])
def test_ours_trains_on(kinds: list[float], guard: Any, policy: str) -> None:
    model = guarded_loop(kinds, guard, policy)
    further = guarded_loop([*kinds, GOOD], guard, policy)
    assert finite(further)
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), further.parameters(), strict=True))


class AnyTrace(RuleBasedStateMachine):
    """Random runs of good, infinite, NaN and huge gradients, under every guard."""

    @initialize(
        guard=st.sampled_from([True, "report", False]),
        policy=st.sampled_from(["mixed_float16", "mixed_bfloat16", "float32"]),
    )
    def start(self, guard: Any, policy: str) -> None:
        self.model = small()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.mp = hw.MixedPrecision(self.model, self.optimizer, policy, guard=guard, log=lambda _: None)

    def steps(self, kind: float, count: int) -> None:
        for _ in range(count):
            before = [t.clone() for t in [*self.model.parameters(), *self.model.buffers()]]
            try:
                applied = self.mp.step(lambda: loss_of(self.model, kind)).applied
            except TrainingStopped:
                applied = False
            if not applied:
                after = [*self.model.parameters(), *self.model.buffers()]
                assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    @rule(count=st.integers(1, 5))
    def good(self, count: int) -> None:
        self.steps(GOOD, count)

    @rule(kind=st.sampled_from([INF, NAN, HUGE, -HUGE, 1e20]), count=st.integers(1, 12))
    def bad(self, kind: float, count: int) -> None:
        self.steps(kind, count)

    @rule(kind=st.sampled_from([INF, HUGE]))
    def far_past_the_collapse(self, kind: float) -> None:
        if self.mp._engine.guard is False:  # quick without localising; the other guards take the shorter runs
            self.steps(kind, 180)

    @invariant()
    def weights_are_finite(self) -> None:
        if hasattr(self, "mp"):
            assert finite(self.model)
            assert 2.0**-14 <= self.mp.loss_scale <= 2.0**24

    def teardown(self) -> None:
        if not hasattr(self, "mp"):
            return
        before = [p.detach().clone() for p in self.model.parameters()]
        results = [self.mp.step(lambda: loss_of(self.model, GOOD)) for _ in range(18)]
        assert results[-1].applied
        assert any(not torch.equal(a, b) for a, b in zip(before, self.model.parameters(), strict=True))
        assert finite(self.model)
        self.mp.close()


QUICK = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # shrinking a failure would take minutes
)
AnyTrace.TestCase.settings = settings(QUICK, max_examples=15, stateful_step_count=8)
TestAnyTrace = AnyTrace.TestCase


@pytest.mark.slow
def test_many_traces() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        AnyTrace,
        settings=settings(
            max_examples=300, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
