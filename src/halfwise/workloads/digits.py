"""The digits that come with scikit-learn: 1,797 real handwritten ones of 8 by 8 pixels. Nothing is downloaded."""

from __future__ import annotations

import numpy as np

from halfwise.errors import MissingDependencyError
from halfwise.workloads.image_data import ImageData

__all__ = ["load_digits"]

_TEST_SHARE = 0.2
_BRIGHTEST = 16.0  # pixels are counts of set bits in 4 x 4 blocks


def load_digits() -> ImageData:
    """1,438 images for training and 359 for testing, the same ones every time, classes alike in both.

    Source: E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits, UCI, 1998.

    Raises:
        MissingDependencyError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as error:
        raise MissingDependencyError("scikit-learn", "workloads", "the data 'digits'") from error
    bunch = load()
    images = np.asarray(bunch.images, dtype=np.float32)[:, None] / np.float32(_BRIGHTEST)
    labels = np.asarray(bunch.target, dtype=np.int64)
    # numpy froze RandomState's streams: the split is the same with every version, unlike that of newer generators.
    random = np.random.RandomState(0)
    order = random.permutation(len(labels))
    test = np.concatenate([_first_share(order[labels[order] == digit]) for digit in range(10)])
    chosen = np.zeros(len(labels), dtype=bool)
    chosen[test] = True
    train, test = order[~chosen[order]], order[chosen[order]]
    return ImageData("digits", images[train], labels[train], images[test], labels[test], classes=10)


def _first_share(indices: np.ndarray) -> np.ndarray:
    return indices[: round(len(indices) * _TEST_SHARE)]
