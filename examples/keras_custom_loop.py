"""A loop over batches in Keras, with a model of its own class, in bfloat16: `hw.step` is the whole training step.

python examples/keras_custom_loop.py    (KERAS_BACKEND=tensorflow, jax or torch chooses the backend)
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import halfwise.keras as hw
from halfwise.workloads.text_data import load_texts


class TextClassifier(keras.Model):  # type: ignore[misc]
    def __init__(self, words: int) -> None:
        super().__init__()
        self.embedding = keras.layers.Embedding(words, 64, mask_zero=True)
        self.mean = keras.layers.GlobalAveragePooling1D()
        self.head = keras.layers.Dense(2, activation="softmax", dtype="float32")

    def call(self, words: Any) -> Any:
        return self.head(self.mean(self.embedding(words)))


data = load_texts("sotu")  # passages from the State of the Union addresses: before 1920, or since?
words, labels = data.train

keras.utils.set_random_seed(0)
hw.set_global_policy("mixed_bfloat16")
model = TextClassifier(data.word_numbers)
model.compile(optimizer=keras.optimizers.Adam(0.003), loss="sparse_categorical_crossentropy", metrics=["accuracy"])

guard = hw.PrecisionGuard()
for epoch in range(3):
    for rows in np.array_split(np.random.permutation(len(words)), 75):
        result = hw.step(model, words[rows], labels[rows], guard=guard)
    print(f"epoch {epoch + 1}: loss {result.loss:.3f}, {guard.skipped_steps} steps skipped")

accuracy = model.evaluate(*data.test, verbose=0, return_dict=True)["accuracy"]
print(f"test accuracy {accuracy:.3f}, embedding in {model.embedding.compute_dtype}")
