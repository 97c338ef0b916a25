"""What a layer gives when the operations inside it run in a format, rather than on rounded operands in float32.

A layer that is one product sums up in float32 whatever the format, so that rounding what goes in and comes out tells
all. Attention is several operations, and what users write themselves may be any: a norm by hand overflows between an
input and an output that both fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import keras
import numpy as np
from keras import Layer

from halfwise.keras.measure import HALF_FORMATS, computing_in
from halfwise.keras.taps import to_numpy

__all__ = ["Pass", "has_an_inside", "passes_inside"]

_backend = import_module(f"halfwise.keras.backends.{keras.backend.backend()}")

_PEAKS = (2.0**10, 2.0**4, 2.0**-2)
"""What the largest gradient is scaled to in float16; where that overflows inside, the next: a loss scale backs off."""

_ATTENTION = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)

Values = Sequence[tuple[keras.Variable, Any]]


@dataclass(frozen=True)
class Pass:
    """A layer's floating outputs, and the gradients of its trained weights; all in float32."""

    outputs: list[np.ndarray[Any, Any]]
    weight_gradients: list[np.ndarray[Any, Any]]


def has_an_inside(layer: Layer) -> bool:
    """True for attention, and for layers whose code is not Keras'.

    Example:
        >>> has_an_inside(keras.layers.Dense(2)), has_an_inside(keras.layers.MultiHeadAttention(2, 1))
        (False, True)
    """
    return isinstance(layer, _ATTENTION) or type(layer).call.__module__.partition(".")[0] != "keras"


def passes_inside(
    layer: Layer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    weights: Values,
    others: Values,
    gradients: Mapping[int, Any],
    format_name: str,
) -> tuple[Pass, Pass] | None:
    """Forward and backward of the layer by itself, in float32 and computing in the format, run eagerly.

    Attention is compared without its dropout, for masks may differ between formats. None where another layer draws
    random numbers, or where Keras does not compute in the format.

    Args:
        layer: one with `has_an_inside`; no variable of it changes.
        args, kwargs: what its `call` gets in float32.
        weights: `(variable, value)` of those that are trained.
        others: the same of all that it has.
        gradients: index among the floating outputs -> the loss's gradient with respect to it.
        format_name: a name in `halfwise.FORMATS`.
    """
    if format_name not in HALF_FORMATS:
        return None
    if isinstance(layer, _ATTENTION):
        kwargs = {name: False if name == "training" else value for name, value in kwargs.items()}
    elif any(part._seed_generators for part in layer._flatten_layers()):
        return None
    exact = _pass(layer, args, kwargs, weights, others, gradients, 1.0)
    largest = _largest([*map(to_numpy, gradients.values()), *exact.weight_gradients])
    scales = [peak / largest for peak in _PEAKS] if format_name == "float16" and largest else [1.0]
    with computing_in(layer, format_name):
        for scale in scales:
            found = _pass(layer, args, kwargs, weights, others, gradients, scale)
            if math.isfinite(_largest(found.weight_gradients)):
                break
    return exact, found


def _pass(
    layer: Layer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    weights: Values,
    others: Values,
    gradients: Mapping[int, Any],
    scale: float,
) -> Pass:
    values = [(variable, keras.ops.convert_to_tensor(value)) for variable, value in weights]
    incoming = {index: gradient * scale for index, gradient in gradients.items()}
    outputs, found = _backend.local_gradients(layer, args, kwargs, values, others, incoming)
    return Pass([_float32(tensor) for tensor in outputs], [_float32(gradient) / scale for gradient in found])


def _float32(tensor: Any) -> np.ndarray[Any, Any]:
    return to_numpy(tensor).astype(np.float32)


def _largest(arrays: Sequence[np.ndarray[Any, Any]]) -> float:
    """The largest magnitude; NaN counts as infinite."""
    found = [float(np.abs(array).max()) for array in arrays if array.size]
    return max((size if math.isfinite(size) else math.inf for size in found), default=0.0)
