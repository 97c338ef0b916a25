"""`step`: one guarded training step, for loops of the user's own."""

from __future__ import annotations

from typing import Any

import keras

from halfwise.errors import UsageError
from halfwise.keras.guard import PrecisionGuard
from halfwise.keras.result import StepResult
from halfwise.keras.validate import check_batch, check_model

__all__ = ["step"]

_GUARD = "_halfwise_guard"  # an attribute of the model, so that both go together


def step(
    model: keras.Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    loss: Any = None,
    optimizer: keras.optimizers.Optimizer | None = None,
    guard: PrecisionGuard | None = None,
) -> StepResult:
    """Trains `model` on one batch: forward, loss, scaling, gradients, check, update; skips or heals a bad step.

    The same policies, guard and incidents as in `fit`. The step is compiled at its first call (not on torch, nor where
    the model was compiled with `run_eagerly=True`).

    Args:
        model: the model; compiled, or with `loss` and `optimizer` given.
        x, y, sample_weight: arrays or tensors, or structures of them, as for `fit`; one batch.
        loss: what `model.compile` takes as a loss; default the model's own.
        optimizer: default the model's own. It is driven through a `LossScaleOptimizer`, and so must not be used for
            this model elsewhere.
        guard: holds policy, options, plan and incidents. Default: one for the model, made at the first call.

    Returns:
        Loss, predictions, whether the step was applied, and what the guard did.

    Raises:
        UsageError: something cannot be used as given.
        TrainingStopped: the guard gave up. Weights and optimizer are those of the last applied step.

    Example:
        >>> import keras, numpy as np, halfwise.keras as hw
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> optimizer = keras.optimizers.SGD(0.1)
        >>> result = hw.step(model, np.ones((8, 4)), np.ones((8, 1)), loss="mse", optimizer=optimizer)
        >>> result.applied, tuple(result.output.shape)
        (True, (8, 1))
    """
    check_model(model)
    check_batch("step", x, y, sample_weight)
    if guard is None:
        guard = model.__dict__.setdefault(_GUARD, PrecisionGuard())
    elif not isinstance(guard, PrecisionGuard):
        raise UsageError(f"step(guard={guard!r}): give a PrecisionGuard, or leave it out")
    return guard._step(model, (x, y, sample_weight), loss, optimizer)
