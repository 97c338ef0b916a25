"""Counting the values of numpy arrays by magnitude: dispatch over dtypes, memory layouts, threads; numba where present.

The bins are those of `halfwise.core.histogram`. Every path counts exactly the same. float32 goes through SIMD code at
memory speed (`exponent_kernels`). 16-bit and 8-bit values are counted by bit pattern and folded into bins, few ones
being widened to float32 instead. float64 is narrowed to float32, away from zero, so that no value changes its bin.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from halfwise.errors import UsageError

__all__ = ["BIN_COUNT", "ExponentCounts", "counts_from_indices", "exponent_counts", "has_numba"]

BIN_COUNT = 1020

UInt32s = npt.NDArray[np.uint32]
Int64s = npt.NDArray[np.int64]

_INDICES = 2048  # 0 to 1019 finite (1019 also inf), 1020 to 1023 NaN, 2047 zero
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_BLOCK = 1 << 16  # values in a block of the numpy code: its temporaries stay in cache
_FEW = 1 << 16  # up to here the set-up of the faster counters costs more than it saves
_MANY = 1 << 20  # values that are worth a thread
_MOST = 1 << 30  # values in a chunk: no uint32 counter overflows
_RUNS, _RUN = 16, 32  # the sample


class ExponentCounts(NamedTuple):
    """What `exponent_counts` found.

    Attributes:
        bins: int64, shape (1020,): finite non-zero values by magnitude.
        zeros: how many values are 0 or -0.
        infinities: how many are inf or -inf.
        nans: how many are NaN.
    """

    bins: Int64s
    zeros: int
    infinities: int
    nans: int


def exponent_counts(array: npt.NDArray[Any], *, threads: int = 1) -> ExponentCounts:
    """Count the values of `array` by magnitude.

    Arrays that are dense in memory (transposed and channels-last ones too) are read in place; strided ones are copied.

    Args:
        array: float16, float32, float64, a float type of ml_dtypes, or complex (both parts are counted); any shape.
        threads: threads to count with, at most. Small arrays use fewer.

    Raises:
        UsageError: the dtype is none of these.

    >>> import numpy as np
    >>> exponent_counts(np.array([0.0, 1.0, -1.0, np.inf], np.float32))[1:]
    (1, 1, 0)
    """
    values = array.ravel(order="K")
    if not values.dtype.isnative:
        values = values.astype(values.dtype.newbyteorder("="))
    if values.dtype.kind == "c":
        values = values.view(values.real.dtype)
    if values.dtype == np.float32:
        return _count_float32(values, threads)
    if values.dtype == np.float64:
        chunks = (values[start : start + _MANY * 4] for start in range(0, values.size, _MANY * 4))
        return _sum([_count_float32(_narrowed(chunk), threads) for chunk in chunks])
    if not _is_small_float(values.dtype):
        raise UsageError(
            f"cannot count exponents of dtype {array.dtype}: "
            "give float16, float32, float64, complex64, complex128, or a float type of ml_dtypes"
        )
    kernels = _kernels()
    if values.size <= _FEW or kernels is None:
        chunks = (values[start : start + _BLOCK] for start in range(0, values.size, _BLOCK))
        return _sum([_count_float32(_widened(chunk), threads) for chunk in chunks])
    return _count_patterns(values, kernels, threads)


def counts_from_indices(indices: npt.NDArray[np.integer[Any]], infinities: int) -> ExponentCounts:
    """The counts behind a count of indices.

    Args:
        indices: shape (2048,), for each index `((bits & 0x7fffffff) - 1) >> 21` (32-bit unsigned) how often it came.
        infinities: how many of those in index 1019 are inf or -inf.
    """
    bins = indices[:BIN_COUNT].astype(np.int64)
    bins[-1] -= infinities
    return ExponentCounts(bins, int(indices[-1]), infinities, int(indices[BIN_COUNT : _INDICES // 2].sum()))


def has_numba() -> bool:
    """Whether counting runs compiled, at memory speed. Loads numba, where it is installed, on the first call."""
    return _kernels() is not None


@lru_cache(maxsize=1)
def _kernels() -> ModuleType | None:
    """The compiled loops, or None where numba is not installed."""
    try:
        from halfwise.core import exponent_kernels
    except ImportError:
        return None
    return exponent_kernels


def _is_small_float(dtype: np.dtype[Any]) -> bool:
    """Whether `dtype` is a float type of 8 or 16 bits."""
    try:
        return ml_dtypes.finfo(dtype).bits in (8, 16)  # type: ignore[no-untyped-call]
    except (KeyError, TypeError, ValueError):
        return False


def _count_float32(values: npt.NDArray[np.float32], threads: int) -> ExponentCounts:
    bits: UInt32s = values.view(np.uint32)
    kernels = _kernels()
    if kernels is None:
        indices = _count_with_numpy(bits)
    elif bits.size <= _FEW:
        indices = _in_threads(kernels.count_float32_plain, bits, _INDICES, threads)
    else:
        window = _window(bits, kernels.WINDOW)
        if window is None:
            indices = _in_threads(kernels.count_float32_plain, bits, _INDICES, threads)
        else:
            base, copies = window

            def count(chunk: UInt32s, indices: UInt32s) -> None:
                kernels.count_float32(chunk, base, copies, indices)

            indices = _in_threads(count, bits, _INDICES, threads)
    # inf shares the top bin with the values next to float32's largest: hardly ever is there anything to look at.
    infinities = _count_infinities(bits) if indices[BIN_COUNT - 1] else 0
    return counts_from_indices(indices, infinities)


def _window(bits: UInt32s, width: int) -> tuple[np.uint32, np.uint32] | None:
    """First bin of the window and copies of counters for `count_float32`, from a sample; None where no window suits."""
    # Short runs from all over: values one by one would cost a miss of the caches each, a tenth of the whole count.
    runs = bits[: bits.size // _RUNS * _RUNS].reshape(_RUNS, -1)
    sample = _count_with_numpy(runs[:, :_RUN].ravel())
    finite = sample[:BIN_COUNT]
    below = np.concatenate(([0], np.cumsum(finite)))
    held = below[width:] - below[:-width]
    # Of the windows that hold the most, the middle one: the tails that the sample missed lie on both sides.
    best = np.flatnonzero(held == held.max())
    if held.max() < 0.99 * finite.sum():
        return None
    crowded = finite.max() > 0.3 * sample.sum()
    return np.uint32(best[best.size // 2]), np.uint32(4 if crowded else 1)


def _count_patterns(values: npt.NDArray[Any], kernels: ModuleType, threads: int) -> ExponentCounts:
    """The counts of 8-bit or 16-bit floats, by bit pattern."""
    unsigned = np.dtype(f"u{values.dtype.itemsize}")
    # The sign is of no interest. Not all formats of 8 bits have it in the top bit, and there the signs cost nothing.
    mask = 0x7FFF if values.dtype.itemsize == 2 else 0xFF
    patterns = np.arange(mask + 1, dtype=unsigned)

    def count(chunk: npt.NDArray[Any], counts: UInt32s) -> None:
        kernels.count_patterns(chunk, unsigned.type(mask), counts)

    counts = _in_threads(count, values.view(unsigned), patterns.size, threads)
    magnitudes = _widened(patterns.view(values.dtype)).view(np.uint32) & _MAGNITUDE
    indices = np.zeros(_INDICES, np.int64)
    np.add.at(indices, (magnitudes - np.uint32(1)) >> np.uint32(21), counts)
    return counts_from_indices(indices, int(counts[magnitudes == _INFINITY].sum()))


def _in_threads(count: Callable[[Any, UInt32s], None], bits: npt.NDArray[Any], size: int, threads: int) -> Int64s:
    """What `count` adds to `size` counters for all of `bits`. Each thread counts one part, with its own counters."""
    parts = max(1, min(threads, bits.size // _MANY), -(-bits.size // _MOST))
    edges = [bits.size * part // parts for part in range(parts + 1)]

    def count_part(start: int, stop: int) -> UInt32s:
        counters = np.zeros(size, np.uint32)
        count(bits[start:stop], counters)
        return counters

    if parts == 1:
        return count_part(*edges).astype(np.int64)
    # Threads of our own, since numba's layers for parallel loops abort on concurrent use or after a fork. Not kept
    # for the next call either, since they would not exist in a forked data-loading worker.
    with ThreadPoolExecutor(min(parts, threads)) as pool:
        counted = list(pool.map(count_part, edges[:-1], edges[1:]))
    total: Int64s = np.stack(counted).sum(axis=0, dtype=np.int64)
    return total


def _count_with_numpy(bits: UInt32s) -> Int64s:
    """The count of indices without numba."""
    indices = np.zeros(_INDICES, np.int64)
    for start in range(0, bits.size, _BLOCK):
        index = ((bits[start : start + _BLOCK] & _MAGNITUDE) - np.uint32(1)) >> np.uint32(21)
        indices += np.bincount(index, minlength=_INDICES)
    return indices


def _count_infinities(bits: UInt32s) -> int:
    blocks = (bits[start : start + _BLOCK] for start in range(0, bits.size, _BLOCK))
    return sum(int(np.count_nonzero((block & _MAGNITUDE) == _INFINITY)) for block in blocks)


def _widened(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Values of 8 or 16 bits in float32, which holds them all."""
    with np.errstate(invalid="ignore"):  # signalling NaN become quiet ones
        return values.astype(np.float32)


def _narrowed(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """`|values|` in float32, rounded up: bins are closed above, so each value keeps its bin. inf beyond the largest."""
    magnitudes = np.abs(values)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        narrow = magnitudes.astype(np.float32)
        return (narrow.view(np.uint32) + (narrow < magnitudes)).view(np.float32)


def _sum(counts: list[ExponentCounts]) -> ExponentCounts:
    bins = np.zeros(BIN_COUNT, np.int64)
    for part in counts:
        bins += part.bins
    return ExponentCounts(
        bins, sum(c.zeros for c in counts), sum(c.infinities for c in counts), sum(c.nans for c in counts)
    )
