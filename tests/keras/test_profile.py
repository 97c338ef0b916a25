"""Profiles of Keras models: what stands where, that it is exact, and that taking one leaves no trace."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from halfwise.core.histogram import ExponentHistogram
from halfwise.core.profile import Role
from halfwise.errors import UsageError
from halfwise.keras.profile import Recorder, parameters, profile, profiled_layers
from halfwise.keras.training_step import OwnStep

BACKEND = keras.backend.backend()
RANDOM = np.random.default_rng(0)
# small integers, so that every product and sum is exact on every backend
X = RANDOM.integers(-3, 4, size=(8, 4)).astype("float32")
Y = RANDOM.integers(-3, 4, size=(8, 2)).astype("float32")
FIRST = RANDOM.integers(-2, 3, size=(4, 3)).astype("float32")
SECOND = RANDOM.integers(-2, 3, size=(3, 2)).astype("float32")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    keras.utils.set_random_seed(0)


def model_of_integers() -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.Dense(2)])
    model.set_weights([FIRST, np.ones(3, "float32"), SECOND, np.zeros(2, "float32")])
    return model


def histogram(*arrays: Any) -> ExponentHistogram:
    total = ExponentHistogram.empty()
    for array in arrays:
        total = total + ExponentHistogram.of(np.asarray(array, np.float32))
    return total


def test_every_role_is_exact() -> None:
    hidden = X @ FIRST + 1.0
    output = hidden @ SECOND
    upstream = (output - Y) / 8.0  # two outputs in eight samples
    expected: dict[Role, ExponentHistogram] = {
        "activation": histogram(hidden, output),
        "activation_gradient": histogram(upstream, upstream @ SECOND.T),
        "weight": histogram(SECOND, np.zeros(2)),
        "weight_gradient": histogram(hidden.T @ upstream, upstream.sum(0)),
    }
    found = profile(model_of_integers(), X, Y, loss="mse")
    assert found.paths() == ("dense", "dense_1")
    for role, one in expected.items():
        assert found.get("dense_1", role) == one, role


def test_the_compiled_step_is_taken_and_sample_weights_count() -> None:
    model = model_of_integers()
    model.compile("sgd", "mse")
    weights = np.array([2.0] + [0.0] * 7, "float32")
    upstream = 2.0 * ((X @ FIRST + 1.0) @ SECOND - Y) / 8.0 * np.array([[1.0]] + [[0.0]] * 7)
    found = profile(model, X, Y, weights)
    assert found.get("dense_1", "activation_gradient") == histogram(upstream, upstream @ SECOND.T)


def test_taking_a_profile_leaves_no_trace() -> None:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(8), layers.BatchNormalization(), layers.Dropout(0.5)])
    model.compile("adam", "mse")
    y = np.zeros((8, 8))
    model.train_on_batch(X, y)
    variables = [*model.variables, *model.metrics_variables, *model.optimizer.variables]
    before = [np.array(ops.convert_to_numpy(v.value)) for v in variables]
    profile(model, X, y)
    for variable, value in zip(variables, before, strict=True):
        assert np.array_equal(ops.convert_to_numpy(variable.value), value)
    assert all("call" not in layer.__dict__ for layer in model._flatten_layers())


def test_layers() -> None:
    class Own(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.fc = layers.Dense(4)

        def build(self, shape: Any) -> None:
            self.fc.build(shape)
            self.scale = self.add_weight(shape=(1,), initializer="ones")

        def call(self, x: Any) -> Any:
            return self.fc(x) * self.scale

    class Plain(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.fc = layers.Dense(4)

        def build(self, shape: Any) -> None:
            self.fc.build(shape)

        def call(self, x: Any) -> Any:
            return self.fc(x)

    inputs = keras.Input((5, 4))
    x = layers.ReLU()(Plain()(Own()(inputs)))
    x = layers.LSTM(3)(layers.MultiHeadAttention(2, 2)(x, x))
    model = keras.Model(inputs, keras.Sequential([layers.BatchNormalization(), layers.Dense(2)], name="end")(x))
    found = profiled_layers(model)
    assert set(found) == {
        "own",
        "own.dense",
        "plain.dense",
        "re_lu",
        "multi_head_attention",
        "lstm",
        "end.batch_normalization",
        "end.dense",
    }
    assert [v is found["own"].scale for v in parameters(found["own"])] == [True]
    assert len(parameters(found["lstm"])) == 3
    assert [v.name for v in parameters(found["end.batch_normalization"])] == ["gamma", "beta"]  # no statistics
    found["end.dense"].trainable = False
    assert len(parameters(found["end.dense"])) == 2


def test_sparse_gradients_count_by_their_values() -> None:
    model = keras.Sequential([layers.Embedding(50, 3), layers.GlobalAveragePooling1D(), layers.Dense(1)])
    found = profile(model, np.array([[1, 2, 3, 4]]), np.zeros((1, 1)), loss="mse").get("embedding", "weight_gradient")
    assert found is not None
    assert found.finite_nonzero == 12
    assert found.total == (12 if BACKEND == "tensorflow" else 150)


def test_half_precision_values_are_counted_as_they_are() -> None:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4, dtype="mixed_float16", use_bias=False)])
    model.set_weights([300.0 * np.eye(4, dtype="float32")])
    found = profile(model, 300.0 * np.eye(4), np.zeros((4, 4)), loss="mse").get("dense", "activation")
    assert found is not None
    assert found.infinities == 4


def test_only_kept_steps_are_evidence() -> None:
    model = model_of_integers()
    step = OwnStep(model, "mse")
    recorder = Recorder(model)
    recorder.record((X, Y), step=step)
    recorder.keep()
    recorder.record((np.full_like(X, np.nan), Y), step=step)
    recorder.discard()
    once = recorder.profile
    assert once == profile(model, X, Y, loss="mse")
    recorder.record((X, Y), step=step)
    recorder.keep()
    assert recorder.profile == once.merge(once)


def test_what_cannot_be_profiled_is_refused() -> None:
    with pytest.raises(UsageError, match="model is Dense"):
        profile(layers.Dense(1), X, Y, loss="mse")
    with pytest.raises(UsageError, match="was given no loss"):
        profile(model_of_integers(), X, Y)
