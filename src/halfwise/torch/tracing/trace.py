"""Records one forward and backward pass, operation by operation, so that a non-finite value can be followed to its
source.

For every floating-point result a `Record` keeps the operation, its place, its range, and the records of its inputs.
Ranges come from `torch.aminmax`, which costs one pass and lets NaN through (`isfinite().all()` costs thirty times as
much); they stay on the device until `settle()` reads them all at once, so tracing an accelerator does not wait once per
operation.

Who produced a tensor is remembered by its storage, so views and in-place operations need no special cases, and no
tensor is
kept alive: a weak reference keeps the storage's address from being used again, not its memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _push_mode,
    is_traceable_wrapper_subclass_type,
)

from halfwise.torch.names import named_layers
from halfwise.torch.tracing.attribution import NOWHERE, Attribution, Place
from halfwise.torch.tracing.operations import Operation, operation_of
from halfwise.torch.tracing.records import Input, Record, is_intended, measure, read_ranges, storage_of

__all__ = ["Trace"]


class Trace(TorchDispatchMode):
    """A context that records what runs within it.

    Args:
        model: names the modules, parameters and buffers.
        most_records: where so many are reached, nothing more is recorded.

    Attributes:
        records: what ran, in order.
        unrecorded: how many operations ran without a record: those on tensors that let nobody look, and those beyond
            `most_records`.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        >>> with Trace(model) as trace:
        ...     loss = model(torch.zeros(1, 2)).sum()
        >>> [(r.operation, r.place.module) for r in trace.settle() if not r.kind]
        [('aten.zeros', ''), ('aten.addmm', '0'), ('aten.tanh', '1'), ('aten.sum', '')]
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, *, most_records: float = math.inf) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records: list[Record] = []
        self.unrecorded = 0
        self._most_records = most_records
        self._left = False
        self.extents: list[tuple[float, float]] = []
        self._attribution = Attribution(model)
        self._ranges: list[tuple[Tensor, Tensor]] = []
        self._producers: dict[int, int] = {}
        self._kept: list[StorageWeakRef] = []
        self._declared: dict[int, tuple[str, str]] = {}
        self._named: list[tuple[str, Tensor]] = []
        for path, module in named_layers(model):
            for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
                for name, tensor in tensors.items():
                    if tensor is None:
                        continue
                    held = getattr(tensor, "_local_tensor", tensor)  # a DTensor computes on its part of it
                    if key := _storage_key(held):
                        self._declared.setdefault(key, (kind, f"{path}.{name}" if path else name))

    def __exit__(self, *error: Any) -> None:
        """Leaves the trace. Modes that were entered after it and are still open stay as they are."""
        modes = _get_current_dispatch_mode_stack()
        place = next((index for index, mode in enumerate(modes) if mode is self), None)
        if place is None:  # another thread leaves it, or the garbage collector within an operation: it stays, idle
            self._left = True
            _push_mode(self)
        above = modes[place + 1 :] if place is not None else []
        for mode in reversed(above):
            TorchDispatchMode.__exit__(mode, None, None, None)
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for mode in above:
            TorchDispatchMode.__enter__(mode)

    def declare_input(self, name: str, tensor: Tensor) -> None:
        """Says that `tensor` is the model's input `name`; has an effect only before an operation reads it."""
        key = _storage_key(tensor)
        if key and key not in self._producers:
            self._declared.setdefault(key, ("input", name))
            self._named.append((name, tensor))

    def declare_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Says that what stands in `.grad` now was summed up before the trace began, good or bad."""
        for parameter in parameters:
            if parameter.grad is not None and (key := _storage_key(parameter.grad)):
                self._declared.setdefault(key, ("gradient", ""))

    def input_named(self, name: str) -> Tensor | None:
        """The model's input that was declared under `name`."""
        return next((tensor for known, tensor in self._named if known == name), None)

    def attributed_to(self, place: Place) -> AbstractContextManager[None]:
        """A context in which every forward operation belongs to `place`."""
        return self._attribution.fixed(place)

    def producer(self, tensor: Tensor) -> int:
        """Index of the record that last wrote to `tensor`; -1 where the trace has not seen it."""
        return self._producers.get(_storage_key(tensor), -1)

    def settle(self) -> list[Record]:
        """Reads all ranges from the device and finds which infinities are intended. Returns the records."""
        if len(self.extents) < len(self._ranges):
            self.extents = read_ranges(self._ranges)
            for record in self.records:
                if record.extent >= 0:
                    record.low, record.high = self.extents[record.extent]
            for record in self.records:
                record.intended = not record.finite and is_intended(record, self.records)
        return self.records

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # spares a wrapper around every operation; compiled code runs eagerly while a trace is on

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operation and records its floating-point results."""
        if types and any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # a DTensor and its like come back here as the plain tensors they hold
        if self._left or len(self.records) >= self._most_records:
            self.unrecorded += 1
            return func(*args, **kwargs) if kwargs else func(*args)
        operation = operation_of(func)
        if operation.ignored:
            out = func(*args, **kwargs) if kwargs else func(*args)
            self._attribution.here(operation.name)  # its backward may overflow: remember the place
            return out
        try:
            read, scalars = self._sorted(args, kwargs)
            written = _written(operation, args, kwargs) if operation.written_names else ()
            inputs = self._inputs(operation, read, written)
        except Exception:  # a tensor that lets nobody look must not break the user's step
            self.unrecorded += 1
            return func(*args, **kwargs) if kwargs else func(*args)
        out = func(*args, **kwargs) if kwargs else func(*args)
        try:
            self._record(operation, out, read, scalars, written, inputs)
        except Exception:
            self.unrecorded += 1
        return out

    def _record(
        self,
        operation: Operation,
        out: Any,
        read: dict[int, list[Tensor]],
        scalars: tuple[float, ...],
        written: Sequence[Tensor],
        inputs: tuple[Input, ...],
    ) -> None:
        direction, place, of = self._attribution.here(operation.name)
        if place is NOWHERE and inputs:
            place = self.records[inputs[0].record].place
        results = [out] if isinstance(out, Tensor) else list(_tensors((out,)))
        for tensor in list({id(t): t for t in (*results, *written)}.values()) if written else results:
            if not _holds_floats(tensor):
                continue
            key = _storage_key(tensor)
            if not key or (not written and key in read):  # a view that its schema does not call one: `_unsafe_view`
                continue
            if operation.uninitialised:
                self._producers.pop(key, None)
                continue
            partial = bool(written) and tensor.numel() * tensor.element_size() < _bytes(tensor)
            record = Record(
                index=len(self.records),
                operation=operation.name,
                short=operation.short,
                place=place,
                direction=direction,
                of=of,
                dtype=_DTYPE_NAMES[tensor.dtype],
                numel=tensor.numel(),
                inputs=inputs,
                scalars=scalars,
                previous=self._producers.get(key, -1) if partial else -1,
                extent=self._measured(tensor),
            )
            self._register(key, tensor, record)

    def _register(self, key: int, tensor: Tensor, record: Record) -> None:
        if key not in self._producers and (storage := storage_of(tensor)) is not None:
            self._kept.append(StorageWeakRef(storage))
        self._producers[key] = record.index
        self.records.append(record)

    def _sorted(
        self, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> tuple[dict[int, list[Tensor]], tuple[float, ...]]:
        """The floating-point tensors among the arguments by their memory, and the Python floats."""
        read: dict[int, list[Tensor]] = {}
        scalars: list[float] = []
        _sort(args, read, scalars)
        if kwargs:
            _sort(kwargs.values(), read, scalars)
        return read, tuple(scalars)

    def _inputs(
        self, operation: Operation, read: dict[int, list[Tensor]], written: Sequence[Tensor]
    ) -> tuple[Input, ...]:
        if operation.constant:
            return ()
        inputs: list[Input] = []
        overwritten = {id(tensor) for tensor in written} if operation.overwrites else ()
        for key, tensors in read.items():
            for tensor in tensors:
                if overwritten and id(tensor) in overwritten:
                    continue
                index = self._producers.get(key, -1)
                if index < 0:
                    index = self._from_outside(tensor, key)
                record = self.records[index]
                part = tensor.numel() < record.numel or record.previous >= 0
                extent = self._measured(tensor) if part else -1
                inputs.append(Input(index, extent))
                while record.previous >= 0:  # a partial write: what stood there before may have been read as well
                    record = self.records[record.previous]
                    inputs.append(Input(record.index, extent))
        return tuple(inputs)

    def _from_outside(self, tensor: Tensor, key: int) -> int:
        kind, name = self._declared.get(key, ("tensor", ""))
        whole = tensor if tensor._base is None else tensor._base
        record = Record(
            index=len(self.records),
            operation="",
            short="",
            place=NOWHERE,
            direction="forward",
            of="",
            dtype=_DTYPE_NAMES[tensor.dtype],
            numel=_bytes(tensor) // tensor.element_size(),  # smaller reads are measured
            inputs=(),
            scalars=(),
            kind=kind,
            name=name,
            extent=self._measured(whole),
        )
        self._register(key, tensor, record)
        return record.index

    def _measured(self, tensor: Tensor) -> int:
        found = measure(tensor)
        if found is None:
            return -1
        self._ranges.append(found)
        return len(self._ranges) - 1


class _DtypeNames(dict[torch.dtype, str]):
    def __missing__(self, dtype: torch.dtype) -> str:
        name = self[dtype] = str(dtype).removeprefix("torch.")
        return name


_DTYPE_NAMES = _DtypeNames()


def _storage_key(tensor: Tensor) -> int:
    """What identifies the memory of `tensor`; 0 where it has none of its own (opaque and foreign tensors)."""
    storage = storage_of(tensor)
    return 0 if storage is None else int(storage._cdata)


def _bytes(tensor: Tensor) -> int:
    storage = storage_of(tensor)
    return 0 if storage is None else storage.nbytes()


def _holds_floats(tensor: Tensor) -> bool:
    dtype = tensor.dtype
    return dtype.is_floating_point or dtype.is_complex


def _sort(values: Iterable[Any], read: dict[int, list[Tensor]], scalars: list[float]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            if _holds_floats(value) and (key := _storage_key(value)):
                read.setdefault(key, []).append(value)
        elif type(value) is float:
            scalars.append(value)
        elif isinstance(value, list | tuple):
            _sort(value, read, scalars)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _written(operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[Tensor]:
    given = [args[i] for i in operation.written if i < len(args)]
    if kwargs:
        given += [kwargs[name] for name in operation.written_names if kwargs.get(name) is not None]
    return [t for t in _tensors(given) if _holds_floats(t)]
