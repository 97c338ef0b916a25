"""What a trace shows to be wrong: where values overflow, are wrong though finite, or an epsilon protects nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable

from halfwise.core.diagnosis import Diagnosis, Suspect
from halfwise.core.formats import get_format
from halfwise.core.hazards import Hazard, HazardKind
from halfwise.torch.localise import range_of, unsound_in_float32
from halfwise.torch.preflighting.observe import Run
from halfwise.torch.preflighting.regions import Setting
from halfwise.torch.preflighting.samples import SampledTrace, errors_against
from halfwise.torch.tracing import fixes
from halfwise.torch.tracing.dead import silent_overflow_between
from halfwise.torch.tracing.outside import from_outside
from halfwise.torch.tracing.records import Record
from halfwise.torch.tracing.slicing import Origins, origins, suspect_of
from halfwise.torch.tracing.trace import Trace

__all__ = ["in_float32_too", "infinite_constants", "lost_digits", "lost_epsilons", "overflows", "silent_overflows"]

_HALF = ("float16", "bfloat16")
_WRONG = 0.2
"""Relative error of what an operation makes from which on its digits count as lost, in formats of 7 bits and more."""

_ROUNDINGS = 4.0
"""The same in coarser formats, in roundings."""

_LOSES = 10.0
"""How much larger than its inputs' error an operation's must be to have lost the digits itself."""


def in_float32_too(run: Run) -> Hazard:
    """The hazard of a run in float32 that is not sound."""
    assert run.trace is not None
    assert run.replay is not None
    found = origins(run.trace, run.replay.bad, limit=run.replay.limit)
    if found.outside:
        diagnosis = from_outside(run.trace, found)
    else:
        diagnosis = unsound_in_float32(run.trace, found, run.replay.what)
    kind: HazardKind = "overflow" if diagnosis.verdict == "overflow_at_every_scale" else "unsound_in_float32"
    return _of_diagnosis(kind, diagnosis)


def overflows(run: Run, setting: Setting) -> list[Hazard]:
    """The hazards of a traced run under the policy that is not sound, one for each module that is to blame."""
    assert run.trace is not None
    assert run.replay is not None
    found = origins(run.trace, run.replay.bad, limit=run.replay.limit)
    hazards: dict[str, Hazard] = {}
    for record in found.operations:
        suspect = suspect_of(run.trace, record)
        hazards.setdefault(suspect.module, _overflow(run.trace, record, suspect, run.replay.what, setting))
    if not hazards:
        hazards[""] = Hazard(kind="overflow", detail=f"{run.replay.what} in {setting.half}, and sound in float32")
    return list(hazards.values())


def _overflow(trace: Trace, record: Record, suspect: Suspect, what: str, setting: Setting) -> Hazard:
    one = Origins((record,), ())
    kind: HazardKind = "overflow"
    detail = f"{what}: {range_of(record, suspect)}"
    if (epsilon := fixes.lost_epsilon(trace, record)) is not None:
        kind = "epsilon"
        detail = f"{what}: {record.operation} gives {record.found}, for {epsilon.value:g} is lost in {epsilon.dtype}"
    elif (constant := _constant_beyond(trace, record)) is not None:
        kind = "mask"
        holds = get_format(record.dtype).largest
        detail = f"{what}: the constant {constant:g} becomes {record.found}; {record.dtype} holds {holds:g}"
    lines = fixes.fixes_for_precision(trace, one, (suspect,), setting.half, setting.autocast_device)
    return _hazard(kind, suspect, detail, lines)


def silent_overflows(run: Run, reference: Run, setting: Setting) -> list[Hazard]:
    """The hazard that an overflow was turned into finite, wrong values."""
    assert run.trace is not None
    assert reference.trace is not None
    diagnosis = silent_overflow_between(
        run.trace, reference.trace, half_format=setting.half, device_type=setting.autocast_device
    )
    return [] if diagnosis is None else [_of_diagnosis("dead_output", diagnosis)]


def lost_epsilons(trace: SampledTrace) -> list[Hazard]:
    """Divisions, logarithms and roots whose protecting constant rounds to zero, whether they met a zero here or not."""
    hazards: dict[tuple[str, str], Hazard] = {}
    for record in trace.settle():
        if record.kind or record.direction != "forward" or not fixes.divides(record):
            continue
        epsilon = fixes.epsilon_behind(trace, record)
        if epsilon is None or epsilon.dtype not in _HALF or epsilon.rounded != 0.0:
            continue
        suspect = suspect_of(trace, record)
        smallest = fixes.smallest_epsilon(record.short, epsilon.dtype)
        fix = [
            f"eps = {smallest:g}  # the smallest that works; {epsilon.value:g} rounds to 0 in {epsilon.dtype}",
            "x = x.float()  # or compute these lines in float32",
        ]
        detail = f"{epsilon.value:g} is added in {epsilon.dtype}, where it is 0: {record.operation} has no protection"
        hazards.setdefault((suspect.module, suspect.source), _hazard("epsilon", suspect, detail, fix))
    return list(hazards.values())


def infinite_constants(trace: SampledTrace) -> list[str]:
    """Sentences on finite constants that became infinite in half: harmless as masks, until a row hides everything."""
    notes = []
    for record in trace.settle():
        if record.kind or record.direction != "forward" or record.finite or record.dtype not in _HALF:
            continue
        constant = _constant_beyond(trace, record)
        if constant is not None:
            at = f" at {record.place.source}" if record.place.source else ""
            notes.append(
                f"the constant {constant:g}{at} is {record.found} in {record.dtype}: "
                "fine in a mask, unless a row hides every position"
            )
    return list(dict.fromkeys(notes))


def lost_digits(run: Run, reference: Run, eps: float) -> list[Hazard]:
    """The first operation on the way to the loss that turned nearly right inputs into a wrong result.

    Args:
        run: under the policy, traced.
        reference: in float32, traced.
        eps: of the format that products are rounded to.
    """
    trace, other = run.trace, reference.trace
    assert trace is not None
    assert other is not None
    records, errors = trace.settle(), errors_against(trace, other)
    wrong = max(_WRONG, _ROUNDINGS * eps)
    for index in _ancestors(trace, run.made):
        record, error = records[index], errors.get(index, 0.0)
        if error < wrong or record.short == "_to_copy" or record.numel == 1:  # a scalar may be near 0 by chance
            continue
        inputs = [errors.get(given.record, 0.0) for given in record.inputs]
        if inputs and error >= _LOSES * max(inputs):
            suspect = suspect_of(trace, record)
            off = f"is off by {error:.0%} from float32" if math.isfinite(error) else "is inf or NaN"
            detail = (
                f"what {record.operation} makes {off}, "
                f"its inputs by {max(inputs):.1g}; they reach {suspect.largest_input:.5g}"
            )
            at = f"at {suspect.source} " if suspect.source else ""
            fix = f"x = x.float()  # {at}compute what leads here in float32, from its first input on"
            return [_hazard("precision", suspect, detail, [fix])]
    return []


def _ancestors(trace: SampledTrace, made: int) -> list[int]:
    """The operations that the loss was made from, in order; `made` is the record that made it."""
    pending = [made] if made >= 0 else []
    seen = set(pending)
    while pending:
        for given in trace.records[pending.pop()].inputs:
            if given.record not in seen:
                seen.add(given.record)
                pending.append(given.record)
    return sorted(index for index in seen if not trace.records[index].kind)


def _constant_beyond(trace: Trace, record: Record) -> float | None:
    """A finite constant in `record` (or in what it casts) that its format cannot hold."""
    if record.dtype not in _HALF:
        return None
    limit = get_format(record.dtype).largest
    scalars = list(record.scalars)
    if record.short in ("_to_copy", "where", "add", "mul", "masked_fill"):
        for given in record.inputs:
            parent = trace.records[given.record]
            scalars += parent.scalars if not parent.inputs else ()
            if record.short == "_to_copy" and parent.kind in ("buffer", "tensor") and parent.low == parent.high:
                scalars.append(parent.low)
    return next((s for s in scalars if math.isfinite(s) and abs(s) > limit), None)


def _of_diagnosis(kind: HazardKind, diagnosis: Diagnosis) -> Hazard:
    suspect = diagnosis.suspects[0] if diagnosis.suspects else None
    if suspect is None:
        return Hazard(kind=kind, detail=diagnosis.detail, fix=diagnosis.fix)
    return _hazard(kind, suspect, diagnosis.detail, diagnosis.fix)


def _hazard(kind: HazardKind, suspect: Suspect, detail: str, fix: Iterable[str]) -> Hazard:
    return Hazard(
        kind=kind,
        module=suspect.module,
        module_class=suspect.module_class,
        operation=suspect.operation,
        direction=suspect.direction,
        source=suspect.source,
        detail=detail,
        fix=tuple(fix),
    )
