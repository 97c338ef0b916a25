"""Image classification data by name or from a directory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfwise.errors import DataError, UsageError
from halfwise.workloads.datasets import Arrays

__all__ = ["ImageData", "load_images"]


@dataclass(frozen=True, eq=False)
class ImageData:
    """Images with labels, split for training and testing.

    Attributes:
        name: a built-in name, or the directory.
        train_images, test_images: float32 in [0, 1], shape (images, channels, height, width).
        train_labels, test_labels: int64 in [0, classes), shape (images,).
        classes: number of classes.
    """

    name: str
    train_images: NDArray[np.float32]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.float32]
    test_labels: NDArray[np.int64]
    classes: int

    @property
    def train(self) -> Arrays:
        """Images and labels for training."""
        return self.train_images, self.train_labels

    @property
    def test(self) -> Arrays:
        """Images and labels for testing."""
        return self.test_images, self.test_labels

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one image."""
        channels, height, width = self.train_images.shape[1:]
        return channels, height, width

    def first(self, limit: int) -> ImageData:
        """The data with at most `limit` images for training and `limit` for testing."""
        return replace(
            self,
            train_images=self.train_images[:limit],
            train_labels=self.train_labels[:limit],
            test_images=self.test_images[:limit],
            test_labels=self.test_labels[:limit],
        )

    def describe(self) -> dict[str, Any]:
        """What a run record keeps of the data: name, counts, shape."""
        counts = {"train": len(self.train_labels), "test": len(self.test_labels)}
        return {"name": self.name, **counts, "shape": list(self.shape), "classes": self.classes}


def load_images(source: str | Path) -> ImageData:
    """`"digits"`, or a directory with the four IDX files of MNIST, Fashion-MNIST and their kind.

    Raises:
        DataError: the directory or a file in it is missing or malformed.
        UsageError: `source` is neither a built-in name nor a directory.
        MissingDependencyError: `"digits"` without scikit-learn.
    """
    if str(source) == "digits":
        from halfwise.workloads.digits import load_digits

        return load_digits()
    directory = Path(source).expanduser()
    if directory.is_dir():
        from halfwise.workloads.idx import load_idx

        return load_idx(directory)
    if directory.exists():
        raise DataError(f"{str(source)!r} is a file; give the directory that holds the IDX files, or 'digits'.")
    raise UsageError(
        f"no data called {str(source)!r}: give 'digits' (1,797 real digits that come with scikit-learn) or an existing "
        "directory with IDX files, such as /usr/share/datasets/fashion-mnist (Debian: dataset-fashion-mnist)."
    )
