"""The range of a tensor's values: all that a trace keeps of them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from halfwise.keras.probe import to_numpy

__all__ = ["Extent", "extent_of"]


class Extent(NamedTuple):
    """Smallest and largest of some values, both NaN where one is; and their dtype.

    >>> Extent(-2.0, 1.0, "float16").largest, Extent(0.0, math.inf, "float16").found
    (2.0, 'inf')
    """

    low: float
    high: float
    dtype: str

    @property
    def finite(self) -> bool:
        """No NaN and no infinity among them."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def largest(self) -> float:
        """Largest magnitude; NaN or inf where there is one."""
        return math.nan if math.isnan(self.low) else max(abs(self.low), abs(self.high))

    @property
    def largest_finite(self) -> float:
        """The larger magnitude of the two ends that are finite; 0 where none is."""
        return max((abs(end) for end in (self.low, self.high) if math.isfinite(end)), default=0.0)

    @property
    def found(self) -> str:
        """What a reader has to know of the values: `"nan"`, `"inf"`, `"-inf"`, or the largest magnitude."""
        if math.isnan(self.low):
            return "nan"
        if self.high == math.inf:
            return "inf"
        return "-inf" if self.low == -math.inf else f"{self.largest:.3g}"

    def beyond(self, limit: float = math.inf) -> bool:
        """Whether NaN, an infinity, or a magnitude above `limit` is among them."""
        return not self.finite or self.largest > limit

    def joined(self, other: Extent | None) -> Extent:
        """The extent of both together."""
        if other is None:
            return self
        if math.isnan(self.low) or math.isnan(other.low):
            return Extent(math.nan, math.nan, self.dtype)
        return Extent(min(self.low, other.low), max(self.high, other.high), self.dtype)


def extent_of(tensor: Any) -> Extent | None:
    """The extent of an array or a tensor with values; None where it is empty or holds no floating-point numbers."""
    array = to_numpy(tensor)
    if array.size == 0 or array.dtype.kind not in "fV":  # ml_dtypes' formats are of kind V
        return None
    dtype = str(array.dtype)
    wide = array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)
    low, high = float(wide.min()), float(wide.max())
    return Extent(math.nan, math.nan, dtype) if math.isnan(low) or math.isnan(high) else Extent(low, high, dtype)
