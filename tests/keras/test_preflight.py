"""Preflight in Keras: what is wrong is named and cured, sound models are left in peace, and nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from halfwise.core.preflight import Preflight
from halfwise.errors import PolicyError, UsageError
from halfwise.keras.preflight import preflight
from halfwise.keras.probe import to_numpy

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(16, 8)).astype("float32"), RANDOM.integers(0, 4, 16)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class HandWrittenNorm(keras.layers.Layer):
    """An RMS norm whose squares do not fit float16."""

    def call(self, x: Any) -> Any:
        return x * ops.rsqrt(ops.mean(ops.square(x), axis=-1, keepdims=True) + 1e-6)


def scaled(units: int, factor: float, name: str) -> keras.layers.Layer:
    initializer = keras.initializers.VarianceScaling(factor**2, seed=0)
    return layers.Dense(units, kernel_initializer=initializer, name=name)


def model(*middle: Any, head: Any = None) -> keras.Model:
    keras.utils.set_random_seed(0)
    last = head if head is not None else layers.Dense(4, name="head")
    made = keras.Sequential([keras.Input((8,)), layers.Dense(16, name="first"), *middle, last])
    made.compile("sgd", LOSS)
    return made


def look(made: keras.Model, **options: Any) -> Preflight:
    return preflight(made, [(X, Y), (X[::-1], Y[::-1])], **options)


def kinds(found: Preflight) -> list[tuple[str, str]]:
    return [(hazard.kind, hazard.module) for hazard in found.hazards]


SOUND: dict[str, Callable[[], keras.Model]] = {
    "dense": lambda: model(layers.Dense(16, activation="relu")),
    "normalised": lambda: model(layers.BatchNormalization(), layers.LayerNormalization(), layers.Dropout(0.2)),
    "recurrent": lambda: model(layers.Reshape((4, 4)), layers.GRU(8)),
    "convolutional": lambda: model(layers.Reshape((4, 4, 1)), layers.Conv2D(4, 3), layers.Flatten()),
    "large but fitting": lambda: model(scaled(16, 30.0, "large")),
}


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float32"])
@pytest.mark.parametrize("name", SOUND)
def test_sound_models_are_left_in_peace(name: str, policy: str) -> None:
    found = look(SOUND[name](), policy=policy)
    assert kinds(found) == []
    assert found.ready
    assert found.batches == 2
    assert found.loss_error is not None
    assert found.loss_error < 0.02 or name == "normalised"  # TensorFlow drops otherwise in half precision
    compute = {"mixed_float16": "float16", "mixed_bfloat16": "bfloat16", "float32": "float32"}[policy]
    rows = {row.path: row for row in found.layers}
    assert rows["first"].formats == (compute,)
    assert rows["first"].cosine is not None
    assert rows["first"].cosine > 0.99 or name == "normalised"
    assert (found.loss_scale is not None) is (policy == "mixed_float16")


def test_an_overflowing_layer_is_named_and_kept_in_float32() -> None:
    made = model(scaled(16, 1e5, "hot"), scaled(16, 1e-5, "cold"))
    weights = [to_numpy(variable.value).copy() for variable in made.variables]
    policies = [layer.dtype_policy.name for layer in made.layers]
    found = look(made)
    assert kinds(found)[0] == ("overflow", "hot")
    assert found.cured
    assert found.plan is not None
    assert found.plan.compute("hot") == "float32"
    assert found.plan.compute("first") == "float16"
    assert found.alternative == "mixed_bfloat16"
    assert look(made, policy="mixed_bfloat16").ready
    assert all(np.array_equal(a, to_numpy(v.value)) for a, v in zip(weights, made.variables, strict=True))
    assert [layer.dtype_policy.name for layer in made.layers] == policies


def test_a_norm_by_hand_is_finite_and_wrong() -> None:
    found = look(model(scaled(16, 600.0, "large"), HandWrittenNorm(name="norm")))
    assert [module for _, module in kinds(found)] == ["norm"]
    assert found.cured
    assert found.plan is not None
    assert found.plan.compute("norm") == "float32"


def test_a_softmax_head_in_half_precision() -> None:
    made = model(head=layers.Dense(4, activation="softmax", name="head"))
    made.compile("sgd", "sparse_categorical_crossentropy")
    head: Any = made.get_layer("head")
    head.bias.assign([60.0, 0.0, 0.0, 0.0])
    x, y = X, np.full(16, 3)
    found = preflight(made, x, y)
    assert ("half_head", "head") in kinds(found)


def test_what_fails_in_float32_too_is_no_precision_problem() -> None:
    found = preflight(model(), np.where(X > 2.0, np.nan, X).astype("float32"), Y)
    assert [kind for kind, _ in kinds(found)] == ["unsound_in_float32"]
    assert found.plan is None


def test_a_target_without_units_is_told() -> None:
    found = look(model(), policy="mixed_bfloat16", target="cuda:volta")
    assert kinds(found) == [("not_native", "")]


def test_bad_arguments() -> None:
    made = model()
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: look(made, policy="float8"), PolicyError, "cannot be run in float8"),
        (lambda: look(made, policy="half"), PolicyError, "half"),
        (lambda: look(made, target="cuda:fermi"), PolicyError, "unknown target"),
        (lambda: preflight(made, X, Y[:3]), UsageError, "same number of rows"),
        (lambda: preflight(keras.Sequential([keras.Input((8,)), layers.Dense(4)]), X, Y), UsageError, "needs a loss"),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()
