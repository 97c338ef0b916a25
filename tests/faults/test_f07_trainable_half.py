"""Trainable weights in half: torch refuses float16 only when unscaling and lets bfloat16 pass; ours says it at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import halfwise.torch as hw
from halfwise.errors import UsageError


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("policy", ["auto", "float32", "mixed_bfloat16", "mixed_float16"])
def test_refused_with_the_way_out(dtype: torch.dtype, policy: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2).to(dtype))
    with pytest.raises(UsageError, match=r"already in half precision.*'1\.weight', '1\.bias'.*model\.float\(\)"):
        hw.MixedPrecision(model, torch.optim.SGD(model.parameters()), policy)


def test_updates_are_lost_in_bfloat16_weights_and_not_in_ours() -> None:
    half = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([half], lr=1e-3)
    for _ in range(100):
        half.grad = torch.ones_like(half)
        optimizer.step()
    assert float(half.detach()) == 1.0

    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    with hw.MixedPrecision(model, torch.optim.SGD(model.parameters(), 1e-3), "mixed_bfloat16") as mp:
        for _ in range(100):
            mp.step(lambda: model(torch.ones(1, 1)).sum())
    assert float(model.weight.detach()) == pytest.approx(0.9, abs=1e-3)


def test_frozen_half_weights_are_welcome() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].to(torch.bfloat16).requires_grad_(False)
    with hw.MixedPrecision(model, torch.optim.SGD(model[1].parameters(), 0.1), "mixed_bfloat16") as mp:
        assert mp.step(lambda: model(torch.ones(3, 4)).square().sum()).applied
