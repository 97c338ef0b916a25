"""Batches as tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["tensors"]


def tensors(batches: Iterable[tuple[Any, ...]]) -> list[Any]:
    """The batches with tensors in the arrays' places; they share the arrays' memory.

    >>> import numpy as np
    >>> tensors([(np.ones(2, np.float32), np.zeros(2, np.int64))])
    [(tensor([1., 1.]), tensor([0, 0]))]
    """
    return [tuple(_tensor(array) for array in batch) for batch in batches]


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(array)
