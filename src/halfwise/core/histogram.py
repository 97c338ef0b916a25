"""Exponent histograms: how a tensor's values are spread over magnitudes, and what any format would do to them.

Four bins per binade of float32, closed above: bin i holds the magnitudes in (EDGES[i], EDGES[i + 1]]. The index is
`((bits & 0x7fffffff) - 1) >> 21` in unsigned 32-bit arithmetic. Closed above, because then

- a power of two lies in the bin below it, so that "rounds to zero" (|v| <= smallest subnormal / 2, the tie goes to the
  even zero) asks for whole bins;
- so does "exceeds 448" and "exceeds 57344", the limits of the float8 formats;
- a zero wraps to an index of its own.

float16's limit 65504 and the limits of the 8-bit exponents lie inside a bin: there the answer is a pair of bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from halfwise.core.exponent_counts import BIN_COUNT, ExponentCounts, exponent_counts
from halfwise.core.formats import FORMATS, Format, get_format
from halfwise.errors import UsageError

__all__ = ["EDGES", "ExponentHistogram", "Share"]


def _edges() -> npt.NDArray[np.float64]:
    edges = (np.arange(BIN_COUNT, dtype=np.uint32) << np.uint32(21)).view(np.float32).astype(np.float64)
    edges = np.append(edges, FORMATS["float32"].largest)
    edges.setflags(write=False)
    return edges


EDGES: npt.NDArray[np.float64] = _edges()
"""The edges of the bins, float64, shape (1021,): 0, 2^-128, 2^-127, ..., float32's largest value."""

# The smallest float32 value of each bin: the open edge does not tell whether any lies at or below a limit in the bin.
_LOWEST = np.nextafter(EDGES[:-1].astype(np.float32), np.float32(np.inf)).astype(np.float64)


@dataclass(frozen=True)
class Share:
    """A share between 0 and 1, exact or between bounds.

    Attributes:
        lower: the share is at least this.
        upper: the share is at most this.
    """

    lower: float
    upper: float

    @property
    def exact(self) -> bool:
        """True where the bounds are equal."""
        return self.lower == self.upper


@dataclass(frozen=True, eq=False)
class ExponentHistogram:
    """Counts of a tensor's values by magnitude. Histograms add up.

    Attributes:
        counts: int64, shape (1020,), read-only: the finite non-zero values; bin i counts (EDGES[i], EDGES[i + 1]].
        zeros: how many values are 0 or -0.
        infinities: how many are inf or -inf.
        nans: how many are NaN.

    Raises:
        UsageError: counts of another shape or dtype, or negative ones.

    >>> import numpy as np
    >>> histogram = ExponentHistogram.of(np.array([0.0, 1.0, 1e-9, 500.0], np.float32))
    >>> histogram.overflow("float8_e4m3fn"), histogram.underflow("float16").lower
    (Share(lower=0.3333333333333333, upper=0.3333333333333333), 0.3333333333333333)
    """

    counts: npt.NDArray[np.int64]
    zeros: int = 0
    infinities: int = 0
    nans: int = 0

    def __post_init__(self) -> None:
        given = np.asarray(self.counts)
        if given.shape != (BIN_COUNT,) or given.dtype != np.int64:
            raise UsageError(
                f"ExponentHistogram got counts of shape {given.shape} and dtype {given.dtype}: "
                f"give int64 of shape ({BIN_COUNT},), or build it with ExponentHistogram.of(array)"
            )
        if given.min() < 0 or min(self.zeros, self.infinities, self.nans) < 0:
            raise UsageError("ExponentHistogram got a negative count: give counts of values, 0 or more")
        counts = given.copy()
        counts.setflags(write=False)
        object.__setattr__(self, "counts", counts)

    @classmethod
    def empty(cls) -> Self:
        """The histogram of no values."""
        return cls(np.zeros(BIN_COUNT, np.int64))

    @classmethod
    def of(cls, array: npt.ArrayLike, *, threads: int = 1) -> Self:
        """The histogram of an array's values.

        float64 values are taken as float32 would hold them: beyond its largest value they count as infinite.

        Args:
            array: float16, float32, float64, complex, or a float type of ml_dtypes; any shape, also empty.
            threads: threads to count with, at most.

        Raises:
            UsageError: the dtype is none of these.
        """
        return cls.from_counts(exponent_counts(np.asarray(array), threads=threads))

    @classmethod
    def from_counts(cls, counts: ExponentCounts) -> Self:
        """The histogram of what `exponent_counts` found."""
        return cls(counts.bins, counts.zeros, counts.infinities, counts.nans)

    def __add__(self, other: ExponentHistogram) -> ExponentHistogram:
        """The histogram of both tensors' values together."""
        if not isinstance(other, ExponentHistogram):
            return NotImplemented
        return ExponentHistogram(
            self.counts + other.counts,
            self.zeros + other.zeros,
            self.infinities + other.infinities,
            self.nans + other.nans,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ExponentHistogram):
            return NotImplemented
        mine = (self.zeros, self.infinities, self.nans)
        return mine == (other.zeros, other.infinities, other.nans) and np.array_equal(self.counts, other.counts)

    def __repr__(self) -> str:
        others = f"zeros={self.zeros}, infinities={self.infinities}, nans={self.nans}"
        return f"ExponentHistogram(total={self.total}, {others}, range=({self.smallest:.4g}, {self.largest:.4g}])"

    @property
    def finite_nonzero(self) -> int:
        """How many values are finite and not zero: what shares are relative to."""
        return int(self.counts.sum())

    @property
    def total(self) -> int:
        """How many values there are, zeros, infinities and NaN included."""
        return self.finite_nonzero + self.zeros + self.infinities + self.nans

    @property
    def largest(self) -> float:
        """Upper bound of the finite magnitudes, reached by less than a quarter of a binade; 0.0 where all are zero."""
        occupied = np.flatnonzero(self.counts)
        return float(EDGES[occupied[-1] + 1]) if occupied.size else 0.0

    @property
    def smallest(self) -> float:
        """Lower bound of the finite non-zero magnitudes, all being larger; 0.0 where there are none."""
        occupied = np.flatnonzero(self.counts)
        return float(EDGES[occupied[0]]) if occupied.size else 0.0

    def overflow(self, format: Format | str, loss_scale: float = 1.0) -> Share:  # noqa: A002
        """Share of the finite non-zero values v with |v| * loss_scale > the format's largest value.

        Values up to half an ulp beyond `largest` count as overflow too, though rounding brings them back to it.
        Exact for the float8 formats at every loss scale that keeps the limit a normal float32. Where a limit falls
        inside a bin (float16, and the formats with 8 exponent bits): bounds, equal if that bin is empty. 0 where there
        are no finite non-zero values.

        Args:
            format: a `Format` or a name in `FORMATS`.
            loss_scale: a power of two, which the values are multiplied with first.

        Raises:
            PolicyError: there is no such format.
            UsageError: `loss_scale` is no power of two.
        """
        limit = _resolved(format).largest / _power_of_two(loss_scale)
        return self._share(certain=EDGES[:-1] >= limit, possible=EDGES[1:] > limit)

    def underflow(self, format: Format | str, loss_scale: float = 1.0) -> Share:  # noqa: A002
        """Share of the finite non-zero values v for which v * loss_scale rounds to zero.

        Exact for float16 and the float8 formats unless the loss scale moves the limit below 2^-128. For the formats
        with 8 exponent bits the limit lies in the lowest bin: bounds, equal if that bin is empty. 0 where there are no
        finite non-zero values.

        Args:
            format: a `Format` or a name in `FORMATS`.
            loss_scale: a power of two, which the values are multiplied with first.

        Raises:
            PolicyError: there is no such format.
            UsageError: `loss_scale` is no power of two.
        """
        limit = _resolved(format).largest_rounded_to_zero / _power_of_two(loss_scale)
        return self._share(certain=EDGES[1:] <= limit, possible=limit >= _LOWEST)

    def _share(self, certain: npt.NDArray[np.bool_], possible: npt.NDArray[np.bool_]) -> Share:
        """The share of values in the bins that certainly, and in those that possibly, meet a condition."""
        values = max(self.finite_nonzero, 1)
        return Share(int(self.counts[certain].sum()) / values, int(self.counts[possible].sum()) / values)


def _resolved(given: Format | str) -> Format:
    return given if isinstance(given, Format) else get_format(given)


def _power_of_two(loss_scale: Any) -> float:
    """`loss_scale`, checked."""
    scale = float(loss_scale)
    if not math.isfinite(scale) or scale <= 0 or math.frexp(scale)[0] != 0.5:
        raise UsageError(
            f"loss_scale={loss_scale!r} is no power of two: histograms answer exactly only for powers of two, such as "
            f"{2.0 ** round(math.log2(scale)) if 0 < scale < math.inf else 65536.0:g}"
        )
    return scale
