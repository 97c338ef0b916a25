"""The contract's network in PyTorch, under `MixedPrecision`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from tests.contract.adapter import SHAPES, Batch, Guard, Outcome, Weights
from torch import nn

import halfwise.torch as hw
from halfwise.core.diagnosis import Incident

__all__ = ["TorchAdapter"]


class TorchTraining:
    """See `Training`."""

    def __init__(
        self,
        policy: str | hw.Plan | Path,
        weights: Weights,
        learning_rate: float,
        guard: Guard,
        timing: hw.TimingTable | None,
    ) -> None:
        self._model = network()
        self.put_weights(weights)
        optimizer = torch.optim.SGD(self._model.parameters(), lr=learning_rate)
        self._mp = hw.MixedPrecision(
            self._model, optimizer, policy, guard=guard, timing=timing, log=lambda message: None
        )

    @property
    def plan(self) -> hw.Plan | None:
        return self._mp.plan

    @property
    def incidents(self) -> tuple[Incident, ...]:
        return self._mp.incidents

    @property
    def loss_scale(self) -> float:
        return self._mp.loss_scale

    @property
    def steps(self) -> int:
        return self._mp.steps

    @property
    def skipped_steps(self) -> int:
        return self._mp.skipped_steps

    def step(self, batch: Batch) -> Outcome:
        x, y = torch.from_numpy(batch.x), torch.from_numpy(batch.y)
        result = self._mp.step(lambda: nn.functional.mse_loss(self._model(x).float(), y))
        return Outcome(
            loss=float(result.loss),
            applied=result.applied,
            loss_scale=result.loss_scale,
            grad_norm=result.grad_norm,
            incident=result.incident,
            retries=result.retries,
        )

    def weights(self) -> Weights:
        return {
            name: (layer.weight.detach().t().numpy().copy(), layer.bias.detach().numpy().copy())
            for name, layer in self._dense().items()
        }

    def put_weights(self, weights: Weights) -> None:
        with torch.no_grad():
            for name, layer in self._dense().items():
                kernel, bias = weights[name]
                layer.weight.copy_(torch.from_numpy(kernel).t())
                layer.bias.copy_(torch.from_numpy(bias))

    def _dense(self) -> dict[str, nn.Linear]:
        return {name: layer for name, layer in self._model.named_children() if isinstance(layer, nn.Linear)}


class TorchAdapter:
    """See `Adapter`."""

    framework: Literal["torch", "keras"] = "torch"

    def training(
        self,
        policy: str | hw.Plan | Path,
        weights: Weights,
        *,
        learning_rate: float = 0.01,
        guard: Guard = True,
        timing: hw.TimingTable | None = None,
    ) -> TorchTraining:
        return TorchTraining(policy, weights, learning_rate, guard, timing)

    def check_policy(self, policy: str) -> None:
        model = network()
        hw.MixedPrecision(model, torch.optim.SGD(model.parameters()), policy).close()

    def plan(
        self, default: str, layers: Mapping[str, str] | None = None, scale: hw.LossScaleSettings | None = None
    ) -> hw.Plan:
        return hw.Plan.manual(layers, default=default, framework=self.framework, loss_scale=scale)


def network() -> nn.Sequential:
    """The network."""
    dense = {name: nn.Linear(*shape) for name, shape in SHAPES.items()}
    return nn.Sequential(OrderedDict(first=dense["first"], relu=nn.ReLU(), second=dense["second"], head=dense["head"]))
