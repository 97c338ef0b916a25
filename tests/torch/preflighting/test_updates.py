"""The share of half-precision weights that an optimizer's update does not move."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from halfwise.torch.preflighting.updates import dead_updates


def _layer(dtype: torch.dtype) -> nn.Linear:
    layer = nn.Linear(4, 1, bias=False).to(dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 1.0, 1.0, 1.0]]))
    return layer


def test_bfloat16_ignores_updates_below_half_an_ulp() -> None:
    layer = _layer(torch.bfloat16)
    gradient = torch.tensor([[1.0, 1e-2, 1e-3, 0.0]])  # half an ulp below 1 is 2^-9
    found = dead_updates({"fc": layer}, [torch.optim.SGD(layer.parameters(), 1.0)], {id(layer.weight): gradient})
    assert found == {"fc": pytest.approx(1 / 3)}


def test_the_optimizers_state_counts_and_is_left_alone() -> None:
    layer = _layer(torch.float16)
    optimizer = torch.optim.SGD(layer.parameters(), 1e-4, momentum=0.9)
    layer.weight.grad = torch.full_like(layer.weight, 100.0)
    optimizer.step()
    layer.weight.grad = None
    state, weight = copy.deepcopy(optimizer.state_dict()), layer.weight.detach().clone()
    gradient = {id(layer.weight): torch.full((1, 4), 1e-3)}
    assert dead_updates({"fc": layer}, [optimizer], gradient) == {"fc": 0.0}  # the momentum moves them
    assert torch.equal(layer.weight, weight)
    assert layer.weight.grad is None
    assert str(optimizer.state_dict()) == str(state)
    assert dead_updates({"fc": layer}, [torch.optim.SGD(layer.parameters(), 1e-4)], gradient) == {"fc": 1.0}


def test_moments_that_are_stored_in_half() -> None:
    layer = _layer(torch.bfloat16)
    optimizer = torch.optim.Adam(layer.parameters(), 1.0)
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    assert optimizer.state[layer.weight]["exp_avg"].dtype is torch.bfloat16
    found = dead_updates({"fc": layer}, [optimizer], {id(layer.weight): torch.ones(1, 4)})
    assert found == {"fc": 0.0}


def test_float32_weights_are_not_looked_at() -> None:
    layer = _layer(torch.float32)
    gradient = {id(layer.weight): torch.full((1, 4), 1e-12)}
    assert dead_updates({"fc": layer}, [torch.optim.SGD(layer.parameters(), 1.0)], gradient) == {}


def test_an_optimizer_that_wants_a_closure_tells_nothing() -> None:
    layer = _layer(torch.bfloat16)
    optimizer = torch.optim.LBFGS(layer.parameters())
    assert dead_updates({"fc": layer}, [optimizer], {id(layer.weight): torch.ones(1, 4)}) == {}
