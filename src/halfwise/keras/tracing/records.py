"""What a trace holds: one record per call, the ranges that went in and came out, and the gradients that came back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from halfwise.keras.tracing.extents import Extent
from halfwise.keras.tracing.places import Place

__all__ = ["UNKNOWN", "WEIGHT", "Input", "Record", "is_intended", "passes_as_mask"]

UNKNOWN = -1
"""Stands for the producer of a tensor that nobody saw being made: data, and what came of code unseen."""

WEIGHT = -2
"""Stands for the producer of a variable's value."""

_SIGN_CHANGING = frozenset({"negative", "subtract", "multiply", "divide", "true_divide", "reciprocal"})
"""Through these an intended infinity may come out with the other sign."""


@dataclass(slots=True)
class Input:
    """A floating-point input of a record.

    Attributes:
        producer: index of the record that made it, `UNKNOWN` or `WEIGHT`.
        extent: its range.
        gradient: range of what the record sent back to it; None where nothing was sent.
    """

    producer: int
    extent: Extent
    gradient: Extent | None = None


@dataclass(slots=True)
class Record:
    """One call of an operation, or (`layer` True) of a layer as a whole.

    Attributes:
        index: position in the order in which calls began.
        operation: the operation's name as Keras spells it, such as `"matmul"`; of a layer its class and `.call`.
        place: module path, module class and line.
        inside: indices of the layers' records around it, the outermost first.
        layer: it stands for a whole layer.
        inputs: the floating-point tensors that went in.
        scalars: the Python floats among the arguments, and what infinities constant arrays hold.
        output: range over all results; None until the call returns, and where none is floating-point.
        arrived: range over the gradients with respect to the results.
        turn: when they arrived first, counted over the backward pass; 0 where none did.
        intended: the infinities in the output stand there on purpose: a mask's -inf, or one passed on.
    """

    index: int
    operation: str
    place: Place
    inside: tuple[int, ...] = ()
    layer: bool = False
    inputs: list[Input] = field(default_factory=list)
    scalars: tuple[float, ...] = ()
    output: Extent | None = None
    arrived: Extent | None = None
    turn: int = 0
    intended: bool = False

    @property
    def bad(self) -> bool:
        """NaN or an infinity that does not stand there on purpose came out."""
        return self.output is not None and not self.output.finite and not self.intended


def is_intended(record: Record, records: Sequence[Record]) -> bool:
    """Whether each infinity in the output is a constant that the code wrote, or comes from one. NaN never is.

    From data and code unseen -inf alone passes as a mask; +inf does not.
    """
    if record.output is None or record.output.finite or math.isnan(record.output.low):
        return False
    if record.layer:
        return False
    if not record.inputs and not record.scalars:
        return True  # a constant made from nothing
    allowed = {int(math.copysign(1, scalar)) for scalar in record.scalars if math.isinf(scalar)}
    for given in record.inputs:
        if given.extent.finite:
            continue
        if not passes_as_mask(given, records):
            return False
        allowed |= {sign for sign, end in ((-1, given.extent.low), (1, given.extent.high)) if math.isinf(end)}
    if allowed and record.operation in _SIGN_CHANGING:
        return True
    return {sign for sign, end in ((-1, record.output.low), (1, record.output.high)) if math.isinf(end)} <= allowed


def passes_as_mask(given: Input, records: Sequence[Record]) -> bool:
    """Whether the infinities in an input are intended."""
    if given.producer >= 0:
        return records[given.producer].intended
    return given.extent.low == -math.inf and given.extent.high < math.inf
