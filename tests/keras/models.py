"""Small models and data that several tests share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

__all__ = ["batch", "classifier", "dtypes_that_ran", "planted"]

Array = NDArray[Any]


def classifier(*, head: str | None = "softmax", **compile_options: Any) -> keras.Model:
    """Dense `first`, batch norm `norm`, dropout, dense `head`; compiled."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(16, activation="relu", name="first"),
            layers.BatchNormalization(name="norm"),
            layers.Dropout(0.1, name="dropout"),
            layers.Dense(4, activation=head, name="head"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=head is None)
    model.compile(**{"optimizer": "adam", "loss": loss, "metrics": ["accuracy"], **compile_options})
    return model


def batch(rows: int = 64, seed: int = 0) -> tuple[Array, Array]:
    """Inputs (rows, 8), float32, and labels (rows,) that a linear model can learn."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 8)).astype("float32")
    return x, (x[:, 0] > 0).astype("int32") + 2 * (x[:, 1] > 0).astype("int32")


def planted() -> tuple[keras.Model, Array, Array]:
    """A model in which one layer's matrix product (up to about 1e5) overflows float16, and nothing else does.

    The activation of `middle` divides by as much as its weights multiply, so that the other layers see ordinary values.
    """
    layers = keras.layers
    large = keras.initializers.Constant(3e3)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(16, activation="relu", name="first"),
            layers.Dense(16, activation=_shrunk, kernel_initializer=large, use_bias=False, name="middle"),
            layers.Dense(16, activation="relu", name="after"),
            layers.Dense(4, name="head"),
        ]
    )
    x, y = batch(256)
    return model, 4.0 * np.abs(x), y


def _shrunk(values: Any) -> Any:
    return values * 1e-4


def dtypes_that_ran(model: keras.Model, x: Array) -> dict[str, str]:
    """`layer name -> dtype` of what its weights were multiplied into, read off the tensors of one call."""
    seen: dict[str, str] = {}
    with ExitStack() as stack:
        for layer in model._flatten_layers(include_self=False):
            stack.enter_context(_noted(layer, seen))
        model(keras.ops.convert_to_tensor(x), training=False)
    return seen


@contextmanager
def _noted(layer: keras.Layer, seen: dict[str, str]) -> Iterator[None]:
    inner, before = layer.call, layer.__dict__.get("call")

    def call(*args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        seen[layer.name] = keras.backend.standardize_dtype(keras.tree.flatten(result)[0].dtype)
        return result

    layer.__dict__["call"] = call
    try:
        yield
    finally:
        del layer.__dict__["call"]
        if before is not None:
            layer.__dict__["call"] = before
