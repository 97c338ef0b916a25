"""Arrays in another format, and what that loses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from halfwise.core.formats import get_format, round_to

__all__ = ["Loss", "converted", "loss_of"]

_DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "tensorfloat32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}


@dataclass(frozen=True)
class Loss:
    """What a tensor loses by conversion.

    Attributes:
        elements: how many values there are.
        overflowed: finite values that the format cannot hold: they become inf, or NaN in a format without inf.
        underflowed: non-zero values that become zero.
        relative_error: 2-norm of the change divided by the 2-norm of the values, over values that stay finite.
    """

    elements: int
    overflowed: int
    underflowed: int
    relative_error: float


def converted(array: NDArray[Any], format_name: str) -> NDArray[Any]:
    """A copy in the format; integers, booleans and complex numbers stay as they are.

    A value beyond the format becomes inf (NaN in `float8_e4m3fn`). `tensorfloat32` has no dtype: values are rounded.

    >>> converted(np.array([1.0, 3.14159], np.float32), "bfloat16")
    array([1, 3.14062], dtype=bfloat16)
    """
    get_format(format_name)
    if not _is_floating(array):
        return array.copy()
    if format_name == "tensorfloat32":
        return round_to(np.asarray(array, np.float32), get_format(format_name))
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(_DTYPES[format_name])


def loss_of(array: NDArray[Any], format_name: str) -> Loss:
    """What `converted` loses.

    >>> loss_of(np.array([1e5, 1e-9, 1.0], np.float32), "float16").overflowed
    1
    """
    values = np.asarray(array, np.float64)
    rounded = np.asarray(converted(array, format_name), np.float64)
    finite, kept = np.isfinite(values), np.isfinite(values) & np.isfinite(rounded)
    norm = float(np.linalg.norm(values[kept]))
    return Loss(
        elements=values.size,
        overflowed=int((finite & ~np.isfinite(rounded)).sum()),
        underflowed=int(((values != 0) & finite & (rounded == 0)).sum()),
        relative_error=float(np.linalg.norm(values[kept] - rounded[kept])) / norm if norm > 0.0 else 0.0,
    )


def _is_floating(array: NDArray[Any]) -> bool:
    return array.dtype.kind == "f" or array.dtype in (_DTYPES["bfloat16"], *map(np.dtype, list(_DTYPES.values())[4:]))
