"""Finds the module, operation and line behind a failed step by running its closure again.

Up to three replays, as few as the verdict needs: half precision at loss scale 1 (traced), plain float32, and half
    precision at
the loss scale at hand. Backward is linear in the loss scale, so the trace at scale 1 also tells which operation
overflows at any other. If the loss itself is not finite, nothing goes backward in half. Everything a replay changes is
put back after it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from halfwise.core.diagnosis import Diagnosis, Suspect
from halfwise.torch.closure import Closure, Region
from halfwise.torch.region import device_type_of
from halfwise.torch.tracing import fixes
from halfwise.torch.tracing.outside import from_outside
from halfwise.torch.tracing.records import Record
from halfwise.torch.tracing.replay import Replay, replay
from halfwise.torch.tracing.slicing import Origins, origins, scale_limit, suspect_of, suspects
from halfwise.torch.tracing.trace import Trace

__all__ = ["localise", "precision_verdict", "range_of", "unsound_in_float32"]

_HALF = ("float16", "bfloat16")


def localise(
    model: nn.Module,
    closures: tuple[Closure, ...],
    *,
    half: Region,
    full: Region,
    half_format: str,
    loss_scale: float,
) -> Diagnosis:
    """Why the step of `closures` failed, and where.

    Args:
        model: what the closures run; its parameters' gradients, its buffers and the random generators are put back.
        closures: the step; its loss is the mean over them.
        half: makes a context in the precision that failed.
        full: makes a context in plain float32.
        half_format: the format behind `half`; `"float32"` if that is no mixed precision (then `full` is not used).
        loss_scale: that of the failed step.

    Returns:
        A diagnosis; its verdict is `"not_reproducible"` where nothing fails any more.

    Raises:
        UsageError: a closure returns no loss.
    """
    traced = replay(model, closures, half, 1.0, traced=True)
    if traced.sound:
        return _at_the_scale(model, closures, half, half_format, loss_scale, traced)
    assert traced.trace is not None
    device = device_type_of(model)
    found = origins(traced.trace, traced.bad, limit=traced.limit)
    if found.outside:
        return from_outside(traced.trace, found)
    if half_format not in _HALF:
        return unsound_in_float32(traced.trace, found, traced.what)
    try:
        plain = replay(model, closures, full, 1.0, traced=False)
    except RuntimeError as error:  # code that casts to half itself meets weights in float32
        what = f"{traced.what} in {half_format}, and the code does not run in float32 ({str(error).splitlines()[0]})"
        if found.operations and fixes.is_for_want_of_precision(traced.trace, found.operations[0]):
            return precision_verdict(traced.trace, found, what, half_format, device, loss_scale)
        return unsound_in_float32(traced.trace, found, what)
    if plain.sound:
        what = f"{traced.what} in {half_format} at loss scale 1 too, and sound in float32"
        return precision_verdict(traced.trace, found, what, half_format, device, loss_scale)
    again = replay(model, closures, full, 1.0, traced=True)
    if again.sound or again.trace is None:
        return unsound_in_float32(traced.trace, found, plain.what)
    found = origins(again.trace, again.bad, limit=again.limit)
    if found.outside:
        return from_outside(again.trace, found)
    return unsound_in_float32(again.trace, found, again.what)


def precision_verdict(
    trace: Trace, found: Origins, what: str, half_format: str, device: str, loss_scale: float
) -> Diagnosis:
    """The verdict `"overflow_at_every_scale"` on the operations `found`, which are sound in float32."""
    named = suspects(trace, found)
    if not named:
        return Diagnosis("overflow_at_every_scale", detail=what, evidence={"loss_scale": loss_scale})
    return Diagnosis(
        "overflow_at_every_scale",
        suspects=named,
        detail=f"{what}; {range_of(found.operations[0], named[0])}",
        fix=tuple(fixes.fixes_for_precision(trace, found, named, half_format, device)),
        evidence=_numbers(named[0], loss_scale),
    )


def unsound_in_float32(trace: Trace, found: Origins, what: str) -> Diagnosis:
    """The verdict on a failure under float32: no precision problem, unless the code itself goes to half."""
    named = suspects(trace, found)
    if not named:
        return Diagnosis("not_a_precision_problem", detail=f"{what} in float32")
    record = found.operations[0]
    if fixes.is_for_want_of_precision(trace, record):
        return Diagnosis(
            "overflow_at_every_scale",
            suspects=named,
            detail=f"{what}; the code itself computes in half (.half(), half constants or weights), so a policy of "
            f"float32 changes nothing; {range_of(record, named[0])}",
            fix=tuple(fixes.fixes_for_half_code(trace, record, named[0])),
            evidence=_numbers(named[0], 1.0),
        )
    return Diagnosis(
        "not_a_precision_problem",
        suspects=named,
        detail=f"{what} in float32 too; {range_of(record, named[0])}",
        fix=tuple(fixes.fixes_for_float32(found)),
        evidence=_numbers(named[0], 1.0),
    )


def _at_the_scale(
    model: nn.Module, closures: Sequence[Closure], half: Region, half_format: str, loss_scale: float, traced: Replay
) -> Diagnosis:
    """The verdict where scale 1 is sound."""
    if loss_scale == 1.0 or replay(model, closures, half, loss_scale, traced=False).sound:
        return Diagnosis(
            "not_reproducible",
            detail=f"loss and gradients are finite when the step runs again in {half_format} at scale {loss_scale:g}",
            fix=("does the closure draw a new batch, or change its inputs? draw the batch outside of it",),
        )
    assert traced.trace is not None
    limit = scale_limit(traced.trace, traced.seeds, loss_scale)
    named = tuple(dict.fromkeys(suspect_of(traced.trace, r, scale=loss_scale) for r in limit.overflowing))
    largest = limit.largest
    if not named:  # it does not overflow by plain growth: look at what happens at that scale
        again = replay(model, closures, half, loss_scale, traced=True)
        if again.trace is not None and not again.sound:
            named = suspects(again.trace, origins(again.trace, again.bad, limit=again.limit))
    if largest >= loss_scale:
        return Diagnosis(
            "loss_scale_too_high",
            suspects=named,
            detail=f"gradients overflow at loss scale {loss_scale:g} and are finite at 1",
            fix=tuple(fixes.fixes_for_scale(1.0, device_type_of(model))),
            evidence={"loss_scale": loss_scale},
        )
    return Diagnosis(
        "loss_scale_too_high",
        suspects=named,
        detail=f"gradients overflow at loss scale {loss_scale:g} and are finite at 1; the largest power of two fitting "
        f"this batch is {largest:.17g}",
        fix=tuple(fixes.fixes_for_scale(largest, device_type_of(model))),
        evidence={"loss_scale": loss_scale, "largest_working_scale": largest},
    )


def range_of(record: Record, suspect: Suspect) -> str:
    """What the operation made of what, and what its format holds."""
    made = f"{record.operation} made {suspect.found} of inputs up to {suspect.largest_input:.4g}"
    if record.of:
        made += f" (gradient of {record.of})"
    if suspect.dtype in _HALF:
        made += f"; {suspect.dtype} holds {torch.finfo(getattr(torch, suspect.dtype)).max:.5g}"
    return made


def _numbers(suspect: Suspect, loss_scale: float) -> dict[str, float]:
    numbers = {"largest_input": suspect.largest_input, "loss_scale": loss_scale}
    if suspect.dtype in _HALF:
        numbers["format_max"] = torch.finfo(getattr(torch, suspect.dtype)).max
    return numbers
