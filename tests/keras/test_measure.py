"""Timing the layers of a Keras model: which layers, what is cut short, and that nothing changes."""

from __future__ import annotations

import logging
import time
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from halfwise.keras.measure import HALF_FORMATS, LayerTimer
from halfwise.keras.training_step import OwnStep

BACKEND = keras.backend.backend()
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(6, 4)).astype("float32")
Y = RANDOM.normal(size=(6, 2)).astype("float32")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    keras.utils.set_random_seed(0)


class SlowInHalf(layers.Dense):
    """Takes longer in half precision: 20 ms, or where code runs only once, a dozen large matrix products."""

    def call(self, x: Any, training: bool | None = None) -> Any:
        if self.compute_dtype != "float32":
            if BACKEND == "torch":
                time.sleep(0.02)
            else:
                big = ops.zeros((400, 400), "float32") + ops.cast(ops.sum(x), "float32")
                for _ in range(12):
                    big = ops.tanh(ops.matmul(big, big))
                x = x + ops.cast(ops.sum(big), x.dtype) * 0.0
        return super().call(x)


def test_layers_are_timed_and_slow_formats_cut_short() -> None:
    inside: list[Any] = [layers.Dense(8), layers.BatchNormalization(), layers.Dropout(0.5), SlowInHalf(2, name="slow")]
    model = keras.Sequential([keras.Input((4,)), *inside])
    model.compile("adam", "mse")
    model.train_on_batch(X, Y)
    variables = [*model.variables, *model.metrics_variables, *model.optimizer.variables]
    before = [np.array(ops.convert_to_numpy(v.value)) for v in variables]
    timer = LayerTimer(model, ("bfloat16",))
    timer.measure((X, Y))
    table = timer.table
    assert set(table.seconds) == {"dense", "batch_normalization", "slow"}
    assert table.is_lower_bound("slow", "bfloat16")
    assert table.seconds["slow"]["bfloat16"] > 3 * table.seconds["slow"]["float32"]
    if BACKEND == "torch":
        assert table.seconds["slow"]["bfloat16"] >= 0.02
    for variable, value in zip(variables, before, strict=True):
        assert np.array_equal(ops.convert_to_numpy(variable.value), value)
    assert all(layer.compute_dtype == "float32" for layer in model._flatten_layers())
    assert all("call" not in layer.__dict__ for layer in model._flatten_layers())


def test_layers_run_in_the_format_that_is_timed_and_on_what_they_get() -> None:
    seen: list[tuple[str, str, tuple[int, ...], bool | None]] = []

    class Telling(layers.Dense):
        def call(self, x: Any, training: bool | None = None) -> Any:
            dtype = keras.backend.standardize_dtype(x.dtype)
            seen.append((self.compute_dtype, dtype, tuple(x.shape), training))
            return super().call(x)

    model = keras.Sequential([keras.Input((4,)), layers.Dense(3), Telling(2)])
    step = OwnStep(model, "mse")
    step.build((X, Y))
    seen.clear()
    LayerTimer(model).measure((X, Y), step=step)
    assert {(policy, dtype) for policy, dtype, _, _ in seen} == {(name, name) for name in ("float32", *HALF_FORMATS)}
    assert {(shape, training) for _, _, shape, training in seen} == {((6, 3), True)}


def test_wholes_are_timed_as_one() -> None:
    inputs = keras.Input((5, 4))
    model = keras.Model(inputs, layers.Dense(2)(layers.ReLU()(layers.SimpleRNN(3)(inputs))))
    timer = LayerTimer(model, ("float16",))
    timer.measure((RANDOM.normal(size=(6, 5, 4)).astype("float32"), Y), step=OwnStep(model, "mse"))
    assert set(timer.table.seconds) == {"simple_rnn", "dense"}
    assert all(set(times) == {"float32", "float16"} for times in timer.table.seconds.values())


def test_twins_are_timed_once() -> None:
    calls: list[str] = []

    class Counted(layers.Dense):
        def call(self, x: Any, training: bool | None = None) -> Any:
            calls.append(self.name)
            return super().call(x)

    model = keras.Sequential([keras.Input((4,))])
    for name in ("zero", "one", "two"):
        model.add(Counted(4, name=name))
    model.add(Counted(2, name="smaller"))
    step = OwnStep(model, "mse")
    step.build((X, Y))
    calls.clear()
    timer = LayerTimer(model, ("float16",))
    timer.measure((X, Y), step=step)
    assert calls.count("zero") > 1  # it computes no gradient of its input
    assert calls.count("one") > 1
    assert calls.count("two") == 1  # in the probe alone
    assert calls.count("smaller") > 1
    assert timer.table.seconds["one"] == timer.table.seconds["two"]


def test_a_layer_that_cannot_run_in_a_format_is_not_timed_in_it(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(layers.Dense):
        def call(self, x: Any, training: bool | None = None) -> Any:
            if self.compute_dtype == "float16":
                raise RuntimeError("no kernel")
            return super().call(x)

    model = keras.Sequential([keras.Input((4,)), Refusing(2)])
    timer = LayerTimer(model)
    with caplog.at_level(logging.INFO, "halfwise"):
        timer.measure((X, Y), step=OwnStep(model, "mse"))
    assert set(timer.table.seconds["refusing"]) == {"float32", "bfloat16"}
    assert "layer 'refusing' cannot run in float16" in caplog.text


def test_tokens_masks_and_frozen_layers() -> None:
    tokens = np.array([[1, 2, 0, 0], [3, 0, 0, 0], [1, 2, 3, 4]])
    frozen = layers.Embedding(5, 3, mask_zero=True, trainable=False)
    model = keras.Sequential([frozen, layers.GlobalAveragePooling1D(), layers.Dense(2)])
    timer = LayerTimer(model, ("bfloat16",))
    timer.measure((tokens, Y[:3]), step=OwnStep(model, "mse"))
    assert set(timer.table.seconds) == {"embedding", "dense"}


@pytest.mark.skipif(BACKEND != "jax", reason="only JAX keeps the state outside the variables")
def test_the_state_of_a_running_fit() -> None:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.BatchNormalization(), layers.Dense(2)])
    model.compile("adam", "mse")
    model.train_on_batch(X, Y)
    names = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")
    state = model._get_jax_state(**dict.fromkeys(names, True), purge_model_variables=True)
    timer = LayerTimer(model, ("float16",))
    timer.measure((X, Y), state=state)
    assert set(timer.table.seconds) == {"dense", "batch_normalization", "dense_1"}
    assert all(variable._value is None for variable in model.variables)
