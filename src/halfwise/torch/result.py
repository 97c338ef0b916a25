"""What a training step gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from halfwise.core.diagnosis import Incident

__all__ = ["StepResult"]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The outcome of one step.

    Attributes:
        loss: the loss (of several closures: their mean), detached, not scaled, no dimensions.
        output: what the closure returned besides the loss; a list of these for several
            closures; None where there was none.
        applied: the optimizer moved the weights. False means that the step was skipped: weights, optimizer state and
            buffers are as before it, and a learning-rate scheduler should not step.
        loss_scale: the scale that this step's loss was multiplied by; 1.0 where none is used.
        grad_norm: the 2-norm over all gradients, unscaled and before clipping; not finite where the step was skipped.
        incident: what the guard did or found, None on nearly all steps.
        retries: how often the batch was run again after the guard healed something.
    """

    loss: Tensor
    output: Any
    applied: bool
    loss_scale: float
    grad_norm: float
    incident: Incident | None = None
    retries: int = 0
