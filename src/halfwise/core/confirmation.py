"""Trying a plan on a whole step before it is used: the layers' times added up are a promise, this is the test.

The plan and float32 run the same batch in turn, so that whatever else the machine does meanwhile slows both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median, pstdev

from halfwise.core.objective import Objective
from halfwise.core.plan import Plan
from halfwise.core.planner import LEAST_GAIN, float32_plan
from halfwise.core.profile import Profile
from halfwise.core.sensitivity import Sensitivity
from halfwise.core.sifting import LEAST_LOSS_NOISE, Because
from halfwise.core.timing import TimingTable

__all__ = ["Trial", "confirmed"]

_ROUNDS = 3

Trial = Callable[[Plan], tuple[float, float]]
"""Runs a batch under a plan, forward and backward, and leaves no trace: `(loss, seconds)`, the loss not scaled."""


def confirmed(
    plan: Plan,
    trial: Trial,
    *,
    profile: Profile,
    timing: TimingTable,
    losses: Sequence[float],
    tolerance: float,
    sensitivity: Sensitivity | None = None,
    objective: Objective = "time",
    kept: Mapping[str, Because] = {},
) -> Plan:
    """`plan` where a whole step is faster under it and its loss hardly changes; else float32, with the reason.

    Args:
        plan: what the layers' ranges and times speak for.
        trial: runs the batch. What it raises is a reason for float32: a trial never ends a training.
        profile, timing, sensitivity, objective, kept: what the plan was made from, as in
            `halfwise.core.planner.plan_from`.
        losses: those of the evidence steps, from different batches.
        tolerance: share of the losses' own spread that the plan may change the loss by.

    Example:
        >>> half = Plan.manual(default="bfloat16")
        >>> evidence = {"profile": Profile({}), "timing": TimingTable({}), "losses": [1.0, 2.0], "tolerance": 0.1}
        >>> confirmed(half, lambda plan: (1.5, 0.9 if plan.uses("bfloat16") else 0.3), **evidence).default.detail
        'tried on a whole step, bfloat16 takes 3.00 times the float32 time'
    """
    what = plan.default.compute

    def in_float32(because: Because | None = None) -> Plan:
        return float32_plan(
            profile,
            timing,
            sensitivity=sensitivity,
            tolerance=tolerance,
            framework=plan.framework,
            model=plan.model,
            kept=kept,
            because=because,
        )

    try:
        half_runs, full_runs = _paired_runs(trial, plan, in_float32())
    except Exception as error:
        return in_float32(("operation", f"tried on a whole step, {what} cannot run it: {error}"))
    ratio = _relative_time([seconds for _, seconds in half_runs], [seconds for _, seconds in full_runs])
    if objective == "time" and not ratio < 1.0 - LEAST_GAIN:
        return in_float32(("slower", f"tried on a whole step, {what} takes {ratio:.2f} times the float32 time"))
    full_loss = full_runs[-1][0]
    change, spread = abs(half_runs[-1][0] - full_loss), max(pstdev(losses), LEAST_LOSS_NOISE * abs(full_loss))
    if not (math.isfinite(change) and change <= tolerance * spread):
        detail = (
            f"tried on a whole step, {what} changes the loss by {change:.3g}; "
            f"its spread over batches is taken to be {spread:.3g}, of which {tolerance:g} may be spent"
        )
        return in_float32(("sensitivity", detail))
    told = f"{plan.default.detail}; tried on a whole step, {what} takes {ratio:.2f} times the float32 time"
    return replace(plan, default=replace(plan.default, detail=told))


def _paired_runs(trial: Trial, half: Plan, full: Plan) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    trial(half)  # warm-up; float32 has just been trained in
    half_runs, full_runs = [], []
    for _ in range(_ROUNDS):
        half_runs.append(trial(half))
        full_runs.append(trial(full))
    return half_runs, full_runs


def _relative_time(half: list[float], full: list[float]) -> float:
    """The larger of two answers: by pairs (their median) and by the shortest times.

    On a busy machine either alone is easily fooled, and a wrong "faster" costs more than a missed one.
    """
    pairs = median(a / b for a, b in zip(half, full, strict=True))
    return max(pairs, min(half) / min(full))
