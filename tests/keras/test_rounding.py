"""Rounding on each backend against the core's, bit by bit, and float8's scaling."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from halfwise.core.formats import FORMATS, round_to
from halfwise.keras.probe import to_numpy
from halfwise.keras.rounding import rounded


def values() -> np.ndarray:
    random = np.random.default_rng(0)
    many = random.normal(size=20_000) * np.exp2(random.integers(-24, 17, 20_000))
    return np.concatenate([many, [0.0, np.inf, -np.inf, np.nan, 448, 464, 465, 65504, 65519, 65520]]).astype(np.float32)


@pytest.mark.parametrize("name", list(FORMATS))
def test_it_rounds_as_the_core_does(name: str) -> None:
    mine = to_numpy(rounded(keras.ops.convert_to_tensor(values()), name))
    assert mine.dtype == np.float32
    np.testing.assert_array_equal(mine, round_to(values(), name))


@pytest.mark.parametrize("peak", [1e-30, 3.0, 1e30])
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float16"])
def test_scaled_it_overflows_nowhere_and_uses_the_range(peak: float, name: str) -> None:
    tensor = np.linspace(-peak, peak, 1001).astype(np.float32)
    found = to_numpy(rounded(keras.ops.convert_to_tensor(tensor), name, scaled=True))
    assert np.isfinite(found).all()
    large = np.abs(tensor) > peak / 100
    assert (np.abs(found - tensor)[large] <= np.abs(tensor)[large] * 2.0**-3).all()


@pytest.mark.parametrize("constant", [0.0, np.inf, np.nan])
def test_scaling_of_what_cannot_be_scaled(constant: float) -> None:
    tensor = np.full(4, constant, np.float32)
    np.testing.assert_array_equal(
        to_numpy(rounded(keras.ops.convert_to_tensor(tensor), "float8_e5m2", scaled=True)), tensor
    )
