"""One infinite gradient into Adam: NaN for ever, in bfloat16 and float32, where nobody scales and nobody checks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import halfwise.torch as hw
from halfwise.errors import TrainingStopped

X = torch.tensor([[1.0, 2.0]])


def loss_of(model: nn.Module, bad: bool) -> Tensor:
    y = model(X).float()
    return torch.sqrt(y * 0).sum() if bad else y.square().sum()  # the gradient of sqrt at 0 is inf


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_plain_loop_is_lost(dtype: torch.dtype) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    for bad in (False, True, False):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
            loss = loss_of(model, bad)
        loss.backward()
        optimizer.step()
    assert not torch.isfinite(model.weight).any()


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float32", "mixed_float16"])
@pytest.mark.parametrize("guard", [True, "report", False])
def test_ours_leaves_the_batch_out_and_says_why(policy: str, guard: bool) -> None:
    model = nn.Linear(2, 1)
    with hw.MixedPrecision(model, torch.optim.Adam(model.parameters()), policy, guard=guard, log=lambda _: None) as mp:
        results = [mp.step(partial(loss_of, model, bad)) for bad in (False, True, False)]
    assert [r.applied for r in results] == [True, False, True]
    assert torch.isfinite(model.weight).all()
    if guard and policy != "mixed_float16":  # there the first skips are the loss scale's affair
        incident = results[1].incident
        assert incident is not None
        assert incident.verdict == "not_a_precision_problem"
        assert incident.operation == "aten.sqrt"
        assert incident.direction == "backward"


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float32", "mixed_float16"])
def test_the_fourth_in_a_row_stops_the_run_with_module_operation_and_line(policy: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.log(-self.inner(x).square() - 1)  # NaN in any precision

    model = Model()
    before = model.inner.weight.detach().clone()
    with hw.MixedPrecision(model, torch.optim.Adam(model.parameters()), policy, log=lambda _: None) as mp:
        for _ in range(3):
            mp.step(lambda: model(X).sum())
        with pytest.raises(TrainingStopped, match="not a precision problem") as caught:
            mp.step(lambda: model(X).sum())
        assert mp.steps == 4
        assert [i.kind for i in mp.incidents] == ["reported"] * 3 + ["stopped"]
        diagnosis = caught.value.diagnosis
        assert (diagnosis.module, diagnosis.operation, diagnosis.direction) == ("", "aten.log", "forward")
        assert diagnosis.source.startswith("test_f13_no_guard_in_bfloat16.py:")
        assert torch.equal(before, model.inner.weight)
        assert mp.step(lambda: model.inner(X).square().sum()).applied  # whoever catches it can go on
