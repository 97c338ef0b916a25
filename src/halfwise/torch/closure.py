"""Closures: the user's forward pass and loss as a function that can be called again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from halfwise.errors import UsageError

__all__ = ["Closure", "Region", "as_closures", "check_replayed", "split_loss"]

Closure = Callable[[], Any]
"""Returns the loss (a tensor with one element), or a tuple that begins with it."""

Region = Callable[[], AbstractContextManager[object]]
"""Makes a context in which a closure runs in some precision."""


def as_closures(closure: Closure | Sequence[Closure]) -> tuple[Closure, ...]:
    """One closure, or several to accumulate over, as a tuple.

    Raises:
        UsageError: something is not callable, or the sequence is empty.
    """
    closures = (closure,) if callable(closure) else tuple(closure) if isinstance(closure, Sequence) else (closure,)
    if not closures or not all(callable(c) for c in closures):
        given = "an empty sequence" if not closures else repr(closure)
        raise UsageError(
            f"step() got {given}; it takes a function without arguments that returns the loss, or a non-empty list of "
            "such functions to accumulate over: mp.step(lambda: criterion(model(x), y))"
        )
    return closures


def split_loss(returned: Any) -> tuple[Tensor, Any]:
    """`(loss, output)` from what a closure returned; `output` is None where only the loss came.

    Raises:
        UsageError: it is not a tensor with one element that depends on parameters.
    """
    loss, output = returned, None
    if isinstance(returned, tuple) and returned:
        loss, output = returned[0], returned[1] if len(returned) == 2 else returned[1:]
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"the closure returned {type(returned).__name__}; it must return the loss, a tensor with one element, "
            "or a tuple that begins with it: lambda: criterion(model(x), y)"
        )
    if loss.numel() != 1:
        raise UsageError(
            f"the closure returned a loss of shape {tuple(loss.shape)}; it must have one element: "
            "reduce it, say with .mean()"
        )
    if not loss.is_floating_point():
        raise UsageError(f"the closure returned a loss of dtype {loss.dtype}; it must be a real floating-point number")
    if not loss.requires_grad:
        raise UsageError(
            "the closure returned a loss that depends on no trainable parameter (requires_grad is False); "
            "compute it from the model's output without .detach(), .item() or torch.no_grad()"
        )
    return loss, output


def check_replayed(expected: float, found: float) -> None:
    """Checks that a closure gave the same loss twice, up to what kernels that add in varying order may change.

    Raises:
        UsageError: the losses differ, so the closure cannot be replayed.
    """
    if math.isfinite(expected) and math.isfinite(found) and abs(expected - found) > 1e-3 * max(abs(expected), 1e-6):
        raise UsageError(
            f"the closure gave the losses {expected:.6g} and {found:.6g} "
            "when it was called twice on unchanged weights: "
            "it seems to draw a new batch at each call, or to change its inputs. "
            "The guard must be able to run a batch again: draw the batch outside "
            "(for x, y in loader: mp.step(lambda: criterion(model(x), y))), or pass guard=False"
        )
