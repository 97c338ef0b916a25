"""How one guarded step is compiled and run: as a part of `model.fit`, or of a loop of the user's own.

Both run one batch at a time and give back its logs. On JAX the model's state is passed along: `fit` owns it while it
runs, and the model's own variables are empty meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import keras

from halfwise.keras.guarded_step import Step, guarded
from halfwise.keras.loss_scale import LossScaleOptimizer

__all__ = ["Execution", "FitExecution", "LoopExecution", "model_state", "put_model_state"]


class Execution(Protocol):
    """Runs guarded steps.

    Attributes:
        step: the step that is guarded, as the model or the user wrote it.
    """

    step: Step

    def compile(self, optimizer: LossScaleOptimizer) -> None:
        """Makes the compiled function anew: after a change of precision or of the loss scale's settings."""

    def run(self, batch: Any, state: Any) -> tuple[dict[str, Any], Any]:
        """`(logs, state)` of one batch; `state` is None but for `fit` on JAX."""


class FitExecution:
    """Within `fit`: the model's own `train_step`, compiled by Keras as the model was told to at `compile()`.

    Args:
        model: compiled.
        train_function: what `fit` is to call in place of the function that Keras makes.
    """

    def __init__(self, model: keras.Model, train_function: Step) -> None:
        self._model = model
        self._train_function = train_function
        self._earlier = model.__dict__.get("train_step")
        self.step: Step = model.train_step
        self._inner: Any = None

    def compile(self, optimizer: LossScaleOptimizer) -> None:
        """Has Keras make the train function anew around the guarded step."""
        model = self._model
        model.__dict__["train_step"] = guarded(self.step, model, optimizer)
        model.make_train_function(force=True)
        self._inner = model.train_function
        model.train_function = self._train_function

    def run(self, batch: Any, state: Any) -> tuple[dict[str, Any], Any]:
        """`(logs, state)` of one batch, as the iterator of the epoch gave it."""
        if keras.backend.backend() == "jax":
            logs, state = self._inner(state, iter([batch]))
            return logs, state
        return self._inner([batch] if keras.backend.backend() == "torch" else iter([batch])), state

    def end(self) -> None:
        """Gives the model its own `train_step` back."""
        if self._earlier is None:
            self._model.__dict__.pop("train_step", None)
        else:
            self._model.__dict__["train_step"] = self._earlier


class LoopExecution:
    """In a loop of the user's own: a plain step, compiled unless the model was told to run eagerly."""

    def __init__(self, model: keras.Model, step: Step) -> None:
        self._model = model
        self.step = step
        self._function: Step | None = None
        self._optimizer: LossScaleOptimizer | None = None

    def compile(self, optimizer: LossScaleOptimizer) -> None:
        """Makes the compiled function anew."""
        self._optimizer = optimizer
        self._function = _compiled(guarded(self.step, self._model, optimizer), self._model)

    def run(self, batch: Any, state: Any) -> tuple[dict[str, Any], Any]:
        """`(logs, state)` of one batch; without a state the model's own variables are used and updated."""
        assert self._function is not None
        if keras.backend.backend() != "jax":
            return self._function(batch), state
        if state is not None:
            logs, after = self._function(state, batch)
            return logs, after
        logs, after = self._function(model_state(self._model, self._optimizer), batch)
        put_model_state(self._model, self._optimizer, after)
        return logs, None


def model_state(model: keras.Model, optimizer: keras.optimizers.Optimizer | None) -> Any:
    """The values of weights, other variables, optimizer and metrics, as Keras' stateless functions take them."""
    return tuple([variable.value for variable in group] for group in _groups(model, optimizer))


def put_model_state(model: keras.Model, optimizer: keras.optimizers.Optimizer | None, state: Any) -> None:
    """The inverse of `model_state`."""
    for group, values in zip(_groups(model, optimizer), state, strict=True):
        for variable, value in zip(group, values, strict=True):
            variable.assign(value)


def _groups(model: keras.Model, optimizer: keras.optimizers.Optimizer | None) -> Iterator[list[keras.Variable]]:
    yield model.trainable_variables
    yield model.non_trainable_variables
    yield optimizer.variables if optimizer is not None else []
    yield model.metrics_variables if getattr(model, "compiled", False) else []


def _compiled(step: Step, model: keras.Model) -> Step:
    """`step` compiled as Keras would compile a train step: on torch it runs as it is."""
    if getattr(model, "run_eagerly", False) or keras.backend.backend() == "torch":
        return step
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(step)
    import tensorflow as tf

    jit = bool(model.jit_compile) if getattr(model, "compiled", False) else False
    return tf.function(step, reduce_retracing=True, jit_compile=jit, autograph=False)
