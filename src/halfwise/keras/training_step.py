"""A plain training step, for models that were not compiled or are trained by a loop that is not `fit`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import keras
from keras.src.trainers.compile_utils import CompileLoss

from halfwise.errors import UsageError

__all__ = ["OwnStep"]

_backend = import_module(f"halfwise.keras.backends.{keras.backend.backend()}")


class OwnStep:
    """Forward, loss, backward and the optimizer's step, called as `model.train_step` is.

    TensorFlow, torch: `own(data) -> logs`. JAX: `own(state, data) -> (logs, state)`, where the state is that of Keras'
    trainer: the values of the model's trainable variables, of its non-trainable ones, of the optimizer's and of the
    metrics'. `data` is `(x,)`, `(x, y)` or `(x, y, sample_weight)`. The logs are `{"loss": the unscaled loss, "output":
    the model's output}`. It may run eagerly, in `tf.function`, or in `jax.jit`; call `build` before.

    Args:
        model: the model; its losses by `add_loss` and regularizers are added to the loss.
        loss: what `model.compile` takes as `loss`: a name, a function, a `keras.Loss`, or one for each output. Default
            None: the loss that the model was compiled with, or the model's own `compute_loss`.
        optimizer: what `scale_loss` and `apply` are called of; may be set later.

    Example:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> step = OwnStep(model, loss="mse")
        >>> step.build((np.ones((8, 4)), np.ones((8, 1))))
        >>> loss, output = step.forward(np.ones((8, 4)), np.ones((8, 1)), None)
        >>> tuple(output.shape)
        (8, 1)
    """

    def __init__(self, model: keras.Model, loss: Any = None, optimizer: Any = None) -> None:
        self.model = model
        self.optimizer = optimizer
        self._loss = None if loss is None else CompileLoss(loss)

    def __call__(self, *arguments: Any) -> Any:
        return _backend.own_step(self, *arguments)

    def build(self, data: Any) -> None:
        """Builds what is not built yet of the model and the loss, from the shapes and dtypes in `data`."""
        model = self.model
        if model.compiled and self._loss is None:
            model._symbolic_build(data_batch=data)
        elif not _is_built(model) or (self._loss is not None and not self._loss.built):
            x, y, _ = keras.utils.unpack_x_y_sample_weight(keras.tree.map_structure(_symbolic, data))
            output = keras.src.backend.compute_output_spec(model, x, training=False)
            if self._loss is not None:
                self._loss.build(y, output)

    def forward(self, x: Any, y: Any, sample_weight: Any) -> tuple[Any, Any]:
        """The unscaled loss, a scalar, and the model's output.

        Raises:
            UsageError: there is no loss.
        """
        model = self.model
        output = model(x, training=True) if model._call_has_training_arg else model(x)
        if self._loss is None:
            self._check_loss()
            return model._compute_loss(x=x, y=y, y_pred=output, sample_weight=sample_weight, training=True), output
        parts = [self._loss(y, output, sample_weight), *map(model._aggregate_additional_loss, model.losses)]
        return (keras.ops.sum(parts) if len(parts) > 1 else parts[0]), output

    def trainable_variables(self) -> list[Any]:
        """The variables that the step trains.

        Raises:
            UsageError: there are none.
        """
        variables = self.model.trainable_variables
        if not variables:
            raise UsageError(
                f"the model {self.model.name!r} has no trainable weights, so no gradient depends on it: "
                "set layer.trainable = True for the layers to train"
            )
        return variables

    def _check_loss(self) -> None:
        model = self.model
        own = type(model).compute_loss is not keras.Model.compute_loss
        if model._compile_loss is None and not model.losses and not own:
            raise UsageError(
                f"the model {model.name!r} was given no loss: pass loss=..., such as loss='mse', "
                "or call model.compile(loss=...) before"
            )


def _is_built(model: keras.Model) -> bool:
    return all(layer.built for layer in model._flatten_layers())


def _symbolic(array: Any) -> Any:
    return None if array is None else keras.KerasTensor(array.shape, keras.backend.standardize_dtype(array.dtype))
