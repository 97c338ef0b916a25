"""Batches of the embedded data, as tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from halfwise.workloads.datasets import load_data
from halfwise.workloads.text_data import TextData

__all__ = ["BATCHES", "digit_batches", "passage_batches", "vocabulary"]

BATCHES = 4


def digit_batches(seed: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """`(images, labels)`: float32 (size, 1, 8, 8) in [0, 1], int64 (size,)."""
    images, labels = load_data("image", "digits").train
    return _batches(images, labels, seed, size)


def passage_batches(seed: int, size: int, words: int) -> list[tuple[Tensor, Tensor]]:
    """`(words, labels)` of State of the Union passages: int64 (size, words), 0 for padding, int64 (size,)."""
    numbers, labels = load_data("text", "sotu").train
    return _batches(numbers[:, :words].astype(np.int64), labels, seed, size)


def vocabulary() -> int:
    """How many different words the passages have, padding included."""
    data = load_data("text", "sotu")
    assert isinstance(data, TextData)
    return data.word_numbers


def _batches(inputs: np.ndarray, labels: np.ndarray, seed: int, size: int) -> list[tuple[Tensor, Tensor]]:
    order = np.random.default_rng(seed).permutation(len(labels))
    chosen = [order[start : start + size] for start in range(0, BATCHES * size, size)]
    return [(torch.from_numpy(inputs[rows]), torch.from_numpy(labels[rows]).long()) for rows in chosen]
