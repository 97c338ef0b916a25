"""How long each layer takes in each format on this device: forward and backward on the inputs that it really gets.

The inputs are those of a probe. As in training, a layer runs compiled on JAX, as a graph on TensorFlow, and eagerly on
torch. A format is given up once it has taken longer than float32 did: that the format is slower here is all that a
planner needs to know. Layers that are alike (the same configuration, weights and inputs of the same shapes) are timed
once, since compiling takes a while.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Literal

import keras
from keras import Layer

from halfwise.core.layer_timing import LayerTimes, time_formats
from halfwise.core.timing import TimingTable
from halfwise.keras.apply import policy_name
from halfwise.keras.names import children, whole
from halfwise.keras.probe import Observer, built, probe, tapped_layers
from halfwise.keras.profile import parameters

__all__ = ["HALF_FORMATS", "LayerTimer", "computing_in", "timed_layers"]

_LOG = logging.getLogger("halfwise")
_backend = import_module(f"halfwise.keras.backends.{keras.backend.backend()}")

HALF_FORMATS = ("bfloat16", "float16")
"""The half-precision formats that Keras computes in; a layer that cannot run in one is not timed in it."""


class LayerTimer(Observer):
    """Times the layers of a model that have weights; see the text of this file."""

    def __init__(self, model: keras.Model, formats: Sequence[str] = HALF_FORMATS) -> None:
        self._model = model
        self._formats = tuple(formats)
        self._calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._input_gradients: set[str] = set()
        self._times: dict[str, LayerTimes] = {}
        self._saved: dict[str, int] = {}

    @property
    def table(self) -> TimingTable:
        """What was measured so far."""
        return TimingTable(
            {path: dict(found.seconds) for path, found in self._times.items()},
            frozenset((path, name) for path, found in self._times.items() for name in found.cut_short),
            spread={path: found.spread for path, found in self._times.items()},
            saved={path: self._saved[path] for path in self._times},
        )

    def measure(
        self, data: Any, *, step: Callable[..., Any] | None = None, state: tuple[Any, ...] | None = None
    ) -> None:
        """Times the layers on what they get in one training step. The arguments are those of `probe`."""
        layers = timed_layers(built(self._model, data, step))
        probed = probe(self._model, data, self, layers=layers, step=step, state=state)
        values = {id(variable): value for variable, value in probed.weights}
        alike: dict[Any, str] = {}
        for path, (args, kwargs) in self._calls.items():
            kind = _kind(layers[path], args, kwargs, path)
            twin = alike.setdefault((kind, path in self._input_gradients), path)
            if twin == path:
                self._time(path, layers[path], args, kwargs, values)
            elif twin in self._times:
                self._times[path] = self._times[twin]
            self._saved[path] = _floating_values((args, kwargs))
        self._calls = {}

    def arguments(self, path: str, call: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if call == 0:
            self._calls[path] = (args, kwargs)

    def backward(
        self,
        path: str,
        call: int,  # noqa: ARG002
        where: Literal["input", "output"],
        index: int,  # noqa: ARG002
        gradient: Any,  # noqa: ARG002
    ) -> None:
        if where == "input":
            self._input_gradients.add(path)

    def _time(self, path: str, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], values: Any) -> None:
        put_back = _backend.keep(layer.non_trainable_variables)
        try:
            self._times[path] = self._measured(path, layer, args, kwargs, values)
        except Exception as error:  # a measurement must never end a training
            _LOG.info("layer %r could not be timed and keeps float32: %s", path, error)
        finally:
            put_back()

    def _measured(
        self, path: str, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], values: Any
    ) -> LayerTimes:
        passes: dict[str, Callable[[float], float]] = {}

        def seconds(name: str, limit: float) -> float:
            with computing_in(layer, name):
                if name not in passes:
                    gradients = path in self._input_gradients
                    passes[name] = _backend.layer_pass(layer, args, kwargs, values, input_gradients=gradients)
                return passes[name](limit)

        return time_formats(path, self._formats, seconds)


def _floating_values(structure: Any) -> int:
    """How many floating values the tensors in it have."""
    leaves = [leaf for leaf in keras.tree.flatten(structure) if keras.ops.is_tensor(leaf)]
    floating = [leaf for leaf in leaves if keras.backend.is_float_dtype(keras.backend.standardize_dtype(leaf.dtype))]
    return sum(math.prod(leaf.shape) for leaf in floating)


def timed_layers(model: keras.Model) -> dict[str, Layer]:
    """The layers of a built model by path that have weights and contain no other such layer: none counts twice."""
    return {path: layer for path, layer in tapped_layers(model).items() if _timed(layer)}


def _timed(layer: Layer) -> bool:
    return bool(parameters(layer)) and (whole(layer) or not children(layer))


@contextmanager
def computing_in(layer: Layer, name: str) -> Iterator[None]:
    """Within the block the layer, and what is inside it, computes in the format."""
    policy = keras.DTypePolicy(policy_name(name))
    parts = [part for part in layer._flatten_layers() if keras.backend.is_float_dtype(part.compute_dtype)]
    before = [(part, part._dtype_policy) for part in parts]
    for part in parts:
        part._dtype_policy = policy
    try:
        yield
    finally:
        for part, earlier in before:
            part._dtype_policy = earlier


def _kind(layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], path: str) -> Any:
    """Equal for layers that take the same time."""
    try:
        config = {name: value for name, value in layer.get_config().items() if name != "name"}
    except Exception:  # a layer of the user's that cannot describe itself is like no other
        return path
    shapes = [
        (getattr(leaf, "shape", leaf), str(getattr(leaf, "dtype", ""))) for leaf in keras.tree.flatten((args, kwargs))
    ]
    return type(layer), repr(config), repr(shapes), repr([variable.shape for variable in layer.weights])
