"""Several optimizers, accumulation, optimizers that call the closure, losses that reach only some parameters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import halfwise.torch as hw
from halfwise.errors import UsageError


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(2, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.critic(torch.tanh(self.generator(x)))


HALF = hw.Plan.manual(default="float16", loss_scale=hw.LossScaleSettings(initial=256.0))
X = torch.tensor([[1.0, 2.0], [3.0, -1.0]])


@pytest.mark.parametrize("bad", [False, True])
def test_all_optimizers_step_or_none(bad: bool) -> None:
    model = Gan()
    optimizers = [torch.optim.Adam(model.generator.parameters()), torch.optim.SGD(model.critic.parameters(), 0.1)]
    before = [p.detach().clone() for p in model.parameters()]
    with hw.MixedPrecision(model, optimizers, HALF) as mp:
        result = mp.step(lambda: model(X).square().mean() * (1e6 if bad else 1.0))
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert result.applied is not bad
    assert moved == [not bad] * 4


def test_a_loss_that_reaches_one_of_two_models_steps_that_one() -> None:
    model = Gan()
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model.generator, model.critic)]
    before = model.generator.weight.detach().clone()
    with hw.MixedPrecision(model, optimizers, HALF) as mp:
        result = mp.step(lambda: model.critic(torch.ones(1, 4)).square().sum())
        assert result.applied
        assert torch.equal(before, model.generator.weight)
        stranger = nn.Linear(2, 1)
        with pytest.raises(UsageError, match="no parameter of the optimizer got a gradient"):
            mp.step(lambda: stranger(X).sum())


def test_an_overflow_in_one_closure_of_several_skips_them_all() -> None:
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()
    with hw.MixedPrecision(model, torch.optim.SGD(model.parameters(), 0.1), HALF) as mp:
        result = mp.step([lambda: model(X).mean(), lambda: model(X).mean() * 1e6, lambda: model(X).mean()])
        assert not result.applied
        assert torch.equal(before, model.weight)
        expected = 2 * float(model(X).detach().mean())
        result = mp.step([lambda: (model(X).mean(), "a"), lambda: (model(X).mean() * 3, "b")])
        assert result.output == ["a", "b"]
        assert float(result.loss) == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_lbfgs_converges_and_survives_an_overflow(policy: str) -> None:
    model = nn.Linear(2, 1)
    target = torch.tensor([[1.0], [-1.0]])
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.2)
    with hw.MixedPrecision(model, optimizer, policy, log=lambda _: None) as mp:
        first = mp.step(lambda: (model(X) - target).square().mean())
        before = [p.detach().clone() for p in model.parameters()]
        bad = mp.step(lambda: (model(X) - target).square().mean() * float("inf"))
        assert not bad.applied
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        for _ in range(10):
            last = mp.step(lambda: (model(X) - target).square().mean(), clip_grad_norm=10.0)
    assert last.applied
    assert float(last.loss) < 0.05 * float(first.loss) + 1e-3


def test_float32_lbfgs_is_bit_identical_to_a_hand_written_one() -> None:
    def make() -> tuple[nn.Linear, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        return model, torch.optim.LBFGS(model.parameters(), lr=0.2)

    model, optimizer = make()

    def closure() -> float:
        optimizer.zero_grad()
        loss = (model(X) - 1).square().mean()
        loss.backward()
        return loss

    twin, twin_optimizer = make()
    with hw.MixedPrecision(twin, twin_optimizer, "float32") as mp:
        for _ in range(3):
            optimizer.step(closure)
            mp.step(lambda: (twin(X) - 1).square().mean())
    assert torch.equal(model.weight, twin.weight)


def test_lbfgs_beside_another_optimizer_is_refused() -> None:
    model = Gan()
    optimizers = [torch.optim.LBFGS(model.generator.parameters()), torch.optim.SGD(model.critic.parameters())]
    with (
        hw.MixedPrecision(model, optimizers, "float32") as mp,
        pytest.raises(UsageError, match="must be the only one"),
    ):
        mp.step(lambda: model(X).mean())
