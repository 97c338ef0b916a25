"""Weights and batches that make the same thing happen in every framework. The arithmetic stands beside each.

With 8 rows and 4 outputs the gradient of the mean squared error is `(output - y) / 16` per output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from tests.contract.adapter import SHAPES, Array, Batch, Weights

__all__ = [
    "BACKWARD",
    "CHAIN",
    "FORWARD",
    "GOOD",
    "HOPELESS",
    "INFINITE_TARGET",
    "NAN_INPUT",
    "ORDINARY",
    "OVERFLOW",
    "WIDE",
    "Case",
    "constant",
]


@dataclass(frozen=True)
class Case:
    """Weights, and a batch that fails with them."""

    weights: Weights
    batch: Batch


def constant(**kernels: float) -> Weights:
    """Each kernel filled with one number; biases of 0."""
    return {
        name: (np.full(shape, kernels[name], np.float32), np.zeros(shape[1], np.float32))
        for name, shape in SHAPES.items()
    }


def _ordinary() -> Weights:
    random = np.random.default_rng(0)
    return {
        name: (random.normal(0.0, 0.3, shape).astype(np.float32), random.normal(0.0, 0.1, shape[1]).astype(np.float32))
        for name, shape in SHAPES.items()
    }


def _rows(columns: int, value: float) -> Array:
    return np.full((8, columns), value, np.float32)


ORDINARY = _ordinary()
"""Weights with which nothing goes wrong by itself."""

_X = np.random.default_rng(1).normal(0.0, 1.0, (8, 8)).astype(np.float32)
_Y = np.random.default_rng(2).normal(0.0, 1.0, (8, 4)).astype(np.float32)

GOOD = Batch(_X, _Y)

OVERFLOW = Batch(_X, _rows(4, 20_000.0))
"""Gradients of 1,250 at the head's outputs: float16 holds them at loss scales up to 32, not at 64 (80,000)."""

NAN_INPUT = Batch(np.where(np.arange(64).reshape(8, 8) == 9, math.nan, _X).astype(np.float32), _Y)

INFINITE_TARGET = Batch(_X, np.where(np.arange(32).reshape(8, 4) == 5, math.inf, _Y).astype(np.float32))

HOPELESS = Batch(_X, _rows(4, 1e30))
"""Finite data whose squared error is infinite in float32 too."""

FORWARD = Case(
    constant(first=0.125, second=3.75, head=80.0),  # 1, then 60, then 16 * 60 * 80 = 76,800: float16 holds 65,504
    Batch(_rows(8, 1.0), _rows(4, 76_800.0 - 1 / 64)),  # almost right, so that backward has small numbers alone
)
"""The head's output overflows in float16."""

CHAIN = Case(
    constant(first=7.5, second=80.0, head=1e-5),  # 60, then 76,800, then 12.3
    Batch(_rows(8, 1.0), _rows(4, 12.0)),
)
"""The second layer's output overflows in float16; and so does the head's input once that output is in float32."""

BACKWARD = Case(
    constant(first=0.125, second=12.5, head=0.01),  # 1, then 200, then 32
    Batch(_rows(8, 1.0), _rows(4, 32.0 - 8_480.0)),  # gradients of 530; for the head's kernel 8 * 200 * 530 = 848,000
)
"""The gradient of the head's kernel overflows in float16 at loss scale 1; all others are below 34,000."""

WIDE = Case(
    constant(first=0.125, second=1.0, head=625.0),  # 1, then 16, then 160,000 = 16 * 16 * 625
    Batch(_rows(8, 1.0), _rows(4, 160_000.0 - 1 / 16)),
)
"""Sound in float32; "auto" must see that float16 cannot hold the head's output."""
