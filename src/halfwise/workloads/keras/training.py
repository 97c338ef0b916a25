"""Training in Keras: what `fit` and a loop of one's own have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import keras
import numpy as np

import halfwise.keras as hw
from halfwise.core.plan import Plan
from halfwise.workloads.datasets import Dataset
from halfwise.workloads.environment import describe_environment
from halfwise.workloads.image_data import ImageData
from halfwise.workloads.keras.checkpoint import load_checkpoint, save_checkpoint
from halfwise.workloads.keras.device import describe_device, use_one_thread
from halfwise.workloads.keras.networks import build_network
from halfwise.workloads.settings import Settings
from halfwise.workloads.training import Step, Training, View, wants_one_thread

__all__ = ["EVALUATION_BATCH", "KerasTraining"]

EVALUATION_BATCH = 500


class KerasTraining(Training):
    """A classifier in Keras, trained with Adam on the cross-entropy.

    Args:
        settings, data, view: as in `Training`.
        plan: the plan to train under; None where `settings.policy` names a policy.

    Raises:
        PolicyError, PlanError: the policy is unknown, or the plan does not fit the network.
    """

    def __init__(self, settings: Settings, data: Dataset, *, plan: Plan | None = None, view: View) -> None:
        super().__init__(settings, data, view)
        if wants_one_thread(data):
            use_one_thread()
        keras.utils.set_random_seed(settings.seed)
        self._wanted = plan or settings.policy
        self.model = self._compiled(self._wanted)
        self.guard = hw.PrecisionGuard(log=view.message)
        self.inputs, self.labels = _channels_last(data, data.train[0]), data.train[1]
        self.test = _channels_last(data, data.test[0]), data.test[1]

    @property
    def precision(self) -> hw.PrecisionGuard:
        """What halfwise knows of the training."""
        return self.guard

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Inputs and labels in the epoch's order, from batch `start` on."""
        order = self.order(epoch)
        for begin in range(start * self.settings.batch_size, len(order), self.settings.batch_size):
            rows = order[begin : begin + self.settings.batch_size]
            yield self.inputs[rows], self.labels[rows]

    def evaluate(self) -> dict[str, float]:
        """`test_loss` and `test_accuracy`, computed in the precision of training."""
        found = self.model.evaluate(*self.test, batch_size=EVALUATION_BATCH, verbose=0, return_dict=True)
        return {"test_loss": float(found["loss"]), "test_accuracy": float(found["accuracy"])}

    def save_checkpoint(self, directory: Path, progress: Mapping[str, Any]) -> None:
        """Replaces the checkpoint. Before the first step there is nothing to keep: the seed decides all."""
        if progress["step"]:
            save_checkpoint(directory, model=self.model, guard=self.guard, progress=progress)

    def load_checkpoint(self, directory: Path) -> dict[str, Any] | None:
        """Puts everything back, and returns the `progress`; None where there is no checkpoint."""
        found = load_checkpoint(directory)
        if found is None:
            return None
        self.model, guard_state, progress = found
        if guard_state["plan"] is None:  # the file does not know that "auto" was still to decide
            self.guard = hw.PrecisionGuard(self._wanted, log=self.view.message)
        self.guard.load_state_dict(guard_state)
        return progress

    def environment(self) -> dict[str, Any]:
        """Versions, device, threads, modules."""
        return {
            **describe_environment(keras, import_module(keras.backend.backend())),
            **describe_device(),
            "modules": {path: type(layer).__name__ for path, layer in hw.named_layers(self.model).items()},
        }

    def elsewhere(self, target: str) -> dict[str, Any] | None:  # noqa: ARG002
        """None: looking takes longer than the training itself where Keras compiles; `halfwise preflight` tells."""
        return None

    def steps_to_compare(self) -> tuple[Step, Step]:
        """A step of `hw.step` under the plan in force, and of Keras in float32, each on its own copy of the model."""
        planned, plain = self._copy(self.guard.plan or self._wanted), self._copy("float32")
        guard = hw.PrecisionGuard(log=lambda _: None)
        return lambda x, y: hw.step(planned, x, y, guard=guard), plain.train_on_batch

    def _compiled(self, wanted: str | Plan) -> keras.Model:
        if isinstance(wanted, Plan):
            model = build_network(self.settings.network, self.data)
            hw.apply(model, wanted)
        else:
            model = self._built_under(wanted)
        model.compile(
            optimizer=keras.optimizers.Adam(self.settings.learning_rate),
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )
        return model

    def _built_under(self, policy: str) -> keras.Model:
        before = keras.config.dtype_policy()
        hw.set_global_policy(policy)
        try:
            return build_network(self.settings.network, self.data)
        finally:
            keras.config.set_dtype_policy(before)

    def _copy(self, wanted: str | Plan) -> keras.Model:
        model = self._compiled(wanted)
        model.set_weights(self.model.get_weights())
        return model


def _channels_last(data: Dataset, inputs: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.moveaxis(inputs, 1, -1)) if isinstance(data, ImageData) else inputs
