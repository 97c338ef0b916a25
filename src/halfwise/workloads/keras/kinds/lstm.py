"""Stacked LSTMs that tell whether a president spoke before 1920 or since: 14 layers."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, ops

from halfwise.core.workload import Workload
from halfwise.workloads.batches import passage_batches, vocabulary
from halfwise.workloads.keras.kinds.data import integers

__all__ = ["StackedLSTM", "workload"]

_WORDS = 32


class StackedLSTM(keras.Model):
    """An embedding, LSTMs with layer norms and dense layers between, the last state, a dense head."""

    def __init__(self, words: int, classes: int, width: int = 64, depth: int = 4, **options: Any) -> None:
        super().__init__(**options)
        numbers = range(1, depth + 1)
        self.embedding = layers.Embedding(words, width, name="embedding")
        self.lstms = [layers.LSTM(width, return_sequences=True, name=f"lstm{n}") for n in numbers]
        self.norms = [layers.LayerNormalization(name=f"norm{n}") for n in numbers]
        self.dense = [layers.Dense(width, activation="tanh", name=f"dense{n}") for n in numbers]
        self.head = layers.Dense(classes, name="head")

    def call(self, words: Any) -> Any:
        """Logits, (batch, classes)."""
        x = self.embedding(words)
        for lstm, norm, dense in zip(self.lstms, self.norms, self.dense, strict=True):
            x = x + dense(norm(lstm(x)))
        return self.head(ops.take(x, -1, axis=1))


def workload(seed: int = 0, batch_size: int = 16) -> Workload:
    """The network with passages."""
    keras.utils.set_random_seed(seed)
    batches = [(integers(words), integers(labels)) for words, labels in passage_batches(seed, batch_size, _WORDS)]
    model = StackedLSTM(vocabulary(), classes=1 + max(int(labels.max()) for _, labels in batches))
    model(batches[0][0])
    return Workload(
        model=model,
        batches=batches,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.Adam(1e-3),
        name="lstm",
    )
