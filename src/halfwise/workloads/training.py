"""A training run of a built-in workload: what it is made of in every framework."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from halfwise.core.diagnosis import Incident
from halfwise.core.plan import Plan
from halfwise.core.profile import Profile
from halfwise.core.record import RunRecord
from halfwise.core.timing import TimingTable
from halfwise.workloads.datasets import Dataset
from halfwise.workloads.session import Session
from halfwise.workloads.settings import Settings

__all__ = ["Batch", "Precision", "Step", "Training", "View", "wants_one_thread"]

Batch = tuple[Any, Any]
"""Inputs and labels, as the framework takes them."""
Step = Callable[[Any, Any], object]
"""A training step on a batch."""

_TINY = 256  # values per input


class View(Protocol):
    """Who is told what happens while it happens."""

    def start(self, *, epochs: int, steps_per_epoch: int, step: int) -> None:
        """Training begins, or goes on, at `step`."""

    def step(self, row: Mapping[str, Any], *, accuracy: float, skipped: int) -> None:
        """A step is done. `row` is its line in `metrics.jsonl`, `accuracy` the epoch's so far, on training data."""

    def measuring(self) -> None:
        """Training is over, and the step time is measured."""

    def message(self, text: str) -> None:
        """The guard has something to say."""


class Precision(Protocol):
    """What halfwise knows of a training: a `MixedPrecision` of PyTorch or a `PrecisionGuard` of Keras."""

    @property
    def plan(self) -> Plan | None: ...
    @property
    def profile(self) -> Profile | None: ...
    @property
    def timing(self) -> TimingTable | None: ...
    @property
    def incidents(self) -> Sequence[Incident]: ...
    @property
    def loss_scale(self) -> float: ...
    @property
    def skipped_steps(self) -> int: ...


class Training(ABC):
    """A classifier under `settings.policy`, ready to train on `data`.

    Args:
        settings: what to train and how.
        data: what to train on.
        view: is told what happens.

    Attributes:
        checkpoint_within_epochs: False where the epochs' ends are the only moments at which all state can be kept.
    """

    checkpoint_within_epochs: ClassVar[bool] = True

    def __init__(self, settings: Settings, data: Dataset, view: View) -> None:
        self.settings = settings
        self.data = data
        self.view = view

    @property
    @abstractmethod
    def precision(self) -> Precision:
        """What halfwise knows of the training."""

    @property
    def steps_per_epoch(self) -> int:
        """Batches in the training data; the last one may be smaller."""
        return -(-len(self.data.train[1]) // self.settings.batch_size)

    def run(self, record: RunRecord) -> dict[str, Any]:
        """Trains to the end of the last epoch, from where `record` stands.

        Returns:
            Loss and accuracy on the test data, seconds spent in steps, number of steps, times per format.

        Raises:
            TrainingStopped: the guard could not keep the run alive; the record holds why.
        """
        session = Session(record, self)
        at = session.begin()
        self.view.start(epochs=self.settings.epochs, steps_per_epoch=self.steps_per_epoch, step=at.step)
        try:
            self.train(session)
            session.checkpoint()
        finally:
            session.note_incidents()
            record.close()
        return {**self.evaluate(), "seconds": at.seconds, "steps": at.step, "format_times": at.format_times}

    @abstractmethod
    def train(self, session: Session) -> None:
        """Trains from where `session.progress` stands to the end of the last epoch, and tells `session`."""

    @abstractmethod
    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Inputs and labels in the epoch's order, from batch `start` on."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """`test_loss` and `test_accuracy`, computed in the precision of training."""

    @abstractmethod
    def save_checkpoint(self, directory: Path, progress: Mapping[str, Any]) -> None:
        """Replaces the checkpoint. A kill at any moment leaves the old one or the new one, complete."""

    @abstractmethod
    def load_checkpoint(self, directory: Path) -> dict[str, Any] | None:
        """Puts everything back, and returns the `progress`; None where there is no checkpoint."""

    @abstractmethod
    def environment(self) -> dict[str, Any]:
        """Versions, device, threads; and the class of every layer by path, under `"modules"`."""

    @abstractmethod
    def steps_to_compare(self) -> tuple[Step, Step]:
        """A step under the plan in force, and a plain float32 step without halfwise, each on its own copy of the model.

        Both return when the device has finished.
        """

    @abstractmethod
    def elsewhere(self, target: str) -> dict[str, Any] | None:
        """What the trained model would get on other hardware: see `describe_elsewhere`; None where nobody can tell."""

    def order(self, epoch: int) -> NDArray[np.int64]:
        """The order of the training data: the seed and the epoch's number decide it, nothing else."""
        return np.random.default_rng((self.settings.seed, epoch)).permutation(len(self.data.train[1]))


def wants_one_thread(data: Dataset) -> bool:
    """True for tiny inputs, unless the user has chosen the number of threads.

    A step on 8 x 8 pixels takes about a millisecond. Threads only wait for each other then, tens of times as long where
    others want the cores; such times are worth nothing to `"auto"`.
    """
    return data.train[0][0].size <= _TINY and "OMP_NUM_THREADS" not in os.environ
