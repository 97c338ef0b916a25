"""Finds the layer, operation and line behind a failed training step by running it again.

Up to three replays, as few as the verdict needs: half precision at loss scale 1, plain float32, and half precision at
the loss scale at hand. Everything a replay changes is put back after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import keras

from halfwise.core.diagnosis import Diagnosis, Suspect
from halfwise.core.formats import get_format
from halfwise.core.plan import Plan
from halfwise.keras.names import named_layers
from halfwise.keras.tracing import fixes
from halfwise.keras.tracing.extents import extent_of
from halfwise.keras.tracing.matching import counterparts
from halfwise.keras.tracing.outside import from_data, from_weights
from halfwise.keras.tracing.records import Record
from halfwise.keras.tracing.replay import Replay, replay
from halfwise.keras.tracing.slicing import Origin, largest_scale, origins_of, reads_from_outside

__all__ = ["FLOAT32", "localise", "precision_verdict"]

FLOAT32 = Plan.manual(default="float32", framework="keras")
_HALF = ("float16", "bfloat16")


def localise(
    model: keras.Model,
    data: tuple[Any, ...],
    *,
    plan: Plan,
    apply_plan: Callable[[Plan], AbstractContextManager[Any]],
    loss_scale: float,
    half_format: str,
    state: tuple[Any, ...] | None = None,
    step: Callable[..., Any] | None = None,
) -> Diagnosis:
    """Why the training step on `data` failed, and where.

    Args:
        model: the model; its weights are not touched, and all else is put back.
        data: `(x, y)` or `(x, y, sample_weight)`, as `train_step` gets it.
        plan: the precision that failed.
        apply_plan: makes a context in which the model computes as a plan says.
        loss_scale: that of the failed step; 1 where the loss is not scaled.
        half_format: `"float16"` or `"bfloat16"`; `"float32"` if the plan holds neither.
        state: JAX only: the training state, where the model's variables are empty, as they are during `fit`.
        step: the training step. Default: `model.train_step`.

    Returns:
        A diagnosis; its verdict is `"not_reproducible"` where nothing fails any more.
    """
    found = _localised(
        model,
        data,
        plan=plan,
        apply_plan=apply_plan,
        loss_scale=loss_scale,
        half_format=half_format,
        state=state,
        step=step,
    )
    kept = "".join(f', "{r.path}": "float32"' for r in plan.layers if r.compute == "float32" and r.path is not None)
    ours = f'"{found.module}": "float32"}}'  # a line to paste must not lower what is in float32 already
    return replace(found, fix=tuple(line.replace(ours, f"{ours[:-1]}{kept}}}") for line in found.fix))


def _localised(
    model: keras.Model,
    data: tuple[Any, ...],
    *,
    plan: Plan,
    apply_plan: Callable[[Plan], AbstractContextManager[Any]],
    loss_scale: float,
    half_format: str,
    state: tuple[Any, ...] | None,
    step: Callable[..., Any] | None,
) -> Diagnosis:

    def run(under: Plan, scale: float) -> Replay:
        with apply_plan(under):
            return replay(model, data, step=step, state=state, loss_scale=scale)

    half = run(plan, 1.0)
    if half.sound:
        return _at_the_scale(half, lambda: run(plan, loss_scale), half_format, loss_scale)
    found = _origins(half)
    blamed = _outside(model, data, half, found)
    if blamed is not None:
        return blamed
    if half_format not in _HALF:
        return _unsound_in_float32(model, half, found, half.what)
    try:
        plain = run(FLOAT32, 1.0)
    except Exception as error:  # code that casts to half itself meets tensors in float32
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        what = f"{half.what} in {half_format}, and the code does not run in float32 ({reason})"
        if found and fixes.is_for_want_of_precision(found[0]):
            return precision_verdict(model, half, found, what, half_format, loss_scale)
        return _unsound_in_float32(model, half, found, what)
    if plain.sound:
        what = f"{half.what} in {half_format} at loss scale 1 too, and sound in float32"
        return precision_verdict(
            model, half, _only_in_half(found, half.records, plain.records), what, half_format, loss_scale
        )
    found = _origins(plain)
    return _outside(model, data, plain, found) or _unsound_in_float32(model, plain, found, plain.what)


def precision_verdict(
    model: keras.Model, half: Replay, found: Sequence[Origin], what: str, half_format: str, loss_scale: float
) -> Diagnosis:
    """The verdict `"overflow_at_every_scale"` on operations that are sound in float32."""
    named = _suspects(model, half, found)
    evidence = {"loss_scale": loss_scale}
    if not named:
        return Diagnosis("overflow_at_every_scale", detail=what, evidence=evidence)
    if not found:
        return Diagnosis("overflow_at_every_scale", suspects=named, detail=what, evidence=evidence)
    return Diagnosis(
        "overflow_at_every_scale",
        suspects=named,
        detail=f"{what}; {_range_of(named[0])}",
        fix=tuple(fixes.fixes_for_precision(found[0], named[0], half_format)),
        evidence=_numbers(named[0], loss_scale),
    )


def _unsound_in_float32(model: keras.Model, plain: Replay, found: Sequence[Origin], what: str) -> Diagnosis:
    """The verdict on a failure under float32: no precision problem, unless the code itself goes to half."""
    named = _suspects(model, plain, found)
    if not found:
        return Diagnosis("not_a_precision_problem", suspects=named, detail=f"{what} in float32")
    if fixes.is_for_want_of_precision(found[0]):
        return Diagnosis(
            "overflow_at_every_scale",
            suspects=named,
            detail=f"{what}; the code itself computes in half (a cast, half constants), so a policy of float32 changes "
            f"nothing; {_range_of(named[0])}",
            fix=tuple(fixes.fixes_for_half_code(found[0], named[0])),
            evidence=_numbers(named[0], 1.0),
        )
    return Diagnosis(
        "not_a_precision_problem",
        suspects=named,
        detail=f"{what} in float32 too; {_range_of(named[0])}",
        fix=tuple(fixes.fixes_for_float32(found[0])),
        evidence=_numbers(named[0], 1.0),
    )


def _at_the_scale(half: Replay, run_again: Callable[[], Replay], half_format: str, loss_scale: float) -> Diagnosis:
    """The verdict where scale 1 is sound."""
    again = None if loss_scale == 1.0 else run_again()
    if again is None or again.sound:
        return Diagnosis(
            "not_reproducible",
            detail=f"loss and gradients are finite when the step runs again in {half_format} at scale {loss_scale:g}",
            fix=(
                "does the step draw random numbers past Keras, or change its data? then it is another step each time",
            ),
        )
    named = tuple(dict.fromkeys(origin.suspect for origin in _origins(again)))
    what = f"gradients overflow at loss scale {loss_scale:g} and are finite at 1"
    evidence = {"loss_scale": loss_scale}
    largest = largest_scale(half.records)
    if largest >= loss_scale:  # what overflows is out of sight
        return Diagnosis(
            "loss_scale_too_high", suspects=named, detail=what, fix=tuple(fixes.fixes_for_scale(1.0)), evidence=evidence
        )
    return Diagnosis(
        "loss_scale_too_high",
        suspects=named,
        detail=f"{what}; the largest power of two fitting this batch is {largest:.17g}",
        fix=tuple(fixes.fixes_for_scale(largest)),
        evidence={**evidence, "largest_working_scale": largest},
    )


def _origins(unsound: Replay) -> list[Origin]:
    return origins_of(unsound.records, loss_finite=unsound.loss_finite, limit=unsound.limit)


def _only_in_half(found: Sequence[Origin], half: Sequence[Record], plain: Sequence[Record]) -> list[Origin]:
    """The origins whose output is finite in float32; all where that leaves none."""
    theirs = counterparts(half, plain)
    left = [origin for origin in found if (same := theirs.get(origin.record.index)) is None or not same.bad]
    return left or list(found)


def _outside(model: keras.Model, data: tuple[Any, ...], unsound: Replay, found: Sequence[Origin]) -> Diagnosis | None:
    """The verdict where weights or data were bad from the start. Weights come first, since they spoil every batch."""
    from_within = any(not reads_from_outside(origin) for origin in found)
    weights = unsound.probed.weights
    return (
        from_weights(model, weights, infinite_state=False)
        or from_data(data, masks=False)
        or (None if from_within else from_weights(model, weights, infinite_state=True) or from_data(data, masks=True))
    )


def _suspects(model: keras.Model, unsound: Replay, found: Sequence[Origin]) -> tuple[Suspect, ...]:
    """The origins as suspects, each place and operation once; where nobody saw any, the layers whose weights got bad
    gradients, the last first.
    """
    if found:
        return tuple(dict.fromkeys(origin.suspect for origin in found))
    owners = {id(v): (path, layer) for path, layer in named_layers(model).items() for v in layer._trainable_variables}
    named = []
    for variable, gradient in reversed(unsound.probed.gradients):
        extent = extent_of(gradient)
        if extent is not None and extent.beyond(unsound.limit) and id(variable) in owners:
            path, layer = owners[id(variable)]
            name = type(layer).__name__
            largest = extent.largest_finite
            named.append(
                Suspect(path, f"{name}.call", "backward", "", layer.compute_dtype, extent.found, largest, name)
            )
    return tuple(dict.fromkeys(named))


def _range_of(suspect: Suspect) -> str:
    """What the operation made of what, and what its format holds."""
    made = f"{suspect.operation} made {suspect.found} of inputs up to {suspect.largest_input:.4g}"
    if suspect.direction == "backward":
        made = f"the gradient of {made}"
    maximum = _format_max(suspect.dtype)
    return f"{made}; {suspect.dtype} holds {maximum:.5g}" if math.isfinite(maximum) else made


def _numbers(suspect: Suspect, loss_scale: float) -> dict[str, float]:
    numbers = {"largest_input": suspect.largest_input, "loss_scale": loss_scale}
    maximum = _format_max(suspect.dtype)
    return {**numbers, "format_max": maximum} if math.isfinite(maximum) else numbers


def _format_max(dtype: str) -> float:
    return get_format(dtype).largest if dtype in _HALF else math.inf
