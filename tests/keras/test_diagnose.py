"""`hw.diagnose` on one step of models that are compiled or not."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import ops
from numpy.typing import NDArray

from halfwise.core.plan import Plan
from halfwise.errors import PolicyError, UsageError
from halfwise.keras.apply import apply
from halfwise.keras.diagnose import diagnose

BACKEND = keras.backend.backend()
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(4, 8)).astype("float32")
Y = np.zeros((4, 2), "float32")


class HandWrittenNorm(keras.layers.Layer):
    """An RMS norm without the cast to float32 that the original papers' code has."""

    def call(self, x: Any) -> Any:
        return x * ops.rsqrt(ops.mean(x * x, axis=-1, keepdims=True) + 1e-6)


class HandWrittenSigmoid(keras.layers.Layer):
    """Overflows in half at -12 and is right nevertheless."""

    def call(self, x: Any) -> Any:
        gate = 1 / (1 + ops.exp(ops.stop_gradient(x) * 0 + 12))
        return gate * x + x


def _model(middle: keras.layers.Layer, bias: float = 0.0) -> keras.Model:
    first = keras.layers.Dense(8, bias_initializer=keras.initializers.Constant(bias))
    return keras.Sequential([keras.Input((8,)), first, middle, keras.layers.Dense(2)])


def _tanh() -> keras.Model:
    return _model(keras.layers.Activation("tanh"))


def test_healthy() -> None:
    model = _tanh()
    for policy in ("mixed_float16", "mixed_bfloat16", "float32", "bf16-mixed"):
        found = diagnose(model, X, Y, policy=policy, loss="mse")
        assert found.healthy
        assert found.text() == "halfwise: the step is healthy"


def test_a_compiled_model_goes_through_its_own_step() -> None:
    model = _model(keras.layers.LayerNormalization())
    model.compile("sgd", loss="mse")
    model.layers[0].kernel.assign(np.full((8, 8), 6e4))
    found = diagnose(model, np.ones((4, 8), "float32"), Y, np.ones(4, "float32"))
    assert (found.verdict, found.module, found.operation) == ("overflow_at_every_scale", "dense", "matmul")
    assert found.dtype == "float16"
    assert diagnose(model, np.ones((4, 8), "float32"), Y, policy="mixed_bfloat16").healthy


def test_an_overflow_that_became_zero_is_found_by_comparing_with_float32() -> None:
    model = _model(HandWrittenNorm(), bias=300.0)
    found = diagnose(model, X, Y, loss="mse", loss_scale=1.0)
    assert (found.verdict, found.module, found.operation) == (
        "overflow_at_every_scale",
        "hand_written_norm",
        "multiply",
    )
    assert "loss and gradients are finite" in found.detail
    assert found.source == f"test_diagnose.py:{HandWrittenNorm.call.__code__.co_firstlineno + 1}"
    assert diagnose(model, X, Y, loss="mse", policy="mixed_bfloat16").healthy


def test_an_overflow_that_is_healed_rightly_is_no_fault() -> None:
    assert diagnose(_model(HandWrittenSigmoid()), X, Y, loss="mse", loss_scale=1.0).healthy


def test_the_loss_scale_counts_for_float16_only() -> None:
    model = _tanh()

    def steep(y: Any, output: Any) -> Any:
        return ops.sum(output * 1e4, axis=-1)

    assert diagnose(model, X, Y, loss=steep).verdict == "loss_scale_too_high"
    assert diagnose(model, X, Y, loss=steep, policy="mixed_bfloat16").healthy
    assert diagnose(model, X, Y, loss=steep, loss_scale=1.0).healthy


def _classifier(gap: float, **head: Any) -> keras.Model:
    """Tells class 1 with a logit that is `gap` above the others'."""
    bias = keras.initializers.Constant(np.array([0.0, gap, 0.0]))
    dense = keras.layers.Dense(3, kernel_initializer="zeros", bias_initializer=bias, name="head", **head)
    return keras.Sequential([keras.Input((8,)), dense])


@pytest.mark.parametrize("targets", ["classes", "rows"])
def test_a_head_that_teaches_nothing(targets: str) -> None:
    y: NDArray[Any] = np.array([1, 0, 1, 2])
    loss = "sparse_categorical_crossentropy"
    if targets == "rows":
        y, loss = np.eye(3, dtype="float32")[y], "categorical_crossentropy"
    model = _classifier(18.0, activation="softmax")
    found = diagnose(model, X, y, loss=loss, loss_scale=1.0)
    assert found.verdict == "gradient_vanishes"
    assert (found.module, found.operation, found.direction, found.dtype) == ("head", "softmax", "backward", "float16")
    assert "2 of 4 samples are misclassified and get a gradient of exactly 0" in found.detail
    assert any("from_logits=True" in line for line in found.fix)
    assert any('dtype="float32"' in line for line in found.fix) == (BACKEND == "tensorflow")
    weights = np.array([1.0, 0.0, 1.0, 0.0])
    assert diagnose(model, X, y, weights, loss=loss, loss_scale=1.0).healthy  # those two do not count
    assert diagnose(_classifier(6.0, activation="softmax"), X, y, loss=loss, loss_scale=1.0).healthy
    assert diagnose(model, X, y, loss=loss, policy="float32").healthy


def test_the_fixes_for_such_a_head_cure_it() -> None:
    y = np.array([1, 0, 1, 2])
    logits = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    assert diagnose(_classifier(18.0), X, y, loss=logits, loss_scale=1.0).healthy
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), _classifier(18.0, dtype="float32").layers[0]])
    keras.config.set_dtype_policy("float32")
    assert diagnose(model, X, y, loss="sparse_categorical_crossentropy", loss_scale=1.0).healthy


def test_layers_that_were_kept_out_of_half_precision_stay_out() -> None:
    large = keras.initializers.Constant(1e4)
    layers = keras.layers

    def build(dtype: str) -> keras.Model:
        head = layers.Dense(2, kernel_initializer=large, dtype=dtype)
        return keras.Sequential([keras.Input((8,)), layers.Dense(8, "relu", bias_initializer="ones"), head])

    loss = keras.losses.CosineSimilarity()
    keras.config.set_dtype_policy("mixed_float16")
    kept, all_half = build("float32"), build("mixed_float16")
    keras.config.set_dtype_policy("float32")
    assert diagnose(kept, X, Y + 1, loss=loss, loss_scale=1.0).healthy
    assert diagnose(all_half, X, Y + 1, loss=loss, loss_scale=1.0).module == "dense_1"
    assert kept.layers[1].compute_dtype == "float32"
    applied = build("float32")
    with apply(applied, Plan.manual({"dense_1": "float32"}, default="float16", framework="keras")):
        assert diagnose(applied, X, Y + 1, loss=loss, loss_scale=1.0).healthy
    assert diagnose(applied, X, Y + 1, loss=loss, loss_scale=1.0).module == "dense_1"


def test_nothing_is_changed() -> None:
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(8),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5, seed=1),
            HandWrittenNorm(),
        ]
    )
    model.compile("adam", loss="mse", metrics=["mae"])
    targets = np.zeros((4, 8), "float32")
    model.train_on_batch(X, targets)
    variables = [*model.variables, *model.metrics_variables, *model.optimizer.variables]
    before = [ops.convert_to_numpy(v.value).copy() for v in variables]
    optimizer = model.optimizer
    diagnose(model, X, targets)
    assert model.optimizer is optimizer
    assert [layer.dtype_policy.name for layer in model.layers] == ["float32"] * 4
    for value, variable in zip(before, variables, strict=True):
        np.testing.assert_array_equal(value, ops.convert_to_numpy(variable.value))
    model.train_on_batch(X, targets)


def test_bad_arguments() -> None:
    model = _tanh()
    with pytest.raises(PolicyError, match='policy="auto"'):
        diagnose(model, X, Y, loss="mse", policy="auto")
    with pytest.raises(PolicyError, match="unknown policy"):
        diagnose(model, X, Y, loss="mse", policy="float12")
    with pytest.raises(UsageError, match="loss_scale=0"):
        diagnose(model, X, Y, loss="mse", loss_scale=0)
    with pytest.raises(UsageError, match="loss_scale='x'"):
        diagnose(model, X, Y, loss="mse", loss_scale="x")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="diagnose\\(model='m'\\)"):
        diagnose("m", X, Y, loss="mse")
    with pytest.raises(PolicyError, match="hw\\.apply"):
        diagnose(model, X, Y, loss="mse", policy=Plan.manual())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="loss"):
        diagnose(model, X, Y)
