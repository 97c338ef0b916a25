"""From a bad value back to the operations that made it.

Not the first bad operation in time: code may compute log(0) and never use it, and masks hold -inf on purpose. So the
walk starts at the loss and follows only inputs that are bad themselves. Where none is, the operation made the trouble.
Where an input's producer was not seen, every bad operation before may be it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from halfwise.core.diagnosis import Direction, Suspect
from halfwise.core.formats import get_format
from halfwise.keras.tracing.extents import Extent
from halfwise.keras.tracing.records import UNKNOWN, Record, passes_as_mask

__all__ = [
    "CONTRACTIONS",
    "SOFTMAX_LIKE",
    "Origin",
    "backward_origins",
    "bad_inputs",
    "forward_origins",
    "largest_scale",
    "origins_of",
    "reads_from_outside",
]

CONTRACTIONS = frozenset(
    {"matmul", "dot", "vdot", "inner", "outer", "tensordot", "einsum", "linear", "conv", "depthwise_conv"}
    | {"separable_conv", "conv_transpose", "sum", "mean", "average", "var", "std", "moments", "cumsum"}
    | {"layer_normalization", "rms_normalization", "batch_normalization", "group_normalization"}
)
"""Operations that mix values: inf - inf within one of them is an overflow, and -inf in what they read no mask."""

SOFTMAX_LIKE = ("softmax", "logsumexp", "dot_product_attention")
"""Parts of the names of operations for which -inf means "not this one"."""

_HALF = ("float16", "bfloat16")


class Origin(NamedTuple):
    """An operation whose inputs were sound and whose output, or the gradient that it sent back, was not."""

    record: Record
    direction: Direction
    records: Sequence[Record]

    @property
    def result(self) -> Extent:
        """What came out: the output, or the worst of the gradients."""
        if self.direction == "forward" and self.record.output is not None:
            return self.record.output
        arrived = self.record.arrived
        if arrived is not None and arrived.beyond():  # a sum of sound gradients
            return arrived
        sent = [given.gradient for given in self.record.inputs if given.gradient is not None]
        bad = [gradient for gradient in sent if gradient.beyond()] or sorted(sent, key=lambda g: -g.largest)
        return bad[0] if bad else Extent(math.nan, math.nan, "")

    @property
    def largest_input(self) -> float:
        """The largest finite magnitude among what the operation worked on."""
        extents = [given.extent for given in self.record.inputs]
        arrived = self.record.arrived
        if self.direction == "backward" and arrived is not None:
            extents = _sent_to(self.records, self.record) if arrived.beyond() else [*extents, arrived]
        return max((extent.largest_finite for extent in extents), default=0.0)

    @property
    def suspect(self) -> Suspect:
        """The origin as a suspect."""
        place, record = self.record.place, self.record
        widens = record.operation == "cast" and record.output is not None and record.output.dtype not in _HALF
        if self.direction == "backward" and widens and record.inputs and record.inputs[0].producer >= 0:
            place = self.records[record.inputs[0].producer].place  # its format is too small for the gradient
        return Suspect(
            module=place.module,
            operation=record.operation,
            direction=self.direction,
            source=place.source or record.place.source,
            dtype=self.result.dtype,
            found=self.result.found,
            largest_input=self.largest_input,
            module_class=place.module_class,
        )


def origins_of(records: Sequence[Record], *, loss_finite: bool, limit: float = math.inf) -> list[Origin]:
    """Where the bad loss, or else the bad gradients, come from; the first in the order of the step first.

    Args:
        records: of a settled trace.
        loss_finite: the loss was finite, so the trouble is in the gradients.
        limit: with a finite value, gradients above it are bad too.
    """
    if not loss_finite:
        return forward_origins(records, _ends(records))
    found: list[Origin] = []
    for origin in backward_origins(records, limit):
        behind = [origin.record.index] if origin.record.bad else bad_inputs(records, origin.record)
        forward = forward_origins(records, behind) if behind else []  # an infinity that only the gradient trips over
        found += forward or [origin]
    return _unique(found)


def forward_origins(records: Sequence[Record], starts: Sequence[int]) -> list[Origin]:
    """Follows bad values from the records `starts` back to the operations that made them."""
    pending, seen = list(starts), set(starts)
    made: set[int] = set()
    while pending:
        record = records[pending.pop()]
        hidden = [r.index for r in records if r.bad and record.index in r.inside] if record.layer else []
        sources = hidden or bad_inputs(records, record)
        if not sources:
            made.add(_maker(records, record).index)
        for index in sources:
            if index not in seen:
                seen.add(index)
                pending.append(index)
    return [Origin(records[index], "forward", records) for index in sorted(made)]


def backward_origins(records: Sequence[Record], limit: float = math.inf) -> list[Origin]:
    """The records that got sound gradients and sent back bad ones, in the order in which gradients came to them.

    A sum of sound gradients may be bad too, where a tensor was used several times: then its producer is named, whose
    format is too small for the sum.
    """
    ordered = sorted((r for r in records if r.turn and r.arrived is not None), key=lambda r: r.turn)
    made = [
        record
        for record in ordered
        if record.arrived is not None
        and not record.arrived.beyond(limit)
        and any(given.gradient is not None and given.gradient.beyond(limit) for given in record.inputs)
    ]
    beyond = [r for r in ordered if not r.layer and r.arrived is not None and r.arrived.beyond(limit)]
    sent = {record.index: _sent_to(records, record) for record in beyond}
    made += [r for r in beyond if sent[r.index] and not any(gradient.beyond(limit) for gradient in sent[r.index])]
    inner = [record for record in made if not any(record.index in other.inside for other in made)]
    inner = inner or [record for record in beyond if not sent[record.index]][:1]  # unseen code sent it
    return [Origin(record, "backward", records) for record in sorted(inner, key=lambda r: r.turn)]


def reads_from_outside(origin: Origin) -> bool:
    """Whether the operation reads something infinite that came with the data or the weights.

    -inf from there is sound where it hides positions, and not where it is multiplied and summed.
    """
    mixes = origin.record.operation in CONTRACTIONS
    pending, seen = [origin.record], {origin.record.index}
    while pending:
        record = pending.pop()
        if mixes and not record.inputs:  # an array that was turned into a tensor
            return True
        for given in record.inputs:
            if given.extent.finite:
                continue
            if given.producer < 0:
                if mixes or not passes_as_mask(given, origin.records):
                    return True
            elif given.producer not in seen:
                seen.add(given.producer)
                pending.append(origin.records[given.producer])
    return False


def largest_scale(records: Sequence[Record]) -> float:
    """The largest power of two, 2^24 at most, at which no gradient in half precision overflows; from a sound trace at
    loss scale 1: backward is linear in the gradient that it starts from.
    """
    largest = 2.0**24
    for record in records:
        for gradient in (record.arrived, *(given.gradient for given in record.inputs)):
            if gradient is not None and gradient.dtype in _HALF and 0.0 < gradient.largest < math.inf:
                room = get_format(gradient.dtype).largest / gradient.largest
                largest = min(largest, 2.0 ** math.floor(math.log2(room)))
    return largest


def _ends(records: Sequence[Record]) -> list[int]:
    """The bad record that is next to the loss: backward began there."""
    bad = [record for record in records if record.bad and not record.layer]
    reached = [record for record in bad if record.turn]
    if reached:
        return [min(reached, key=lambda r: r.turn).index]
    return [record.index for record in bad[-1:]]


def bad_inputs(records: Sequence[Record], record: Record) -> list[int]:
    """Producers of the record's bad inputs."""
    found: list[int] = []
    for given in record.inputs:
        if given.extent.finite or passes_as_mask(given, records):
            continue
        if given.producer >= 0:
            found.append(given.producer)
        elif given.producer == UNKNOWN:
            found += [r.index for r in records[: record.index] if r.bad and r.index not in record.inside]
    return found


def _maker(records: Sequence[Record], record: Record) -> Record:
    """The record itself, or where it only reads what came of code unseen: the layer whose code that is."""
    around = records[record.inside[-1]] if record.inside else None
    if around is None or around.output is None or any(not given.extent.finite for given in around.inputs):
        return record
    unseen = any(
        given.producer == UNKNOWN and not given.extent.finite and not passes_as_mask(given, records)
        for given in record.inputs
    )
    return around if unseen else record


def _sent_to(records: Sequence[Record], record: Record) -> list[Extent]:
    """The gradients that the users of the record's output sent back."""
    return [
        given.gradient
        for user in records
        for given in user.inputs
        if given.producer == record.index and given.gradient is not None
    ]


def _unique(found: Sequence[Origin]) -> list[Origin]:
    kept: dict[tuple[int, str], Origin] = {}
    for origin in found:
        kept.setdefault((origin.record.index, origin.direction), origin)
    return list(kept.values())
