"""What halfwise does in TensorFlow's own terms.

Each function but `run_if` and `trace` has its twin in `jax.py` and `torch.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

if TYPE_CHECKING:
    from halfwise.keras.training_step import OwnStep

__all__ = [
    "current_values",
    "gradient_fields_kept",
    "keep",
    "layer_pass",
    "local_gradients",
    "own_step",
    "run_if",
    "run_step",
    "tap",
    "to_numpy",
    "trace",
]


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


def run_if(condition: Any, then: Callable[[], Any]) -> None:
    """Calls `then`, for what it does to variables, where the scalar is true.

    `tf.cond` puts a switch before each tensor that a branch uses, which for the hundreds that an optimizer uses takes
    some per cent of a step. So on CPUs the branch stays a function, which is called or not. On other devices it does
    not, because TensorFlow places the operations of such a function on one device, and not all of them run on each.
    """
    if tf.executing_eagerly() or any(device.device_type != "CPU" for device in tf.config.list_logical_devices()):
        tf.cond(condition, lambda: (then(), None)[1], lambda: None)
        return
    taken = tf.function(lambda: (then(), None)[1], autograph=False).get_concrete_function()
    inputs = taken.captured_inputs
    types = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in inputs]
    other = tf.function(_nothing, autograph=False).get_concrete_function(*types)
    tf.raw_ops.If(cond=condition, input=inputs, Tout=[], then_branch=taken, else_branch=other)


def _nothing(*inputs: Any) -> None:
    pass


def trace(step: Callable[..., Any], data: Any) -> None:
    """Makes what a training step makes in its first call, without carrying it out."""
    tf.function(step, autograph=False).get_concrete_function(data)


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
    """A function that runs one forward and backward of the layer, traced at its first call, and returns its seconds.

    It takes a limit in seconds, for its twins' sake.
    """
    leaves = keras.tree.flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, tf.Tensor)]
    tensors = [leaves[place] for place in places]

    @tf.function
    def both(tensors: list[Any]) -> Any:  # as arguments: with constants the graph's optimizer would compute
        given = dict(zip(places, tensors, strict=True))
        own_args, own_kwargs = keras.tree.pack_sequence_as(
            (args, kwargs), [given.get(place, leaf) for place, leaf in enumerate(leaves)]
        )
        inputs = [tensor for tensor in tensors if tensor.dtype.is_floating] if input_gradients else []
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = [leaf for leaf in keras.tree.flatten(layer(*own_args, **own_kwargs)) if leaf.dtype.is_floating]
        return outputs, tape.gradient(outputs, [*inputs, *layer.trainable_variables])

    traced = False

    def run(_limit: float) -> float:
        nonlocal traced
        if not traced:
            both(tensors)
            traced = True
        start = _now()
        both(tensors)
        return _now() - start

    return run


def local_gradients(
    layer: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    weights: Sequence[tuple[Any, Any]],
    others: Sequence[tuple[Any, Any]],
    gradients: Mapping[int, Any],
) -> tuple[list[Any], list[Any]]:
    """One forward and backward of a layer by itself, run eagerly, which changes no variable.

    Args:
        layer, args, kwargs: what is called.
        weights: `(variable, the value that it is to have)` of those whose gradients are wanted.
        others: the same for the layer's other variables.
        gradients: index among the floating outputs -> gradient with respect to it; cast to the output's dtype.

    Returns:
        The floating outputs, and the gradients with respect to those weights that the outputs depend on.
    """
    values = [value for _, value in weights]
    mapping = [*others, *weights]
    with tf.GradientTape() as tape:
        tape.watch(values)
        with keras.StatelessScope(state_mapping=mapping):
            outputs = [leaf for leaf in keras.tree.flatten(layer(*args, **kwargs)) if leaf.dtype.is_floating]
    targets = [outputs[index] for index in gradients]
    upstream = [tf.cast(gradient, outputs[index].dtype) for index, gradient in gradients.items()]
    found = tape.gradient(targets, values, output_gradients=upstream)
    return outputs, [_all_rows(gradient) for gradient in found if gradient is not None]


def _all_rows(gradient: Any) -> Any:
    """A gradient of an embedding's few rows with the zeros of the others."""
    return tf.convert_to_tensor(gradient)


def _now() -> float:
    """Seconds on a steady clock, once the device has done all that it was given."""
    if tf.config.list_logical_devices("GPU"):
        tf.test.experimental.sync_devices()
    return time.perf_counter()


def _has_value(tensor: Any) -> bool:
    return isinstance(tensor, tf.Tensor) and tensor.dtype.is_floating and not tf.is_symbolic_tensor(tensor)


def _dense(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
