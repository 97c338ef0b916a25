"""The same accidents in a loop that uses the parts.

The batch cannot be tried again, but the next step is traced and the run goes on.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import halfwise.torch as hw
from halfwise.errors import TrainingStopped


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(64, 64)
        self.hot = nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 2)
        nn.init.constant_(self.hot.weight, 40.0)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.hot(60 + self.before(x)))
        return self.head(hidden)


X, Y = torch.randn(4, 64), torch.tensor([0, 1, 0, 1])


def step(mp: hw.MixedPrecision, model: nn.Module, factor: float = 1.0) -> hw.StepResult:
    mp.zero_grad()
    with mp.autocast():
        loss = nn.functional.cross_entropy(model(X), Y) * factor
    mp.backward(loss)
    mp.clip_grad_norm_(1.0)
    return mp.optimizer_step()


def test_skipped_then_traced_then_healed() -> None:
    model = Net()
    with hw.MixedPrecision(model, torch.optim.SGD(model.parameters(), 1e-3), "mixed_float16", log=lambda _: None) as mp:
        results = [step(mp, model) for _ in range(24)]
        assert not results[0].applied
        assert results[0].incident is None
        incident = results[1].incident
        assert incident is not None
        assert (incident.kind, incident.module, incident.verdict) == ("healed", "hot", "overflow_at_every_scale")
        assert mp.plan is not None
        assert [rule.path for rule in mp.plan.layers] == ["hot"]
        assert results[-1].applied
        assert len(mp.incidents) == 1
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_reported_and_nothing_changed() -> None:
    model = Net()
    with hw.MixedPrecision(
        model, torch.optim.SGD(model.parameters()), "mixed_float16", guard="report", log=lambda _: None
    ) as mp:
        results = [step(mp, model) for _ in range(4)]
        assert [r.incident.kind for r in results if r.incident is not None] == ["reported"] * 2
        assert mp.plan is not None
        assert mp.plan.layers == ()


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_what_no_precision_can_heal_stops_the_run(policy: str) -> None:
    linear = nn.Linear(64, 2)
    model = nn.Sequential(linear)
    with hw.MixedPrecision(model, torch.optim.SGD(model.parameters(), 0.1), policy, log=lambda _: None) as mp:
        for _ in range(3):
            step(mp, model)
        before = linear.weight.detach().clone()

        def bad_steps() -> None:
            for _ in range(10):
                step(mp, model, float("nan"))

        with pytest.raises(TrainingStopped):
            bad_steps()
        assert mp.incidents[-1].kind == "stopped"
        assert torch.equal(before, linear.weight)
        assert step(mp, model).applied


def test_an_interrupted_trace_leaves_no_mode_behind() -> None:
    def mode() -> object:
        return torch.utils._python_dispatch._get_current_dispatch_mode()

    model = Net()
    with hw.MixedPrecision(model, torch.optim.SGD(model.parameters()), "mixed_float16", log=lambda _: None) as mp:
        step(mp, model)
        with mp.autocast():
            model(X)
        assert mode() is not None
        with pytest.raises(KeyboardInterrupt), mp.autocast():
            raise KeyboardInterrupt
        assert mode() is None
        with mp.autocast():
            model(X)
        assert mode() is not None
    assert mode() is None


@pytest.mark.parametrize("where", ["before the forward pass", "between forward and backward", "at the end"])
def test_it_does_not_matter_where_gradients_are_cleared(where: str) -> None:
    model = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    with hw.MixedPrecision(model, torch.optim.SGD(model.parameters(), 1e-4), "mixed_float16", log=lambda _: None) as mp:
        for _ in range(8):
            if where == "before the forward pass":
                mp.zero_grad()
            with mp.autocast():
                loss = (model(X * 3e5) * 1e-5).float().square().mean()
            if where == "between forward and backward":
                mp.zero_grad()
            mp.backward(loss)
            result = mp.optimizer_step()
            if where == "at the end":
                mp.zero_grad()
        assert [incident.kind for incident in mp.incidents][:1] == ["healed"]
        assert result.applied
        assert torch.isfinite(model[1].running_mean).all()  # type: ignore[arg-type]


def test_steps_that_cannot_be_traced_are_told_and_stop_the_run_in_the_end() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = Net()
    with hw.MixedPrecision(model, torch.optim.SGD(model.parameters()), "mixed_float16", log=lambda _: None) as mp:

        def counted_steps() -> None:
            for _ in range(12):
                with FlopCounterMode(display=False):
                    step(mp, model)

        with pytest.raises(TrainingStopped, match="could not be traced"):
            counted_steps()
        assert [incident.kind for incident in mp.incidents] == ["reported"] * 3 + ["stopped"]
