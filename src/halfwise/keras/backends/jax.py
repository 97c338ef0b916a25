"""What halfwise does in JAX's own terms. Every function here has its twin in `tensorflow.py` and `torch.py`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import jax
import keras
import numpy as np

if TYPE_CHECKING:
    from halfwise.keras.training_step import OwnStep

__all__ = ["current_values", "gradient_fields_kept", "keep", "layer_pass", "own_step", "run_step", "tap", "to_numpy"]


def tap(tensor: Any, forward: Callable[[Any], None], backward: Callable[[Any], None]) -> Any:
    """`tensor`, whose value is handed to `forward` now, and its gradient to `backward` when it is known.

    Only the gradient of what is computed from the tensor that is returned counts. What is no floating array is
    returned as it is, and nothing is called; neither is anything called for values that are being traced (in `jit`,
    `scan`).
    """
    if not _is_floating(tensor):
        return tensor

    def seen(value: Any, tell: Callable[[Any], None]) -> Any:
        if not isinstance(value, jax.core.Tracer):
            tell(value)
        return value

    @jax.custom_vjp
    def identity(same: Any) -> Any:
        return seen(same, forward)

    identity.defvjp(lambda same: (seen(same, forward), None), lambda _, upstream: (seen(upstream, backward),))
    return identity(tensor)


def to_numpy(tensor: Any) -> np.ndarray[Any, Any]:
    """The values, without loss: bfloat16 as ml_dtypes' type."""
    return np.asarray(tensor)


def keep(variables: Iterable[Any]) -> Callable[[], None]:
    """Remembers the variables' values; the function that is returned puts them back.

    In `fit` variables have no values: they are in the state that goes from step to step.
    """
    kept = [(variable, variable._value) for variable in variables]

    def put_back() -> None:
        for variable, value in kept:
            variable._value = value

    return put_back


def gradient_fields_kept(_variables: Iterable[Any]) -> AbstractContextManager[None]:
    """JAX's arrays hold no gradients."""
    return nullcontext()


def current_values(model: Any, state: Any) -> list[tuple[Any, Any]]:
    """Each variable of the model with its value, except metrics; the values are those of the state."""
    trainable, non_trainable, *_ = state or _state_of(model)
    return [
        *zip(model.trainable_variables, trainable, strict=True),
        *zip(model.non_trainable_variables, non_trainable, strict=True),
    ]


def run_step(step: Callable[..., Any], model: Any, data: Any, state: Any) -> dict[str, Any]:
    """Calls a training step without `jit`, and without the optimizer's variables; returns its logs."""
    trainable, non_trainable, _, metrics = state or _state_of(model)
    logs, _ = step((trainable, non_trainable, [], metrics), data)
    return logs


def own_step(own: OwnStep, state: Any, data: Any) -> tuple[dict[str, Any], Any]:
    """One step of `OwnStep`."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    trainable, non_trainable, optimizer, metrics = state
    variables, others = own.trainable_variables(), own.model.non_trainable_variables

    def scaled_loss(values: Any) -> tuple[Any, Any]:
        mapping = [*zip(variables, values, strict=True), *zip(others, non_trainable, strict=True)]
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope:
            loss, output = own.forward(x, y, sample_weight)
        updated = [scope.get_current_value(variable) for variable in others]
        with keras.StatelessScope(state_mapping=list(zip(own.optimizer.variables, optimizer, strict=True))):
            scaled = own.optimizer.scale_loss(loss)
        return scaled, (loss, output, updated)

    (_, (loss, output, non_trainable)), gradients = jax.value_and_grad(scaled_loss, has_aux=True)(trainable)
    trainable, optimizer = own.optimizer.stateless_apply(optimizer, gradients, trainable)
    return {"loss": loss, "output": output}, (trainable, non_trainable, optimizer, metrics)


def layer_pass(
    layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], values: Mapping[int, Any], *, input_gradients: bool
) -> Callable[[float], float]:
    """A function that runs one forward and backward of the layer, compiled at its first call, and returns its seconds.

    It takes a limit in seconds, for its twins' sake.
    """
    variables = layer.variables
    trained = {id(variable) for variable in layer.trainable_variables}
    given = dict(enumerate(keras.tree.flatten((args, kwargs))))
    inputs = {place: leaf for place, leaf in given.items() if input_gradients and _is_floating(leaf)}
    arrays = {place: leaf for place, leaf in given.items() if isinstance(leaf, jax.Array) and place not in inputs}
    weights = {place: values[id(v)] for place, v in enumerate(variables) if id(v) in trained}
    others = {place: values[id(v)] for place, v in enumerate(variables) if id(v) not in trained}

    def forward(weights: Any, inputs: Any, others: Any, arrays: Any) -> list[Any]:
        own = keras.tree.pack_sequence_as((args, kwargs), [*({**given, **arrays, **inputs}).values()])
        mapping = [(variables[place], value) for place, value in {**others, **weights}.items()]
        with keras.StatelessScope(state_mapping=mapping):
            output = layer(*own[0], **own[1])
        return [leaf for leaf in keras.tree.flatten(output) if _is_floating(leaf)]

    @jax.jit
    def both(weights: Any, inputs: Any, others: Any, arrays: Any, upstream: list[Any]) -> Any:
        outputs, backward = jax.vjp(lambda w, i: forward(w, i, others, arrays), weights, inputs)
        return outputs, backward(upstream)

    upstream: list[Any] = []

    def run(_limit: float) -> float:
        if not upstream:  # an argument, not a constant, which the compiler would compute with
            shapes = jax.eval_shape(forward, weights, inputs, others, arrays)
            upstream.extend(jax.numpy.ones(shape.shape, shape.dtype) for shape in shapes)
            jax.block_until_ready(both(weights, inputs, others, arrays, upstream))
        start = time.perf_counter()
        jax.block_until_ready(both(weights, inputs, others, arrays, upstream))
        return time.perf_counter() - start

    return run


def local_gradients(
    layer: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    weights: Sequence[tuple[Any, Any]],
    others: Sequence[tuple[Any, Any]],
    gradients: Mapping[int, Any],
) -> tuple[list[Any], list[Any]]:
    """One forward and backward of a layer by itself, run eagerly, which changes no variable; see `tensorflow.py`."""

    def forward(values: list[Any]) -> list[Any]:
        mapping = [*others, *((variable, value) for (variable, _), value in zip(weights, values, strict=True))]
        with keras.StatelessScope(state_mapping=mapping):
            output = layer(*args, **kwargs)
        return [leaf for leaf in keras.tree.flatten(output) if _is_floating(leaf)]

    outputs, backward = jax.vjp(forward, [value for _, value in weights])
    upstream = [
        gradients[index].astype(output.dtype) if index in gradients else jax.numpy.zeros_like(output)
        for index, output in enumerate(outputs)
    ]
    return outputs, list(backward(upstream)[0])


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)


def _state_of(model: Any) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """The state as a training step takes it, from the model's variables."""
    groups: tuple[list[Any], ...] = (
        model.trainable_variables,
        model.non_trainable_variables,
        [],
        model.metrics_variables,
    )
    trainable, non_trainable, optimizer, metrics = ([variable.value for variable in group] for group in groups)
    return trainable, non_trainable, optimizer, metrics
