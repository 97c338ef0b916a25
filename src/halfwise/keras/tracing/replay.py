"""Runs a training step once more, recorded, and says whether it would be applied."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from halfwise.keras.probe import Probed, probe, to_numpy
from halfwise.keras.tracing.records import Record
from halfwise.keras.tracing.trace import Trace

__all__ = ["LARGEST_NORM", "Replay", "replay"]

LARGEST_NORM = math.sqrt(float(np.finfo(np.float32).max))
"""A gradient above it has no finite square in float32: Adam would freeze."""


@dataclass(frozen=True)
class Replay:
    """What one more run of the step showed.

    Attributes:
        loss_finite: the loss was finite.
        gradients_sound: the squared norm of the unscaled gradients is finite in float32.
        records: what ran.
        limit: gradients above it count as bad: inf unless all are finite and too large to square.
        probed: loss, gradients and weights.
    """

    loss_finite: bool
    gradients_sound: bool
    records: Sequence[Record]
    limit: float
    probed: Probed

    @property
    def sound(self) -> bool:
        """The step would be applied."""
        return self.loss_finite and self.gradients_sound

    @property
    def what(self) -> str:
        """What is wrong, in words."""
        if not self.loss_finite:
            return "the loss is not finite"
        if self.limit < math.inf:
            return "the squared norm of the gradients is not finite in float32"
        return "gradients are not finite"


def replay(
    model: keras.Model,
    data: tuple[Any, ...],
    *,
    step: Callable[..., Any] | None = None,
    state: tuple[Any, ...] | None = None,
    loss_scale: float = 1.0,
) -> Replay:
    """Runs one training step on `data` in the precision that the model stands in, and puts back what it changed."""
    with Trace(model) as trace:
        probed = probe(model, data, step=step, state=state, loss_scale=loss_scale)
    norm, largest = 0.0, 0.0
    for _, gradient in probed.gradients:
        values = to_numpy(gradient).astype(np.float32) / np.float32(loss_scale)
        with np.errstate(over="ignore", invalid="ignore"):
            norm += float(np.square(values).sum(dtype=np.float32))
        largest = max(largest, float(np.abs(values).max(initial=0.0)))  # NaN is never the larger one
    sound = math.isfinite(norm) and norm <= float(np.finfo(np.float32).max)
    finite = all(np.isfinite(to_numpy(gradient).astype(np.float32)).all() for _, gradient in probed.gradients)
    limit = min(LARGEST_NORM, largest) / 2 if finite and not sound else math.inf
    return Replay(math.isfinite(probed.loss), sound, trace.settle(), limit, probed)
