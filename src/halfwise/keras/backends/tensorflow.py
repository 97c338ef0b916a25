"""What halfwise does in TensorFlow's own terms. Every function here has its twin in `jax.py` and `torch.py`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

if TYPE_CHECKING:
    from halfwise.keras.training_step import OwnStep

__all__ = ["current_values", "gradient_fields_kept", "keep", "layer_pass", "own_step", "run_step", "tap", "to_numpy"]


def tap(tensor: Any, forward: Callable[[Any], None], backward: Callable[[Any], None]) -> Any:
    """`tensor`, whose value is handed to `forward` now, and its gradient to `backward` when it is known.

    Only the gradient of what is computed from the tensor that is returned counts. What is no floating tensor with a
    value (an integer, a tensor of a graph that is being traced) is returned as it is, and nothing is called.

    Keras computes a cross-entropy of probabilities from the logits that its softmax and sigmoid hand on beside them.
    Then the logits' gradient is handed to `backward`.
    """
    if not _has_value(tensor):
        return tensor
    forward(tensor)

    @tf.custom_gradient
    def identity(same: Any) -> tuple[Any, Callable[[Any], Any]]:
        def gradient(upstream: Any) -> Any:
            if _has_value(values := _dense(upstream)):
                backward(values)
            return upstream

        return same, gradient

    tapped = identity(tensor)
    if (logits := getattr(tensor, "_keras_logits", None)) is not None:
        tapped._keras_logits = tap(logits, lambda _: None, backward)
    return tapped


def to_numpy(tensor: Any) -> np.ndarray[Any, Any]:
    """The values, without loss: bfloat16 as ml_dtypes' type; of sparse gradients the values that are there."""
    return np.asarray(_dense(tensor))


def keep(variables: Iterable[Any]) -> Callable[[], None]:
    """Remembers the variables' values; the function that is returned puts them back."""
    kept = [(variable, tf.convert_to_tensor(variable.value)) for variable in variables]

    def put_back() -> None:
        for variable, value in kept:
            variable.assign(value)

    return put_back


def gradient_fields_kept(_variables: Iterable[Any]) -> AbstractContextManager[None]:
    """TensorFlow's variables hold no gradients."""
    return nullcontext()


def current_values(model: Any, _state: Any) -> list[tuple[Any, Any]]:
    """Each variable of the model with its value, except metrics."""
    return [(variable, tf.convert_to_tensor(variable.value)) for variable in model.variables]


def run_step(step: Callable[..., Any], _model: Any, data: Any, _state: Any) -> dict[str, Any]:
    """Calls a training step eagerly; returns its logs."""
    return step(data)


def own_step(own: OwnStep, data: Any) -> dict[str, Any]:
    """One step of `OwnStep`."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    variables = own.trainable_variables()
    with tf.GradientTape() as tape:
        loss, output = own.forward(x, y, sample_weight)
        scaled = own.optimizer.scale_loss(loss)
    own.optimizer.apply_gradients(zip(tape.gradient(scaled, variables), variables, strict=True))
    return {"loss": loss, "output": output}


def layer_pass(
    layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _values: Any, *, input_gradients: bool
) -> Callable[[float], float]:
    """A function that runs one forward and backward of the layer, eagerly, and returns its seconds.

    It takes a limit in seconds: where the forward pass alone took longer, its time is returned.
    """
    inputs = [tensor for tensor in keras.tree.flatten((args, kwargs)) if _has_value(tensor)] if input_gradients else []
    sources = [*inputs, *layer.trainable_variables]

    def run(limit: float) -> float:
        start = _now()
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = [tensor for tensor in keras.tree.flatten(layer(*args, **kwargs)) if _has_value(tensor)]
        if limit != float("inf") and (forward := _now() - start) > limit:
            return forward
        tape.gradient(outputs, sources)
        return _now() - start

    return run


def _now() -> float:
    """Seconds on a steady clock, once the device has done all that it was given."""
    if tf.config.list_logical_devices("GPU"):
        tf.test.experimental.sync_devices()
    return time.perf_counter()


def _has_value(tensor: Any) -> bool:
    return isinstance(tensor, tf.Tensor) and tensor.dtype.is_floating and not tf.is_symbolic_tensor(tensor)


def _dense(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
