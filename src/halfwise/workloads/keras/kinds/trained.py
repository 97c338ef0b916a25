"""The workloads of `halfwise train`, untrained: networks, data and optimizer as there."""

from __future__ import annotations

from typing import Any

import keras

from halfwise.core.workload import Workload
from halfwise.workloads.batches import passage_batches
from halfwise.workloads.datasets import load_data
from halfwise.workloads.keras.kinds.data import digit_batches, integers
from halfwise.workloads.keras.networks import build_network
from halfwise.workloads.settings import Settings

__all__ = ["workload"]


def workload(name: str, seed: int = 0) -> Workload:
    """`"image"` or `"text"`."""
    keras.utils.set_random_seed(seed)
    settings = Settings.of(name)
    data = load_data(name, settings.data)
    size = settings.batch_size
    batches: list[Any] = digit_batches(seed, size)
    if name == "text":
        words = data.train[0].shape[1]
        batches = [(integers(numbers), integers(labels)) for numbers, labels in passage_batches(seed, size, words)]
    return Workload(
        model=build_network(settings.network, data),
        batches=batches,
        loss="sparse_categorical_crossentropy",
        optimizer=keras.optimizers.Adam(settings.learning_rate),
        name=name,
    )
