"""A training step that leaves no trace when it is skipped, and says how it went.

The optimizer leaves weights and moments alone when the gradients are not sound. What a step changes besides is moving
statistics, seeds and metrics. On JAX and TensorFlow the step itself keeps their old values then. On torch, where each
operation takes the host's time, it hands them out, and `undo` puts them back, which is rare.

A step has the signature of Keras' `train_step`: `step(data) -> logs` on TensorFlow and torch, `step(state, data) ->
(logs, state)` on JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops

from halfwise.core.loss_scale import LossScaleState
from halfwise.keras.loss_scale import LossScaleOptimizer
from halfwise.keras.restore import hidden_state

__all__ = ["BEFORE", "VITALS", "GuardedStep", "Step", "Vitals", "read_vitals"]

VITALS, BEFORE = "_halfwise_vitals", "_halfwise_before"
"""Keys in the logs of a guarded step: a float32 vector for `read_vitals`, and on torch values for `undo`."""

Step = Callable[..., Any]

_BACKEND = keras.backend.backend()


@dataclass(frozen=True)
class Vitals:
    """What a step showed.

    Attributes:
        loss: the loss, not scaled.
        grad_norm: the 2-norm over all gradients, unscaled; not finite where the step is not sound.
        before: the loss scale's state before the step; None where the scale is fixed.
    """

    loss: float
    grad_norm: float
    before: LossScaleState | None


def read_vitals(vector: Any) -> Vitals:
    """Brings the vector to the host: the one time that a step waits for the device."""
    numbers = vector.numpy() if _BACKEND == "tensorflow" else vector
    norm, total, count, *scale = numbers.tolist()
    before = None
    if scale:
        before = LossScaleState(scale=scale[0], growth_tracker=int(scale[1]), hysteresis_left=int(scale[2]))
    return Vitals(loss=total / count if count else total, grad_norm=norm, before=before)


class GuardedStep:
    """`step`, guarded. Call it as the step is called, eagerly or within a compiled function.

    Args:
        step: one that goes through `optimizer` exactly once.
        model: the model that it trains, built.
        optimizer: built.
    """

    def __init__(self, step: Step, model: keras.Model, optimizer: LossScaleOptimizer) -> None:
        self._step = step
        self._model = model
        self._optimizer = optimizer
        tracker = getattr(model, "_loss_tracker", None)
        self._sums = [] if tracker is None else [tracker.total, tracker.count]
        if not {id(variable) for variable in self._sums} <= {id(variable) for variable in _metrics_of(model)}:
            self._sums = []  # a model that keeps metrics of its own, and no mean of the loss
        scale = [optimizer.dynamic_scale, optimizer.step_counter, optimizer.hysteresis_left]
        self._scale = [] if optimizer.transparent else scale
        self._kept = _kept_variables(model)
        self.__name__ = getattr(step, "__name__", "guarded_step")

    def __call__(self, *arguments: Any) -> Any:
        return self._stateless(*arguments) if _BACKEND == "jax" else self._stateful(*arguments)

    def undo(self, before: Sequence[Any]) -> None:
        """Puts back what a step that was not sound had changed: `before` is what its logs held under `BEFORE`."""
        for variable, value in zip(self._kept, before, strict=False):
            variable.assign(value)
        _put_generators(before[len(self._kept) :])

    def _stateful(self, data: Any) -> dict[str, Any]:
        before, scale = _values(self._kept), _values(self._scale)
        generators = _generators() if _BACKEND == "torch" else []
        logs = dict(self._step(data))
        norm = ops.convert_to_tensor(self._optimizer.gradient_norm)
        places = _places(self._sums, self._kept)
        if _BACKEND == "tensorflow":
            after = _values(self._kept)
            for variable, value in zip(self._kept, _chosen(ops.isfinite(norm), after, before), strict=True):
                variable.assign(value)
            seen = _loss(logs, [before[i] for i in places], [after[i] for i in places])
        else:
            logs[BEFORE] = (*before, *generators)
            seen = _loss(logs, [before[i] for i in places], [variable.value for variable in self._sums])
        logs[VITALS] = _vector(norm, *seen, *scale)
        return logs

    def _stateless(self, state: Any, data: Any) -> tuple[dict[str, Any], Any]:
        _, kept, slots, metrics = state
        logs, (weights, new_kept, new_slots, new_metrics) = self._step(state, data)
        places = _places(self._sums, self._model.metrics_variables) if self._sums else []
        seen = _loss(logs, [metrics[i] for i in places], [new_metrics[i] for i in places])
        scale = [slots[i] for i in _places(self._scale, self._optimizer.variables)]
        norm = new_slots[_places([self._optimizer.gradient_norm], self._optimizer.variables)[0]]
        sound = ops.isfinite(norm)
        new_kept, new_metrics = _chosen(sound, new_kept, kept), _chosen(sound, new_metrics, metrics)
        return {**logs, VITALS: _vector(norm, *seen, *scale)}, (weights, new_kept, new_slots, new_metrics)


def _kept_variables(model: keras.Model) -> list[keras.Variable]:
    """What a step changes besides weights and optimizer: moving statistics, seeds, metrics. Frozen weights are none."""
    found: dict[int, keras.Variable] = {}
    for layer in model._flatten_layers():
        for variable in layer._non_trainable_variables:
            found[id(variable)] = variable
        for generator in layer._seed_generators:
            found[id(generator.state)] = generator.state
    for variable in (*_metrics_of(model), *hidden_state(model)):
        found[id(variable)] = variable
    return list(found.values())


def _metrics_of(model: keras.Model) -> list[keras.Variable]:
    return model.metrics_variables if model.compiled else []


def _values(variables: Sequence[keras.Variable]) -> list[Any]:
    """The variables' values now, which later assignments do not change."""
    if _BACKEND == "torch":
        return [variable.value.detach().clone() for variable in variables]
    import tensorflow as tf

    return [tf.convert_to_tensor(variable.value) for variable in variables]  # Keras' function gives the variable itself


def _vector(*numbers: Any) -> Any:
    if _BACKEND == "torch":  # Keras' functions take several times as long as what they do here
        import torch

        return torch.stack([number.detach().to(torch.float32).reshape(()) for number in numbers])
    return ops.stack([ops.cast(number, "float32") for number in numbers])


def _loss(logs: dict[str, Any], before: list[Any], after: list[Any]) -> list[Any]:
    """`[sum, count]` of the batch's loss: what a plain step tells, or by how much Keras' running mean moved."""
    if "output" in logs:
        return [logs["loss"], ops.ones(())]
    if not after:
        return [ops.zeros(()), ops.ones(())]  # a step of the user's own that keeps no such mean
    return [new - old for new, old in zip(after, before, strict=True)]


def _chosen(sound: Any, new: list[Any], old: list[Any]) -> list[Any]:
    pairs = zip(new, old, strict=True)
    return [value if value is before else ops.where(sound, value, before) for value, before in pairs]


def _places(wanted: list[keras.Variable], variables: list[keras.Variable]) -> list[int]:
    by_identity = {id(variable): index for index, variable in enumerate(variables)}
    return [by_identity[id(variable)] for variable in wanted]


def _generators() -> list[Any]:
    """Where torch's generators stand, which dropout draws from on that backend: the host's, and each device's."""
    import torch

    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]


def _put_generators(states: Sequence[Any]) -> None:
    import torch

    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(list(states[1:]))
