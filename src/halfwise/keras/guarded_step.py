"""A training step that leaves no trace when it is skipped, and says how it went.

The optimizer leaves weights and moments alone when the gradients are not sound. What a step changes besides (moving
statistics, seeds, metrics) is put back here, within the same compiled function: no batch has to be kept, and nothing
waits for the host. A step has the signature of Keras' `train_step`: `step(data) -> logs` on TensorFlow and torch,
`step(state, data) -> (logs, state)` on JAX.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops

from halfwise.core.loss_scale import LossScaleState
from halfwise.keras.loss_scale import LossScaleOptimizer

__all__ = ["VITALS", "Step", "Vitals", "guarded", "is_sound", "kept_variables", "read_vitals"]

VITALS = "_halfwise"
"""Under this key the logs of a guarded step hold a float32 vector, which `read_vitals` understands."""

Step = Callable[..., Any]


@dataclass(frozen=True)
class Vitals:
    """What a step showed.

    Attributes:
        loss: the loss, not scaled.
        grad_norm: the 2-norm over all gradients, unscaled; not finite where the step is not sound.
        before: the loss scale's state before the step.
    """

    loss: float
    grad_norm: float
    before: LossScaleState


def guarded(step: Step, model: keras.Model, optimizer: LossScaleOptimizer) -> Step:
    """`step` with what it changed put back where its gradients are not sound, and with `VITALS` in its logs.

    Args:
        step: one that goes through `optimizer` exactly once.
        model: the model that it trains.
        optimizer: built.
    """
    return (_stateless if keras.backend.backend() == "jax" else _stateful)(step, model, optimizer)


def read_vitals(vector: Any) -> Vitals:
    """Brings the vector to the host: the one time that a step waits for the device."""
    numbers = keras.ops.convert_to_numpy(vector)
    norm, total, count, scale, tracker, hysteresis = (float(number) for number in numbers)
    loss = total / count if count else total
    before = LossScaleState(scale=scale, growth_tracker=int(tracker), hysteresis_left=int(hysteresis))
    return Vitals(loss=loss, grad_norm=norm, before=before)


def kept_variables(model: keras.Model) -> list[keras.Variable]:
    """What a step changes besides weights and optimizer: moving statistics, seeds, metrics. Frozen weights are none."""
    found: dict[int, keras.Variable] = {}
    for layer in model._flatten_layers():
        for variable in layer._non_trainable_variables:
            found[id(variable)] = variable
        for generator in layer._seed_generators:
            found[id(generator.state)] = generator.state
    if isinstance(model, keras.Model):
        for variable in model.metrics_variables:
            found[id(variable)] = variable
    return list(found.values())


def is_sound(gradient_norm: Any) -> Any:
    """Whether a step with this norm may be applied."""
    return ops.isfinite(gradient_norm)


def _stateful(step: Step, model: keras.Model, optimizer: LossScaleOptimizer) -> Step:
    tracker = getattr(model, "_loss_tracker", None)
    branch = keras.backend.backend() == "torch"  # runs eagerly: a skipped step is the only one that pays

    def guarded_step(data: Any) -> dict[str, Any]:
        rewind = _generators_kept() if branch else None
        before = [(variable, ops.copy(variable.value)) for variable in kept_variables(model)]
        scale = [ops.copy(ops.cast(variable.value, "float32")) for variable in _scale_variables(optimizer)]
        sums = [ops.copy(variable.value) for variable in _sums(tracker)]
        logs = dict(step(data))
        seen = _loss(logs, sums, [variable.value for variable in _sums(tracker)])
        norm = optimizer.gradient_norm.value
        vitals = ops.stack([ops.cast(number, "float32") for number in (norm, *seen, *scale)])
        sound = is_sound(norm)
        if not branch:
            for variable, value in before:
                variable.assign(ops.where(sound, variable.value, value))
        elif not sound:
            for variable, value in before:
                variable.assign(value)
            if rewind is not None:
                rewind()
        return {**logs, VITALS: vitals}

    return guarded_step


def _stateless(step: Step, model: keras.Model, optimizer: LossScaleOptimizer) -> Step:
    tracker = getattr(model, "_loss_tracker", None)

    def guarded_step(state: Any, data: Any) -> tuple[dict[str, Any], Any]:
        _, kept, slots, metrics = state
        logs, (weights, new_kept, new_slots, new_metrics) = step(state, data)
        places = _places(_sums(tracker), model.metrics_variables)
        seen = _loss(logs, [metrics[i] for i in places], [new_metrics[i] for i in places])
        scale = [slots[i] for i in _places(_scale_variables(optimizer), optimizer.variables)]
        norm = new_slots[_places([optimizer.gradient_norm], optimizer.variables)[0]]
        vitals = ops.stack([ops.cast(number, "float32") for number in (norm, *seen, *scale)])
        sound = is_sound(norm)
        new_kept = _chosen(sound, new_kept, kept)
        new_metrics = _chosen(sound, new_metrics, metrics)
        return {**logs, VITALS: vitals}, (weights, new_kept, new_slots, new_metrics)

    return guarded_step


def _generators_kept() -> Callable[[], None]:
    """Notes where torch's generators stand, which dropout draws from there; what comes back puts them back."""
    import torch

    host = torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def rewind() -> None:
        torch.set_rng_state(host)
        if devices is not None:
            torch.cuda.set_rng_state_all(devices)

    return rewind


def _chosen(sound: Any, new: list[Any], old: list[Any]) -> list[Any]:
    pairs = zip(new, old, strict=True)
    return [value if value is before else ops.where(sound, value, before) for value, before in pairs]


def _loss(logs: dict[str, Any], before: list[Any], after: list[Any]) -> list[Any]:
    """`[sum, count]` of the batch's loss: what a plain step tells, or by how much Keras' running mean moved."""
    if "output" in logs:
        return [logs["loss"], ops.ones(())]
    if not after:
        return [ops.zeros(()), ops.ones(())]  # a step of the user's own that keeps no such mean
    return [new - old for new, old in zip(after, before, strict=True)]


def _sums(tracker: Any) -> list[keras.Variable]:
    return [tracker.total, tracker.count] if tracker is not None else []


def _scale_variables(optimizer: LossScaleOptimizer) -> list[keras.Variable]:
    return [optimizer.dynamic_scale, optimizer.step_counter, optimizer.hysteresis_left]


def _places(wanted: list[keras.Variable], variables: list[keras.Variable]) -> list[int]:
    by_identity = {id(variable): index for index, variable in enumerate(variables)}
    return [by_identity[id(variable)] for variable in wanted]
