"""Profiles: exponent histograms of what each layer reads and writes, forward and backward.

A layer is one that has weights of its own or no layers inside it; one that computes in one piece with what is inside it
(recurrent layers, attention, wrappers) is one layer. Under `activation` stand the layer's floating inputs, as they are
after the cast to its precision, and its floating outputs, for both must fit the format that it computes in. Masks,
which legitimately hold -inf, are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import keras
from keras import Layer

from halfwise.core.histogram import ExponentHistogram
from halfwise.core.profile import Profile, Role
from halfwise.core.step_histograms import StepHistograms
from halfwise.keras.names import children, whole
from halfwise.keras.probe import Observer, Probed, built, probe, tapped_layers, to_numpy
from halfwise.keras.training_step import OwnStep
from halfwise.keras.validate import check_model

__all__ = ["Recorder", "parameters", "profile", "profiled_layers"]


def profile(model: keras.Model, x: Any, y: Any = None, sample_weight: Any = None, *, loss: Any = None) -> Profile:
    """Exponent histograms of one training step on one batch, per layer and role.

    Weights, optimizer, metrics, moving statistics and random seeds are as before afterwards.

    Args:
        model: the model, in whatever precision its layers have; it is built if it is not.
        x: one batch of inputs: an array, or a structure of arrays, as for `fit`.
        y: the batch's targets.
        sample_weight: the batch's weights. Default: none.
        loss: as for `model.compile`. Default None: the compiled model's own training step.

    Raises:
        UsageError: this is no Keras model, its weights are in half precision, or there is no loss.

    Example:
        >>> import keras, numpy as np, halfwise.keras as hw
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> found = hw.profile(model, np.ones((8, 4)), np.zeros((8, 2)), loss="mse")
        >>> found.get("dense", "activation").total
        48
    """
    check_model(model)
    recorder = Recorder(model)
    step = None if loss is None and model.compiled else OwnStep(model, loss)
    recorder.record((x, y, sample_weight), step=step)
    recorder.keep()
    return recorder.profile


def profiled_layers(model: Layer) -> dict[str, Layer]:
    """The layers of the built model by path."""
    return {
        path: layer
        for path, layer in tapped_layers(model).items()
        if whole(layer) or not children(layer) or parameters(layer)
    }


def parameters(layer: Layer) -> list[keras.Variable]:
    """The layer's own weights, trained or frozen; those inside it too where it is one whole. Statistics are none."""
    parts = layer._flatten_layers() if whole(layer) else [layer]
    return list({id(variable): variable for part in parts for variable in part._trainable_variables}.values())


class Recorder(Observer, StepHistograms):
    """Gathers histograms over training steps."""

    def __init__(self, model: keras.Model) -> None:
        super().__init__()
        self._model = model

    def record(
        self, data: Any, *, step: Callable[..., Any] | None = None, state: tuple[Any, ...] | None = None
    ) -> Probed:
        """Records one training step, which leaves no trace. The arguments are those of `probe`."""
        layers = profiled_layers(built(self._model, data, step))
        probed = probe(self._model, data, self, layers=layers, step=step, state=state)
        weights = {id(variable): value for variable, value in probed.weights}
        gradients = {id(variable): value for variable, value in probed.gradients}
        for path, layer in layers.items():
            for key in map(id, parameters(layer)):
                self._add(path, "weight", weights.get(key))
                self._add(path, "weight_gradient", gradients.get(key))
        return probed

    def forward(self, path: str, call: int, inputs: list[Any], outputs: list[Any]) -> None:  # noqa: ARG002
        for tensor in (*inputs, *outputs):
            self._add(path, "activation", tensor)

    def backward(
        self,
        path: str,
        call: int,  # noqa: ARG002
        where: Literal["input", "output"],  # noqa: ARG002
        index: int,  # noqa: ARG002
        gradient: Any,
    ) -> None:
        self._add(path, "activation_gradient", gradient)

    def _add(self, path: str, role: Role, tensor: Any) -> None:
        if tensor is None or not keras.backend.is_float_dtype(keras.backend.standardize_dtype(tensor.dtype)):
            return
        self.add(path, role, ExponentHistogram.of(to_numpy(tensor)))
