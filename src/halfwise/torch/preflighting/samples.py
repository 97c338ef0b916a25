"""A trace that also keeps a sample of what every forward operation made, to be compared with that of another run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halfwise.core.diagnosis import Direction
from halfwise.torch.tracing.attribution import Place
from halfwise.torch.tracing.operations import operation_of
from halfwise.torch.tracing.records import Record, values_of
from halfwise.torch.tracing.trace import Trace

__all__ = ["Failure", "SampledTrace", "errors_against"]

_MOST = 4096
"""Values that are kept of each result."""

_HALF = ("float16", "bfloat16")
_MOST_RESULTS = 3  # of one operation: an LSTM has as many, and they are cast one after the other
_INNER = "emulated."

_Place = tuple[str, str, str]


class Failure(NamedTuple):
    """The operation that raised."""

    operation: str
    direction: Direction
    place: Place
    scalars: tuple[float, ...]


class SampledTrace(Trace):
    """Attributes beside those of `Trace`:

    samples: by index of the record, up to 4096 of its values in float32, evenly spread.
    failure: the operation that raised, if one did.

    An emulated product is several operations: casts, the product in float32, and a cast to half, in which it may
    overflow. With `emulated`, that last cast is told as the product itself, once `settle` was called.
    """

    def __init__(self, model: nn.Module, *, emulated: bool = False) -> None:
        super().__init__(model)
        self.samples: dict[int, Tensor] = {}
        self.failure: Failure | None = None
        self._emulated = emulated

    def settle(self) -> list[Record]:
        """As in `Trace`."""
        records = super().settle()
        if self._emulated:
            self._emulated = False
            for record in records:
                _tell_as_the_product(record, records)
        return records

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs and records the operation."""
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except Exception:
            if self.failure is None:
                operation = operation_of(func)
                direction, place, _ = self._attribution.here(operation.name)
                scalars = tuple(float(value) for value in args if isinstance(value, int | float))
                self.failure = Failure(operation.name, direction, place, scalars)
            raise

    def _register(self, key: int, tensor: Tensor, record: Record) -> None:
        super()._register(key, tensor, record)
        if record.direction == "forward" and not record.kind:
            sample = _sample(tensor)
            if sample is not None:
                self.samples[record.index] = sample


def _tell_as_the_product(record: Record, records: Sequence[Record]) -> None:
    """Gives a cast to half, right after a float32 result of the same line, that result's name and inputs."""
    if record.short != "_to_copy" or record.dtype not in _HALF or len(record.inputs) != 1:
        return
    inner = records[record.inputs[0].record]
    if inner.kind or inner.dtype != "float32" or inner.place != record.place or inner.direction != record.direction:
        return
    if record.direction == "backward":
        record.of, record.operation = inner.of, inner.operation
    elif record.index - inner.index <= _MOST_RESULTS and not inner.operation.startswith(_INNER):
        record.operation, record.short, record.inputs = inner.operation, inner.short, inner.inputs
        record.scalars = inner.scalars
        inner.operation = inner.short = f"{_INNER}{inner.short}"


def _sample(tensor: Tensor) -> Tensor | None:
    values = values_of(tensor)
    if values is None or values.numel() == 0 or values.is_complex():
        return None
    try:
        flat = values.detach().reshape(-1)
        return flat[:: -(-flat.numel() // _MOST)].to(torch.float32, copy=True)
    except (NotImplementedError, RuntimeError):
        return None


def errors_against(trace: SampledTrace, reference: SampledTrace) -> dict[int, float]:
    """By index of the record in `trace`, the relative error (2-norms) of what it made against the same in `reference`.

    The same: the same operation, module and line, called as often before, and in all. What has no
    counterpart, such as a cast, takes the error of its inputs, where those are known.
    """
    trace.settle()
    theirs = _by_place(reference)
    found: dict[int, float] = {}
    for where, records in _by_place(trace).items():
        others = theirs.get(where, [])
        if len(others) != len(records):  # which belongs to which is not known
            continue
        for record, other in zip(records, others, strict=True):
            ours, expected = trace.samples.get(record.index), reference.samples.get(other.index)
            if record.numel != other.numel or ours is None or expected is None or ours.shape != expected.shape:
                continue
            size = float(expected.norm())
            if size > 0.0:
                found[record.index] = float((ours - expected).norm()) / size
    for record in trace.records:
        if record.index not in found and record.direction == "forward":
            inherited = [found[given.record] for given in record.inputs if given.record in found]
            if inherited:
                found[record.index] = max(inherited)
    return found


def _by_place(trace: Trace) -> dict[_Place, list[Record]]:
    """The forward records of each operation, module and line, in order."""
    placed: dict[_Place, list[Record]] = {}
    for record in trace.records:
        if not record.kind and record.direction == "forward" and record.short != "_to_copy":
            placed.setdefault((record.place.module, record.operation, record.place.source), []).append(record)
    return placed
