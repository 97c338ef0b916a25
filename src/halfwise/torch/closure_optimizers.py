"""Optimizers that call the closure themselves, several times a step, such as LBFGS.

Loss, backward, unscaling and the check happen inside each of their evaluations. They write weights
between evaluations, so that "all or nothing" needs copies of weights and optimizer state, which are put
back where any evaluation is not sound.
"""

from __future__ import annotations

import copy
import inspect
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfwise.core.healing import heal, judge
from halfwise.errors import UsageError
from halfwise.torch.attempt import Attempt
from halfwise.torch.closure import Closure, check_replayed
from halfwise.torch.result import StepResult

if TYPE_CHECKING:
    from halfwise.torch.engine import Engine

__all__ = ["needs_closure", "step_inside_optimizer"]


class _UnsoundError(Exception):
    """Ends the optimizer's step at an evaluation that is not sound."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt


def needs_closure(optimizer: Optimizer) -> bool:
    """True where `optimizer.step` cannot be called without a closure."""
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def step_inside_optimizer(
    engine: Engine, closures: tuple[Closure, ...], max_norm: float | None, expected: float | None
) -> StepResult:
    """One step of the only optimizer, which evaluates the closures as often as it likes.

    Args:
        engine, closures, max_norm: as in `MixedPrecision.step`.
        expected: the loss that the first evaluation must give; None does not check it.

    Raises:
        UsageError: there are several optimizers, which could not be stepped all or none; or the loss is another one.
    """
    if len(engine.optimizers) != 1:
        raise UsageError(
            f"{type(engine.optimizers[0]).__name__} and others: "
            "an optimizer that calls the closure itself must be the only one"
        )
    (optimizer,) = engine.optimizers
    weights = [p.detach().clone() for p in engine.trained()]
    optimizer_state = copy.deepcopy(optimizer.state_dict())

    def restore() -> None:
        with torch.no_grad():
            for parameter, kept in zip(engine.trained(), weights, strict=True):
                parameter.copy_(kept)
        optimizer.load_state_dict(copy.deepcopy(optimizer_state))

    engine.begin()
    incident, retries = None, 0
    while True:
        try:
            first = _run(engine, optimizer, closures, max_norm, expected)
        except _UnsoundError as unsound:
            restore()
            attempt = unsound.attempt
            if judge(engine, attempt) == "localise":
                attempt, incident, tries = heal(engine, closures, attempt)
                retries += tries
                if attempt.sound:
                    engine.rewind()
                    continue
            return engine.ended(attempt, engine.loss_scale, incident, retries, closures)
        except BaseException:
            restore()
            raise
        engine.applied(first)
        return engine.ended(first, engine.loss_scale, incident, retries, closures)


def _run(
    engine: Engine,
    optimizer: Optimizer,
    closures: tuple[Closure, ...],
    max_norm: float | None,
    expected: float | None,
) -> Attempt:
    attempts: list[Attempt] = []

    def evaluate() -> Tensor:
        engine.clear_gradients()
        if engine.begun is not None:
            engine.begun.clear()
        attempt = engine.attempt(closures)
        if expected is not None and not attempts:
            check_replayed(expected, attempt.loss_value)
        if not attempt.sound:
            raise _UnsoundError(attempt)
        if max_norm is not None:
            engine.clip(max_norm)
        attempts.append(attempt)
        return attempt.loss

    optimizer.step(evaluate)  # type: ignore[arg-type]  # torch's stub asks for a closure that returns a float
    return attempts[0]
