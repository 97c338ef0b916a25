"""Histograms against the values themselves: shares by comparison and by real casts."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfwise.core.exponent_counts import BIN_COUNT
from halfwise.core.formats import FORMATS, get_format
from halfwise.core.histogram import EDGES, ExponentHistogram, Share
from halfwise.errors import PolicyError, UsageError

CASTS = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
LIMITS = [
    limit * scale
    for known in FORMATS.values()
    for limit in (known.largest, known.smallest_normal, known.smallest_subnormal, known.smallest_subnormal / 2)
    for scale in (1.0, 2.0**-16)
]


def float32s(values: list[float]) -> list[float]:
    """Values that float32 holds, and their neighbours, both signs."""
    with np.errstate(over="ignore", under="ignore"):
        single = np.array(values, np.float64).astype(np.float32)
        near = np.concatenate((single, np.nextafter(single, np.float32(0)), np.nextafter(single, np.float32(np.inf))))
    return [*near.tolist(), *(-near).tolist()]


interesting = st.sampled_from(float32s([*LIMITS, *EDGES[1:].tolist()]))
arrays = st.lists(st.floats(width=32) | st.floats(-1e3, 1e3, width=32) | interesting, max_size=40).map(
    lambda values: np.array(values, np.float32)
)
scales = st.integers(-24, 24).map(lambda exponent: 2.0**exponent)
names = st.sampled_from(list(FORMATS))


def finite_nonzero(array: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    magnitudes: npt.NDArray[np.float64] = np.abs(array[np.isfinite(array) & (array != 0)].astype(np.float64))
    return magnitudes


def share(condition: npt.NDArray[Any]) -> float:
    return float(condition.mean()) if condition.size else 0.0


@settings(deadline=None)  # the first call compiles
@given(arrays, names, scales)
def test_shares_hold_what_a_comparison_finds(array: npt.NDArray[np.float32], name: str, scale: float) -> None:
    histogram = ExponentHistogram.of(array)
    magnitudes = finite_nonzero(array) * scale
    beyond = share(magnitudes > FORMATS[name].largest)
    lost = share(magnitudes <= FORMATS[name].smallest_subnormal / 2)
    overflow, underflow = histogram.overflow(name, scale), histogram.underflow(name, scale)

    assert overflow.lower <= beyond <= overflow.upper
    assert underflow.lower <= lost <= underflow.upper
    if name.startswith("float8"):
        assert overflow.exact
    if name.startswith("float8") or name == "float16":
        assert underflow.exact
    if name == "float32" and scale >= 1:
        assert underflow == Share(0.0, 0.0)


@settings(deadline=None)  # the first call compiles
@given(arrays, st.sampled_from(list(CASTS)), st.integers(0, 24).map(lambda exponent: np.float32(2.0**exponent)))
def test_shares_hold_what_a_cast_does(array: npt.NDArray[np.float32], name: str, scale: np.float32) -> None:
    histogram = ExponentHistogram.of(array)
    kept = array[np.isfinite(array) & (array != 0)]
    with np.errstate(over="ignore"):
        cast = (kept * scale).astype(CASTS[name]).astype(np.float32)
    underflow = histogram.underflow(name, float(scale))

    assert underflow.lower <= share(cast == 0) <= underflow.upper
    assert share(~np.isfinite(cast)) <= histogram.overflow(name, float(scale)).upper


def around(limit: float) -> npt.NDArray[np.float32]:
    """The float32 values just below, at and just above a limit."""
    single = np.float32(limit)
    return np.array([np.nextafter(single, np.float32(0)), single, np.nextafter(single, np.float32(np.inf))])


@pytest.mark.parametrize("scale", [1.0, 2.0**-10, 2.0**16])
@pytest.mark.parametrize("name", ["float16", "float8_e4m3fn", "float8_e5m2"])
def test_shares_are_exact_next_to_the_limits(name: str, scale: float) -> None:
    lost = FORMATS[name].largest_rounded_to_zero / scale
    assert ExponentHistogram.of(around(lost)).underflow(name, scale) == Share(2 / 3, 2 / 3)
    if name != "float16":
        beyond = FORMATS[name].largest / scale
        assert ExponentHistogram.of(around(beyond)).overflow(name, scale) == Share(1 / 3, 1 / 3)


def test_nothing_underflows_below_the_smallest_float32() -> None:
    smallest = ExponentHistogram.of(np.array([2.0**-149], np.float32))
    assert smallest.underflow("float32") == Share(0.0, 0.0)
    assert smallest.underflow("bfloat16") == Share(0.0, 1.0)
    assert ExponentHistogram.of(np.array([2.0**127, 3.4e38], np.float32)).overflow("float32") == Share(0.0, 0.0)


@pytest.mark.parametrize("scale", [1.0, 2.0**-20, 2.0**16])
def test_bounds_are_no_wider_than_one_bin(scale: float) -> None:
    everything = ExponentHistogram(np.ones(BIN_COUNT, np.int64))
    for name in FORMATS:
        for found in (everything.overflow(name, scale), everything.underflow(name, scale)):
            assert found.upper - found.lower <= 1.001 / BIN_COUNT


def test_float16_overflow_is_exact_where_the_bin_of_the_limit_is_empty() -> None:
    assert ExponentHistogram.of([1.0, 70000.0]).overflow("float16") == Share(0.5, 0.5)
    unsure = ExponentHistogram.of([1.0, 65504.0]).overflow("float16")
    assert (unsure.lower, unsure.upper, unsure.exact) == (0.0, 0.5, False)


def test_shares_are_relative_to_finite_nonzero_values() -> None:
    histogram = ExponentHistogram.of(np.array([0, 0, np.inf, np.nan, 1e6, 1, 1, 1e-9], np.float32))
    assert (histogram.total, histogram.finite_nonzero) == (8, 4)
    assert (histogram.zeros, histogram.infinities, histogram.nans) == (2, 1, 1)
    assert histogram.overflow("float16") == Share(0.25, 0.25)
    assert histogram.underflow("float16") == Share(0.25, 0.25)
    assert histogram.underflow("float16", 2.0**10) == Share(0.0, 0.0)
    nothing = ExponentHistogram.of(np.array([0.0, np.nan], np.float32))
    assert nothing.overflow("float16") == nothing.underflow("float16") == Share(0.0, 0.0)


@settings(deadline=None)  # the first call compiles
@given(arrays, arrays)
def test_adding_is_counting_together(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> None:
    both = ExponentHistogram.of(np.concatenate((a, b)))
    assert ExponentHistogram.of(a) + ExponentHistogram.of(b) == both
    assert both + ExponentHistogram.empty() == both
    assert both.total == a.size + b.size


@settings(deadline=None)  # the first call compiles
@given(arrays)
def test_largest_and_smallest_are_bounds(array: npt.NDArray[np.float32]) -> None:
    histogram = ExponentHistogram.of(array)
    magnitudes = finite_nonzero(array)
    if magnitudes.size:
        assert magnitudes.max() <= histogram.largest <= max(1.34 * magnitudes.max(), 2.0**-125)
        assert histogram.smallest < magnitudes.min() <= max(1.34 * histogram.smallest, 2.0**-125)
    else:
        assert histogram.largest == histogram.smallest == 0.0


def test_edges_are_the_limits_of_the_float8_formats() -> None:
    assert EDGES.shape == (BIN_COUNT + 1,)
    assert {448.0, 57344.0, 2.0**-10, 2.0**-17, 2.0**-25} <= set(EDGES.tolist())
    assert EDGES[0] == 0
    assert EDGES[-1] == np.finfo(np.float32).max
    assert (np.diff(EDGES) > 0).all()
    with pytest.raises(ValueError, match="read-only"):
        EDGES[0] = 1


def test_float64_beyond_float32_is_infinite() -> None:
    histogram = ExponentHistogram.of([1e300, -1e300, 1e-300, 1.0])
    assert histogram.infinities == 2
    assert histogram.smallest == 0.0  # 1e-300 stands in the lowest bin, not among the zeros
    assert histogram.zeros == 0


def test_equality_covers_every_field() -> None:
    histogram = ExponentHistogram(np.arange(BIN_COUNT), 1, 2, 3)
    assert histogram == ExponentHistogram(np.arange(BIN_COUNT), 1, 2, 3)
    assert histogram != replace(histogram, counts=np.zeros(BIN_COUNT, np.int64))
    assert histogram != replace(histogram, zeros=9)
    assert histogram != replace(histogram, infinities=9)
    assert histogram != replace(histogram, nans=9)
    assert histogram != "histogram"


def test_histograms_are_frozen_copies() -> None:
    counts = np.ones(BIN_COUNT, np.int64)
    histogram = ExponentHistogram(counts)
    counts[0] = 5
    assert histogram.counts[0] == 1
    with pytest.raises(ValueError, match="read-only"):
        histogram.counts[0] = 1
    with pytest.raises(FrozenInstanceError):
        histogram.zeros = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        histogram + 1  # type: ignore[operator]
    assert "total=1020" in repr(histogram)


@pytest.mark.parametrize(
    ("counts", "zeros"),
    [
        (np.zeros(BIN_COUNT - 1, np.int64), 0),
        (np.zeros((BIN_COUNT, 1), np.int64), 0),
        (np.zeros(BIN_COUNT), 0),
        (np.full(BIN_COUNT, -1), 0),
        (np.zeros(BIN_COUNT, np.int64), -1),
    ],
)
def test_malformed_counts_are_refused(counts: Any, zeros: int) -> None:
    with pytest.raises(UsageError, match="ExponentHistogram got"):
        ExponentHistogram(counts, zeros)


@pytest.mark.parametrize("scale", [0.0, -2.0, 3.0, 1000.0, float("inf"), float("nan")])
def test_loss_scales_are_powers_of_two(scale: float) -> None:
    histogram = ExponentHistogram.of([1.0])
    for ask in (histogram.overflow, histogram.underflow):
        with pytest.raises(UsageError, match="no power of two"):
            ask("float16", scale)
        with pytest.raises(PolicyError, match="unknown format 'half'"):
            ask("half")
    assert histogram.overflow(get_format("float16"), 1024) == Share(0.0, 0.0)


def test_unfit_arrays_are_refused() -> None:
    with pytest.raises(UsageError, match="dtype int64"):
        ExponentHistogram.of([1, 2])
