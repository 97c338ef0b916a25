"""The state of a step under way, and what came out of trying a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from halfwise.core.diagnosis import Diagnosis
from halfwise.core.guard import LARGEST_NORM
from halfwise.torch.gradients import Gradients
from halfwise.torch.snapshot import RandomState

__all__ = ["Attempt", "Begun"]


@dataclass
class Begun:
    """A step that has begun and not ended.

    Attributes:
        random_state: the generators before it.
        losses: the losses that went backward, detached, not scaled.
        unscaled: the gradients and their norm (a float32 scalar), once they are unscaled.
        stepped: the optimizers' step is queued already; it changes nothing where the numbers are not sound.
        diagnosis: what a trace of the step found, where it was traced and something was wrong.
    """

    random_state: RandomState
    losses: list[Tensor] = field(default_factory=list)
    unscaled: tuple[Gradients, Tensor] | None = None
    diagnosis: Diagnosis | None = None
    stepped: bool = False

    def clear(self) -> None:
        """Back to the beginning of the step."""
        self.losses, self.unscaled, self.stepped = [], None, False


@dataclass(frozen=True)
class Attempt:
    """One try at a batch: forward, backward, gradients unscaled and measured.

    Attributes:
        loss: the loss, detached, not scaled, no dimensions.
        output: what the closure returned besides it.
        loss_value, norm_value: loss and gradient norm on the host.
        unchecked: it is to be applied whatever the numbers are.
    """

    loss: Tensor
    output: Any
    loss_value: float
    norm_value: float
    unchecked: bool = False

    @property
    def loss_finite(self) -> bool:
        """The loss is finite."""
        return math.isfinite(self.loss_value)

    @property
    def gradients_sound(self) -> bool:
        """The squared norm of the gradients is finite in float32."""
        return self.norm_value <= LARGEST_NORM  # False for NaN

    @property
    def sound(self) -> bool:
        """The step may be applied."""
        return self.unchecked or (self.loss_finite and self.gradients_sound)
