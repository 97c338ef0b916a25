"""How sensitive each layer is to rounding, from one observed training step in float32.

What each layer got, and the gradient of what it gave, are those of a probe. Then each layer is run again by itself: as
it is, and with inputs, weights and output rounded to each format. The change of the output times the gradient is the
change of the loss, to first order; the same passes backward give the error of the weight gradients. What is measured is
in `halfwise.core.sensitivity`. Layers that are more than one product are also run as the format would compute inside
them (`inside.py`), and the larger change counts.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import keras
import numpy as np
from keras import Layer

from halfwise.core.sensitivity import Sensitivity, SensitivityRecord
from halfwise.keras.heads import heads
from halfwise.keras.inside import Pass, has_an_inside, passes_inside
from halfwise.keras.measure import timed_layers
from halfwise.keras.probe import Observer, Probed, probe, to_numpy
from halfwise.keras.profile import parameters
from halfwise.keras.rounding import rounded

__all__ = ["SensitivityProbe"]

_LOG = logging.getLogger("halfwise")
_backend = import_module(f"halfwise.keras.backends.{keras.backend.backend()}")

_SAMPLE = 65536  # values of a weight's gradient


@dataclass(frozen=True)
class _Rounding:
    """What computing in a format rounds: the format's name for inputs and weights, for outputs, and for gradients."""

    operands: str
    output: str
    gradient: str


_ROUNDINGS = {
    "bfloat16": _Rounding("bfloat16", "bfloat16", "bfloat16"),
    "float16": _Rounding("float16", "float16", "float16"),
    "tensorfloat32": _Rounding("tensorfloat32", "float32", "tensorfloat32"),
    "float8_e4m3fn": _Rounding("float8_e4m3fn", "bfloat16", "float8_e5m2"),
}


class SensitivityProbe(Observer):
    """Gathers sensitivities of the layers that have weights; softmax heads, which stay in float32 anyway, left out.

    Args:
        model: built.

    Attributes:
        spent: seconds that looking took so far.
    """

    def __init__(self, model: keras.Model) -> None:
        self.spent = 0.0
        self._model = model
        self._record = SensitivityRecord()
        self._sums: dict[str, list[np.ndarray[Any, Any]]] = {}
        self._pending: dict[str, list[np.ndarray[Any, Any]]] = {}
        self._calls: dict[tuple[str, int], tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._gradients: dict[tuple[str, int], dict[int, Any]] = {}

    @property
    def sensitivity(self) -> Sensitivity:
        """What was gathered and kept so far."""
        count = max(1, self._record.batches)
        return self._record.sensitivity({path: _norm(sums) / count for path, sums in self._sums.items()})

    def look(
        self,
        data: Any,
        formats: Sequence[str],
        *,
        step: Callable[..., Any] | None = None,
        state: tuple[Any, ...] | None = None,
    ) -> None:
        """Looks at one training step, which leaves no trace. `data`, `step` and `state` are those of `probe`.

        Args:
            formats: bfloat16, float16, tensorfloat32, float8_e4m3fn, or some of them; none looks at nothing.
        """
        formats = [name for name in formats if name in _ROUNDINGS]
        if not formats:
            return
        start = time.perf_counter()
        kept = set(heads(self._model))
        layers = {path: layer for path, layer in timed_layers(self._model).items() if path not in kept}
        probed = probe(self._model, data, self, layers=layers, step=step, state=state)
        values = {id(variable): value for variable, value in probed.weights}
        for (path, call), (args, kwargs) in self._calls.items():
            gradients = self._gradients.get((path, call))
            if gradients:
                self._compare(path, layers[path], args, kwargs, gradients, values, formats)
        self._calls, self._gradients = {}, {}
        self.spent += time.perf_counter() - start

    def add_gradients(self, probed: Probed) -> None:
        """Takes a step's weight gradients into the batch: they show how much batches differ.

        Of a large gradient every so many values are taken, so that little has to be kept.
        """
        start = time.perf_counter()
        found = {id(variable): gradient for variable, gradient in probed.gradients}
        for path, layer in timed_layers(self._model).items():
            gradients = [_sample(found[id(v)]) for v in parameters(layer) if id(v) in found]
            if gradients:
                self._record.add_gradient(path, norm=_norm(gradients))
                self._pending[path] = gradients
        self.spent += time.perf_counter() - start

    def keep(self, loss: float) -> None:
        """Ends a batch."""
        self._record.end_batch(loss)
        for path, gradients in self._pending.items():
            sums = self._sums.get(path)
            same = sums is not None and [s.shape for s in sums] == [g.shape for g in gradients]  # not where sparse
            if sums is None:
                self._sums[path] = gradients
            elif same:
                self._sums[path] = [s + g for s, g in zip(sums, gradients, strict=True)]
        self._pending = {}

    def drop(self) -> None:
        """Ends a batch that is no evidence."""
        self._record.drop_batch()
        self._pending = {}

    def arguments(self, path: str, call: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls[path, call] = args, kwargs

    def backward(self, path: str, call: int, where: Literal["input", "output"], index: int, gradient: Any) -> None:
        if where == "output":
            self._gradients.setdefault((path, call), {})[index] = gradient

    def _compare(
        self,
        path: str,
        layer: Layer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        gradients: dict[int, Any],
        values: dict[int, Any],
        formats: Sequence[str],
    ) -> None:
        try:
            weights = [(variable, values[id(variable)]) for variable in parameters(layer)]
            others = [(v, values[id(v)]) for v in layer.variables if id(v) in values]
            exact = _run(layer, args, kwargs, weights, others, gradients, None)
            for name in formats:
                found = _run(layer, args, kwargs, weights, others, gradients, _ROUNDINGS[name])
                score = _score(exact.outputs, found.outputs, gradients)
                error = _relative_error(exact.weight_gradients, found.weight_gradients)
                if has_an_inside(layer):
                    inside = _look_inside(layer, args, kwargs, weights, others, gradients, name)
                    score, error = max(score, inside[0]), max(error, inside[1])
                self._record.add_score(path, name, score)
                if exact.weight_gradients:
                    self._record.add_gradient_error(path, name, error)
        except Exception as error:  # a measurement must never end a training
            _LOG.info("the sensitivity of layer %r is unknown: %s", path, error)


def _look_inside(
    layer: Layer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    weights: Sequence[tuple[keras.Variable, Any]],
    others: Sequence[tuple[keras.Variable, Any]],
    gradients: dict[int, Any],
    name: str,
) -> tuple[float, float]:
    """Score and gradient error where the layer computes in the format; 0 where it cannot."""
    try:
        found = passes_inside(layer, args, kwargs, weights, others, gradients, name)
    except Exception as error:  # an operation that the backend lacks in the format here
        _LOG.info("%r cannot run by itself in %s: %s", layer.name, name, error)
        return 0.0, 0.0
    if found is None:
        return 0.0, 0.0
    exact, lowered = found
    score = _score(exact.outputs, lowered.outputs, gradients)
    return score, _relative_error(exact.weight_gradients, lowered.weight_gradients)


def _run(
    layer: Layer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    weights: Sequence[tuple[keras.Variable, Any]],
    others: Sequence[tuple[keras.Variable, Any]],
    gradients: dict[int, Any],
    rounding: _Rounding | None,
) -> Pass:
    """Forward and backward of the layer by itself: plainly, or as computing in a format would round it."""
    operands = "float32" if rounding is None else rounding.operands
    scaled = operands.startswith("float8")

    def given(leaf: Any) -> Any:
        floating = keras.ops.is_tensor(leaf) and keras.backend.is_float_dtype(
            keras.backend.standardize_dtype(leaf.dtype)
        )
        return rounded(leaf, operands, scaled=scaled) if floating and rounding is not None else leaf

    args, kwargs = keras.tree.map_structure(given, (args, kwargs))
    lowered = [(variable, given(keras.ops.convert_to_tensor(value))) for variable, value in weights]
    incoming = {
        index: gradient if rounding is None else _rounded_gradient(gradient, rounding.gradient)
        for index, gradient in gradients.items()
    }
    outputs, found = _backend.local_gradients(layer, args, kwargs, lowered, others, incoming)
    if rounding is None:
        return Pass([to_numpy(t) for t in outputs], [to_numpy(g) for g in found])
    return Pass(
        [to_numpy(rounded(t, rounding.output)) for t in outputs],
        [to_numpy(_rounded_gradient(g, rounding.output)) for g in found],
    )


def _rounded_gradient(gradient: Any, name: str) -> Any:
    """Scaled where the format needs it, as a loss scale does: how much underflows is judged by the range gate."""
    return rounded(gradient, name, scaled=name in ("float16", "float8_e5m2"))


def _score(exact: list[Any], found: list[Any], gradients: dict[int, Any]) -> float:
    """The sum over samples (the first axis) of the squared change of the loss."""
    changes: dict[int, np.ndarray[Any, Any]] = {}
    with np.errstate(over="ignore", invalid="ignore"):  # what overflowed in the format
        for index, gradient in gradients.items():
            products = (found[index].astype(np.float64) - exact[index]) * to_numpy(gradient)
            per_sample = products.reshape(len(products), -1).sum(1) if products.ndim else products.reshape(1)
            known = changes.get(len(per_sample))
            changes[len(per_sample)] = per_sample if known is None else known + per_sample
        total = math.fsum(float(np.square(change).sum()) for change in changes.values())
    return total if math.isfinite(total) else math.inf


def _relative_error(exact: list[Any], found: list[Any]) -> float:
    """The 2-norm of the difference over that of the exact gradients."""
    with np.errstate(over="ignore", invalid="ignore"):
        size, error = _norm(exact), _norm([b - a for a, b in zip(exact, found, strict=True)])
    if not math.isfinite(error) or not math.isfinite(size):
        return math.inf
    return error / size if size > 0.0 else 0.0


def _norm(arrays: Sequence[Any]) -> float:
    """The 2-norm over all of them."""
    return math.sqrt(math.fsum(float(np.square(array, dtype=np.float64).sum()) for array in arrays))


def _sample(gradient: Any) -> np.ndarray[Any, Any]:
    values = to_numpy(gradient).reshape(-1)
    return values[:: 1 + values.size // _SAMPLE].astype(np.float32)
