"""Batches as Keras takes them: channels last, whole numbers of 32 bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from halfwise.workloads import batches

__all__ = ["channels_last", "digit_batches", "integers"]


def channels_last(images: Any) -> Any:
    """(size, channels, height, width) to (size, height, width, channels)."""
    return np.ascontiguousarray(np.moveaxis(images, 1, -1))


def integers(numbers: Any) -> Any:
    """int64 as int32, which is what JAX has."""
    return numbers.astype(np.int32)


def digit_batches(seed: int, size: int) -> list[tuple[Any, Any]]:
    """`(images, labels)`: float32 (size, 8, 8, 1) in [0, 1], int32 (size,)."""
    return [(channels_last(images), integers(labels)) for images, labels in batches.digit_batches(seed, size)]
