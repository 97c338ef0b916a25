"""Rounding in torch against the core's, bit by bit, and float8's scaling."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from halfwise.core.formats import FORMATS, round_to
from halfwise.errors import PolicyError
from halfwise.torch.rounding import rounded

EDGES = [0.0, -0.0, np.inf, -np.inf, np.nan, 448, 464, 465, -464, 57344, 61439, 61440, 65504, 65519, 65520, 3.4e38]


def values() -> np.ndarray:
    random = np.random.default_rng(0)
    many = random.normal(size=50_000) * np.exp2(random.integers(-40, 40, 50_000))
    return np.concatenate([many, EDGES]).astype(np.float32)


@pytest.mark.parametrize("name", list(FORMATS))
def test_it_rounds_as_the_core_does(name: str) -> None:
    mine = rounded(torch.from_numpy(values()), name).numpy()
    np.testing.assert_array_equal(mine, round_to(values(), name))


def test_the_dtype_stays_and_no_gradient_flows() -> None:
    tensor = torch.ones(3, dtype=torch.float64, requires_grad=True)
    found = rounded(tensor, "bfloat16")
    assert (found.dtype, found.requires_grad) == (torch.float64, False)


@pytest.mark.parametrize("peak", [1e-30, 1e-3, 3.0, 1e5, 1e30])
def test_scaled_float8_overflows_nowhere_and_uses_its_range(peak: float) -> None:
    tensor = torch.linspace(-peak, peak, 1001)
    found = rounded(tensor, "float8_e4m3fn", scaled=True)
    assert found.isfinite().all()
    large = tensor.abs() > peak / 100
    assert ((found - tensor).abs()[large] <= tensor.abs()[large] * 2.0**-4).all()


@pytest.mark.parametrize("peak", [1e-12, 3.0, 1e5])
def test_scaled_float16_loses_nothing_but_digits(peak: float) -> None:
    tensor = torch.linspace(-peak, peak, 1001)
    found = rounded(tensor, "float16", scaled=True)
    assert ((found - tensor).abs() <= tensor.abs() * 2.0**-11).all()


@pytest.mark.parametrize("constant", [0.0, float("inf"), float("nan")])
def test_scaling_of_what_cannot_be_scaled(constant: float) -> None:
    found = rounded(torch.full((4,), constant), "float8_e5m2", scaled=True)
    np.testing.assert_array_equal(found.numpy(), np.full(4, constant, np.float32))


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(PolicyError, match="unknown format 'int4'"):
        rounded(torch.ones(1), "int4")
