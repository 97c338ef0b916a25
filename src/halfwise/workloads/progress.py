"""Where a training run stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Progress"]


@dataclass
class Progress:
    """Where training stands: the next step to take, and the sums behind the running epoch's training numbers.

    Attributes:
        epoch: the running epoch, from 0.
        position: batches of it that are done.
        step: steps of the run that are done.
        loss_sum, correct, seen: over the epoch's applied steps: loss times inputs, right answers, inputs.
        seconds: spent in steps since the run began.
        format_times: where `"auto"` measured: by format the time of all layers relative to float32 (`"ratio"`), and
            whether that is a lower bound (`"at_least"`).
    """

    epoch: int = 0
    position: int = 0
    step: int = 0
    loss_sum: float = 0.0
    correct: int = 0
    seen: int = 0
    seconds: float = 0.0
    format_times: dict[str, dict[str, Any]] = field(default_factory=dict)

    def count(self, loss: float, correct: int, inputs: int) -> None:
        """Adds an applied step to the epoch's sums."""
        self.seen += inputs
        self.loss_sum += loss * inputs
        self.correct += correct

    @property
    def train_loss(self) -> float:
        """The epoch's mean loss so far."""
        return self.loss_sum / max(1, self.seen)

    @property
    def train_accuracy(self) -> float:
        """The epoch's share of right answers so far."""
        return self.correct / max(1, self.seen)

    def next_epoch(self) -> None:
        """Moves to the beginning of the next epoch."""
        self.epoch += 1
        self.position, self.loss_sum, self.correct, self.seen = 0, 0.0, 0, 0
