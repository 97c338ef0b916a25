"""What the Keras adapter accepts: one clear error for each thing that it cannot use."""

from __future__ import annotations

from os import PathLike, fspath
from pathlib import Path

import keras

from halfwise.core.plan import Plan
from halfwise.core.policy import POLICIES, parse_policy
from halfwise.core.timing import TimingTable
from halfwise.errors import PolicyError, UsageError
from halfwise.keras.names import named_layers

__all__ = ["as_policy", "check_model", "check_options", "check_timing"]

_HALF = ("float16", "bfloat16")


def as_policy(policy: str | Plan | PathLike[str]) -> str | Plan:
    """`"auto"`, `"float32"`, `"mixed_float16"`, `"mixed_bfloat16"`, or the plan that was given or lies in the file."""
    if isinstance(policy, Plan):
        return policy
    if isinstance(policy, PathLike) or (
        isinstance(policy, str) and policy not in POLICIES and (policy.endswith(".toml") or Path(policy).is_file())
    ):
        return Plan.load(fspath(policy))
    if not isinstance(policy, str):
        raise PolicyError(
            f"policy is {policy!r}. Allowed: {', '.join(map(repr, POLICIES))}, a Plan, or the path of a plan file "
            "(plan.toml)."
        )
    return parse_policy(policy)


def check_model(model: object) -> None:
    """Checks that `model` is a Keras model whose trainable variables are in float32.

    Raises:
        UsageError: it is not.
    """
    if not isinstance(model, keras.Model):
        raise UsageError(f"model is {type(model).__name__}; give a keras.Model")
    half = [path for path, layer in named_layers(model).items() if layer.variable_dtype in _HALF]
    if half:
        dtype = named_layers(model)[half[0]].variable_dtype
        raise UsageError(
            f"the variables of {', '.join(map(repr, half[:3]))} are {dtype}. Small updates would be lost (a weight of "
            f"1.0 in bfloat16 ignores every update below 0.004). Build the model under the policy 'mixed_{dtype}': "
            "computation in half, variables in float32"
        )


def check_options(
    *, guard: object, tolerance: float, objective: str = "time", timing: object = None, log: object = None
) -> None:
    """Checks the keyword arguments of `PrecisionGuard` and `plan`."""
    if guard is not True and guard is not False and guard != "report":
        raise UsageError(f'guard is {guard!r}; allowed: True, "report", False')
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0.0 < tolerance < float("inf"):
        raise UsageError(f"tolerance is {tolerance!r}; give a positive number, such as 0.1")
    if objective != "time":
        raise PolicyError(f"objective is {objective!r}; allowed: 'time'")
    if timing is not None and not isinstance(timing, TimingTable):
        raise UsageError(f"timing is {type(timing).__name__}; give a TimingTable, or None to measure")
    if log is not None and not callable(log):
        raise UsageError(f"log is {log!r}; give a function that takes a text, such as print, or None")


def check_timing(timing: TimingTable, model: keras.Model) -> None:
    """Checks that a supplied timing table is about layers of this model."""
    known = named_layers(model)
    if unknown := [path for path in timing.seconds if path not in known]:
        shown = ", ".join(map(repr, unknown[:5]))
        raise UsageError(f"the timing table names layers that {type(model).__name__!r} does not have: {shown}")
