"""A convolutional classifier with batch norms, on digits: 13 layers."""

from __future__ import annotations

import keras
from keras import layers

from halfwise.core.workload import Workload
from halfwise.workloads.keras.kinds.data import digit_batches

__all__ = ["convnet", "workload"]


def convnet(widths: tuple[int, ...] = (32, 32, 64, 64, 128, 128), classes: int = 10) -> keras.Model:
    """Six convolutions, each with a batch norm, mean over the positions, a dense head: (batch, 8, 8, 1) to logits."""
    stack: list[keras.Layer] = [keras.Input((8, 8, 1))]
    for number, width in enumerate(widths, start=1):
        stack += [
            layers.Conv2D(width, 3, padding="same", use_bias=False, name=f"conv{number}"),
            layers.BatchNormalization(name=f"norm{number}"),
            layers.ReLU(name=f"relu{number}"),
        ]
    return keras.Sequential([*stack, layers.GlobalAveragePooling2D(name="mean"), layers.Dense(classes, name="head")])


def workload(seed: int = 0, batch_size: int = 32) -> Workload:
    """The network with digits."""
    keras.utils.set_random_seed(seed)
    return Workload(
        model=convnet(),
        batches=digit_batches(seed, batch_size),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
        name="convnet",
    )
