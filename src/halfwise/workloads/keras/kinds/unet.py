"""A U-Net block of a diffusion model, which foretells the noise in noisy digits: 18 layers."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from halfwise.core.workload import Workload
from halfwise.workloads.batches import noisy_batches
from halfwise.workloads.keras.kinds.data import channels_last

__all__ = ["Residual", "UNet", "workload"]


class Residual(layers.Layer):
    """Two convolutions behind group norms, with the time added between, and a residual connection."""

    def __init__(self, after: int, **options: Any) -> None:
        super().__init__(**options)
        self.norm1, self.norm2 = (layers.GroupNormalization(8, name=f"norm{n}") for n in (1, 2))
        self.conv1, self.conv2 = (layers.Conv2D(after, 3, padding="same", name=f"conv{n}") for n in (1, 2))
        self.time = layers.Dense(after, name="time")
        self.skip = layers.Conv2D(after, 1, name="skip")

    def call(self, x: Any, time: Any) -> Any:
        """(batch, height, width, before) to (batch, height, width, after)."""
        hidden = self.conv1(ops.silu(self.norm1(x))) + self.time(time)[:, None, None, :]
        return self.conv2(ops.silu(self.norm2(hidden))) + self.skip(x)


class UNet(keras.Model):
    """Down once, attention at the bottom, up again beside what came down."""

    def __init__(self, width: int = 32, **options: Any) -> None:
        super().__init__(**options)
        self.frequencies = np.exp(np.linspace(0.0, math.log(1000.0), width // 2)).astype(np.float32)
        self.time1 = layers.Dense(2 * width, activation="silu", name="time1")
        self.time2 = layers.Dense(2 * width, name="time2")
        self.first = layers.Conv2D(width, 3, padding="same", name="first")
        self.down = Residual(2 * width, name="down")
        self.attention = layers.MultiHeadAttention(4, width // 2, name="attention")
        self.up = Residual(width, name="up")
        self.norm = layers.GroupNormalization(8, name="norm")
        self.last = layers.Conv2D(1, 3, padding="same", name="last")
        self.smaller, self.larger = layers.AveragePooling2D(2, name="smaller"), layers.UpSampling2D(2, name="larger")

    def call(self, inputs: Any) -> Any:
        """`(images, time)`, (batch, 8, 8, 1) and (batch,) in [0, 1), to the noise, in the images' shape."""
        images, time = inputs
        angles = time[:, None] * ops.cast(self.frequencies, time.dtype)
        embedded = self.time2(self.time1(ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=1)))
        first = self.first(images)
        x = self.down(self.smaller(first), embedded)
        places = ops.reshape(x, (-1, x.shape[1] * x.shape[2], x.shape[3]))
        x = x + ops.reshape(self.attention(places, places), (-1, *x.shape[1:]))
        x = self.up(ops.concatenate([self.larger(x), first], axis=-1), embedded)
        return self.last(ops.silu(self.norm(x)))


def workload(seed: int = 0, batch_size: int = 16) -> Workload:
    """The network with digits to which noise was added."""
    keras.utils.set_random_seed(seed)
    batches = [
        ((channels_last(noisy), time), channels_last(noise)) for noisy, time, noise in noisy_batches(seed, batch_size)
    ]
    model = UNet()
    model(batches[0][0])
    return Workload(
        model=model,
        batches=batches,
        loss=keras.losses.MeanSquaredError(),
        optimizer=keras.optimizers.AdamW(1e-3),
        name="unet",
    )
