"""Training in Keras with a loop over batches, written by hand on `hw.step`."""

from __future__ import annotations

import time

import keras
import numpy as np

import halfwise.keras as hw
from halfwise.workloads.keras.training import KerasTraining
from halfwise.workloads.session import Session

__all__ = ["CustomLoopTraining"]


class CustomLoopTraining(KerasTraining):
    """Trains batch by batch."""

    def train(self, session: Session) -> None:
        """Trains from where `session.progress` stands to the end of the last epoch, and tells `session`."""
        at = session.progress
        while at.epoch < self.settings.epochs:
            for inputs, labels in self.batches(at.epoch, start=at.position):
                began = time.perf_counter()
                result = hw.step(self.model, inputs, labels, guard=self.guard)
                seconds = time.perf_counter() - began
                if result.applied:
                    answers = np.argmax(keras.ops.convert_to_numpy(result.output), axis=-1)
                    at.count(result.loss, int(np.sum(answers == labels)), len(labels))
                session.note_step(
                    loss=result.loss,
                    loss_scale=result.loss_scale,
                    applied=result.applied,
                    seconds=seconds,
                    accuracy=at.train_accuracy,
                )
            trained = {"train_loss": at.train_loss, "train_accuracy": at.train_accuracy}
            session.end_epoch({**trained, **self.evaluate()})
