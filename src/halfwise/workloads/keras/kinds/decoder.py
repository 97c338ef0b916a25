"""A decoder with a causal mask that foretells the next word of State of the Union passages: 22 layers."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, ops

from halfwise.core.workload import Workload
from halfwise.workloads.batches import passage_batches, vocabulary
from halfwise.workloads.keras.kinds.data import integers

__all__ = ["Block", "Decoder", "workload"]

_WORDS = 24


class Block(layers.Layer):
    """Causal self-attention and a feed-forward network, each behind a layer norm, with residual connections."""

    def __init__(self, width: int, heads: int = 4, **options: Any) -> None:
        super().__init__(**options)
        self.width, self.heads = width, heads
        self.norm1, self.norm2 = layers.LayerNormalization(name="norm1"), layers.LayerNormalization(name="norm2")
        self.qkv, self.out = layers.Dense(3 * width, name="qkv"), layers.Dense(width, name="out")
        self.fc1 = layers.Dense(4 * width, activation="gelu", name="fc1")
        self.fc2 = layers.Dense(width, name="fc2")

    def call(self, x: Any) -> Any:
        """(batch, words, width) to the same."""
        words, depth = x.shape[1], self.width // self.heads
        parts = ops.reshape(self.qkv(self.norm1(x)), (-1, words, 3, self.heads, depth))
        q, k, v = ops.unstack(ops.transpose(parts, (2, 0, 3, 1, 4)), axis=0)
        scores = ops.matmul(q, ops.swapaxes(k, -2, -1)) / depth**0.5
        later = ops.arange(words)[None, :] > ops.arange(words)[:, None]
        shares = ops.softmax(ops.where(later, -float("inf"), scores))
        mixed = ops.transpose(ops.matmul(shares, v), (0, 2, 1, 3))
        x = x + self.out(ops.reshape(mixed, (-1, words, self.width)))
        return x + self.fc2(self.fc1(self.norm2(x)))


class Decoder(keras.Model):
    """Embeddings of words and positions, blocks, a last norm, a head over the vocabulary."""

    def __init__(self, words: int, width: int = 64, depth: int = 3, **options: Any) -> None:
        super().__init__(**options)
        self.embedding = layers.Embedding(words, width, name="embedding")
        self.positions = layers.Embedding(_WORDS, width, name="positions")
        self.blocks = [Block(width, name=f"block{number}") for number in range(1, depth + 1)]
        self.norm = layers.LayerNormalization(name="norm")
        self.head = layers.Dense(words, use_bias=False, name="head")

    def call(self, words: Any) -> Any:
        """Logits of the next word, (batch, words, vocabulary)."""
        x = self.embedding(words) + self.positions(ops.arange(words.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def workload(seed: int = 0, batch_size: int = 8) -> Workload:
    """The network with passages."""
    keras.utils.set_random_seed(seed)
    passages = [integers(words) for words, _ in passage_batches(seed, batch_size, _WORDS + 1)]
    batches = [(words[:, :-1], words[:, 1:]) for words in passages]
    model = Decoder(vocabulary())
    model(batches[0][0])
    return Workload(
        model=model,
        batches=batches,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0),
        optimizer=keras.optimizers.AdamW(1e-3),
        name="decoder",
    )
