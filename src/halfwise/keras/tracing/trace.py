"""Records one training step, operation by operation, so that a bad value can be followed to where it arose.

Every floating-point tensor that goes into an operation or comes out of it is tapped: its range is measured, and the
gradient that flows back through this very operation is measured too. Who made a tensor is remembered by the tensor
object. Code that nobody can look into (`jax.jit`, `scan`, `tf.function`) is recorded as one call of its layer.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple, Self

import keras
import numpy as np
from keras import Layer

from halfwise.keras.names import named_layers, whole
from halfwise.keras.probe import probe, tap
from halfwise.keras.tracing.extents import Extent, extent_of
from halfwise.keras.tracing.operations import operations_seen
from halfwise.keras.tracing.places import NOWHERE, Place, line_here
from halfwise.keras.tracing.records import UNKNOWN, WEIGHT, Input, Record, is_intended

__all__ = ["Trace"]


class _Known(NamedTuple):
    """A tensor that was seen. Holding it keeps its identity from being used again."""

    tensor: Any
    producer: int
    extent: Extent


class Trace:
    """A context that records what one thread computes in it.

    Attributes:
        records: what ran, in order.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, activation="tanh")])
        >>> with Trace(model) as trace:
        ...     output = model(keras.ops.ones((1, 2)))
        >>> [(r.operation, r.place.module) for r in trace.settle() if not r.layer]
        [('ones', ''), ('matmul', 'dense'), ('add', 'dense'), ('tanh', 'dense')]
    """

    def __init__(self, model: keras.Model) -> None:
        self.records: list[Record] = []
        self._paths = {id(layer): path for path, layer in named_layers(model).items()}
        self._known: dict[int, _Known] = {}
        self._weights: dict[int, Any] = {}  # values of variables, kept for the same reason
        self._running: list[int] = []  # records of the layers that are being called, the outermost first
        self._closed: list[bool] = []  # whether such a layer is one whole, or inside one that is
        self._within = False  # an operation is running: what it calls is its own affair
        self._turns = 0
        self._thread = threading.get_ident()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(operations_seen(self._operation, self._layer, self._unseen))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._known.clear()
        self._weights.clear()

    def settle(self) -> list[Record]:
        """Finds which infinities are intended. Returns the records."""
        for record in self.records:
            record.intended = is_intended(record, self.records)
        return self.records

    def _operation(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operation that nobody else is running already, and records it."""
        if self._within or threading.get_ident() != self._thread or _takes_functions(args, kwargs):
            return function(*args, **kwargs)
        args, kwargs = keras.tree.map_structure(self._weight_as_tensor, (args, kwargs))
        self._within = True
        try:
            record = Record(-1, name, self._place(), tuple(self._running))
            given: dict[int, Any] = {}
            args, kwargs = keras.tree.map_structure(functools.partial(self._into, record, given), (args, kwargs))
            result = function(*args, **kwargs)
            record.index = len(self.records)
            result = keras.tree.map_structure(functools.partial(self._out_of, record, given), result)
            if record.output is not None:
                self.records.append(record)
            return result
        finally:
            self._within = False

    def _layer(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a layer. Its record stands for what it computes where nobody can see how."""
        layer, *rest = args
        if self._within or threading.get_ident() != self._thread:
            return function(*args, **kwargs)
        record = Record(len(self.records), f"{type(layer).__name__}.{name}", NOWHERE, tuple(self._running), layer=True)
        record.place = self._place(layer)
        self.records.append(record)
        closed = bool(self._closed) and self._closed[-1]
        self._running.append(record.index)
        self._closed.append(closed or whole(layer))
        try:
            given: dict[int, Any] = {}
            rest, kwargs = self._quietly(functools.partial(self._into, record, given), (rest, kwargs))
            result = function(layer, *rest, **kwargs)
            return self._quietly(functools.partial(self._out_of, record, given), result)
        finally:
            self._running.pop()
            self._closed.pop()

    def _unseen(self, _: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls what is no operation of the forward pass, whatever operations it makes use of."""
        if self._within or threading.get_ident() != self._thread:
            return function(*args, **kwargs)
        self._within = True
        try:
            return function(*args, **kwargs)
        finally:
            self._within = False

    def _quietly(self, function: Callable[[Any], Any], structure: Any) -> Any:
        return self._unseen("", keras.tree.map_structure, (function, structure), {})

    def _weight_as_tensor(self, leaf: Any) -> Any:
        """The value of a variable, in the precision that Keras casts it to here; anything else as it is."""
        if not isinstance(leaf, keras.Variable):
            return self._unseen("", _plain_tensor, (leaf,), {})
        tensor = self._unseen("", _plain_tensor, (leaf.value,), {})  # the cast is an operation of its own
        self._weights[id(tensor)] = tensor
        return tensor

    def _place(self, layer: Layer | None = None) -> Place:
        """Where what begins now belongs: to the innermost layer, or the one whole that this is part of."""
        source = line_here(probe.__code__)
        outer = self.records[self._running[-1]].place if self._running else NOWHERE
        path = None if layer is None or (self._closed and self._closed[-1]) else self._paths.get(id(layer))
        module = outer.module if path is None else path
        module_class = outer.module_class if path is None else type(layer).__name__
        return Place(module, module_class, source)

    def _into(self, record: Record, given: dict[int, Any], leaf: Any) -> Any:
        """Taps what goes into a call."""
        if isinstance(leaf, float):
            record.scalars += (leaf,)
        elif isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f":
            record.scalars += (
                tuple(float(end) for end in (leaf.min(), leaf.max()) if np.isinf(end)) if leaf.size else ()
            )
        else:
            place = len(record.inputs)
            tapped, value = self._tap(leaf, functools.partial(self._sent, record, place))
            if value is not None and (extent := self._extent(leaf, value)) is not None:
                producer = WEIGHT if id(leaf) in self._weights else self._producer(leaf, UNKNOWN)
                record.inputs.append(Input(producer, extent))
                given[id(tapped)] = leaf
                for tensor in (leaf, tapped):
                    self._known[id(tensor)] = _Known(tensor, producer, extent)
            return tapped
        return leaf

    def _out_of(self, record: Record, given: dict[int, Any], leaf: Any) -> Any:
        """Taps what comes out of a call; what only went through it stays what it was."""
        if id(leaf) in given:
            return given[id(leaf)]
        tapped, value = self._tap(leaf, functools.partial(self._arrived, record))
        if value is None or (extent := self._extent(leaf, value)) is None:
            return leaf
        record.output = extent.joined(record.output)
        self._known[id(tapped)] = _Known(tapped, self._producer(leaf, record.index), extent)
        return tapped

    def _tap(self, leaf: Any, gradient: Callable[[Any], None]) -> tuple[Any, Any]:
        """The leaf tapped, and its value; as it was, and None, where there is none."""
        values: list[Any] = []
        tapped = tap(leaf, values.append, gradient)
        if not values:
            return leaf, None
        return tapped, values[0]

    def _producer(self, leaf: Any, default: int) -> int:
        return self._known[id(leaf)].producer if id(leaf) in self._known else default

    def _extent(self, leaf: Any, value: Any) -> Extent | None:
        known = self._known.get(id(leaf))
        return known.extent if known is not None else extent_of(value)

    def _sent(self, record: Record, place: int, gradient: Any) -> None:
        extent = self._unseen("", extent_of, (gradient,), {})
        if extent is not None and place < len(record.inputs):
            record.inputs[place].gradient = extent.joined(record.inputs[place].gradient)

    def _arrived(self, record: Record, gradient: Any) -> None:
        extent = self._unseen("", extent_of, (gradient,), {})
        if extent is not None:
            self._turns += 1
            record.turn = record.turn or self._turns
            record.arrived = extent.joined(record.arrived)


def _takes_functions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether something callable is among the arguments: `scan`, `cond` and their like run the user's operations."""
    return any(callable(value) and not isinstance(value, type) for value in (*args, *kwargs.values()))


def _plain_tensor(leaf: Any) -> Any:
    """The value of what TensorFlow keeps the value of a Keras variable in; anything else as it is."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.convert_to_tensor(leaf) if isinstance(leaf, tf.Variable) else leaf
    return leaf
