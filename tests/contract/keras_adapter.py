"""The contract's network in Keras, on the backend of this process, in a loop of `hw.step`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import keras
import numpy as np
from tests.contract.adapter import SHAPES, Array, Batch, Guard, Outcome, Weights

import halfwise.keras as hw
from halfwise.core.diagnosis import Incident
from halfwise.core.loss_scale import LossScaleSettings
from halfwise.core.plan import Plan
from halfwise.core.timing import TimingTable

__all__ = ["KerasAdapter"]


class KerasTraining:
    """See `Training`."""

    def __init__(
        self,
        policy: str | Plan | Path,
        weights: Weights,
        learning_rate: float,
        guard: Guard,
        timing: TimingTable | None,
    ) -> None:
        hw.set_global_policy(policy)
        try:
            self._model = network()
        finally:
            hw.set_global_policy("float32")
        self.put_weights(weights)
        self._loss = keras.losses.MeanSquaredError()
        self._optimizer = keras.optimizers.SGD(learning_rate)
        self._guard = hw.PrecisionGuard(guard=guard, timing=timing, log=lambda message: None)

    @property
    def plan(self) -> Plan | None:
        return self._guard.plan

    @property
    def incidents(self) -> tuple[Incident, ...]:
        return self._guard.incidents

    @property
    def loss_scale(self) -> float:
        return self._guard.loss_scale

    @property
    def steps(self) -> int:
        return self._guard.steps

    @property
    def skipped_steps(self) -> int:
        return self._guard.skipped_steps

    def step(self, batch: Batch) -> Outcome:
        result = hw.step(self._model, batch.x, batch.y, loss=self._loss, optimizer=self._optimizer, guard=self._guard)
        return Outcome(
            loss=float(result.loss),
            applied=result.applied,
            loss_scale=result.loss_scale,
            grad_norm=result.grad_norm,
            incident=result.incident,
            retries=result.retries,
        )

    def weights(self) -> Weights:
        return {name: self._copies(name) for name in SHAPES}

    def put_weights(self, weights: Weights) -> None:
        for name, (kernel, bias) in weights.items():
            self._model.get_layer(name).set_weights([kernel, bias])

    def _copies(self, name: str) -> tuple[Array, Array]:
        kernel, bias = self._model.get_layer(name).get_weights()
        return np.array(kernel), np.array(bias)


class KerasAdapter:
    """See `Adapter`."""

    framework: Literal["torch", "keras"] = "keras"

    def training(
        self,
        policy: str | Plan | Path,
        weights: Weights,
        *,
        learning_rate: float = 0.01,
        guard: Guard = True,
        timing: TimingTable | None = None,
    ) -> KerasTraining:
        return KerasTraining(policy, weights, learning_rate, guard, timing)

    def check_policy(self, policy: str) -> None:
        hw.PrecisionGuard(policy)
        hw.set_global_policy(policy)

    def plan(
        self, default: str, layers: Mapping[str, str] | None = None, scale: LossScaleSettings | None = None
    ) -> Plan:
        return Plan.manual(layers, default=default, framework=self.framework, loss_scale=scale)


def network() -> keras.Sequential:
    """The network, in the global policy."""
    dense = {name: keras.layers.Dense(outputs, name=name) for name, (_, outputs) in SHAPES.items()}
    inputs = keras.Input((SHAPES["first"][0],))
    return keras.Sequential(
        [inputs, dense["first"], keras.layers.Activation("relu", name="relu"), dense["second"], dense["head"]]
    )
