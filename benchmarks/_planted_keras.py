"""The planted cases in Keras, on whichever backend it runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import keras
import numpy as np
from keras import Layer, layers, ops

from _planted_cases import BEYOND, FIRST_POSITION, KEY_OFFSET, OFFSET, SHARPER, SQUARES_BEYOND, TINY, Case, Trouble
from halfwise.core.workload import Workload
from halfwise.keras.names import children, named_layers
from halfwise.keras.probe import to_numpy
from halfwise.workloads.load import load_workload

__all__ = ["plant", "planted"]


def planted(case: Case, seed: int = 0) -> tuple[Workload, str]:
    """The model of the case, and the path of the layer that has the trouble."""
    return plant(load_workload(case.kind, framework="keras", seed=seed), case.keras, case.trouble)


def plant(workload: Workload, path: str, trouble: Trouble) -> tuple[Workload, str]:
    """The workload with the trouble in the layer, and the path of the one that has it."""
    layer = named_layers(workload.model)[path]
    around = _AROUND[trouble](layer, _Seen(workload, layer))
    model = workload.model if around is layer else _with_other(workload.model, layer, around)
    model(workload.batches[0][0])  # builds what is new
    troubled = around if around is layer else around.troubled
    found = next(name for name, one in named_layers(model).items() if one is troubled)
    return replace(workload, model=model), found


class _Seen:
    """What a layer gets and gives in the first batch."""

    def __init__(self, workload: Workload, layer: Layer) -> None:
        self._largest, self._size = [0.0, 0.0], [0.0, 0.0]
        inner = layer.call

        def noted(*args: Any, **kwargs: Any) -> Any:
            output = inner(*args, **kwargs)
            for place, values in enumerate((args, output)):
                for value in keras.tree.flatten(values):
                    array = to_numpy(value)
                    self._largest[place] = max(self._largest[place], float(np.abs(array).max()))
                    self._size[place] = max(self._size[place], float(np.sqrt(np.square(array * 1.0).mean())))
            return output

        layer.__dict__["call"] = noted
        try:
            workload.model(workload.batches[0][0], training=False)
        finally:
            del layer.__dict__["call"]
        self.largest_input, self.largest_output = self._largest
        self.typical_input = self._size[0]


def _with_other(model: keras.Model, old: Layer, new: Layer) -> keras.Model:
    """The model with one layer in another's place."""
    if isinstance(model, keras.Sequential):
        return keras.Sequential([keras.Input(model.input_shape[1:]), *(new if x is old else x for x in model.layers)])
    for parent in named_layers(model).values():
        if any(child is old for child in children(parent)):
            _exchange(parent, old, new)
    return model


def _exchange(parent: Layer, old: Layer, new: Layer) -> None:
    parent._tracker.replace_tracked_value("layers", old, new)
    for name, value in [*vars(parent).items(), *vars(parent).get("_modules", {}).items()]:
        if value is old:  # on the torch backend it stands among the modules
            setattr(parent, name, new)
        elif isinstance(value, list) and value is not parent._layers:
            value[:] = [new if item is old else item for item in value]


class Around(Layer):
    """Stands in a layer's place and calls it, with something done before and behind it."""

    def __init__(
        self, layer: Layer, before: Callable[[Any], Any] | None = None, behind: Callable[[Any], Any] | None = None
    ) -> None:
        super().__init__(name=f"around_{layer.name}")
        self.layer = layer
        self.before, self.behind = before, behind
        self.built = True

    @property
    def troubled(self) -> Layer:
        """The layer that has the trouble."""
        return self.layer

    def call(self, x: Any) -> Any:
        """The layer's."""
        y = self.layer(x if self.before is None else self.before(x))
        return y if self.behind is None else self.behind(y)


def _overflow(layer: Layer, seen: _Seen) -> Around:
    """Inputs and outputs are so many times larger; the weights, and their gradients, are as they were."""
    scale = 2.0 ** math.ceil(math.log2(BEYOND / seen.largest_output))
    if getattr(layer, "bias", None) is not None:
        layer.bias.assign(layer.bias * scale)
    activation = _taken_off(layer)
    return Around(layer, partial(_times, scale), lambda y: activation(_times(1.0 / scale, y)))


def _tiny_gradients(layer: Layer, _: _Seen) -> Around:
    return Around(layer, behind=_with_tiny_gradient)


def _outlier_channels(layer: Layer, _: _Seen) -> Around:
    """Some channels stand far from zero, which is taken off again behind."""
    bias = layer.beta if hasattr(layer, "beta") else layer.bias
    offset = np.zeros(bias.shape, np.float32)
    offset[::4] = OFFSET
    bias.assign(bias + offset)
    activation = _taken_off(layer)
    return Around(layer, behind=lambda y: activation(ops.subtract(ops.cast(y, "float32"), offset)))


def _large_logits(layer: Layer, _: _Seen) -> Layer:
    """All logits of a softmax are so much larger, which it does not see."""
    if isinstance(layer, layers.MultiHeadAttention):
        for part in (layer._query_dense, layer._key_dense):
            part.kernel.assign(part.kernel * SHARPER)
        layer._key_dense.bias.assign(layer._key_dense.bias + KEY_OFFSET)
    else:
        layer.bias.assign(layer.bias + OFFSET)
    return layer


def _hand_written_norm(layer: Layer, seen: _Seen) -> Around:
    scale = 2.0 ** round(math.log2(SQUARES_BEYOND / seen.typical_input))
    return Around(HandWrittenNorm(layer), lambda x: x * scale)


def _large_positions(layer: Layer, _: _Seen) -> Around:
    return WithPositions(layer)


_AROUND: dict[Trouble, Callable[[Layer, _Seen], Any]] = {
    "overflow": _overflow,
    "tiny gradients": _tiny_gradients,
    "outlier channels": _outlier_channels,
    "large logits": _large_logits,
    "hand-written norm": _hand_written_norm,
    "large positions": _large_positions,
}


class HandWrittenNorm(Layer):
    """A layer norm, or group norm, as people write it, with squares that do not fit float16."""

    def __init__(self, norm: Layer) -> None:
        super().__init__(name=norm.name)
        self.groups = norm.groups if isinstance(norm, layers.GroupNormalization) else 0
        width = norm.gamma.shape[-1]
        self.gamma = self.add_weight(shape=(width,), initializer="ones", name="gamma")
        self.beta = self.add_weight(shape=(width,), initializer="zeros", name="beta")
        self.built = True

    def call(self, x: Any) -> Any:
        """In the shape of `x`, channels last."""
        shape = (-1, *x.shape[1:-1], self.groups, x.shape[-1] // self.groups) if self.groups else (-1, *x.shape[1:])
        grouped = ops.reshape(x, shape)
        axes = (*range(1, len(x.shape) - 1), -1) if self.groups else -1
        centred = grouped - ops.mean(grouped, axis=axes, keepdims=True)
        normed = centred * ops.rsqrt(ops.mean(centred * centred, axis=axes, keepdims=True) + 1e-5)
        return ops.reshape(normed, (-1, *x.shape[1:])) * self.gamma + self.beta


class WithPositions(Around):
    """Adds to what a layer gives something that depends on positions far along."""

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer)
        self.far = Positions(layer.units if isinstance(layer, layers.Dense) else layer.output_dim)

    @property
    def troubled(self) -> Layer:
        """The layer that has the trouble."""
        return self.far

    def call(self, x: Any) -> Any:
        """The layer's, and the positions'."""
        y = self.layer(x)
        return y + self.far(ops.cast(FIRST_POSITION + ops.arange(y.shape[1]), "float32")[:, None])


class Positions(Layer):
    """Sines of positions at several frequencies, the angles by a matrix product, as rotary embeddings have them."""

    def __init__(self, width: int) -> None:
        super().__init__(name="far")
        self.frequencies = np.logspace(-2.0, 0.0, width, dtype=np.float32)[None]
        self.scale = self.add_weight(shape=(width,), initializer=keras.initializers.Constant(0.5), name="scale")
        self.built = True

    def call(self, positions: Any) -> Any:
        """(positions, 1) to (positions, width)."""
        return ops.sin(ops.matmul(positions, ops.cast(self.frequencies, positions.dtype))) * self.scale


def _taken_off(layer: Layer) -> Callable[[Any], Any]:
    """The layer's activation, which stands behind what comes behind the layer instead."""
    activation: Callable[[Any], Any] = getattr(layer, "activation", keras.activations.linear)
    if hasattr(layer, "activation"):
        layer.activation = keras.activations.linear
    return activation


def _times(scale: float, x: Any) -> Any:
    return ops.cast(x, "float32") * scale


def _with_tiny_gradient(y: Any) -> Any:
    y = ops.cast(y, "float32")
    fixed = ops.stop_gradient(y)
    return fixed + TINY * (y - fixed)
