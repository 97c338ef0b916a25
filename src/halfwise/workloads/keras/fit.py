"""Training in Keras with one call of `fit`: a callback keeps the record."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar

import keras
import numpy as np

from halfwise.workloads.keras.training import EVALUATION_BATCH, KerasTraining
from halfwise.workloads.session import Session

__all__ = ["FitTraining"]


class FitTraining(KerasTraining):
    """Trains with `model.fit`."""

    checkpoint_within_epochs: ClassVar[bool] = False

    def train(self, session: Session) -> None:
        """Trains from where `session.progress` stands to the end of the last epoch, and tells `session`."""
        epoch, epochs = session.progress.epoch, self.settings.epochs
        data = _OrderedData(self, epoch)
        self.model.fit(
            data,
            initial_epoch=epoch,
            epochs=epochs,
            shuffle=False,
            validation_data=self.test,
            validation_batch_size=EVALUATION_BATCH,
            callbacks=[self.guard, _Recorder(self, session, data)],
            verbose=0,
        )


class _OrderedData(keras.utils.PyDataset):
    """The training data in the order of an epoch."""

    def __init__(self, training: KerasTraining, epoch: int) -> None:
        super().__init__()
        self._training = training
        self.use_epoch(epoch)

    def use_epoch(self, epoch: int) -> None:
        """Takes the order of that epoch."""
        self._order = self._training.order(epoch)

    def __len__(self) -> int:
        return self._training.steps_per_epoch

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        size = self._training.settings.batch_size
        rows = self._order[index * size : (index + 1) * size]
        return self._training.inputs[rows], self._training.labels[rows]


class _Recorder(keras.callbacks.Callback):
    """Tells `session` of every step, once the guard has judged it, and of every epoch."""

    def __init__(self, training: KerasTraining, session: Session, data: _OrderedData) -> None:
        super().__init__()
        self._training, self._session, self._data = training, session, data
        self._began = 0.0

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:  # noqa: ARG002
        self._data.use_epoch(epoch)

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:  # noqa: ARG002
        self._began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:  # noqa: ARG002
        seconds = time.perf_counter() - self._began
        step = self._training.guard.last_step
        assert step is not None  # the guard has judged this one
        self._session.note_step(
            loss=step.loss,
            loss_scale=step.loss_scale,
            applied=step.applied,
            seconds=seconds,
            accuracy=float(logs["accuracy"]),
        )

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any]) -> None:  # noqa: ARG002
        assert self.model is not None  # on JAX this brings the weights from `fit` back to the model
        names = {"train_loss": "loss", "train_accuracy": "accuracy", "test_loss": "val_loss"}
        names["test_accuracy"] = "val_accuracy"
        self._session.end_epoch({name: float(logs[of_keras]) for name, of_keras in names.items()})
