"""A step of a generative adversarial network on digits, both losses at once: 12 layers."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from halfwise.core.workload import Workload
from halfwise.workloads.keras.kinds.data import digit_batches

__all__ = ["Discriminator", "Gan", "Generator", "workload"]

_NOISE = 32


class Generator(layers.Layer):
    """Noise to images: a dense layer and three convolutions, two of them transposed, with batch norms."""

    def __init__(self, width: int = 64, **options: Any) -> None:
        super().__init__(**options)
        self.width = width
        self.dense = layers.Dense(width * 4, name="dense")
        self.norm1, self.norm2 = layers.BatchNormalization(name="norm1"), layers.BatchNormalization(name="norm2")
        self.conv1 = layers.Conv2DTranspose(width // 2, 4, strides=2, padding="same", name="conv1")
        self.conv2 = layers.Conv2DTranspose(width // 2, 4, strides=2, padding="same", activation="relu", name="conv2")
        self.last = layers.Conv2D(1, 3, padding="same", activation="sigmoid", name="last")

    def call(self, noise: Any, training: bool = False) -> Any:
        """(batch, noise) to (batch, 8, 8, 1) in (0, 1)."""
        x = ops.reshape(self.dense(noise), (-1, 2, 2, self.width))
        x = ops.relu(self.norm1(x, training=training))
        x = ops.relu(self.norm2(self.conv1(x), training=training))
        return self.last(self.conv2(x))


class Discriminator(layers.Layer):
    """Images to the logit of "real": four convolutions and two dense layers."""

    def __init__(self, width: int = 32, **options: Any) -> None:
        super().__init__(**options)
        self.convs = [
            layers.Conv2D(channels, 3, strides=1 + number % 2, padding="same", name=f"conv{number + 1}")
            for number, channels in enumerate((width, width, 2 * width, 2 * width))
        ]
        self.flatten = layers.Flatten(name="flatten")
        self.hidden, self.head = layers.Dense(64, name="hidden"), layers.Dense(1, name="head")

    def call(self, images: Any) -> Any:
        """(batch, 8, 8, 1) to (batch, 1)."""
        x = images
        for conv in self.convs:
            x = ops.leaky_relu(conv(x), 0.2)
        return self.head(ops.leaky_relu(self.hidden(self.flatten(x)), 0.2))


class Gan(keras.Model):
    """The discriminator's logits of real images and of generated ones.

    The one loss trains both: between them the gradient changes its sign, so that the generator ascends what the
    discriminator descends (the minimax game of arXiv 1406.2661, played by both at once).
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.generator, self.discriminator = Generator(name="generator"), Discriminator(name="discriminator")

    def call(self, inputs: Any, training: bool = False) -> Any:
        """`(images, noise)` to logits, (batch, 2)."""
        images, noise = inputs
        fake = self.generator(noise, training=training)
        reversed_fake = 2.0 * ops.stop_gradient(fake) - fake
        return ops.concatenate([self.discriminator(images), self.discriminator(reversed_fake)], axis=1)


def workload(seed: int = 0, batch_size: int = 32) -> Workload:
    """Both networks with digits."""
    keras.utils.set_random_seed(seed)
    random = np.random.default_rng(seed)
    truth = np.tile(np.array([1.0, 0.0], np.float32), (batch_size, 1))
    batches = [
        ((images, random.normal(size=(batch_size, _NOISE)).astype(np.float32)), truth)
        for images, _ in digit_batches(seed, batch_size)
    ]
    model = Gan()
    model(batches[0][0])
    return Workload(
        model=model,
        batches=batches,
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        optimizer=keras.optimizers.Adam(2e-4, beta_1=0.5),
        name="gan",
    )
