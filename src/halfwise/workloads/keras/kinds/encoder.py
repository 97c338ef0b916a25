"""A transformer encoder that classifies digits from 16 patches: 24 layers."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, ops

from halfwise.core.workload import Workload
from halfwise.workloads.keras.kinds.data import digit_batches

__all__ = ["Encoder", "EncoderLayer", "workload"]


class EncoderLayer(layers.Layer):
    """Self-attention and a feed-forward network, each behind a layer norm, with residual connections and dropout."""

    def __init__(self, width: int, heads: int, dropout: float, **options: Any) -> None:
        super().__init__(**options)
        self.norm1 = layers.LayerNormalization(name="norm1")
        self.attention = layers.MultiHeadAttention(heads, width // heads, dropout=dropout, name="attention")
        self.norm2 = layers.LayerNormalization(name="norm2")
        self.fc1 = layers.Dense(4 * width, activation="relu", name="fc1")
        self.fc2 = layers.Dense(width, name="fc2")
        self.dropout = layers.Dropout(dropout, name="dropout")

    def call(self, x: Any, training: bool = False) -> Any:
        """(batch, patches, width) to the same."""
        hidden = self.norm1(x)
        x = x + self.dropout(self.attention(hidden, hidden, training=training), training=training)
        return x + self.dropout(self.fc2(self.fc1(self.norm2(x))), training=training)


class Encoder(keras.Model):
    """Patches of 2 x 2, learned positions, transformer layers, a last norm, mean over the patches, a dense head."""

    def __init__(self, width: int = 96, depth: int = 4, classes: int = 10, **options: Any) -> None:
        super().__init__(**options)
        self.patches = layers.Dense(width, name="patches")
        self.positions = layers.Embedding(16, width, name="positions")
        self.blocks = [EncoderLayer(width, 4, 0.1, name=f"layer{number}") for number in range(1, depth + 1)]
        self.norm = layers.LayerNormalization(name="norm")
        self.head = layers.Dense(classes, name="head")

    def call(self, images: Any, training: bool = False) -> Any:
        """(batch, 8, 8, 1) to logits, (batch, classes)."""
        cut = ops.reshape(ops.transpose(ops.reshape(images, (-1, 4, 2, 4, 2)), (0, 1, 3, 2, 4)), (-1, 16, 4))
        x = self.patches(cut) + self.positions(ops.arange(16))
        for block in self.blocks:
            x = block(x, training=training)
        return self.head(ops.mean(self.norm(x), axis=1))


def workload(seed: int = 0, batch_size: int = 32) -> Workload:
    """The network with digits."""
    keras.utils.set_random_seed(seed)
    model, batches = Encoder(), digit_batches(seed, batch_size)
    model(batches[0][0])
    return Workload(
        model=model,
        batches=batches,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.AdamW(1e-3),
        name="encoder",
    )
