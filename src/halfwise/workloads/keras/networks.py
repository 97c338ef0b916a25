"""The classifiers in Keras. They return probabilities of shape (batch, classes)."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers

from halfwise.workloads.datasets import Dataset
from halfwise.workloads.image_data import ImageData
from halfwise.workloads.text_data import LENGTH, TextData

__all__ = ["EmbeddingBag", "build_network"]


@keras.saving.register_keras_serializable(package="halfwise")
class EmbeddingBag(keras.Model):
    """Embedding of width 64, mean over the words that are no padding, dense to the classes.

    Words are integers in [0, word_numbers), shape (batch, words), 0 for padding.
    """

    def __init__(self, word_numbers: int, classes: int, **options: Any) -> None:
        super().__init__(**options)
        self.word_numbers, self.classes = word_numbers, classes
        self.embedding = layers.Embedding(word_numbers, 64, mask_zero=True, name="embedding")
        self.mean = layers.GlobalAveragePooling1D(name="mean")
        self.head = _head(classes)

    def call(self, words: Any) -> Any:
        """The probabilities."""
        return self.head(self.mean(self.embedding(words)))

    def get_config(self) -> dict[str, Any]:
        """What the model is made of anew from."""
        return {**super().get_config(), "word_numbers": self.word_numbers, "classes": self.classes}


def build_network(name: str, data: Dataset) -> keras.Model:
    """A fresh network for `data`, built, initialised from Keras' global generator.

    Args:
        name: one of `halfwise.workloads.settings.NETWORKS`.
        data: gives the inputs' shape and the number of classes.
    """
    match name, data:
        case "convnet", ImageData():
            hidden = [
                layers.MaxPooling2D(2, name="pool"),
                layers.Flatten(name="flatten"),
                layers.Dense(128, activation="relu", name="hidden"),
            ]
        case "small", ImageData():
            hidden = [layers.Flatten(name="flatten")]
        case "embedding_bag", TextData():
            model = EmbeddingBag(data.word_numbers, data.classes, name=name)
            model(keras.ops.zeros((1, LENGTH), "int32"))
            return model
        case _:
            raise ValueError(f"no network {name!r} for {type(data).__name__}")
    channels, height, width = data.shape
    return keras.Sequential(
        [
            keras.Input((height, width, channels)),
            layers.Conv2D(32, 3, activation="relu", name="conv"),
            *hidden,
            _head(data.classes),
        ],
        name=name,
    )


def _head(classes: int) -> layers.Dense:
    # Probabilities in half precision round to 0 where the answer is badly wrong, and the gradient with them.
    return layers.Dense(classes, activation="softmax", dtype="float32", name="head")
