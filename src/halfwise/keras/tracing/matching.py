"""The same call in two runs of a step, one in half precision and one in float32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from halfwise.keras.tracing.records import Record

__all__ = ["counterparts"]


def counterparts(records: Sequence[Record], reference: Sequence[Record]) -> dict[int, Record]:
    """`index -> record of the reference` for the records that have one there: the n-th call of the same operation by
    the same layer at the same line. Casts have none: float32 does without them.
    """
    theirs = {place: record for record, place in _placed(reference)}
    return {record.index: theirs[place] for record, place in _placed(records) if place in theirs}


def _placed(records: Sequence[Record]) -> list[tuple[Record, tuple[str, str, str, int]]]:
    count: Counter[tuple[str, str, str]] = Counter()
    placed = []
    for record in records:
        if record.operation == "cast":
            continue
        where = (record.place.module, record.operation, record.place.source)
        placed.append((record, (*where, count[where])))
        count[where] += 1
    return placed
