"""Overflow that leaves no NaN: a later operation turned the infinity into finite, wrong values.

`x * rsqrt(mean(x ** 2))` at 300 in float16 is `x * rsqrt(inf)`, which is 0: loss and gradients stay finite and the
layer is dead. But `1 / (1 + exp(12))` is healed rightly. So each healed result is compared with float32's at the same
place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn

from halfwise.core.diagnosis import Diagnosis
from halfwise.torch.closure import Closure, Region
from halfwise.torch.localise import precision_verdict
from halfwise.torch.region import device_type_of
from halfwise.torch.tracing.records import Record
from halfwise.torch.tracing.replay import replay
from halfwise.torch.tracing.slicing import Origins, origins
from halfwise.torch.tracing.trace import Trace

__all__ = ["silent_overflow", "silent_overflow_between"]

_HALF = ("float16", "bfloat16")
_FACTOR = 2.0  # largest values further apart than this are different, whatever rounding does

_SMALL = 2.0**-14  # what lies below float16's normal numbers may vanish without a fault

_Where = tuple[str, str, str, int]


def silent_overflow(
    model: nn.Module, closures: Sequence[Closure], *, half: Region, full: Region, half_format: str
) -> Diagnosis | None:
    """The diagnosis of a sound step in which an overflow made values finite and wrong; None where there is none."""
    trace = replay(model, closures, half, 1.0, traced=True).trace
    assert trace is not None
    if not _healed(trace):
        return None
    reference = replay(model, closures, full, 1.0, traced=True).trace
    assert reference is not None
    return silent_overflow_between(trace, reference, half_format=half_format, device_type=device_type_of(model))


def silent_overflow_between(trace: Trace, reference: Trace, *, half_format: str, device_type: str) -> Diagnosis | None:
    """The same, from traces that exist: one in half precision and one in float32."""
    healed = _healed(trace)
    theirs = _by_place(reference)
    ours = {record.index: where for where, record in _by_place(trace).items()}

    def is_wrong(record: Record) -> bool:
        return any(_differs(r, theirs.get(ours[r.index])) for r in (record, *_readers(trace, record)))

    wrong = [record for record in healed if is_wrong(record)]
    if not wrong:
        return None
    # the walk starts at the inputs of the healing operations: these are the infinities
    starts = [given.record for record in wrong for given in record.inputs if _overflowed(trace.records[given.record])]
    found = origins(trace, starts)
    found = Origins(tuple(r for r in found.operations if r.dtype in _HALF), ())
    if not found.operations:
        return None
    first = wrong[0]
    at = f" at {first.place.source}" if first.place.source else ""
    what = (
        f"loss and gradients are finite, but {first.operation}{at} turned an infinity into values up to "
        f"{first.largest:.3g}; in float32 they reach {theirs[ours[first.index]].largest:.3g}"
    )
    return precision_verdict(trace, found, what, half_format, device_type, 1.0)


def _overflowed(record: Record) -> bool:
    return not record.finite and not record.intended and not record.kind


def _healed(trace: Trace) -> list[Record]:
    """Forward records with finite values although an input has overflowed."""
    records = trace.settle()
    return [
        record
        for record in records
        if record.finite
        and record.direction == "forward"
        and any(_overflowed(records[given.record]) for given in record.inputs)
    ]


def _readers(trace: Trace, record: Record) -> list[Record]:
    """Forward records that read `record`: a factor of 0 instead of 1e-5 matters where it is multiplied by 1e5."""
    return [
        reader
        for reader in trace.records[record.index + 1 :]
        if reader.direction == "forward" and any(given.record == record.index for given in reader.inputs)
    ]


def _by_place(trace: Trace) -> dict[_Where, Record]:
    """Records by module, operation, line, and count of such: the same place has the same key in both precisions."""
    count: Counter[tuple[str, str, str]] = Counter()
    placed: dict[_Where, Record] = {}
    for record in trace.settle():
        where = (record.place.module, record.operation, record.place.source)
        placed[(*where, count[where])] = record
        count[where] += 1
    return placed


def _differs(record: Record, reference: Record | None) -> bool:
    if reference is None or not reference.finite:
        return False
    low, high = sorted((record.largest, reference.largest))
    return high > max(_FACTOR * low, _SMALL)
