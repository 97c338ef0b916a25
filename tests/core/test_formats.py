"""Formats against ml_dtypes, exhaustively where 8 or 16 bits allow it."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfwise.core.formats import FORMATS, get_format, round_to
from halfwise.errors import PolicyError, UsageError

DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}


def decoded(name: str) -> npt.NDArray[np.float32]:
    """The values of all bit patterns of a format of 8 or 16 bits, in the order of the patterns."""
    dtype = DTYPES[name]
    patterns = np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}")
    with np.errstate(invalid="ignore"):
        values: npt.NDArray[np.float32] = patterns.view(dtype).astype(np.float32)
    return values


def same(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    """Equal values, NaN equal to NaN, and zeros of equal sign."""
    return bool(np.array_equal(a, b, equal_nan=True)) and bool(np.array_equal(np.signbit(a), np.signbit(b)))


@pytest.mark.parametrize("name", [*DTYPES, "float32"])
def test_limits_are_those_of_ml_dtypes(name: str) -> None:
    known = FORMATS[name]
    oracle: Any = ml_dtypes.finfo(DTYPES.get(name, np.dtype(np.float32)))  # type: ignore[no-untyped-call]

    assert known.name == name
    assert known.bits == oracle.bits
    assert known.exponent_bits == oracle.nexp
    assert known.mantissa_bits == oracle.nmant
    assert known.largest == float(oracle.max)
    assert known.smallest_normal == float(oracle.smallest_normal)
    assert known.smallest_subnormal == float(oracle.smallest_subnormal)
    assert known.eps == float(oracle.eps)


def test_limits_of_tensorfloat32() -> None:
    known = FORMATS["tensorfloat32"]
    float32 = FORMATS["float32"]

    assert (known.bits, known.exponent_bits, known.mantissa_bits) == (19, float32.exponent_bits, 10)
    assert known.eps == FORMATS["float16"].eps
    assert known.smallest_normal == float32.smallest_normal
    assert known.smallest_subnormal == known.smallest_normal * known.eps
    assert known.largest == (2 - known.eps) * 2.0**127


@pytest.mark.parametrize("name", DTYPES)
def test_limits_are_those_of_the_decoded_patterns(name: str) -> None:
    values = decoded(name)
    known = FORMATS[name]

    assert known.largest == values[np.isfinite(values)].max()
    assert known.smallest_subnormal == values[values > 0].min()
    assert known.has_infinity == np.isinf(values).any()
    assert known.eps == values[values > 1].min() - 1


@pytest.mark.parametrize("name", DTYPES)
def test_every_value_of_a_format_rounds_to_itself(name: str) -> None:
    values = decoded(name)
    assert same(round_to(values, name), values)


@pytest.mark.parametrize("name", DTYPES)
def test_midpoints_go_to_the_even_neighbour_and_their_neighbours_to_the_nearer_one(name: str) -> None:
    values = decoded(name)
    half = values[: values.size // 2]  # the positive ones, ascending: pattern k is the k-th value
    finite = half[np.isfinite(half)]
    lower, upper = finite[:-1], finite[1:]
    middle = ((lower.astype(np.float64) + upper) / 2).astype(np.float32)
    even = np.where(np.arange(lower.size) % 2 == 0, lower, upper)
    below = np.nextafter(middle, np.float32(0))
    above = np.nextafter(middle, np.float32(np.inf))

    for sign in (np.float32(1), np.float32(-1)):
        assert same(round_to(sign * middle, name), sign * even)
        assert same(round_to(sign * below, name), sign * lower)
        assert same(round_to(sign * above, name), sign * upper)
    assert round_to(FORMATS[name].largest_rounded_to_zero, name) == 0
    assert round_to(np.nextafter(np.float32(FORMATS[name].largest_rounded_to_zero), np.float32(1)), name) > 0


@pytest.mark.parametrize("name", FORMATS)
def test_not_finite_values(name: str) -> None:
    rounded = round_to([np.inf, -np.inf, np.nan], name)
    expected = [np.inf, -np.inf, np.nan] if FORMATS[name].has_infinity else [np.nan] * 3
    np.testing.assert_array_equal(rounded, np.array(expected, np.float32))


# Half an ulp beyond the largest value. Its mantissa is odd where it is all ones, so that the tie goes to inf; in
# float8_e4m3fn, whose last pattern is NaN, it is even and takes the tie.
@pytest.mark.parametrize(
    ("name", "tie", "after_tie"),
    [
        ("tensorfloat32", (2 - 2.0**-11) * 2.0**127, np.inf),
        ("bfloat16", (2 - 2.0**-8) * 2.0**127, np.inf),
        ("float16", 65520.0, np.inf),
        ("float8_e4m3fn", 464.0, 448.0),
        ("float8_e5m2", 61440.0, np.inf),
    ],
)
def test_beyond_the_largest_value(name: str, tie: float, after_tie: float) -> None:
    before, after = np.nextafter(np.float32(tie), np.float32(0)), np.nextafter(np.float32(tie), np.float32(np.inf))
    assert round_to(before, name) == FORMATS[name].largest
    assert round_to(-before, name) == -FORMATS[name].largest
    assert round_to(tie, name) == after_tie
    assert not np.isfinite(round_to(after, name))
    assert not np.isfinite(round_to(1e300, name))


@settings(deadline=None)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_tensorfloat32_rounds_as_exact_arithmetic_does(value: float) -> None:
    known = FORMATS["tensorfloat32"]
    _, exponent = math.frexp(value)
    ulp = max(2.0 ** (exponent - 1 - known.mantissa_bits), known.smallest_subnormal)
    expected = round(value / ulp) * ulp  # Python rounds ties to even; both operations are exact
    if abs(expected) > known.largest:
        expected = math.copysign(math.inf, value)

    assert float(round_to(value, "tensorfloat32")) == expected


def test_round_to_leaves_its_argument_alone_and_keeps_the_shape() -> None:
    values = np.full((2, 3), 1.001, np.float32)
    for name in FORMATS:
        rounded = round_to(values, get_format(name))
        assert rounded.shape == (2, 3)
        assert rounded.dtype == np.float32
        assert not np.shares_memory(rounded, values)
    assert (values == np.float32(1.001)).all()
    assert round_to(np.float64(0.1), "float32").shape == ()


@pytest.mark.parametrize("values", [np.ones(2, np.complex64), np.array(["1"]), np.array([None])])
def test_round_to_refuses_what_is_not_real(values: npt.NDArray[Any]) -> None:
    with pytest.raises(UsageError, match="array of real numbers"):
        round_to(values, "float16")


@pytest.mark.parametrize("name", ["fp16", "", "mixed_float16", None, ["float16"]])
def test_unknown_formats_are_refused_with_the_known_ones(name: Any) -> None:
    with pytest.raises(PolicyError) as raised:
        get_format(name)
    assert repr(name) in str(raised.value)
    for known in FORMATS:
        assert known in str(raised.value)


def test_the_registry_is_read_only_and_complete() -> None:
    assert list(FORMATS) == ["float32", "tensorfloat32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
    with pytest.raises(TypeError):
        FORMATS["float16"] = FORMATS["float32"]  # type: ignore[index]


def test_importing_loads_no_array_library() -> None:
    code = "import sys, halfwise.core.formats as f; f.get_format('float16'); print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = output.stdout.split()
    assert "halfwise.core.formats" in loaded
    assert not {"numpy", "ml_dtypes"} & {*loaded}
