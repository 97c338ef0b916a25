"""Rounding tensors to a format while they stay in float32: on every backend as `core.formats.round_to` does."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from halfwise.core.formats import get_format, round_to
from halfwise.keras.taps import to_numpy

__all__ = ["rounded"]

_CAST = ("bfloat16", "float16")  # the formats that every backend has and casts to alike


def rounded(tensor: Any, format_name: str, *, scaled: bool = False) -> Any:
    """`tensor` rounded to the format, to nearest, ties to even, as a float32 tensor of the same shape.

    It must not be called where code is compiled: XLA may leave out a cast that is taken back.

    Args:
        tensor: a floating tensor of the backend, with values.
        format_name: a name in `halfwise.FORMATS`.
        scaled: brings the largest magnitude to the format's largest value before, and divides by the same power of two
            after: float8's per-tensor scaling (arXiv 2209.05433), or what a loss scale does.

    Raises:
        PolicyError: there is no such format.

    Example:
        >>> to_numpy(rounded(keras.ops.convert_to_tensor([1.001, 2e-8]), "float16")).tolist()
        [1.0009765625, 0.0]
    """
    limits = get_format(format_name)
    if format_name == "float32":
        return keras.ops.cast(tensor, "float32")
    if format_name in _CAST and not scaled:
        return keras.ops.cast(keras.ops.cast(tensor, format_name), "float32")
    values = to_numpy(tensor).astype(np.float32)
    scale = _power_of_two_to_fit(values, limits.largest) if scaled else np.float32(1.0)
    with np.errstate(over="ignore", invalid="ignore"):
        return keras.ops.convert_to_tensor(round_to(values * scale, limits) / scale)


def _power_of_two_to_fit(values: np.ndarray[Any, Any], largest: float) -> np.float32:
    peak = float(np.abs(values).max()) if values.size else 0.0
    if not 0.0 < peak < float("inf"):
        return np.float32(1.0)
    return np.float32(2.0 ** float(np.clip(np.floor(np.log2(largest / peak)), -126, 126)))
