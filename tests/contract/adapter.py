"""What the contract asks of an adapter: to train one small network in its own framework, and to say what happened.

Every adapter trains `first` (8 -> 16), `relu`, `second` (16 -> 16), `head` (16 -> 4): dense layers, of which only the
first has an activation, named so that module paths are the same everywhere. Plain gradient descent, mean squared error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from halfwise.core.diagnosis import Incident
from halfwise.core.loss_scale import LossScaleSettings
from halfwise.core.plan import Plan
from halfwise.core.timing import TimingTable

__all__ = ["SHAPES", "Adapter", "Array", "Batch", "Facts", "Guard", "Outcome", "Training", "Weights", "facts"]

Array = NDArray[np.float32]
Guard = bool | Literal["report"]

SHAPES = {"first": (8, 16), "second": (16, 16), "head": (16, 4)}
"""Inputs and outputs of the dense layers."""

Weights = Mapping[str, tuple[Array, Array]]
"""Dense layer -> kernel `(inputs, outputs)` and bias `(outputs,)`, float32."""


class Batch(NamedTuple):
    """`x` of shape `(8, 8)` and `y` of shape `(8, 4)`, float32."""

    x: Array
    y: Array


class Facts(NamedTuple):
    """What an incident says in every adapter alike; operation, source line and wording are each framework's own."""

    kind: str
    verdict: str
    module: str
    direction: str
    dtype: str
    action: str


def facts(incident: Incident) -> Facts:
    """The incident's part that the contract is about."""
    return Facts(*(getattr(incident, name) for name in Facts._fields))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One step, in plain numbers: as in each adapter's `StepResult`."""

    loss: float
    applied: bool
    loss_scale: float
    grad_norm: float
    incident: Incident | None
    retries: int


class Training(Protocol):
    """A training under way."""

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None while "auto" gathers evidence."""

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """All incidents so far."""

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next step."""

    @property
    def steps(self) -> int:
        """Steps so far."""

    @property
    def skipped_steps(self) -> int:
        """Those of them that were skipped."""

    def step(self, batch: Batch) -> Outcome:
        """One training step. Raises `TrainingStopped` as the adapter does."""

    def weights(self) -> Weights:
        """A copy of the weights as they are."""

    def put_weights(self, weights: Weights) -> None:
        """Replaces the weights, behind the guard's back."""


class Adapter(Protocol):
    """A framework.

    Attributes:
        framework: as in plans.
    """

    framework: Literal["torch", "keras"]

    def training(
        self,
        policy: str | Plan | Path,
        weights: Weights,
        *,
        learning_rate: float = 0.01,
        guard: Guard = True,
        timing: TimingTable | None = None,
    ) -> Training:
        """Begins a training; the messages are dropped."""

    def check_policy(self, policy: str) -> None:
        """Hands the policy to whatever takes policies from users; raises as that does."""

    def plan(
        self, default: str, layers: Mapping[str, str] | None = None, scale: LossScaleSettings | None = None
    ) -> Plan:
        """A plan set by hand, for this framework."""
