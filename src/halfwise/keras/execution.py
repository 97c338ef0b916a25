"""How one guarded step is compiled and run: as a part of `model.fit`, or of a loop of the user's own.

Both run one batch at a time and give back its logs. On JAX the model's state is passed along: `fit` owns it while it
runs, and the model's own variables are empty meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import keras

from halfwise.keras.guarded_step import GuardedStep, Step
from halfwise.keras.loss_scale import LossScaleOptimizer

__all__ = ["Execution", "FitExecution", "LoopExecution", "Next", "model_state", "put_model_state"]

_BACKEND = keras.backend.backend()


class Next:
    """In place of a batch: whatever the iterator yields next, drawn within the compiled step."""

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator


class Execution(Protocol):
    """Runs guarded steps.

    Attributes:
        step: the step that is guarded, as the model or the user wrote it.
    """

    step: Step

    def compile(self, optimizer: LossScaleOptimizer) -> None:
        """Makes the compiled function anew: after a change of precision or of the loss scale's settings."""

    def run(self, batch: Any, state: Any) -> tuple[dict[str, Any], Any, Any]:
        """`(logs, state, batch)`; `state` is None but for `fit` on JAX."""

    def undo(self, before: Sequence[Any]) -> None:
        """Puts back what a step that was not sound had changed."""


class FitExecution:
    """Within `fit`: the model's own `train_step`, compiled by Keras as the model was told to at `compile()`.

    Args:
        model: compiled.
        train_function: what `fit` is to call in place of the function that Keras makes.

    Attributes:
        draws: the compiled step can draw its batch itself, which saves a call into TensorFlow for each step.
    """

    def __init__(self, model: keras.Model, train_function: Step) -> None:
        self._model = model
        self._train_function = train_function
        self._make = model.make_train_function
        self._earlier = model.__dict__.get("train_step")
        self.step: Step = model.train_step
        self._inner: Any = None
        self._drawing: Step | None = None
        self.draws = self._can_draw()
        self._guarded: GuardedStep | None = None

    def _can_draw(self) -> bool:
        if _BACKEND != "tensorflow":
            return False
        model = self._model
        made_by_keras = getattr(self._make, "__func__", None) is keras.Model.make_train_function
        special = model.steps_per_execution > 1 or model.jit_compile or model.run_eagerly or model._distribute_strategy
        return made_by_keras and not special

    def compile(self, optimizer: LossScaleOptimizer) -> None:
        """Has Keras make the train function anew around the guarded step."""
        model = self._model
        self._guarded = GuardedStep(self.step, model, optimizer)
        model.__dict__["train_step"] = self._guarded
        self._make(force=True)
        self._inner = model.train_function
        self._drawing = self._compiled_with_its_draw() if self.draws else None
        model.train_function = self._train_function

    def run(self, batch: Any, state: Any) -> tuple[dict[str, Any], Any, Any]:
        """`(logs, state, batch)` of one batch, as the iterator of the epoch gave it, or of the `Next` one."""
        if _BACKEND == "jax":
            logs, state = self._inner(state, iter([batch]))
            return logs, state, batch
        if _BACKEND == "torch":
            return self._inner([batch]), state, batch
        if isinstance(batch, Next):
            logs, batch = self._drawn(batch)
            return logs, state, batch
        return dict(self._inner(iter([batch]))), state, batch

    def _compiled_with_its_draw(self) -> Step:
        """`iterator -> (logs, batch)`. Keras' own puts the logs into an `Optional`, which takes time to open."""
        import tensorflow as tf

        guarded = self._guarded
        assert guarded is not None
        both = self._model._autoconvert_optionals(lambda batch: (guarded(batch), batch))
        return tf.function(lambda iterator: both(next(iterator)), reduce_retracing=True, autograph=False)

    def _drawn(self, batch: Next) -> Any:
        import tensorflow as tf

        assert self._drawing is not None
        try:
            return self._drawing(batch.iterator)
        except tf.errors.OutOfRangeError:
            raise StopIteration from None

    def undo(self, before: Sequence[Any]) -> None:
        """Puts back what a step that was not sound had changed."""
        assert self._guarded is not None
        self._guarded.undo(before)

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
        self._guarded: GuardedStep | None = None
        self._optimizer: LossScaleOptimizer | None = None

    def compile(self, optimizer: LossScaleOptimizer) -> None:
        """Makes the compiled function anew."""
        self._optimizer = optimizer
        self._guarded = GuardedStep(self.step, self._model, optimizer)
        self._function = _compiled(self._guarded, self._model)

    def run(self, batch: Any, state: Any) -> tuple[dict[str, Any], Any, Any]:
        """`(logs, state, batch)`; without a state the model's own variables are used and updated."""
        assert self._function is not None
        if _BACKEND != "jax":
            return dict(self._function(batch)), state, batch
        if state is not None:
            logs, state = self._function(state, batch)
            return logs, state, batch
        logs, after = self._function(model_state(self._model, self._optimizer), batch)
        put_model_state(self._model, self._optimizer, after)
        return logs, None, batch

    def undo(self, before: Sequence[Any]) -> None:
        """Puts back what a step that was not sound had changed."""
        assert self._guarded is not None
        self._guarded.undo(before)


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
    yield model.metrics_variables if model.compiled else []


def _compiled(step: Step, model: keras.Model) -> Step:
    """`step` compiled as Keras would compile a train step: on torch it runs as it is."""
    if getattr(model, "run_eagerly", False) or _BACKEND == "torch":
        return step
    if _BACKEND == "jax":
        import jax

        return jax.jit(lambda state, batch: step(state, batch))
    import tensorflow as tf

    jit = bool(model.jit_compile) if model.compiled else False
    return tf.function(lambda batch: step(batch), reduce_retracing=True, jit_compile=jit, autograph=False)
