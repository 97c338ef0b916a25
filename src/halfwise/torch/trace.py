"""Records one forward and backward pass, operation by operation, so that a non-finite value can be followed to its source.

For every floating-point result a `Record` keeps the operation, its place, its range, and the records of its inputs. Ranges come
from `torch.aminmax`, which costs one pass and lets NaN through (`isfinite().all()` costs thirty times as much); they stay on
the device until `settle()` reads them all at once, so tracing an accelerator does not wait once per operation.

Who produced a tensor is remembered by its storage, so views and in-place operations need no special cases, and no tensor is
kept alive: a weak reference keeps the storage's address from being used again, not its memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from halfwise.core.diagnosis import Direction
from halfwise.torch.attribution import NOWHERE, Attribution, Place
from halfwise.torch.names import named_layers
from halfwise.torch.operations import SIGN_CHANGING, Operation, operation_of

__all__ = ["Input", "Record", "Trace", "measure"]


class Input(NamedTuple):
    """An input of a record: the record that produced it, and the range of the part that was read (-1: all of it)."""

    record: int
    extent: int


@dataclass(slots=True)
class Record:
    """One floating-point result of one operation, or (kind not `""`) a tensor that came from outside.

    Attributes:
        index: position in the order of execution.
        operation: such as `"aten.addmm"`; `""` for tensors from outside.
        short: the operation's name alone.
        place: module path, module class and line.
        direction: `"forward"` or `"backward"`.
        of: backward, the forward operation that is being differentiated.
        dtype: of the result, such as `"float16"`.
        numel: number of elements of the result.
        inputs: the producers of the floating-point inputs.
        scalars: the Python floats among the arguments.
        kind: `"parameter"`, `"buffer"`, `"input"` (of the model) or `"tensor"` (any other from outside); else `""`.
        name: of a tensor from outside, where it has one.
        previous: of a write to a part of a tensor, the record that wrote to it before; else -1.
        extent: number of the range in the trace.
        low, high: smallest and largest value; both NaN if there is one. Known after `Trace.settle()`.
        intended: the infinities in it stand there on purpose: a mask's -inf, or one passed on. Known after `settle()`.
    """

    index: int
    operation: str
    short: str
    place: Place
    direction: Direction
    of: str
    dtype: str
    numel: int
    inputs: tuple[Input, ...]
    scalars: tuple[float, ...]
    kind: str = ""
    name: str = ""
    previous: int = -1
    extent: int = -1
    low: float = 0.0
    high: float = 0.0
    intended: bool = False

    @property
    def finite(self) -> bool:
        """No NaN and no infinity in it."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def largest(self) -> float:
        """Largest magnitude; NaN or inf where there is one."""
        return max(abs(self.low), abs(self.high)) if self.low == self.low else math.nan

    @property
    def found(self) -> str:
        """What a reader has to know of the values: `"nan"`, `"inf"`, `"-inf"`, or the largest magnitude."""
        if math.isnan(self.low):
            return "nan"
        if self.high == math.inf:
            return "inf"
        return "-inf" if self.low == -math.inf else f"{self.largest:.3g}"


class Trace(TorchDispatchMode):
    """A context that records what runs within it.

    Args:
        model: names the modules, parameters and buffers.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        >>> with Trace(model) as trace:
        ...     loss = model(torch.ones(1, 2)).sum()
        >>> [(r.operation, r.place.module) for r in trace.settle() if not r.kind]
        [('aten.addmm', '0'), ('aten.tanh', '1'), ('aten.sum', '')]
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.records: list[Record] = []
        self.extents: list[tuple[float, float]] = []
        self._attribution = Attribution(model)
        self._ranges: list[tuple[Tensor, Tensor]] = []
        self._producers: dict[int, int] = {}
        self._kept: list[StorageWeakRef] = []
        self._declared: dict[int, tuple[str, str]] = {}
        self._inputs: list[tuple[str, Tensor]] = []
        for path, module in named_layers(model):
            for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
                for name, tensor in tensors.items():
                    if tensor is not None and (key := _storage_key(tensor)):
                        self._declared.setdefault(key, (kind, f"{path}.{name}" if path else name))

    def declare_input(self, name: str, tensor: Tensor) -> None:
        """Says that `tensor` is the model's input `name`; has an effect only before an operation reads it."""
        key = _storage_key(tensor)
        if key and key not in self._producers:
            self._declared.setdefault(key, ("input", name))
            self._inputs.append((name, tensor))

    def input_named(self, name: str) -> Tensor | None:
        """The model's input that was declared under `name`."""
        return next((tensor for known, tensor in self._inputs if known == name), None)

    def attributed_to(self, place: Place) -> AbstractContextManager[None]:
        """A context in which every forward operation belongs to `place`."""
        return self._attribution.fixed(place)

    def producer(self, tensor: Tensor) -> int:
        """Index of the record that last wrote to `tensor`; -1 where the trace has not seen it."""
        return self._producers.get(_storage_key(tensor), -1)

    def settle(self) -> list[Record]:
        """Reads all ranges from the device and finds which infinities are intended. Returns the records."""
        if len(self.extents) < len(self._ranges):
            self.extents = _read(self._ranges)
            for record in self.records:
                if record.extent >= 0:
                    record.low, record.high = self.extents[record.extent]
            for record in self.records:
                record.intended = not record.finite and _is_intended(record, self.records)
        return self.records

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operation and records its floating-point results."""
        kwargs = kwargs or {}
        if types and any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # a DTensor and its like come back here as the plain tensors they hold
        operation = operation_of(func)
        if operation.ignored:
            out = func(*args, **kwargs)
            self._attribution.here(operation.name)  # its backward may overflow: remember the place
            return out
        inputs, scalars = self._inputs_of(operation, args, kwargs)
        written = _written(operation, args, kwargs)
        shared = {_storage_key(t) for t in _tensors(args)} if not written else ()
        out = func(*args, **kwargs)
        direction, place, of = self._attribution.here(operation.name)
        if place is NOWHERE and inputs:
            place = self.records[inputs[0].record].place
        results = [t for t in _tensors((out,)) if _holds_floats(t)]
        for tensor in _distinct(results, written):
            key = _storage_key(tensor)
            if not key or key in shared:  # a view that its schema does not call one, such as `_unsafe_view`
                continue
            if operation.uninitialised:
                self._producers.pop(key, None)
                continue
            partial = bool(written) and tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes()
            record = Record(
                index=len(self.records),
                operation=operation.name,
                short=operation.short,
                place=place,
                direction=direction,
                of=of,
                dtype=_dtype_name(tensor),
                numel=tensor.numel(),
                inputs=inputs,
                scalars=scalars,
                previous=self._producers.get(key, -1) if partial else -1,
                extent=self._measured(tensor),
            )
            self._register(key, tensor, record)
        return out

    def _register(self, key: int, tensor: Tensor, record: Record) -> None:
        if key not in self._producers:
            self._kept.append(StorageWeakRef(_plain(tensor).untyped_storage()))
        self._producers[key] = record.index
        self.records.append(record)

    def _inputs_of(
        self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Input, ...], tuple[float, ...]]:
        inputs: list[Input] = []
        scalars: list[float] = []
        tensors: list[Tensor] = []
        _sort(args, tensors, scalars)
        if kwargs:
            _sort(kwargs.values(), tensors, scalars)
        if operation.constant:
            return (), tuple(scalars)
        overwritten = {id(t) for t in _written(operation, args, kwargs)} if operation.overwrites else ()
        for tensor in tensors:
            if id(tensor) in overwritten or not _holds_floats(tensor) or not (key := _storage_key(tensor)):
                continue
            index = self._producers.get(key, -1)
            if index < 0:
                index = self._from_outside(tensor, key)
            record = self.records[index]
            numel = tensor.numel()
            extent = self._measured(tensor) if numel < record.numel or record.previous >= 0 else -1
            inputs.append(Input(index, extent))
            while record.previous >= 0:  # a partial write: what stood there before may have been read as well
                record = self.records[record.previous]
                inputs.append(Input(record.index, extent))
        return tuple(inputs), tuple(scalars)

    def _from_outside(self, tensor: Tensor, key: int) -> int:
        kind, name = self._declared.get(key, ("tensor", ""))
        record = Record(
            index=len(self.records),
            operation="",
            short="",
            place=NOWHERE,
            direction="forward",
            of="",
            dtype=_dtype_name(tensor),
            numel=tensor.numel(),
            inputs=(),
            scalars=(),
            kind=kind,
            name=name,
            extent=self._measured(tensor),
        )
        self._register(key, tensor, record)
        return record.index

    def _measured(self, tensor: Tensor) -> int:
        found = measure(tensor)
        if found is None:
            return -1
        self._ranges.append(found)
        return len(self._ranges) - 1


def measure(tensor: Tensor) -> tuple[Tensor, Tensor] | None:
    """Smallest and largest value of `tensor` as 0-dim tensors on its device, both NaN if it holds one; None if it is empty.

    A tensor whose dimensions are in another order than its memory is read in the memory's order (12 times as fast), and
    expanded dimensions are read once.
    """
    tensor = _plain(tensor.detach())
    if tensor.numel() == 0:
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_contiguous():
        strides = tensor.stride()
        if 0 in strides:
            tensor = tensor[tuple(0 if stride == 0 else slice(None) for stride in strides)]
            strides = tensor.stride()
        tensor = tensor.permute(sorted(range(tensor.dim()), key=lambda d: -strides[d]))
    if tensor.element_size() == 1:  # the float8 formats have no kernels for this
        tensor = tensor.float()
    low, high = torch.aminmax(tensor)
    return low, high


def _read(ranges: list[tuple[Tensor, Tensor]]) -> list[tuple[float, float]]:
    """The values of all ranges with one transfer per device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, (low, _) in enumerate(ranges):
        groups.setdefault((low.device, low.dtype), []).append(index)
    read: list[tuple[float, float]] = [(0.0, 0.0)] * len(ranges)
    for indices in groups.values():
        lows = torch.stack([ranges[i][0] for i in indices]).tolist()
        highs = torch.stack([ranges[i][1] for i in indices]).tolist()
        for index, low, high in zip(indices, lows, highs, strict=True):
            read[index] = (low, high)
    return read


def _is_intended(record: Record, records: Sequence[Record]) -> bool:
    """Whether each infinity in `record` is a constant that the code wrote, or comes from one. NaN never is.

    From outside, -inf alone passes as a mask; +inf does not, and neither does anything in a parameter.
    """
    if math.isnan(record.low):
        return False
    signs = {sign for sign in (-1, 1) if math.inf == sign * (record.high if sign > 0 else record.low)}
    if record.kind:
        return record.kind != "parameter" and signs == {-1}
    if not record.inputs and not record.scalars:
        return True  # a constant made from nothing, such as torch.tensor([-inf])
    allowed = {int(math.copysign(1, scalar)) for scalar in record.scalars if math.isinf(scalar)}
    for parent in (records[given.record] for given in record.inputs):
        if parent.finite:
            continue
        if not parent.intended:
            return False
        allowed |= {-1} if parent.low == -math.inf else set()
        allowed |= {1} if parent.high == math.inf else set()
    if allowed and record.short in SIGN_CHANGING:
        return True
    return signs <= allowed


def _plain(tensor: Tensor) -> Tensor:
    """The strided tensor that holds the values."""
    return tensor if tensor.layout is torch.strided else tensor._values()  # type: ignore[no-any-return, no-untyped-call]


def _storage_key(tensor: Tensor) -> int:
    """What identifies the memory of `tensor`; 0 where it has none of its own (meta and foreign tensors)."""
    try:
        return _plain(tensor).untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return 0


def _holds_floats(tensor: Tensor) -> bool:
    dtype = tensor.dtype
    return dtype.is_floating_point or dtype.is_complex


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _sort(values: Any, tensors: list[Tensor], scalars: list[float]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif type(value) is float:
            scalars.append(value)
        elif isinstance(value, list | tuple):
            _sort(value, tensors, scalars)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _written(operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    if not operation.written_names:
        return []
    given = [args[i] for i in operation.written if i < len(args)]
    given += [kwargs[name] for name in operation.written_names if kwargs.get(name) is not None]
    return [t for t in _tensors(given) if _holds_floats(t)]


def _distinct(results: list[Tensor], written: list[Tensor]) -> list[Tensor]:
    """Results and arguments that were written to, each tensor once."""
    return list({id(t): t for t in (*results, *written)}.values()) if written else results
