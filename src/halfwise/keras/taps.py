"""Taps: identities in a model's computation that show values on the way forward and gradients on the way back."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from itertools import zip_longest
from typing import Any, Literal

import keras
import numpy as np
from keras import Layer

from halfwise.keras.names import named_layers, whole

__all__ = ["Observer", "Taps", "ignore", "tap", "tapped_call", "tapped_layers", "to_numpy"]

_backend = import_module(f"halfwise.keras.backends.{keras.backend.backend()}")

to_numpy: Callable[[Any], np.ndarray[Any, Any]] = _backend.to_numpy


class Observer:
    """What is told during a probe. Override what is needed; tensors are the backend's, with values.

    `path` names the layer, `call` counts its calls in this step from 0. A layer's floating arguments are its inputs,
    whether given by position or by name, except those whose name ends in `mask`: masks hold -inf on purpose.
    """

    def arguments(self, path: str, call: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """All arguments that the layer's `call` gets, as it gets them: inputs are cast to its precision already."""

    def forward(self, path: str, call: int, inputs: list[Any], outputs: list[Any]) -> None:
        """The layer returned. Layers inside it were told before it."""

    def backward(self, path: str, call: int, where: Literal["input", "output"], index: int, gradient: Any) -> None:
        """The scaled loss's gradient with respect to one of the inputs or outputs, `index` being its place in the list.

        Outputs come before inputs, and later layers before earlier ones. An input's gradient is the part that flows
        through this layer; what the tensor gets elsewhere is not in it.
        """


def tap(tensor: Any, forward: Callable[[Any], None], backward: Callable[[Any], None]) -> Any:
    """`tensor`, whose value is handed to `forward` now, and its gradient to `backward` when it is known.

    Only the gradient of what is computed from the tensor that is returned counts: a tensor that is tapped twice gives
    two. What is no floating tensor with a value (an integer, what a compiler is tracing) is returned as it is.
    """
    tapped = _backend.tap(tensor, forward, backward)
    if tapped is not tensor and (mask := keras.src.backend.get_keras_mask(tensor)) is not None:
        keras.src.backend.set_keras_mask(tapped, mask)
    return tapped


def tapped_layers(model: Layer) -> dict[str, Layer]:
    """`path -> layer` of the layers that can be observed: all but those inside a layer that is one whole."""
    inside: set[int] = set()
    found = {}
    for path, layer in named_layers(model).items():
        if id(layer) not in inside:
            found[path] = layer
            if whole(layer):
                inside.update(map(id, named_layers(layer).values()))
    return found


class Taps:
    """Puts taps on the floating tensors of structures.

    Attributes:
        seen: the values of the tapped tensors, in order.
    """

    def __init__(self, backward: Callable[[int, Any], None] | None = None) -> None:
        self.seen: list[Any] = []
        self._backward = backward

    def on(self, structure: Any) -> tuple[Any, Any]:
        """The structure with each floating tensor tapped, and with the values of these: in JAX tensors hide them."""
        pairs = [self._tap(leaf) for leaf in keras.tree.flatten(structure)]
        tapped, values = ([pair[i] for pair in pairs] for i in (0, 1))
        return keras.tree.pack_sequence_as(structure, tapped), keras.tree.pack_sequence_as(structure, values)

    def _tap(self, leaf: Any) -> tuple[Any, Any]:
        index, backward = len(self.seen), self._backward
        tapped = tap(leaf, self.seen.append, ignore if backward is None else functools.partial(backward, index))
        return tapped, self.seen[-1] if len(self.seen) > index else leaf


def tapped_call(call: Callable[..., Any], path: str, observer: Observer) -> Callable[..., Any]:
    """A layer's `call`, with taps on what it gets and gives."""
    names = list(inspect.signature(call).parameters)
    calls = 0

    @functools.wraps(call)
    def tapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        number = calls
        inputs, outputs = (
            Taps(functools.partial(observer.backward, path, number, where)) for where in ("input", "output")
        )

        def on(name: str, argument: Any) -> tuple[Any, Any]:
            return (argument, argument) if name.endswith("mask") else inputs.on(argument)

        by_place = [on(name, argument) for name, argument in zip_longest(names[: len(args)], args, fillvalue="")]
        by_name = {name: on(name, argument) for name, argument in kwargs.items()}
        observer.arguments(path, number, tuple(v for _, v in by_place), {name: v for name, (_, v) in by_name.items()})
        result = call(*(t for t, _ in by_place), **{name: t for name, (t, _) in by_name.items()})
        result, _ = outputs.on(result)
        if inputs.seen or outputs.seen:
            calls = number + 1
            observer.forward(path, number, inputs.seen, outputs.seen)
        return result

    return tapped


def ignore(_gradient: Any) -> None:
    """For gradients that nobody wants to see."""
