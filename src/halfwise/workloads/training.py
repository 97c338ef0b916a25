"""Training an image classifier: a loop written by hand on the public API, with a record that survives a kill."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import halfwise.torch as hw
from halfwise.core.record import RunRecord
from halfwise.workloads.data import ImageData
from halfwise.workloads.image import build_network
from halfwise.workloads.session import Session
from halfwise.workloads.settings import ImageSettings

__all__ = ["ImageTraining", "View"]

_EVALUATION_BATCH = 500


class View(Protocol):
    """Who is told what happens while it happens."""

    def start(self, *, epochs: int, steps_per_epoch: int, step: int) -> None:
        """Training begins, or goes on, at `step`."""

    def step(self, row: Mapping[str, Any], *, accuracy: float, skipped: int) -> None:
        """A step is done. `row` is its line in `metrics.jsonl`, `accuracy` the epoch's so far, on training images."""

    def measuring(self) -> None:
        """Training is over, and the step time is measured."""

    def message(self, text: str) -> None:
        """The guard has something to say."""


class ImageTraining:
    """An image classifier under `settings.policy`, ready to train on `data`.

    Args:
        settings: what to train and how.
        data: the images.
        plan: the plan to train under; None where `settings.policy` names a policy.
        view: is told what happens.

    Raises:
        PolicyError, PlanError: the policy is unknown, or the plan does not fit the network.
    """

    def __init__(self, settings: ImageSettings, data: ImageData, *, plan: hw.Plan | None = None, view: View) -> None:
        self.settings = settings
        self.data = data
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.view = view
        torch.manual_seed(settings.seed)
        self.model = build_network(settings.network, data.shape, data.classes).to(self.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=settings.learning_rate)
        self.mp = hw.MixedPrecision(self.model, self.optimizer, plan or settings.policy, log=view.message)
        self._images, self._labels = self._on_device(data.train_images), self._on_device(data.train_labels)
        self._test_images, self._test_labels = self._on_device(data.test_images), self._on_device(data.test_labels)

    @property
    def steps_per_epoch(self) -> int:
        """Batches in the training data; the last one may be smaller."""
        return -(-len(self._labels) // self.settings.batch_size)

    def run(self, record: RunRecord) -> dict[str, Any]:
        """Trains to the end of the last epoch, from where `record` stands.

        Returns:
            Loss and accuracy on the test images, seconds spent in steps, number of steps, times per format.

        Raises:
            TrainingStopped: the guard could not keep the run alive; the record holds why.
        """
        session = Session(
            record,
            model=self.model,
            optimizer=self.optimizer,
            mp=self.mp,
            checkpoint_every=self.settings.checkpoint_every,
        )
        at = session.begin()
        self.view.start(epochs=self.settings.epochs, steps_per_epoch=self.steps_per_epoch, step=at.step)
        try:
            while at.epoch < self.settings.epochs:
                for images, labels in self.batches(at.epoch, start=at.position):
                    began = time.perf_counter()
                    result = self.mp.step(partial(self._loss_and_logits, images, labels))
                    loss = float(result.loss)
                    seconds = time.perf_counter() - began

                    row = {"step": at.step, "epoch": at.epoch, "loss": loss, "loss_scale": result.loss_scale}
                    row |= {"applied": result.applied, "seconds": round(seconds, 6)}
                    at.step, at.position, at.seconds = at.step + 1, at.position + 1, at.seconds + seconds
                    if result.applied:
                        at.seen += len(labels)
                        at.loss_sum += loss * len(labels)
                        at.correct += int((result.output.argmax(1) == labels).sum())
                    accuracy = at.correct / max(1, at.seen)
                    if ends_epoch := at.position == self.steps_per_epoch:
                        row |= {"train_loss": at.loss_sum / max(1, at.seen), "train_accuracy": accuracy}
                        row |= self.evaluate()
                        at.next_epoch()
                    session.note_step(row)
                    self.view.step(row, accuracy=accuracy, skipped=self.mp.skipped_steps)
                    if ends_epoch and self.mp.plan is not None:
                        session.checkpoint()
            session.checkpoint()
        finally:
            session.note_incidents()
            record.close()
        return {**self.evaluate(), "seconds": at.seconds, "steps": at.step, "format_times": at.format_times}

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and labels in the order that the seed and the epoch's number decide, from batch `start` on."""
        order = np.random.default_rng((self.settings.seed, epoch)).permutation(len(self._labels))
        indices = torch.from_numpy(order).to(self.device)
        for batch in torch.split(indices, self.settings.batch_size)[start:]:
            yield self._images[batch], self._labels[batch]

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Loss and accuracy on the test images, computed in the precision of training."""
        self.model.eval()
        loss, correct = 0.0, 0
        all_images = torch.split(self._test_images, _EVALUATION_BATCH)
        all_labels = torch.split(self._test_labels, _EVALUATION_BATCH)
        for images, labels in zip(all_images, all_labels, strict=True):
            with self.mp.autocast():
                batch_loss, logits = self._loss_and_logits(images, labels)
            loss += float(batch_loss) * len(labels)
            correct += int((logits.argmax(1) == labels).sum())
        self.model.train()
        return {"test_loss": loss / len(self._test_labels), "test_accuracy": correct / len(self._test_labels)}

    def _loss_and_logits(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(images)
        return cross_entropy(logits, labels), logits

    def _on_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


def fresh_copy(training: ImageTraining) -> nn.Module:
    """The network with its present weights, not wrapped by anything."""
    with torch.random.fork_rng(devices=[]):
        model = build_network(training.settings.network, training.data.shape, training.data.classes)
    model.load_state_dict(training.model.state_dict())
    return model.to(training.device)
