"""Every way of counting against a search among the bins' edges, which shares no code with them."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfwise.core.exponent_counts import BIN_COUNT, ExponentCounts, counts_from_indices, exponent_counts, has_numba
from halfwise.errors import UsageError

SMALL_FLOATS = [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
OTHER_SMALL_FLOATS = [ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz, ml_dtypes.float8_e8m0fnu]

# 0, 2^-128, 2^-127, 1.5 * 2^-127, and from there on four edges in each binade; in float64, so that 2^128 exists.
EDGES = np.concatenate(
    (np.arange(4) * 2.0**-128, [m * 2.0**e for e in range(-126, 128) for m in (1.0, 1.25, 1.5, 1.75)], [2.0**128])
)


def searched(array: npt.NDArray[Any]) -> ExponentCounts:
    """The counts of an array by binary search."""
    with np.errstate(invalid="ignore"):
        values = np.abs(np.asarray(array).astype(np.float64)).ravel()
    nan, infinite, zero = np.isnan(values), np.isinf(values), values == 0
    positions = np.searchsorted(EDGES, values[~(nan | infinite | zero)], side="left") - 1
    return ExponentCounts(
        np.bincount(positions, minlength=BIN_COUNT), int(zero.sum()), int(infinite.sum()), int(nan.sum())
    )


def assert_same(found: ExponentCounts, expected: ExponentCounts) -> None:
    assert found.bins.dtype == np.int64
    assert found.bins.shape == (BIN_COUNT,)
    np.testing.assert_array_equal(found.bins, expected.bins)
    assert found[1:] == expected[1:]


def data(kind: str, size: int, seed: int = 0) -> npt.NDArray[np.float32]:
    random = np.random.default_rng(seed)
    normal = random.standard_normal(size).astype(np.float32)
    if kind == "half zeros":
        return np.maximum(normal, 0)
    if kind == "mostly zeros":
        return np.where(random.random(size) < 0.9, np.float32(-0.0), normal)
    if kind == "constant":
        return np.full(size, 0.75, np.float32)
    if kind == "zeros":
        return np.zeros(size, np.float32)
    if kind == "not finite":
        normal[::5] = np.nan
        normal[::7] = -np.inf
        return normal
    if kind == "a few outliers":  # far above and below any window, and not finite
        normal[:: max(1, size // 20)] = 1e38
        normal[1 :: max(1, size // 30)] = 1e-42
        normal[2 :: max(1, size // 10)] = np.inf
        normal[3 :: max(1, size // 10)] = -np.nan
        return normal
    if kind == "two worlds":  # the second half lies outside the first one's window
        normal[size // 2 :] *= np.float32(1e-25)
        return normal
    if kind == "all patterns":
        return random.integers(0, 1 << 32, size, dtype=np.uint32).view(np.float32)
    if kind == "edges":
        edges = EDGES[1:-1].astype(np.float32)
        near = np.concatenate((edges, np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(np.inf))))
        return np.resize(near, size)
    return normal


KINDS = [
    "normal",
    "half zeros",
    "mostly zeros",
    "constant",
    "zeros",
    "not finite",
    "a few outliers",
    "two worlds",
    "all patterns",
    "edges",
]


def test_the_compiled_loops_are_under_test() -> None:
    assert has_numba()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [0, 1, 5, 8191, 65536, 65537, 73728, 250_003])
def test_float32(kind: str, size: int) -> None:
    values = data(kind, size)
    before = values.copy()
    assert_same(exponent_counts(values), searched(values))
    np.testing.assert_array_equal(values.view(np.uint32), before.view(np.uint32))


@pytest.mark.parametrize("kind", KINDS)
def test_float32_in_threads(kind: str) -> None:
    values = data(kind, (1 << 21) + 13)
    assert_same(exponent_counts(values, threads=2), exponent_counts(values, threads=1))
    assert_same(exponent_counts(values, threads=7), searched(values))


@pytest.mark.parametrize(
    "repeats", [1, 3]
)  # the first stays below, the second above the size from which patterns are counted
@pytest.mark.parametrize("dtype", SMALL_FLOATS + OTHER_SMALL_FLOATS)
def test_all_patterns_of_small_floats(dtype: Any, repeats: int) -> None:
    small = np.dtype(dtype)
    patterns = np.arange(1 << 8 * small.itemsize, dtype=f"u{small.itemsize}")
    array = np.tile(patterns, repeats * 65536 // patterns.size).view(small)
    assert_same(exponent_counts(array), searched(array))


@pytest.mark.parametrize("dtype", SMALL_FLOATS)
def test_small_floats_in_threads(dtype: Any) -> None:
    array = data("normal", (1 << 21) + 5).astype(dtype)
    assert_same(exponent_counts(array, threads=2), searched(array))


@settings(deadline=None)  # the first call compiles
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from(list(EDGES))))
def test_float64_values_keep_their_bins(values: list[float]) -> None:
    array = np.array(values, np.float64)
    beyond = np.abs(array) > np.finfo(np.float32).max  # counts as infinite: float32 would hold it so
    assert_same(exponent_counts(array), searched(np.where(beyond, np.inf, array)))


def test_float64_next_to_the_edges() -> None:
    inner = EDGES[1:-1]
    assert_same(exponent_counts(np.nextafter(inner, 0)), searched(np.nextafter(inner, 0)))
    assert_same(exponent_counts(np.nextafter(inner, np.inf)), searched(np.nextafter(inner, np.inf)))


def test_complex_parts_are_both_counted() -> None:
    values = data("normal", 1000)
    for dtype in (np.complex64, np.complex128):
        array = (values[:500] + 1j * values[500:]).astype(dtype)
        assert_same(exponent_counts(array), searched(values))
        assert_same(exponent_counts(array[::2]), searched(np.concatenate((values[:500:2], values[500::2]))))


def test_memory_layouts() -> None:
    cube = data("normal", 60 * 70 * 80).reshape(60, 70, 80)
    for array in (
        cube.transpose(2, 0, 1),
        cube[:, ::2],
        cube[::-1],
        np.broadcast_to(cube[0], (3, 70, 80)),
        cube[0, 0, 0],
    ):
        assert_same(exponent_counts(np.asarray(array)), searched(np.asarray(array)))
    swapped = cube.astype(cube.dtype.newbyteorder())
    assert_same(exponent_counts(swapped), searched(cube))
    unaligned = np.frombuffer(b"\0" + cube.tobytes(), np.uint8)[1:].view(np.float32)
    assert not unaligned.flags.aligned
    assert not unaligned.flags.writeable
    assert_same(exponent_counts(unaligned), searched(cube))


@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.longdouble, np.str_, ml_dtypes.int4, ml_dtypes.float4_e2m1fn])
def test_other_dtypes_are_refused(dtype: Any) -> None:
    with pytest.raises(UsageError, match="cannot count exponents of dtype"):
        exponent_counts(np.zeros(3, dtype))


def test_indices_become_counts() -> None:
    indices = np.zeros(2048, np.int64)
    indices[[7, 1019, 1021, 2047]] = [2, 10, 3, 4]
    counts = counts_from_indices(indices, infinities=6)
    assert (counts.bins[7], counts.bins[1019], counts.bins.sum()) == (2, 4, 6)
    assert counts[1:] == (4, 6, 3)
    assert indices[1019] == 10


WITHOUT = """
import sys
{prepare}
import ml_dtypes, numpy as np
from halfwise.core import exponent_counts as module
assert module.has_numba() is {numba}, module.has_numba()
values = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint32).view(np.float32)
with np.errstate(all="ignore"):
    for array in (values, values.astype(np.float64), values.astype(np.float16), values.astype(ml_dtypes.float8_e5m2)):
        counts = module.exponent_counts(array, threads=2)
        print([counts.bins.tolist(), *counts[1:]])
"""


def run(prepare: str, *, numba: bool, **environment: str) -> str:
    code = WITHOUT.format(prepare=prepare, numba=numba)
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_without_numba_and_without_a_writable_cache_the_counts_are_the_same() -> None:
    usual = run("", numba=True)
    assert len(usual.splitlines()) == 4
    assert run("sys.modules['numba'] = None", numba=False) == usual
    # The only place for compiled code is now one that exists in notebooks: as on a read-only installation.
    assert run("", numba=True, NUMBA_CACHE_LOCATOR_CLASSES="IPythonCacheLocator") == usual


def test_importing_loads_no_numba() -> None:
    code = "import sys, halfwise.core.histogram; print('numba' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "False"
