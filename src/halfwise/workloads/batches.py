"""A few batches for each kind of model, as numpy arrays, which PyTorch and Keras both take theirs from."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfwise.workloads.datasets import load_data
from halfwise.workloads.text_data import TextData

__all__ = ["BATCHES", "digit_batches", "interaction_batches", "noisy_batches", "passage_batches", "vocabulary"]

BATCHES = 4

_PEOPLE = 20_000  # users, and items
_CATEGORIES = 200
_TASTES = 4

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]


def digit_batches(seed: int, size: int) -> list[tuple[Floats, Integers]]:
    """`(images, labels)` of real digits: float32 (size, 1, 8, 8) in [0, 1], int64 (size,).

    >>> images, labels = digit_batches(seed=0, size=32)[0]
    >>> images.shape, labels.shape
    ((32, 1, 8, 8), (32,))
    """
    return _batches(*load_data("image", "digits").train, seed, size)


def passage_batches(seed: int, size: int, words: int) -> list[tuple[Integers, Integers]]:
    """`(words, labels)` of State of the Union passages: int64 (size, words), 0 for padding, int64 (size,)."""
    numbers, labels = load_data("text", "sotu").train
    return _batches(numbers[:, :words].astype(np.int64), labels, seed, size)


def vocabulary() -> int:
    """How many different words the passages have, padding included."""
    data = load_data("text", "sotu")
    assert isinstance(data, TextData)
    return data.word_numbers


def interaction_batches(seed: int, size: int) -> list[tuple[Integers, Integers, Integers, Floats]]:
    """`(user, item, category, taken)`, each (size,), the last float32 of 0 and 1: synthetic.

    They hang together by hidden tastes; few of the 20,000 users and items are met often.
    """
    random = np.random.default_rng(seed)
    tastes, traits = random.normal(size=(2, _PEOPLE, _TASTES))
    found = []
    for _ in range(BATCHES):
        user, item = (random.random((2, size)) ** 4 * _PEOPLE).astype(np.int64)
        liked = (tastes[user] * traits[item]).sum(1) + random.normal(size=size) > 0.0
        found.append((user, item, item % _CATEGORIES, liked.astype(np.float32)))
    return found


def noisy_batches(seed: int, size: int) -> list[tuple[Floats, Floats, Floats]]:
    """`(noisy, time, noise)` as a diffusion model is trained on: digits with noise, more of it the later the time.

    float32 (size, 1, 8, 8), (size,) in [0, 1), and as the first.
    """
    random = np.random.default_rng(seed)
    found = []
    for images, _ in digit_batches(seed, size):
        noise = random.normal(size=images.shape).astype(np.float32)
        time = random.random(len(images)).astype(np.float32)
        kept = np.cos(time * np.float32(np.pi / 2))[:, None, None, None]
        found.append((kept * images + np.sqrt(1 - kept**2) * noise, time, noise))
    return found


def _batches(inputs: NDArray[Any], labels: Integers, seed: int, size: int) -> list[tuple[Any, Integers]]:
    order = np.random.default_rng(seed).permutation(len(labels))
    chosen = [order[start : start + size] for start in range(0, BATCHES * size, size)]
    return [(inputs[rows], labels[rows]) for rows in chosen]
