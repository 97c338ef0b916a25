"""Training in PyTorch: a loop written by hand on the public API."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import halfwise.torch as hw
from halfwise.torch.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint, tidy_checkpoint
from halfwise.torch.names import named_layers
from halfwise.workloads.datasets import Dataset
from halfwise.workloads.elsewhere import PREFLIGHTS, describe_elsewhere
from halfwise.workloads.environment import describe_environment
from halfwise.workloads.session import Session
from halfwise.workloads.settings import Settings
from halfwise.workloads.torch.networks import build_network
from halfwise.workloads.training import Step, Training, View, wants_one_thread

__all__ = ["TorchTraining"]

_EVALUATION_BATCH = 500
_ELSEWHERE_BATCHES = 3


class TorchTraining(Training):
    """A classifier in PyTorch, trained with Adam on the cross-entropy.

    Args:
        settings, data, view: as in `Training`.
        plan: the plan to train under; None where `settings.policy` names a policy.

    Raises:
        PolicyError, PlanError: the policy is unknown, or the plan does not fit the network.
    """

    def __init__(self, settings: Settings, data: Dataset, *, plan: hw.Plan | None = None, view: View) -> None:
        super().__init__(settings, data, view)
        if wants_one_thread(data):
            torch.set_num_threads(1)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(settings.seed)
        self.model = build_network(settings.network, data).to(self.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=settings.learning_rate)
        self.mp = hw.MixedPrecision(self.model, self.optimizer, plan or settings.policy, log=view.message)
        self._inputs, self._labels = map(self._on_device, data.train)
        self._test_inputs, self._test_labels = map(self._on_device, data.test)

    @property
    def precision(self) -> hw.MixedPrecision:
        """What halfwise knows of the training."""
        return self.mp

    def train(self, session: Session) -> None:
        """Trains from where `session.progress` stands to the end of the last epoch, and tells `session`."""
        at = session.progress
        while at.epoch < self.settings.epochs:
            for inputs, labels in self.batches(at.epoch, start=at.position):
                began = time.perf_counter()
                result = self.mp.step(partial(self._loss_and_logits, inputs, labels))
                loss = float(result.loss)
                seconds = time.perf_counter() - began
                if result.applied:
                    at.count(loss, int((result.output.argmax(1) == labels).sum()), len(labels))
                session.note_step(
                    loss=loss,
                    loss_scale=result.loss_scale,
                    applied=result.applied,
                    seconds=seconds,
                    accuracy=at.train_accuracy,
                )
            trained = {"train_loss": at.train_loss, "train_accuracy": at.train_accuracy}
            session.end_epoch({**trained, **self.evaluate()})

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and labels in the epoch's order, from batch `start` on."""
        indices = torch.from_numpy(self.order(epoch)).to(self.device)
        for batch in torch.split(indices, self.settings.batch_size)[start:]:
            yield self._inputs[batch], self._labels[batch]

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """`test_loss` and `test_accuracy`, computed in the precision of training."""
        self.model.eval()
        loss, correct = 0.0, 0
        all_inputs = torch.split(self._test_inputs, _EVALUATION_BATCH)
        all_labels = torch.split(self._test_labels, _EVALUATION_BATCH)
        for inputs, labels in zip(all_inputs, all_labels, strict=True):
            with self.mp.autocast():
                batch_loss, logits = self._loss_and_logits(inputs, labels)
            loss += float(batch_loss) * len(labels)
            correct += int((logits.argmax(1) == labels).sum())
        self.model.train()
        return {"test_loss": loss / len(self._test_labels), "test_accuracy": correct / len(self._test_labels)}

    def save_checkpoint(self, directory: Path, progress: Mapping[str, Any]) -> None:
        """Replaces the checkpoint. A kill at any moment leaves the old one or the new one, complete."""
        save_checkpoint(directory, model=self.model, optimizer=self.optimizer, mp=self.mp, progress=progress)

    def load_checkpoint(self, directory: Path) -> dict[str, Any] | None:
        """Puts everything back, and returns the `progress`; None where there is no checkpoint."""
        tidy_checkpoint(directory)
        if find_checkpoint(directory) is None:
            return None
        return load_checkpoint(directory, model=self.model, optimizer=self.optimizer, mp=self.mp)

    def environment(self) -> dict[str, Any]:
        """Versions, device, threads, modules."""
        return {
            **describe_environment(torch),
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
            "modules": {path: type(module).__name__ for path, module in named_layers(self.model)},
        }

    def steps_to_compare(self) -> tuple[Step, Step]:
        """A step of `MixedPrecision` under the plan in force, and a plain float32 step, each on its own copy."""
        planned, plain = self._fresh_copy(), self._fresh_copy()
        optimizer = torch.optim.Adam(planned.parameters(), lr=self.settings.learning_rate)
        mp = hw.MixedPrecision(planned, optimizer, self.mp.plan or self.mp.policy, log=lambda _: None)
        plain_optimizer = torch.optim.Adam(plain.parameters(), lr=self.settings.learning_rate)

        def plan_step(inputs: Tensor, labels: Tensor) -> None:
            float(mp.step(lambda: cross_entropy(planned(inputs), labels)).loss)
            _finish(inputs)

        def float32_step(inputs: Tensor, labels: Tensor) -> None:
            plain_optimizer.zero_grad()
            loss = cross_entropy(plain(inputs), labels)
            torch.autograd.backward(loss)
            plain_optimizer.step()
            loss.item()
            _finish(inputs)

        return plan_step, float32_step

    def elsewhere(self, target: str) -> dict[str, Any] | None:
        """What a plan and preflights say; None on a GPU, where the rules of another cannot be followed."""
        if self.device.type != "cpu":
            return None
        model = self._fresh_copy()
        batches = list(islice(self.batches(0), _ELSEWHERE_BATCHES))
        closures = [partial(_loss, model, inputs, labels) for inputs, labels in batches]
        verdicts = {policy: hw.preflight(model, closures, policy=policy, target=target) for policy in PREFLIGHTS}
        return describe_elsewhere(target, hw.plan(model, closures, target=target), verdicts)

    def _loss_and_logits(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(inputs)
        return cross_entropy(logits, labels), logits

    def _on_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _fresh_copy(self) -> nn.Module:
        """The network with its present weights, not wrapped by anything."""
        with torch.random.fork_rng(devices=[]):
            model = build_network(self.settings.network, self.data)
        model.load_state_dict(self.model.state_dict())
        return model.to(self.device)


def _loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(model(inputs), labels)


def _finish(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()
