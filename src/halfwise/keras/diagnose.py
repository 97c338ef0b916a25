"""`diagnose`: one training step of any model, examined without training."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras

from halfwise.core.diagnosis import Diagnosis
from halfwise.core.plan import Plan
from halfwise.core.policy import compute_format
from halfwise.errors import PolicyError, UsageError
from halfwise.keras.apply import AppliedPlan
from halfwise.keras.heads import half_heads
from halfwise.keras.localise import FLOAT32, localise, precision_verdict
from halfwise.keras.probe import built
from halfwise.keras.start import plan_of_policies
from halfwise.keras.tracing.replay import Replay, replay
from halfwise.keras.tracing.silent import silent_overflow
from halfwise.keras.tracing.vanished import vanished_gradients
from halfwise.keras.training_step import OwnStep
from halfwise.keras.validate import check_batch

__all__ = ["diagnose", "diagnose_under", "plan_to_examine"]

_ALLOWED = '"mixed_float16", "mixed_bfloat16", "float32"'


def diagnose(
    model: keras.Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    policy: str = "mixed_float16",
    loss: Any = None,
    loss_scale: float = 65536.0,
) -> Diagnosis:
    """Whether one training step on a batch would fail under `policy`, where, and what to do about it.

    The step is run a few times: in the policy's precision, in float32, with and without the loss scale. Weights and
    optimizer are never touched; moving statistics, metrics, random seeds and dtype policies are as before afterwards.

    A step that looks healthy is also compared with float32 for overflow that a later operation turned into finite,
    wrong values (a hand-written RMS norm at 300 gives exactly 0), and its softmax heads are searched for samples that
    are misclassified and get a gradient of exactly 0.

    Args:
        model: the model; it is built if it is not. Where some of its layers compute in the policy's format already, its
            layers are left as they are; else all of them compute in it meanwhile.
        x: one batch of inputs: an array, or a structure of arrays, as for `fit`.
        y: the batch's targets.
        sample_weight: the batch's weights. Default: none.
        policy: `"mixed_float16"`, `"mixed_bfloat16"` or `"float32"`.
        loss: as for `model.compile`. Default None: the compiled model's own training step.
        loss_scale: what the loss is multiplied with; float16 only (other formats use 1).

    Returns:
        A diagnosis; `diagnosis.healthy` where nothing has to be done, and `print(diagnosis.text())` for the screen.

    Raises:
        PolicyError: the policy is unknown, `"auto"`, or no name.
        UsageError: this is no Keras model, there is no loss, or the loss scale is no positive number.

    Example:
        >>> import keras, numpy as np, halfwise.keras as hw
        >>> large = keras.initializers.Constant(40.0)
        >>> model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(2, kernel_initializer=large)])
        >>> diagnosis = hw.diagnose(model, np.full((1, 64), 60.0), np.zeros((1, 2)), loss="mse")
        >>> diagnosis.verdict, diagnosis.module, diagnosis.operation
        ('overflow_at_every_scale', 'dense', 'matmul')
    """
    half_format = _checked(model, policy, loss_scale)
    check_batch("diagnose", x, y, sample_weight)
    data = (x, y, sample_weight)
    step = None if loss is None and model.compiled else OwnStep(model, loss)
    built(model, data, step)
    scale = loss_scale if half_format == "float16" else 1.0
    return diagnose_under(
        plan_to_examine(model, half_format), model, data, half_format=half_format, loss_scale=scale, step=step
    )


def diagnose_under(
    plan: Plan,
    model: keras.Model,
    data: tuple[Any, ...],
    *,
    half_format: str,
    loss_scale: float,
    step: Callable[..., Any] | None,
) -> Diagnosis:
    """Whether one step of the built model on `data` would fail under `plan`; see `diagnose`.

    Args:
        half_format: the plan's format of fewest bits, or `"float32"`.
        step: the training step; None for the compiled model's own.
    """
    found = localise(
        model,
        data,
        plan=plan,
        apply_plan=lambda other: AppliedPlan(model, other, settle=False),
        loss_scale=loss_scale,
        half_format=half_format,
        step=step,
    )
    if found.verdict != "not_reproducible":
        return found
    unseen = _finite_and_wrong(model, data, plan, half_format, step) if half_format != "float32" else None
    return unseen or Diagnosis("healthy")


def _finite_and_wrong(
    model: keras.Model, data: tuple[Any, ...], plan: Plan, half_format: str, step: Callable[..., Any] | None
) -> Diagnosis | None:
    """The diagnosis of a step that is sound and yet wrong; None where it is not."""

    def run(under: Plan) -> Replay:
        with AppliedPlan(model, under, settle=False):
            return replay(model, data, step=step)

    half, full = run(plan), run(FLOAT32)
    origins, what = silent_overflow(half.records, full.records)
    if origins:
        return precision_verdict(model, half, origins, what, half_format, 1.0)
    with AppliedPlan(model, plan, settle=False):
        return vanished_gradients(model, data, half_heads(model, plan), half_format=half_format, step=step)


def plan_to_examine(model: keras.Model, half_format: str) -> Plan:
    """What the layers' own policies say, where some compute in the format already; else the format everywhere."""
    standing = plan_of_policies(model)
    in_use = half_format != "float32" and standing.uses(half_format)
    return standing if in_use else Plan.manual(default=half_format, framework="keras")


def _checked(model: Any, policy: Any, loss_scale: Any) -> str:
    """The format that the policy computes in."""
    if not isinstance(model, keras.Model):
        raise UsageError(f"diagnose(model={model!r}): it must be a keras.Model: hw.diagnose(model, x, y)")
    if not isinstance(policy, str):
        raise PolicyError(
            f"diagnose(policy={policy!r}): it must be a policy's name. Allowed: {_ALLOWED}; "
            "to examine a plan, hw.apply(model, plan) first."
        )
    if policy == "auto":
        raise PolicyError(
            'diagnose(policy="auto"): "auto" has no precision of its own before evidence is gathered. '
            f"Allowed: {_ALLOWED}; try the one you mean to train in."
        )
    is_number = isinstance(loss_scale, int | float) and not isinstance(loss_scale, bool)
    if not (is_number and math.isfinite(loss_scale) and loss_scale > 0):
        raise UsageError(f"diagnose(loss_scale={loss_scale!r}): it must be a finite number above 0, such as 65536.0")
    return compute_format(policy)
