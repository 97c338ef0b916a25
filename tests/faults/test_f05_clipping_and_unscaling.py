"""Clipping before unscaling, and unscaling twice: the API makes both impossible."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import halfwise.torch as hw
from halfwise.errors import UsageError

HALF = hw.Plan.manual(default="float16", loss_scale=hw.LossScaleSettings(initial=256.0))


def test_clipping_acts_on_unscaled_gradients_and_unscaling_twice_is_once() -> None:
    model = nn.Linear(4, 1)
    mp = hw.MixedPrecision(model, torch.optim.SGD(model.parameters(), 1.0), HALF)
    before = model.weight.detach().clone()
    with mp.autocast():
        loss = (model(torch.full((2, 4), 8.0)) * 4).mean()
    mp.backward(loss)
    mp.unscale_()
    mp.unscale_()
    norm = mp.clip_grad_norm_(1.0)
    assert float(norm) == pytest.approx((4 * 32.0**2 + 4.0**2) ** 0.5, rel=1e-3)
    mp.unscale_()
    assert mp.optimizer_step().applied
    assert model.bias.grad is not None
    moved = torch.cat([(model.weight.detach() - before).flatten(), model.bias.grad.flatten()])
    assert float(moved.norm()) == pytest.approx(1.0, rel=1e-3)
    mp.close()


def test_the_same_in_one_call() -> None:
    model = nn.Linear(4, 1, bias=False)
    before = model.weight.detach().clone()
    with hw.MixedPrecision(model, torch.optim.SGD(model.parameters(), 1.0), HALF) as mp:
        mp.step(lambda: (model(torch.full((2, 4), 8.0)) * 4).mean(), clip_grad_norm=1.0)
    assert float((model.weight.detach() - before).norm()) == pytest.approx(1.0, rel=1e-3)


def test_gradients_are_readable_and_unscaled_after_a_step() -> None:
    model = nn.Linear(2, 1, bias=False)
    with hw.MixedPrecision(model, torch.optim.SGD(model.parameters(), 0.0), HALF) as mp:
        mp.step(lambda: model(torch.tensor([[2.0, 3.0]])).sum())
        assert mp.loss_scale == 256.0
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[2.0, 3.0]]


@pytest.mark.parametrize("call", ["unscale_", "clip_grad_norm_"])
def test_going_backward_after_unscaling_is_refused(call: str) -> None:
    model = nn.Linear(4, 1)
    with hw.MixedPrecision(model, torch.optim.SGD(model.parameters()), "mixed_float16") as mp:
        with mp.autocast():
            first, second = (model(torch.ones(2, 4)).mean() for _ in range(2))
        mp.backward(first)
        getattr(mp, call)(*([1.0] if call == "clip_grad_norm_" else []))
        with pytest.raises(UsageError, match=r"backward\(\) after unscale_\(\)"):
            mp.backward(second)
