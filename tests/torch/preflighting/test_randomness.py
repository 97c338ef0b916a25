"""Noise in half precision is the float32 noise, rounded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from halfwise.torch.preflighting.randomness import SameRandomNumbers

DRAWS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "randn": lambda dtype: torch.randn(100, dtype=dtype),
    "rand": lambda dtype: torch.rand(100, dtype=dtype),
    "randn_like": lambda dtype: torch.randn_like(torch.ones(100, dtype=dtype)),
    "rand_like": lambda dtype: torch.rand_like(torch.ones(100, dtype=dtype)),
    "rand_like of float32": lambda dtype: torch.rand_like(torch.ones(100), dtype=dtype),
    "normal_": lambda dtype: torch.empty(100, dtype=dtype).normal_(1.0, 2.0),
    "uniform_": lambda dtype: torch.empty(100, dtype=dtype).uniform_(-1.0, 1.0),
    "exponential_": lambda dtype: torch.empty(100, dtype=dtype).exponential_(),
    "dropout": lambda dtype: torch.dropout(torch.ones(100, dtype=dtype), 0.5, True),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", DRAWS)
def test_the_same_numbers_in_half(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    expected = DRAWS[name](torch.float32).to(dtype)
    torch.manual_seed(1)
    with SameRandomNumbers():  # type: ignore[no-untyped-call]
        found = DRAWS[name](dtype)
    assert found.dtype is dtype
    assert torch.equal(found, expected)


def test_without_it_they_differ() -> None:
    torch.manual_seed(1)
    expected = torch.randn(100).half()
    torch.manual_seed(1)
    assert not torch.equal(torch.randn(100, dtype=torch.float16), expected)


def test_float32_is_left_alone() -> None:
    torch.manual_seed(1)
    expected = torch.randn(100)
    torch.manual_seed(1)
    with SameRandomNumbers():  # type: ignore[no-untyped-call]
        assert torch.equal(torch.randn(100), expected)
