"""From a bad value back to the operations that made it.

Not the first non-finite operation in time: code may compute log(0) and never use it, and masks hold -inf on purpose. So
the walk starts at what is bad (the loss, gradients) and follows only inputs that are bad themselves. Where none is, the
operation
made the trouble: it is an origin.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from halfwise.core.diagnosis import Suspect
from halfwise.torch.tracing.operations import CONTRACTIONS, SOFTMAX_LIKE
from halfwise.torch.tracing.records import Record
from halfwise.torch.tracing.trace import Trace

__all__ = ["Origins", "ScaleLimit", "largest_input", "origins", "scale_limit", "suspect_of", "suspects"]


@dataclass(frozen=True)
class Origins:
    """Where the bad values come from.

    Attributes:
        operations: records of operations with sound inputs and a bad result, forward before backward, in order of
            execution.
        outside: records of parameters, buffers and inputs that were bad from the start.
    """

    operations: tuple[Record, ...]
    outside: tuple[Record, ...]


def origins(trace: Trace, starts: Iterable[int], *, limit: float = math.inf) -> Origins:
    """Follows bad values from the records `starts` back to where they arose.

    Args:
        trace: a finished trace.
        starts: indices of records that are known to be bad.
        limit: with a finite value, magnitudes above it are bad too (gradients of 1e30).
    """
    records = trace.settle()
    pending = [index for index in starts if index >= 0]
    seen = set(pending)
    made: set[int] = set()
    outside: set[int] = set()
    while pending:
        record = records[pending.pop()]
        bad = [given.record for given in record.inputs if _is_bad(trace, records[given.record], given.extent, limit)]
        if record.kind:
            outside.update({record.index} if record.kind != "gradient" else ())
        elif not bad:
            guilty = [] if record.intended else _infinite_data(record, records)
            outside.update(guilty)
            if not guilty:
                made.add(record.index)
        for index in bad:
            if index not in seen:
                seen.add(index)
                pending.append(index)
    ordered = sorted((records[i] for i in made), key=lambda r: (r.direction != "forward", r.index))
    return Origins(tuple(ordered), tuple(records[i] for i in sorted(outside)))


def _is_bad(trace: Trace, record: Record, extent: int, limit: float) -> bool:
    if record.finite and (limit == math.inf or record.largest <= limit):
        return False
    if record.intended and not record.finite:
        return False
    if extent < 0:
        return True
    low, high = trace.extents[extent]  # the part that was read may be sound
    return not (math.isfinite(low) and math.isfinite(high) and max(abs(low), abs(high)) <= limit)


def _infinite_data(record: Record, records: Sequence[Record]) -> list[int]:
    """-inf from outside is fine in a mask; where it is multiplied and summed it was data."""
    if record.short not in CONTRACTIONS or any(part in record.short for part in SOFTMAX_LIKE):
        return []
    return [given.record for given in record.inputs if records[given.record].kind and not records[given.record].finite]


def suspects(trace: Trace, found: Origins) -> tuple[Suspect, ...]:
    """The origins as suspects, each place and operation once."""
    return tuple(dict.fromkeys(suspect_of(trace, record) for record in found.operations))


def suspect_of(trace: Trace, record: Record, *, scale: float = 1.0) -> Suspect:
    """`record` as a suspect; a finite backward record that was traced at scale 1 can be restated at another `scale`.

    Backward it is named by the operation in the user's code whose gradient it is: `aten.sqrt`, not the `aten.div`
    within. A cast that overflows at the entrance of a module belongs to the module that asked for it, the one that
    consumes it.
    """
    place = record.place
    if record.short == "_to_copy" and record.direction == "forward":
        consumer = next(
            (r for r in trace.records[record.index + 1 :] if any(i.record == record.index for i in r.inputs)), None
        )
        if consumer is not None and consumer.direction == "forward":
            place = consumer.place._replace(source=place.source or consumer.place.source)
    found = record.found if scale == 1.0 else "-inf" if abs(record.low) > record.high else "inf"
    return Suspect(
        module=place.module,
        operation=record.of or record.operation,
        direction=record.direction,
        source=place.source,
        dtype=record.dtype,
        found=found,
        largest_input=largest_input(trace, record) * scale,
        module_class=place.module_class,
    )


def largest_input(trace: Trace, record: Record) -> float:
    """The largest finite magnitude among the inputs of `record`; zero where it has none."""
    largest = 0.0
    for given in record.inputs:
        parent = trace.records[given.record]
        low, high = trace.extents[given.extent] if given.extent >= 0 else (parent.low, parent.high)
        for value in (abs(low), abs(high)):
            if math.isfinite(value):
                largest = max(largest, value)
    return largest


@dataclass(frozen=True)
class ScaleLimit:
    """What a backward pass that is sound at loss scale 1 says about higher scales.

    Attributes:
        largest: the largest power of two at which nothing overflows, under 2^24.
        overflowing: the backward records that are the first to overflow at the asked-for scale.
    """

    largest: float
    overflowing: tuple[Record, ...]


def scale_limit(trace: Trace, seeds: Iterable[int], scale: float) -> ScaleLimit:
    """Which backward operations overflow at `scale`, from a trace at scale 1: backward is linear in the gradient it
    starts from.

    Only records that depend on the `seeds`, the records of those first gradients, grow with it; factors such as `1 -
    tanh(x)^2` are left alone.
    """
    records = trace.settle()
    grows = [False] * len(records)
    over = [False] * len(records)
    for seed in seeds:
        grows[seed] = True
    largest = 2.0**24
    first: list[Record] = []
    for record in records:
        if record.direction != "backward":
            continue
        parents = [given.record for given in record.inputs]
        grows[record.index] = any(grows[p] for p in parents)
        if not grows[record.index] or record.largest == 0.0 or not record.finite:
            continue
        room = torch.finfo(getattr(torch, record.dtype)).max / record.largest
        if 0.0 < room < largest:  # it is infinite beside a gradient that hardly is one
            largest = 2.0 ** math.floor(math.log2(room))
        over[record.index] = record.largest * scale > torch.finfo(getattr(torch, record.dtype)).max
        if over[record.index] and not any(over[p] for p in parents):
            first.append(record)
    return ScaleLimit(largest, tuple(first))
