"""What every training needs of its data, whatever the inputs are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["Arrays", "Dataset", "load_data"]

Arrays = tuple[NDArray[Any], NDArray[np.int64]]
"""Inputs, and a label in [0, classes) for each."""


class Dataset(Protocol):
    """Labelled inputs, split for training and testing: `ImageData` or `TextData`."""

    @property
    def name(self) -> str:
        """A built-in name, or the path."""

    @property
    def classes(self) -> int:
        """Number of classes."""

    @property
    def train(self) -> Arrays:
        """Inputs and labels for training."""

    @property
    def test(self) -> Arrays:
        """Inputs and labels for testing."""

    def first(self, limit: int) -> Self:
        """The data with at most `limit` inputs for training and `limit` for testing."""

    def describe(self) -> dict[str, Any]:
        """What a run record keeps of the data: name, counts, shape."""


def load_data(workload: str, source: str | Path) -> Dataset:
    """The data of a workload: a built-in name, or a path.

    Args:
        workload: `"image"` or `"text"`.
        source: see `load_images` and `load_texts`.

    Raises:
        UsageError: there is no such data; DataError: they are malformed.
    """
    if workload == "image":
        from halfwise.workloads.image_data import load_images

        return load_images(source)
    from halfwise.workloads.text_data import load_texts

    return load_texts(source)
