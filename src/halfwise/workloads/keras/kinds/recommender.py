"""A two-tower recommender whose weights are nearly all embeddings: 14 layers. The interactions are synthetic."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, ops

from halfwise.core.workload import Workload
from halfwise.workloads.batches import interaction_batches
from halfwise.workloads.keras.kinds.data import integers

__all__ = ["Tower", "TwoTowers", "workload"]


class Tower(layers.Layer):
    """Embeddings of an identity and of a category, dense layers, a layer norm."""

    def __init__(self, identities: int, categories: int, width: int, **options: Any) -> None:
        super().__init__(**options)
        self.identity = layers.Embedding(identities, width, name="identity")
        self.category = layers.Embedding(categories, width, name="category")
        self.dense = [layers.Dense(width, activation="relu", name=f"dense{n}") for n in (1, 2)]
        self.norm = layers.LayerNormalization(name="norm")

    def call(self, identity: Any, category: Any) -> Any:
        """(batch,) twice to (batch, width)."""
        x = ops.concatenate([self.identity(identity), self.category(category)], axis=1)
        for dense in self.dense:
            x = dense(x)
        return self.norm(x)


class TwoTowers(keras.Model):
    """A tower for users, one for items, and dense layers on their product."""

    def __init__(
        self, users: int = 20_000, items: int = 20_000, categories: int = 200, width: int = 32, **options: Any
    ) -> None:
        super().__init__(**options)
        self.user = Tower(users, categories, width, name="user")
        self.item = Tower(items, categories, width, name="item")
        self.dense = [layers.Dense(width, activation="relu", name=f"dense{n}") for n in (1, 2, 3)]
        self.head = layers.Dense(1, name="head")

    def call(self, inputs: Any) -> Any:
        """`(user, item, category)`, each (batch,), to logits of "the user takes the item", (batch, 1)."""
        user, item, category = inputs
        x = self.user(user, category) * self.item(item, category)
        for dense in self.dense:
            x = x + dense(x)
        return self.head(x)


def workload(seed: int = 0, batch_size: int = 512) -> Workload:
    """The network with interactions."""
    keras.utils.set_random_seed(seed)
    batches = [
        ((integers(user), integers(item), integers(category)), taken[:, None])
        for user, item, category, taken in interaction_batches(seed, batch_size)
    ]
    model = TwoTowers()
    model(batches[0][0])
    return Workload(
        model=model,
        batches=batches,
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        optimizer=keras.optimizers.Adam(1e-3),
        name="recommender",
    )
