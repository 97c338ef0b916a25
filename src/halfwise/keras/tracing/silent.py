"""Overflow that leaves no NaN: a later operation turned the infinity into finite, wrong values.

`x * rsqrt(mean(x ** 2))` at 300 in float16 is `x * rsqrt(inf)`, which is 0: loss and gradients stay finite and the
layer is dead. But `1 / (1 + exp(12))` is healed rightly. So each healed result is compared with float32's at the same
place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from halfwise.keras.tracing.matching import counterparts
from halfwise.keras.tracing.records import Record
from halfwise.keras.tracing.slicing import Origin, bad_inputs, forward_origins

__all__ = ["silent_overflow"]

_HALF = ("float16", "bfloat16")
_FACTOR = 2.0  # largest values further apart than this are different, whatever rounding does
_SMALL = 2.0**-14  # what lies below float16's normal numbers may vanish without a fault


def silent_overflow(half: Sequence[Record], full: Sequence[Record]) -> tuple[list[Origin], str]:
    """The operations that overflowed without a trace in loss and gradients, and what became of them in words; an empty
    list where there are none.

    Args:
        half: records of a sound step in half precision.
        full: records of the same step in float32.
    """
    theirs = counterparts(half, full)
    healed = [record for record in half if not record.layer and not _infinite(record) and bad_inputs(half, record)]
    wrong = [r for r in healed if any(_differs(other, theirs) for other in (r, *_readers(half, r)))]
    if not wrong:
        return [], ""
    starts = [index for record in wrong for index in bad_inputs(half, record)]
    found = [origin for origin in forward_origins(half, starts) if origin.result.dtype in _HALF]
    first = wrong[0]
    at = f" at {first.place.source}" if first.place.source else ""
    what = f"loss and gradients are finite, but {first.operation}{at} turned an infinity into finite, wrong values"
    if first.output is not None and first.index in theirs and (reference := theirs[first.index].output) is not None:
        what += f" up to {first.output.largest:.3g}; in float32 they reach {reference.largest:.3g}"
    return found, what


def _infinite(record: Record) -> bool:
    return record.output is None or not record.output.finite


def _readers(records: Sequence[Record], record: Record) -> list[Record]:
    """Operations that read the record: a factor of 0 instead of 1e-5 matters where it is multiplied by 1e5."""
    return [
        reader
        for reader in records[record.index + 1 :]
        if not reader.layer and any(given.producer == record.index for given in reader.inputs)
    ]


def _differs(record: Record, references: Mapping[int, Record]) -> bool:
    reference = references.get(record.index)
    if reference is None or reference.output is None or record.output is None:
        return False
    if not reference.output.finite or not record.output.finite:
        return False
    low, high = sorted((record.output.largest, reference.output.largest))
    return high > max(_FACTOR * low, _SMALL)
