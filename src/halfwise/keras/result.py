"""What a training step gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from halfwise.core.diagnosis import Incident

__all__ = ["StepResult"]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The outcome of one step.

    Attributes:
        loss: the loss of the batch, not scaled. Within `fit` it is the difference of two running sums, right to about
            four digits.
        output: the model's predictions for the batch, a tensor or a structure of tensors; None within `fit`.
        applied: the optimizer moved the weights. False means that the step was skipped: weights, optimizer, moving
            statistics, seeds and metrics are as before it.
        loss_scale: the scale that this step's loss was multiplied by; 1.0 where none is used.
        grad_norm: the 2-norm over all gradients, unscaled and before clipping; not finite where the step was skipped.
        incident: what the guard did or found, None on nearly all steps.
        retries: how often the batch was run again after the guard healed something.
    """

    loss: float
    output: Any
    applied: bool
    loss_scale: float
    grad_norm: float
    incident: Incident | None = None
    retries: int = 0
