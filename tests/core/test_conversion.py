"""Arrays in another format, and what that loses."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from halfwise.core.conversion import converted, loss_of
from halfwise.errors import PolicyError

VALUES = np.array([1e5, 448.0, 464.1, 1.0, 1e-9, 0.0, -3.3], np.float32)


@pytest.mark.parametrize(
    ("name", "dtype", "largest"),
    [
        ("bfloat16", ml_dtypes.bfloat16, 99840.0),
        ("float16", np.float16, np.inf),
        ("float8_e5m2", ml_dtypes.float8_e5m2, np.inf),
    ],
)
def test_dtypes_and_overflow(name: str, dtype: type, largest: float) -> None:
    result = converted(VALUES, name)
    assert result.dtype == dtype
    assert float(result[0]) == largest


def test_e4m3_has_no_infinity() -> None:
    result = converted(VALUES, "float8_e4m3fn").astype(np.float32)
    assert np.isnan(result[[0, 2]]).all()
    assert result[1] == 448.0


def test_tensorfloat32_is_rounded_float32() -> None:
    result = converted(np.array([1.0 + 2.0**-12, 1.0 + 2.0**-10], np.float32), "tensorfloat32")
    assert result.dtype == np.float32
    assert result.tolist() == [1.0, 1.0 + 2.0**-10]


def test_integers_and_half_arrays() -> None:
    numbers = np.array([1, 2], np.int32)
    assert converted(numbers, "float16").dtype == np.int32
    half = np.array([1.0, 3.0], ml_dtypes.bfloat16)
    assert converted(half, "float32").dtype == np.float32


def test_what_is_lost() -> None:
    loss = loss_of(VALUES, "float16")
    assert (loss.elements, loss.overflowed, loss.underflowed) == (7, 1, 1)
    assert 0.0 < loss.relative_error < 1e-3
    assert loss_of(VALUES, "float32").relative_error == 0.0
    assert loss_of(np.array([], np.float32), "float16").relative_error == 0.0


def test_unknown_formats() -> None:
    with pytest.raises(PolicyError, match="float15"):
        converted(VALUES, "float15")
