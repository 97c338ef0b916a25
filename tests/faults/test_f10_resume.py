"""Everything that a bit-exact resume needs is in one state dict."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import halfwise.torch as hw


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))


def loss_of(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
    return model(x).square().mean() * (1e4 if step % 7 == 3 else 1.0)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float32", "auto"])
@pytest.mark.parametrize("stop", [2, 5, 11])
def test_resumed_run_is_bit_identical(policy: str, stop: int) -> None:
    steps = 20

    def run(
        model: nn.Module, optimizer: torch.optim.Optimizer, mp: hw.MixedPrecision, first: int, last: int
    ) -> list[tuple[bool, float]]:
        results = [mp.step(partial(loss_of, model, step)) for step in range(first, last)]
        return [(r.applied, r.loss_scale) for r in results]

    timing = hw.TimingTable.uniform(["0", "1", "3"], relative={"float16": 0.5})
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with hw.MixedPrecision(model, optimizer, policy, timing=timing) as mp:
        before = run(model, optimizer, mp, 0, stop)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), mp.state_dict()))
        expected = before + run(model, optimizer, mp, stop, steps)
        final = mp.state_dict()

    torch.manual_seed(99)
    twin = network()
    twin_optimizer = torch.optim.Adam(twin.parameters(), 1e-2)
    torch.manual_seed(98)
    with hw.MixedPrecision(twin, twin_optimizer, policy, timing=timing) as resumed:
        twin.load_state_dict(saved[0])
        twin_optimizer.load_state_dict(saved[1])
        resumed.load_state_dict(saved[2])
        found = before + run(twin, twin_optimizer, resumed, stop, steps)
        state = resumed.state_dict()
    if policy != "auto" or stop > 3:  # evidence that was not complete is gathered anew, so that the plan comes later
        assert found == expected
        assert all(
            torch.equal(a, b) for a, b in zip(twin.state_dict().values(), model.state_dict().values(), strict=True)
        )
        random, final_random = state.pop("random"), final.pop("random")
        assert torch.equal(random["cpu"], final_random["cpu"])
        assert state == final


def test_state_of_a_gradscaler_is_taken_over() -> None:
    model = nn.Linear(2, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2048.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=7)
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 5})
    with hw.MixedPrecision(model, torch.optim.SGD(model.parameters(), 0.0), "mixed_float16") as mp:
        mp.load_state_dict(scaler.state_dict())
        scales = [mp.step(lambda: model(torch.ones(1, 2)).sum() * 1e-3).loss_scale for _ in range(3)]
        assert scales == [2048.0, 2048.0, 8192.0]  # 5 healthy steps before, 2 more to the interval of 7
        ours = mp.state_dict()
        assert {key: ours[key] for key in scaler.state_dict()} == {
            "scale": 8192.0,
            "growth_factor": 4.0,
            "backoff_factor": 0.25,
            "growth_interval": 7,
            "_growth_tracker": 1,
        }
        scaler.load_state_dict({key: ours[key] for key in scaler.state_dict()})  # and back
        assert scaler.get_scale() == 8192.0


def test_a_collapsed_gradscaler_comes_back_at_the_floor() -> None:
    model = nn.Linear(2, 1)
    with hw.MixedPrecision(model, torch.optim.SGD(model.parameters()), "mixed_float16") as mp:
        mp.load_state_dict(
            {
                "scale": 2.0**-130,
                "growth_factor": 2.0,
                "backoff_factor": 0.5,
                "growth_interval": 2000,
                "_growth_tracker": 0,
            }
        )
        assert mp.loss_scale == 1.0
        mp.load_state_dict({})  # a GradScaler that was not enabled
        assert mp.loss_scale == 1.0


@pytest.mark.parametrize("state", [{"scale": 1.0}, {"nonsense": 3}, {"version": 99}])
def test_other_states_are_refused(state: dict[str, float]) -> None:
    model = nn.Linear(2, 1)
    with (
        hw.MixedPrecision(model, torch.optim.SGD(model.parameters()), "mixed_float16") as mp,
        pytest.raises(ValueError, match=r"keys|version"),
    ):
        mp.load_state_dict(state)
